"""The processes of a launcher (torchrun): who does what once a machine, once for all, and what they tell each other.

They exchange bytes over gloo, which needs no GPU and no pickle.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tritonfp8.warmup.workers import describe

T = TypeVar("T")
# How often this process has joined others: the same on all ranks.
_joins = itertools.count()


@dataclass(frozen=True)
class Ranks:
    """This process among all.

    Attributes:
        rank: its number, 0 where there is one process alone.
        local_rank: its number on this machine.
        size: how many there are.
        group: what they talk over, None for one alone.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    group: Any = None

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank; returns when all have.

        Raises:
            RuntimeError: a rank is gone, or did not come in time.
        """
        if self.group is None:
            return [data]
        with _waiting():
            return self._all_gather(data)

    def _all_gather(self, data: bytes) -> list[bytes]:
        size = torch.tensor([len(data)])
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self.group)
        room = max(int(each) for each in sizes)
        if not room:
            return [b""] * self.size
        mine = torch.frombuffer(bytearray(data.ljust(room, b"\0")), dtype=torch.uint8)
        all_data = [torch.zeros_like(mine) for _ in range(self.size)]
        dist.all_gather(all_data, mine, group=self.group)
        return [each.numpy().tobytes()[: int(n)] for each, n in zip(all_data, sizes, strict=True)]

    def together(self, function: Callable[[], T] | None) -> T | None:
        """Run ``function`` on the ranks that have one, the others waiting. An error on one is an error on all.

        Raises:
            RuntimeError: another rank failed; its error is in the message. On the failing rank its own error.
        """
        result, error = None, None
        try:
            if function is not None:
                result = function()
        except Exception as raised:
            error = raised
        reports = self.exchange(b"" if error is None else describe(error).encode())
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report:
                raise RuntimeError(f"the warm-up failed on rank {rank}: {report.decode()}")
        return result


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Say what an error of a collective means."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"waited in vain for the other ranks of the warm-up: one of them is gone or took too long "
            f"({describe(error)})"
        ) from error


def rank() -> int | None:
    """The number of this process among all, None where no launcher gave one."""
    return _number("RANK")


def local_rank() -> int | None:
    """The number of this process on its machine, None where no launcher gave one."""
    return _number("LOCAL_RANK")


def _number(name: str) -> int | None:
    given = os.environ.get(name)
    return None if given is None else int(given)


@contextlib.contextmanager
def joined(timeout: float) -> Iterator[Ranks]:
    """The ranks of this program: those of an initialized process group, of the launcher's environment, or one alone.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    wait = datetime.timedelta(seconds=timeout)
    ours = not dist.is_initialized()
    if ours and (_number("WORLD_SIZE") or 1) < 2:
        yield Ranks()
        return
    with _waiting():
        if ours:
            store, number, size = next(rendezvous("env://", timeout=wait))
            # Keys of our own: those of a group that is gone would mislead the program's, which has yet to come.
            store = dist.PrefixStore(f"tritonfp8/warmup/{next(_joins)}", store)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", timeout=wait, store=store, rank=number, world_size=size)
        group = dist.group.WORLD if ours else dist.new_group(backend="gloo", timeout=wait)
    number = dist.get_rank()
    try:
        yield Ranks(number, number if (local := local_rank()) is None else local, dist.get_world_size(), group)
    finally:
        dist.destroy_process_group(None if ours else group)
