"""Run jobs in spawned processes. A process that dies fails its own job; the other jobs still run."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, cast

import torch

from tritonfp8.specs.checks import first_line

MAX_WORKERS = 8
_JOIN_SECONDS = 5.0


class Portable(Protocol):
    """Work on a device that can be sent to another process."""

    def run(self, device: torch.device) -> object:
        """Run the job on ``device``."""


def default_workers() -> int:
    """One worker for each core of this process, at most :data:`MAX_WORKERS`."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0))))


def run_jobs(
    jobs: Sequence[Portable], device: torch.device, workers: int, done: Callable[[int, str | None], object]
) -> None:
    """Run every job once.

    Args:
        jobs: the jobs; they run in any order.
        device: passed to each job; the current device of each worker.
        workers: number of processes; 0 runs the jobs in this process.
        done: called after each job with its index, and None or a text: its error, or how its process ended.
    """
    if not workers:
        return _run_here(jobs, device, done)
    waiting = deque(range(len(jobs)))
    busy: dict[Connection, tuple[Any, int]] = {}
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                connection, process = _start(device)
                _give(connection, jobs[waiting[0]])
                busy[connection] = (process, waiting.popleft())
            for ready in wait(list(busy)):
                connection = cast(Connection, ready)
                process, index = busy.pop(connection)
                error = _outcome(connection, process)
                # A worker ends after an error: after a CUDA error its process cannot run further jobs.
                if error is None and waiting:
                    _give(connection, jobs[waiting[0]])
                    busy[connection] = (process, waiting.popleft())
                else:
                    _end(connection, process)
                done(index, error)
    finally:
        for process, _ in busy.values():
            process.terminate()
        for connection, (process, _) in busy.items():
            _end(connection, process)


def _run_here(jobs: Sequence[Portable], device: torch.device, done: Callable[[int, str | None], object]) -> None:
    for index, job in enumerate(jobs):
        outcome = None
        try:
            job.run(device)
        except Exception as error:
            outcome = first_line(error)
        done(index, outcome)


@contextlib.contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Block SIGINT in this thread until the end. A process started in the block inherits this; its parent ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(device: torch.device) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # Spawned, not forked: CUDA does not survive a fork.
    process = context.Process(target=_work, args=(theirs, str(device)), daemon=True)
    with _ctrl_c_later():
        process.start()
    theirs.close()
    return ours, process


def _end(connection: Connection, process: Any) -> None:
    """Close a worker's connection, which ends it; kill it if it does not end in time."""
    connection.close()
    process.join(_JOIN_SECONDS)
    if process.is_alive():
        process.kill()


def _give(connection: Connection, job: Portable) -> None:
    # A worker may have ended: `_outcome` then reports how.
    with contextlib.suppress(OSError):
        connection.send(job)


def _outcome(connection: Connection, process: Any) -> str | None:
    """None if the job succeeded, else its error or how the process ended."""
    try:
        outcome: str | None = connection.recv()
    except (EOFError, OSError):
        process.join(_JOIN_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"
    return outcome


def _work(connection: Connection, device_name: str) -> None:
    """Main function of a worker: run jobs until one fails, or until the parent closes the connection or ends."""
    device = torch.device(device_name)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.suppress(EOFError, OSError):
        while True:
            job: Portable = connection.recv()
            try:
                job.run(device)
            except Exception as error:
                connection.send(first_line(error))
                return
            connection.send(None)
