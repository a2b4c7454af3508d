"""Processes of one group that stay alive between tests: importing torch costs each of them seconds.

``with Ranks(2) as ranks: ranks.run(function, ...)`` calls ``function(...)`` on each rank and returns their results.
The function must be importable by name in the child: it lives in a module beside the tests.
"""

import contextlib
import os
import tempfile
import time
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60
GRACE = 3


def _serve(rank, world, backend, rendezvous, connection):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    connection.send(("ready", None))
    while (job := connection.recv()) is not None:
        function, args = job
        try:
            connection.send(("result", function(*args)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class RankError(AssertionError):
    """A rank raised, died, or did not end in time."""


class Ranks:
    """A process group of ``world`` ranks; a job that fails ends it, and the next one starts another."""

    def __init__(self, world, backend="gloo"):
        self.world = world
        self.backend = backend
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.stop()

    def _start(self):
        context = mp.get_context("spawn")
        handle, rendezvous = tempfile.mkstemp()
        os.close(handle)
        os.unlink(rendezvous)
        self.processes, self.connections = [], []
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, self.backend, rendezvous, there), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self.connections.append(here)
        self._collect(2 * TIMEOUT)

    def stop(self):
        for connection in self.connections if self.processes else ():
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes = []

    def _collect(self, timeout):
        """The answer of each rank; raise if one failed, soon after it did: the others may wait for it."""
        answers, deadline = {}, time.monotonic() + timeout
        while len(answers) < self.world and time.monotonic() < deadline:
            waiting = {c: rank for rank, c in enumerate(self.connections) if rank not in answers}
            for connection in wait(list(waiting), timeout=0.5):
                rank = waiting[connection]
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    answers[rank] = ("error", f"the process of rank {rank} ended")
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        errors = [f"rank {rank}: {text}" for rank, (kind, text) in sorted(answers.items()) if kind == "error"]
        if errors or len(answers) < self.world:
            late = sorted(set(range(self.world)) - set(answers))
            for process in self.processes:
                process.kill()
                process.join()
            self.processes = []
            raise RankError("\n".join([*errors, *([f"no answer from ranks {late}"] if late else [])]))
        return [answers[rank][1] for rank in range(self.world)]

    def run(self, function, *args, timeout=TIMEOUT):
        if not self.processes:
            self._start()
        for connection in self.connections:
            connection.send((function, args))
        return self._collect(timeout)
