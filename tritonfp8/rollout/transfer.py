"""send, and its counterparts on an engine's ranks: headers, what each rank wants of them, then bytes in buckets.

Every rank of the group runs all steps, also after an error of its own, so that no rank waits for another one. An error
is told in the next step that all take part in; nothing is written before the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritonfp8.export import Stored, TensorStream, attempt, settled
from tritonfp8.rollout.shards import Box, cut

# Parts begin at multiples of it, so that their bytes can be read as their dtype, and copied fast.
_ALIGNED = 16
_Header = tuple[torch.dtype, tuple[int, ...]]


def send(
    stream: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    src: int = 0,
    bucket_bytes: int = 2**26,
) -> int:
    """Send a stream to the ranks of engines, which call :meth:`Receiver.receive`: to each rank what its shard needs.

    Every rank of the group calls one of both. Of a trainer with sharded weights all ranks call this one, because all of
    them take part in making the stream; ``src`` sends. Headers go first, and data only if they fit all engines.

    Args:
        stream: of :func:`tritonfp8.export.tensors`, which is taken tensor by tensor; or names and tensors.
        group: a process group; None for the default one. Of gloo data travels from the CPU, else from the GPU.
        src: the rank, in the default group, that sends.
        bucket_bytes: of a message, rounded up to 16. The sender has two of them in memory for each rank of an engine.

    Returns:
        The bytes of tensors that this rank sent, to all ranks together.

    Raises:
        ValueError, TypeError: as the stream. No engine has changed then.
        RuntimeError: another rank raised, with its text. No engine has changed then.
    """
    group = whole_group(group)
    found, error = attempt(lambda: TensorStream.of(stream))
    bucket_bytes = _aligned(max(1, bucket_bytes))
    announced(group, src, (None if found is None else found.headers, bucket_bytes))
    wanted = settle(group, error)
    assert found is not None
    outboxes = [
        _Outbox(boxes, found.headers, rank, group, bucket_bytes)
        for rank, boxes in zip(dist.get_process_group_ranks(group), wanted, strict=True)
        if boxes and dist.get_rank() == src
    ]

    def put_all() -> None:
        for name, x in found.checked():
            for outbox in outboxes:
                outbox.put(name, x.detach())

    _, error = attempt(put_all)
    for outbox in outboxes:
        outbox.finish()
    settle(group, error)
    return sum(outbox.total for outbox in outboxes)


def whole_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or the default one."""
    found = group if group is not None else dist.group.WORLD
    assert found is not None
    return found


def announced(group: dist.ProcessGroup, src: int, mine: Any = None) -> tuple[Any, int]:
    """Headers and the bytes of a bucket, as the rank ``src`` has them; None if it has an error."""
    found = [mine]
    dist.broadcast_object_list(found, src, group=group)
    headers, bucket_bytes = found[0]
    return headers, bucket_bytes


def settle(group: dist.ProcessGroup | None, error: Exception | None, mine: Any = None) -> list[Any]:
    """As :func:`tritonfp8.export.settled`, of weights that are sent."""

    def stopped(texts: str) -> RuntimeError:
        return RuntimeError(f"weights were not sent, and no engine has changed: {texts}")

    return settled(() if group is None else (group,), error, mine, stopped)


def take(group: dist.ProcessGroup, src: int, headers: Sequence[_Header], bucket_bytes: int) -> list[Tensor]:
    """The tensors of these dtypes and shapes that ``src`` sends to this rank."""
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in headers]
    staged = torch.empty(sum(map(_aligned, sizes)), dtype=torch.uint8, device=_device(group))
    for bucket in staged.split(bucket_bytes) if len(staged) else ():
        dist.recv(bucket, src, group=group)
    parts = staged.split([_aligned(size) for size in sizes])
    return [
        part[:size].view(dtype).view(shape) for part, size, (dtype, shape) in zip(parts, sizes, headers, strict=True)
    ]


class _Outbox:
    """The buckets for one rank: what is put in fills them, and full ones are sent."""

    def __init__(
        self,
        boxes: Iterable[tuple[str, Box]],
        headers: Mapping[str, Stored],
        rank: int,
        group: dist.ProcessGroup,
        bucket_bytes: int,
    ) -> None:
        self._boxes: dict[str, list[Box]] = {}
        self.total = 0
        for name, box in boxes:
            self._boxes.setdefault(name, []).append(box)
            self.total += _aligned(math.prod(n for _, n in box) * headers[name].dtype.itemsize)
        self._rank, self._group, self._bucket_bytes = rank, group, bucket_bytes
        self._left, self._filled = self.total, 0
        self._bucket = self._next()
        self._sent: list[tuple[Any, Tensor]] = []

    def put(self, name: str, x: Tensor) -> None:
        """Add the parts of a tensor that the rank wants."""
        for box in self._boxes.get(name, ()):
            data = cut(x, box).contiguous().view(-1).view(torch.uint8)
            while len(data):
                here = data[: len(self._bucket) - self._filled]
                self._bucket[self._filled : self._filled + len(here)].copy_(here)
                self._advance(len(here))
                data = data[len(here) :]
            self._advance(-self._filled % _ALIGNED)

    def finish(self) -> None:
        """Send what the rank still waits for, whatever is in it, and wait until all has arrived."""
        while self._left:
            self._advance(len(self._bucket) - self._filled)
        for work, _ in self._sent:
            work.wait()

    def _next(self) -> Tensor:
        return torch.empty(min(self._bucket_bytes, self._left), dtype=torch.uint8, device=_device(self._group))

    def _advance(self, count: int) -> None:
        self._filled += count
        if not count or self._filled < len(self._bucket):
            return
        for work, _ in self._sent:
            work.wait()
        self._sent = [(dist.isend(self._bucket, self._rank, group=self._group), self._bucket)]
        self._left -= len(self._bucket)
        self._bucket, self._filled = self._next(), 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _device(group: dist.ProcessGroup) -> torch.device:
    """The device whose memory the group sends."""
    if dist.get_backend(group) == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
