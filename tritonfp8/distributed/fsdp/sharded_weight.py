"""The local shard of a weight as FSDP2 sees it when it gathers, and its bytes that are kept for several gathers."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tritonfp8.distributed.fsdp.gather_plan import Reduction
from tritonfp8.distributed.fsdp.torch_fsdp import Managed
from tritonfp8.layers import Watch, sample_of


class ShardSource(Protocol):
    """Answers the hooks of the sharded weights of one model: :class:`~.all_gather.Float8AllGather`, and for experts
    :class:`~.experts.all_gather.ExpertsAllGather`.
    """

    def is_gathered(self, name: str) -> bool:
        """Whether FSDP should find hooks on this weight, which is gathered in 8 bits then."""

    def can_gather(self, name: str) -> bool:
        """Whether FSDP should call the first hook in the gather that begins now."""

    def segment_to_send(self, name: str, shard: Tensor, mesh: Any) -> tuple[Tensor | tuple[Tensor, ...], Any]:
        """The rank segment of this rank, flat uint8, or several; and what :meth:`receive` must know of it."""

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

    def __call__(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        shard = self.shard
        sent, told = shard.source.segment_to_send(shard.fqn, shard.data, mesh)
        return sent if isinstance(sent, tuple) else (sent,), told


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


class GatheredInEvaluation:
    """Groups of weights that FSDP leaves gathered after a forward without gradients, such as those of the outermost.

    FSDP computes the next forward with the gathered values, even if the shards have others by then: an evaluation of
    EMA weights would be one of the old weights. Torch does not count writes through ``.data``, so samples are compared.
    They have elements of each row and of each column, so no swap of weights misses them.

    Args:
        groups: the parameters of each group.
    """

    def __init__(self, groups: Sequence[Sequence[Managed]]) -> None:
        self._seen = [(group, _sample(group)) for group in groups if not group[0].is_sharded]

    def gather_changed(self) -> None:
        """Have FSDP gather the groups again whose shards changed since. All ranks of a group call this together."""
        for group, (stamps, before) in self._seen:
            first = group[0]
            if first.is_sharded:
                continue
            now = _sample(group)
            same = now[0] == stamps and all(torch.equal(x, before[dtype]) for dtype, x in now[1].items())
            changed = torch.tensor(int(not same), device=first.device)
            # A rank whose rows did not change gathers as well.
            dist.all_reduce(changed, dist.ReduceOp.MAX, group=first.process_group)
            if changed.item():
                first.shard_again()


def _sample(group: Sequence[Managed]) -> tuple[list[object], dict[torch.dtype, Tensor]]:
    """The stamps of shards, and some of their elements as integers, by the size of these."""
    samples: dict[torch.dtype, list[Tensor]] = {}
    for managed in group:
        sample = sample_of(managed.local).reshape(-1)
        samples.setdefault(sample.dtype, []).append(sample)
    return [managed.stamp for managed in group], {dtype: torch.cat(each) for dtype, each in samples.items()}


class Assignments:
    """Notices ``param.data = other`` on sharded weights, which torch ignores: the DTensor keeps its local shard."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, weakref.ref[Tensor]]] = {}

    def check(self, weights: dict[str, Managed]) -> None:
        """Raise RuntimeError for weights that were assigned to since the last call, and so have their old values."""
        found = []
        for name, managed in weights.items():
            holder, local = managed.holder, managed.local
            before = self._seen.get(name)
            if before is not None and before[1]() is local and before[0] != holder:
                found.append(name)
            self._seen[name] = holder, weakref.ref(local)
        if found:
            raise RuntimeError(
                f"the weight of {', '.join(found)} was assigned by param.data = ..., which torch ignores for a sharded "
                "parameter: it still has the old values. Copy instead: param.data.copy_(values), or "
                "model.load_state_dict"
            )
