"""Ranks that report failures to each other, so that no rank waits for ever.

They communicate over the rendezvous store, which works even if collectives hang.
"""

import contextlib
import datetime
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from bench.contest.compare import describe

T = TypeVar("T")
START_SECONDS = 300
# Compiling may take one rank much longer than another.
PATIENCE_SECONDS = 900
# Ranks with the same error fail at about the same time. After that the other ranks must be waiting in a collective.
GRACE_SECONDS = 60
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class RankError(RuntimeError):
    """Some ranks failed and others did not, or a rank is gone. Nothing can run after that."""


class AllFailedError(RuntimeError):
    """The same step failed on every rank. The ranks may go on with another step."""


@dataclass
class Ranks:
    """All ranks of a run, seen from this one.

    Attributes:
        rank: index of this process.
        size: number of ranks.
        store: shared by all ranks, and not used for anything else.
        patience: seconds that a rank waits for the others.
        grace: seconds that a rank waits for the others after it failed.
    """

    rank: int
    size: int
    store: dist.Store
    patience: float = PATIENCE_SECONDS
    grace: float = GRACE_SECONDS
    _turn: Iterator[int] = field(default_factory=itertools.count)

    def exchange(self, value: Any, patience: float | None = None) -> list[Any]:
        """Exchange JSON values: wait for all ranks, and return their values by rank.

        Raises:
            RankError: a rank did not come in time.
        """
        seconds = self.patience if patience is None else patience
        turn = next(self._turn)
        keys = [f"{turn}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise RankError(f"rank {self.rank} waited {seconds:g} s in vain for {_named(missing)}") from error
        return [json.loads(self.store.get(key)) for key in keys]

    def together(self, function: Callable[[], T]) -> T:
        """Run ``function``, which may use collectives, on all ranks.

        Raises:
            AllFailedError: it raised on every rank.
            RankError: it raised on some, or some did not come back.
        """
        failure: Exception | None = None
        try:
            result = function()
        # Every error must be reported to the other ranks.
        except Exception as error:
            failure = error
        if failure is None:
            reports = self.exchange(None)
        else:
            try:
                reports = self.exchange(describe(failure), self.grace)
            except RankError as alone:
                raise RankError(f"rank {self.rank} failed: {describe(failure)} ({alone})") from failure
        failed = {rank: report for rank, report in enumerate(reports) if report is not None}
        if not failed:
            return result
        first, report = next(iter(failed.items()))
        if len(failed) < self.size:
            raise RankError(f"{_named(failed)} failed and the others did not; rank {first}: {report}") from failure
        raise AllFailedError(report) from failure


def _named(ranks: Any) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks of the launcher's environment, with a process group for ``device``."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    wait = datetime.timedelta(seconds=START_SECONDS)
    store, rank, size = next(rendezvous("env://", timeout=wait))
    group = dist.PrefixStore("group", store)
    dist.init_process_group(BACKENDS[device.type], store=group, rank=rank, world_size=size)
    ranks = Ranks(rank, size, dist.PrefixStore("bench", store))
    yield ranks
    # Skipped after an error: destroying a group waits for its collectives.
    ranks.exchange(None)
    dist.destroy_process_group()
