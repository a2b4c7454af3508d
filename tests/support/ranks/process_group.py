"""Rank processes that run functions of tests. They start once, because a start takes longer than most tests."""

import contextlib
import faulthandler
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import collector  # noqa: F401  before what imports many modules
import torch
import torch.multiprocessing as mp

START_TIMEOUT, TIMEOUT = 120, 60
# Characters of what a process that ended had printed last: its stack, and the error of C++.
LAST_WORDS = 4000
# Each process group has threads that wake up a hundred times a second until the process ends. Forking new processes is
# cheaper.
MAX_GROUPS = 12
# "cuda" also needs gloo: with offloading, parameters are on the CPU.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# A fork of a process with all imports starts at once. A process that has used the GPUs cannot be forked.
START_METHODS = {"cpu": "forkserver", "cuda": "spawn"}
IMPORTED_ONCE = [
    "collector",
    # What functions of tests and torch.compile import: half a second for each process that does.
    "cases",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "tritonfp8.distributed",
]


@functools.cache
def made_mesh(device, sizes, names):
    """The mesh of all ranks with these sizes, made once in each process: a second one would make groups of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, sizes, mesh_dim_names=names)


def _serve(rank, size, folder, pipe, device, group_timeout):
    """Run each received function in the group of the first ``world`` ranks, until the pipe closes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    # A process that a signal ends sends no error: what it prints then is all there is to find the cause by.
    printed = os.open(_printed(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, sys.__stderr__.fileno())
    faulthandler.enable(sys.__stderr__)
    torch.set_num_threads(1)
    # As in the process of the tests (tests/conftest.py). Collections also copy the pages that processes share.
    gc.freeze()
    if device == "cuda":
        torch.cuda.set_device(rank)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(BACKENDS[device], init_method=rendezvous, rank=rank, world_size=size)
    worlds = range(1, size + 1)
    meshes = {world: DeviceMesh(device, list(range(world)), mesh_dim_names=("shard",)) for world in worlds}
    dist.barrier()
    if group_timeout is not None:
        # Set it only after the barrier, because processes may start far apart.
        for world in range(rank + 1, size + 1):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=group_timeout), meshes[world].get_group())
    pipe.send((True, None))
    while True:
        try:
            function, world, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            # Earlier functions must not count towards the limit of recompilations.
            torch.compiler.reset()
            result = function(meshes[world], *args, **kwargs) if rank < world else None
            pipe.send((True, (result, len(dist.distributed_c10d._world.pg_map))))
        except BaseException as error:
            pipe.send((False, f"rank {rank} of {world}: {error!r}\n{traceback.format_exc()}"))


def _printed(folder, rank):
    """The file with what a rank prints to stderr."""
    return Path(folder, f"{rank}.stderr")


class RankError(Exception):
    """Errors of the ranks, with their tracebacks."""


class Processes:
    """``size`` rank processes. New ones start after an error or a time-out, because ranks may wait for each other, and
    after many process groups.

    Args:
        size: number of processes.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, one GPU per rank).
        group_timeout: time-out of a collective in seconds, or None for torch's default.
    """

    def __init__(self, size, device="cpu", group_timeout=None):
        self.size, self.device, self.group_timeout = size, device, group_timeout
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self):
        self._folder = tempfile.mkdtemp()
        context = mp.get_context(START_METHODS[self.device])
        context.set_forkserver_preload(IMPORTED_ONCE)
        # The fork server of Python 3.11 leaves out, silently, what it does not find by its environment.
        path = os.pathsep.join(filter(None, sys.path))
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path):
            for rank in range(self.size):
                pipe, theirs = context.Pipe()
                args = (rank, self.size, self._folder, theirs, self.device, self.group_timeout)
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(pipe)
        self._collect(START_TIMEOUT)

    def _end(self, rank):
        """How a process ended, and what it printed last."""
        self._processes[rank].join(timeout=10)
        code = self._processes[rank].exitcode
        by = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        printed = _printed(self._folder, rank)
        last = printed.read_text(errors="replace")[-LAST_WORDS:] if printed.exists() else ""
        return f"rank {rank}: the process ended ({by})\n{last}"

    def _collect(self, timeout, after_error=2):
        """The answer of each process. Stops soon after a failure, because other ranks may wait for the failed one."""
        answers, deadline = {}, time.monotonic() + timeout
        while len(answers) < self.size and time.monotonic() < deadline:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in wait(list(waiting), timeout=0.5):
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    answers[rank] = (False, self._end(rank))
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + after_error)
        errors = [result for _, (done, result) in sorted(answers.items()) if not done]
        errors += [
            f"rank {rank}: nothing within {timeout if not errors else after_error} s"
            for rank in range(self.size)
            if rank not in answers
        ]
        if errors:
            self.stop()
            raise RankError("\n".join(errors))
        return [answers[rank][1] for rank in range(self.size)]

    def run(self, world, function, *args, timeout=TIMEOUT, after_error=2, **kwargs):
        """Run ``function(mesh, *args, **kwargs)`` on ``world`` ranks and return the result of each.

        The processes import the function by the name of its module, which may be a file of tests.

        Raises:
            RankError: a rank raised, took more than ``timeout`` seconds, or ended later than ``after_error`` seconds
                after another rank raised; with the tracebacks.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, world, args, kwargs))
        results, groups = zip(*self._collect(timeout, after_error), strict=True)
        if self.device == "cpu" and max(groups) > MAX_GROUPS:
            self.stop()
        return list(results[:world])

    def stop(self):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None
