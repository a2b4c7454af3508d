"""The local shard of a weight as FSDP2 sees it when it gathers, and its bytes that are kept for several gathers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonfp8.distributed.fsdp.gather_plan import Reduction
from tritonfp8.layers.linear import Watch


class ShardSource(Protocol):
    """Answers the hooks of the sharded weights of one model: :class:`~.all_gather.Float8AllGather`."""

    def is_gathered(self, name: str) -> bool:
        """Whether FSDP should find hooks on this weight, which is gathered in 8 bits then."""

    def can_gather(self, name: str) -> bool:
        """Whether FSDP should call the first hook in the gather that begins now."""

    def segment_to_send(self, name: str, shard: Tensor, mesh: Any) -> tuple[Tensor, Any]:
        """The rank segment of this rank, flat uint8; and what :meth:`receive` must know of it."""

    def receive(self, name: str, buffer: Tensor, sent: Any, out: Tensor | None) -> Tensor | None:
        """The gathered weight over the rank segments of all ranks; or None, with ``out`` refilled."""


class ShardToGather:
    """Carries the two hooks of FSDP2's all-gather extension.

    FSDP reads the hooks from here. The sharded parameter itself stays a plain DTensor of a plain tensor, so optimizers,
    checkpoints and code that compares memory or identity see nothing of the 8-bit gather.

    Args:
        source: answers the hooks.
        fqn: the name of the weight's layer.
        data: the local shard.
    """

    def __init__(self, source: ShardSource, fqn: str, data: Tensor) -> None:
        self.source = source
        self.fqn = fqn
        self.data = data

    def to(self, *args: Any, **kwargs: Any) -> ShardToGather:
        """The shard on another device: with CPU offload FSDP moves it before it gathers."""
        return ShardToGather(self.source, self.fqn, self.data.to(*args, **kwargs))

    @property
    def fsdp_pre_all_gather(self) -> Callable[[Any], Any]:
        """The hook that FSDP calls with the mesh before it gathers; absent where FSDP should gather the values."""
        if not (self.source.is_gathered(self.fqn) and self.source.can_gather(self.fqn)):
            raise AttributeError("fsdp_pre_all_gather")
        return _PreAllGather(self)

    @property
    def fsdp_post_all_gather(self) -> Callable[..., Any]:
        """The hook that FSDP calls with the gathered bytes; absent likewise."""
        if not self.source.is_gathered(self.fqn):
            raise AttributeError("fsdp_post_all_gather")
        return self._post_all_gather

    def _post_all_gather(
        self, outputs: tuple[Tensor, ...], sent: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        gathered = self.source.receive(self.fqn, outputs[0] if outputs else None, sent, out)  # type: ignore[arg-type]
        # The empty tuple names no tensor for FSDP to free: it frees what it gathered anyway.
        return None if out is not None else (gathered, ())


class _PreAllGather:
    """The first hook. FSDP reads its signature at every gather, so it is made once."""

    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self, shard: ShardToGather) -> None:
        self.shard = shard

    def __call__(self, mesh: Any) -> tuple[tuple[Tensor], Any]:
        shard = self.shard
        segment, sent = shard.source.segment_to_send(shard.fqn, shard.data, mesh)
        return (segment,), sent


class KeptSegments:
    """Rank segments that serve several gathers, inside :func:`tritonfp8.quantize_weights_once`."""

    def __init__(self) -> None:
        self._watches: dict[str, Watch] = {}
        self._segments: dict[tuple[str, tuple[int, ...]], tuple[Reduction, Tensor]] = {}

    def find(self, name: str, orientations: tuple[int, ...], reduction: Reduction) -> Tensor | None:
        """The segment of a weight in the orientations of these indices, if one was kept with these scales."""
        found = self._segments.get((name, orientations))
        # A write that torch counts brought a new reduction.
        if found is None or found[0] is not reduction:
            return None
        self._watches[name].note()
        if found[1].is_cuda:
            # Another stream may have made it.
            found[1].record_stream(torch.cuda.current_stream())
        return found[1]

    def keep(
        self,
        name: str,
        orientations: tuple[int, ...],
        reduction: Reduction,
        segment: Tensor,
        parameter: Callable[[], Tensor],
    ) -> None:
        """Keep a segment that was made just now of ``parameter()``, the sharded DTensor."""
        self._segments[name, orientations] = reduction, segment
        watch = self._watches.get(name)
        if watch is None or watch.is_written():
            self._watches[name] = Watch(lambda: [parameter()])
        else:
            watch.note()

    def changed(self) -> list[str]:
        """The weights whose shards changed since by writes that torch does not count."""
        return [name for name, watch in self._watches.items() if not watch.is_written() and watch.has_changed()]
