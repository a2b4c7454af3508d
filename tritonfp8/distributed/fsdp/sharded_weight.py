"""The local shard of a weight as FSDP2 sees it when it gathers: the two hooks of its all-gather extension."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


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
