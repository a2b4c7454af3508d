"""Processes on gloo that tests run functions in: started once, as that takes longer than most tests."""

import contextlib
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.multiprocessing as mp

START_TIMEOUT, TIMEOUT = 120, 60
# Each process group has threads that wake up a hundred times a second for as long as the process lives, for nothing;
# new processes are forked quickly.
MAX_GROUPS = 12
# With offloading, parameters are on the CPU.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# A fork of a process that imported everything starts at once; one that has asked for the GPUs cannot be forked.
START_METHODS = {"cpu": "forkserver", "cuda": "spawn"}
IMPORTED_ONCE = [
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "tritonfp8.distributed",
]


def _serve(rank, size, rendezvous, pipe, device, group_timeout):
    """Run what comes, in the process group of its first ``world`` ranks, until there is no more."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(BACKENDS[device], init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    worlds = range(1, size + 1)
    meshes = {world: DeviceMesh(device, list(range(world)), mesh_dim_names=("shard",)) for world in worlds}
    dist.barrier()
    if group_timeout is not None:
        # Only now: processes may start far apart.
        for world in range(rank + 1, size + 1):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=group_timeout), meshes[world].get_group())
    pipe.send((True, None))
    while True:
        try:
            function, world, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            # What ran before must not count to the limit of recompilations.
            torch.compiler.reset()
            result = function(meshes[world], **kwargs) if rank < world else None
            pipe.send((True, (result, len(dist.distributed_c10d._world.pg_map))))
        except BaseException as error:
            pipe.send((False, f"rank {rank} of {world}: {error!r}\n{traceback.format_exc()}"))


class RankError(Exception):
    """What was raised on the ranks, with their tracebacks."""


class Processes:
    """``size`` processes; after an error or a time-out new ones are started, as the old may wait for each other, and
    when they have made many process groups.

    Args:
        size: how many.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL, a GPU each).
        group_timeout: seconds that a collective may take, or None for torch's default.
    """

    def __init__(self, size, device="cpu", group_timeout=None):
        self.size, self.device, self.group_timeout = size, device, group_timeout
        self._processes, self._pipes = [], []

    def _start(self):
        folder = tempfile.mkdtemp()
        context = mp.get_context(START_METHODS[self.device])
        context.set_forkserver_preload(IMPORTED_ONCE)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            for rank in range(self.size):
                pipe, theirs = context.Pipe()
                args = (rank, self.size, f"{folder}/rendezvous", theirs, self.device, self.group_timeout)
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(pipe)
        finally:
            os.environ.pop("OMP_NUM_THREADS")
            if threads is not None:
                os.environ["OMP_NUM_THREADS"] = threads
        self._collect(START_TIMEOUT)

    def _collect(self, timeout, after_error=2):
        """What each process answered; ends soon after one failed, as the others may wait for it."""
        answers, deadline = {}, time.monotonic() + timeout
        while len(answers) < self.size and time.monotonic() < deadline:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in wait(list(waiting), timeout=0.5):
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionError):
                    answers[rank] = (False, f"rank {rank}: the process ended")
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

    def run(self, world, function, timeout=TIMEOUT, after_error=2, **kwargs):
        """``function(mesh, **kwargs)`` on ``world`` ranks.

        Returns what each returned; raises :class:`RankError` with the tracebacks if one raised or took more than
        ``timeout`` seconds, or ``after_error`` once another had raised.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, world, kwargs))
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
        self._processes, self._pipes = [], []


def _without_mesh(mesh, call, args):
    return call(*args)


class Ranks:
    """All of ``world`` processes at once: ``with Ranks(2) as ranks: ranks.run(function, *args)``."""

    def __init__(self, world, device="cpu"):
        self.processes = Processes(world, device)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.processes.stop()

    def run(self, function, *args, timeout=TIMEOUT):
        """``function(*args)`` on each rank; what each returned."""
        return self.processes.run(self.processes.size, _without_mesh, timeout, call=function, args=args)
