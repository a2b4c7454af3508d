"""torchtitan's own Trainer on whole models, for ``python -m bench.distributed.torchtitan --model 8b``.

Tokens a second, MFU and memory are what torchtitan logs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from bench.contest.machine import write_results
from bench.distributed.compare import make_deterministic
from bench.distributed.experts import failures, stuck
from bench.distributed.kernels import kernels_of
from bench.distributed.models import TORCHAO_GATHER, torchao_contestants
from bench.distributed.titan.config import LOGGED, PEER, PLAIN, Whole, config_of, without_a_device
from bench.models import sums_of
from tritonfp8.training import timers


def _cpu_dims(trainer: Any) -> Any:
    from torchtitan.distributed import ParallelDims

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return ParallelDims.from_config(trainer.config.parallelism, dist.get_world_size())


def _measured(whole: Whole, traffic: dict[str, int], profiled: dict[str, Any]) -> Any:
    """torchtitan's Trainer, which fills ``traffic`` and ``profiled`` after the steps that are timed."""
    from torchtitan.trainer import Trainer

    from tritonfp8.distributed import count_collective_bytes

    (peer,) = (each for each in torchao_contestants() if each.name == TORCHAO_GATHER)
    after_step = peer.after_step if whole.contender.startswith(PEER) else lambda model: None

    class Measured(Trainer):  # type: ignore[misc]
        def whole_step(self, batches: Any) -> None:
            super().train_step(batches)
            after_step(self.model_parts[0])

        def train_step(self, batches: Any) -> None:
            if self.step <= whole.steps:
                self.whole_step(batches)
            elif self.step == whole.steps + 1:
                with count_collective_bytes() as counted:
                    self.whole_step(batches)
                traffic.update(counted.bytes)
            else:
                with torch.profiler.profile() as profile:
                    self.whole_step(batches)
                    timers.synchronize(self.device)
                profiled.update(kernels_of(profile))

    return Measured


def train(whole: Whole, device: str) -> dict[str, Any]:
    """Train, and return what torchtitan logs.

    Returns:
        ``losses`` of ``logged_steps``, in nats a token; ``tokens_per_second`` of a rank, the median of the windows
        after the first, or after a third of a long run; ``tflops`` of a rank; the largest ``peak_gib`` (reserved) and
        ``active_gib``; ``bytes`` that each collective moved in one step; ``profile``, see :func:`kernels_of`;
        ``stuck``, parameters that did not change; ``converted`` layers; ``parameters`` of the model; ``failures``, why
        this is no result.
    """
    logged: list[dict[str, float]] = []
    traffic: dict[str, int] = {}
    profiled: dict[str, Any] = {}

    trainer_type = _measured(whole, traffic, profiled)
    if device == "cpu":
        without_a_device()
        trainer_type.init_distributed = _cpu_dims
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_type(config_of(whole, folder))
        model = trainer.model_parts[0]
        if device == "cpu":
            # Gloo adds gradients, and cannot scale them in the same call.
            for module in model.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    module.set_force_sum_reduction_for_comms(True)
        before = sums_of(model)
        trainer.metrics_processor.logger.log = lambda metrics, step: logged.append({"step": step, **metrics})
        # It sleeps at its end, for other machines.
        clock = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
        with mock.patch("torchtitan.trainer.time", clock):
            trainer.train()
        after = sums_of(model)
        found = _summary(logged, trainer.metrics_processor.num_flops_per_token)
        unchanged = [name for name, sums in after.items() if sums == before[name]]
        lost = [name for name, sums in after.items() if not math.isfinite(sums[0])]
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (found["losses"], unchanged, lost))
        found |= _checks(whole, model, *zip(*ranks, strict=True))
        found["parameters"] = sum(p.numel() for p in model.parameters())
        trainer.close()
    return found | {"bytes": traffic, "profile": profiled}


def _checks(whole: Whole, model: nn.Module, losses: Any, unchanged: Any, lost: Any) -> dict[str, Any]:
    """``stuck``, ``converted`` and ``failures``.

    Args:
        whole: the run.
        model: of this rank.
        losses, unchanged, lost: of each rank its losses, and the parameters that did not change, or are not finite.
    """
    from torchtitan.models.common.moe import GroupedExperts

    from tritonfp8.layers.moe import is_converted_experts

    def converts(module: nn.Module) -> bool:
        # torchao's layers have names like ours.
        return is_converted_experts(module) or any(c.__name__.startswith("Float8") for c in type(module).__mro__)

    kinds = (nn.Linear, GroupedExperts)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, kinds) and "router" not in name}
    left = [name for name, module in layers.items() if not converts(module) and "lm_head" not in name]
    failed = failures([{"contender": whole.contender, "losses": losses, "unchanged": unchanged}])
    if any(each != losses[0] for each in losses):
        failed.append(f"{whole.contender}: the ranks log different losses")
    if whole.contender != PLAIN and left:
        failed.append(f"{whole.contender}: not converted: {', '.join(left)}")
    if lost := sorted(set().union(*lost)):
        failed.append(f"{whole.contender}: not finite: {', '.join(lost)}")
    return {"stuck": stuck(unchanged), "converted": sum(map(converts, layers.values())), "failures": failed}


def _summary(logged: list[dict[str, float]], flops_per_token: int) -> dict[str, Any]:
    # A long run settles for a third of its steps.
    timed = [row for row in logged if row["step"] > max(LOGGED, logged[-1]["step"] // 3)] or logged[-1:]
    speed = statistics.median(row["throughput(tps)"] for row in timed)
    return {
        "logged_steps": [row["step"] for row in logged],
        "losses": [row["loss_metrics/global_avg_loss"] for row in logged],
        "tokens_per_second": speed,
        "tflops": flops_per_token * speed / 1e12,
        "peak_gib": max(row["memory/max_reserved(GiB)"] for row in logged),
        # Of each window: the first compiles.
        "active_gib": max(row["memory/max_active(GiB)"] for row in timed),
        "active_gib_of_windows": [row["memory/max_active(GiB)"] for row in logged],
    }


@functools.cache
def peak_tflops(device: str) -> float:
    """bf16's peak of the GPU, in TFLOP/s, from torchtitan's table; infinite for a CPU."""
    from torchtitan.tools.utils import get_peak_flops

    return float(get_peak_flops(torch.cuda.get_device_name()) / 1e12) if device == "cuda" else float("inf")


def serve(wholes: list[Whole], path: Path, device: str) -> None:
    """Train in this rank, one after the other; rank 0 writes what they gave."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if any(whole.deterministic for whole in wholes):
        make_deterministic()
    found: list[dict[str, Any]] = []
    for whole in wholes:
        row = train(whole, device)
        row["mfu"] = row["tflops"] / peak_tflops(device)
        found.append(row)
        if int(os.environ["RANK"]) == 0:
            path.write_text(json.dumps(found))


def launch(kind: str, requests: Sequence[Any], processes: int, device: str) -> list[dict[str, Any]]:
    """What ``processes`` ranks give for each request of a kind.

    Raises:
        RuntimeError: they failed; their output says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        request = json.dumps([kind, [asdict(each) for each in requests]])
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*launcher, "-m", "bench.distributed.torchtitan", "--serve", request, "--out", str(path)]
        done = subprocess.run([*command, "--device", device], check=False)
        if done.returncode:
            raise RuntimeError(f"{processes} processes failed: exit status {done.returncode}")
        found: list[dict[str, Any]] = json.loads(path.read_text())
        return found


def run_whole(wholes: list[Whole], device: str, warm: int, path: Path) -> bool:
    """Train whole models one after the other, print a line for each, and write after each; whether all is well.

    Args:
        wholes: the runs.
        device: cpu or cuda.
        warm: so many are compiled at a time before, with one layer and three steps; 0 for none.
        path: of the data.
    """
    if warm:
        with ThreadPoolExecutor(warm) as pool:
            short = [replace(each, layers=1, steps=2) for each in wholes]
            list(pool.map(lambda each: launch("whole", [each], each.processes, device), short))
    rows: list[dict[str, Any]] = []
    # A model has the GPUs to itself. On a CPU to start processes takes longer than to train.
    parts = [wholes] if device == "cpu" else [[whole] for whole in wholes]
    results = (found for part in parts for found in launch("whole", part, part[0].processes, device))
    for whole, found in zip(wholes, results, strict=True):
        rows.append({**asdict(whole), **found})
        write_results(path, {"rows": rows})
        named = f"{whole.model:<8} {whole.contender:<24} tp {whole.tp} ep {whole.ep} {whole.checkpointing:<9}"
        named += "".join(name for name, chosen in _choices(whole).items() if chosen)
        speed = f"{found['tokens_per_second']:>8.0f} tokens/s/GPU  MFU {found['mfu']:.1%}  {found['peak_gib']:.1f} GiB"
        print("BAD" if found["failures"] else "ok ", named, speed, f"loss {found['losses'][-1]:.4f}", flush=True)
        print("".join(f"    {failure}\n" for failure in found["failures"]), end="", flush=True)
    different = differing(rows)
    print("".join(f"BAD {each}\n" for each in different), end="", flush=True)
    return not different and not any(row["failures"] for row in rows)


def _choices(whole: Whole) -> dict[str, bool]:
    return {" wide": not whole.gather, " exact": whole.payload != "float8", " graph": whole.graphs}


def differing(rows: list[dict[str, Any]]) -> list[str]:
    """Which choices changed losses that they must leave: the gather and graphs all, and the payload the first."""
    found = []
    names = [each.name for each in dataclasses.fields(Whole)]
    for choice, steps in (("gather", None), ("graphs", None), ("payload", 1)):
        kept = [name for name in names if name != choice]
        groups: dict[tuple[Any, ...], set[tuple[float, ...]]] = {}
        for row in rows:
            # torchao's scales with its gather are of float32 weights, and without it of bf16.
            if row["deterministic"] and not row["contender"].startswith(PEER):
                groups.setdefault(tuple(row[name] for name in kept), set()).add(tuple(row["losses"][:steps]))
        for group, losses in groups.items():
            if len(losses) > 1:
                found.append(f"{choice} changes losses: {dict(zip(kept, group, strict=True))}")
    return found
