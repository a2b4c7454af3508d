"""The processes of a launcher such as torchrun: their ranks, and the bytes that they exchange during a warm-up.

They communicate over gloo, which needs no GPU and no pickle.
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

from tritonfp8.specs.checks import first_line

T = TypeVar("T")
# Number of warm-ups that this process has joined: equal on all ranks.
_joins = itertools.count()


@dataclass(frozen=True)
class Ranks:
    """This process and its group.

    Attributes:
        rank: rank of this process; 0 without a group.
        local_rank: its rank on this machine.
        size: number of ranks.
        group: the process group; None for a single process.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    group: Any = None

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather: the ``data`` of every rank, in the order of ranks. Waits for all ranks.

        Raises:
            RuntimeError: a rank has ended, or did not call this in time.
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
        """Run ``function`` on the ranks that pass one, while the others wait. An error on one rank is raised on all.

        Raises:
            RuntimeError: another rank failed; the message has its error. The failing rank raises its own error.
        """
        result, error = None, None
        try:
            if function is not None:
                result = function()
        except Exception as raised:
            error = raised
        reports = self.exchange(b"" if error is None else first_line(error).encode())
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report:
                raise RuntimeError(f"the warm-up failed on rank {rank}: {report.decode()}")
        return result


@contextlib.contextmanager
def _waiting() -> Iterator[None]:
    """Turn the error of a collective into one that names its cause."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"the other ranks of the warm-up did not answer: one of them ended or took longer than the timeout "
            f"({first_line(error)})"
        ) from error


def rank() -> int | None:
    """The rank of this process (``RANK``), or None without a launcher."""
    return _number("RANK")


def local_rank() -> int | None:
    """The rank of this process on its machine (``LOCAL_RANK``), or None without a launcher."""
    return _number("LOCAL_RANK")


def _number(name: str) -> int | None:
    given = os.environ.get(name)
    return None if given is None else int(given)


@contextlib.contextmanager
def joined(timeout: float) -> Iterator[Ranks]:
    """The ranks of this program: from its process group, else from the launcher's environment, else a single process.

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
            # A prefix of our own: keys left by this group would confuse the one that the program initializes later.
            store = dist.PrefixStore(f"tritonfp8/warmup/{next(_joins)}", store)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", timeout=wait, store=store, rank=number, world_size=size)
        group = dist.group.WORLD if ours else dist.new_group(backend="gloo", timeout=wait)
    number = dist.get_rank()
    try:
        yield Ranks(number, number if (local := local_rank()) is None else local, dist.get_world_size(), group)
    finally:
        dist.destroy_process_group(None if ours else group)
