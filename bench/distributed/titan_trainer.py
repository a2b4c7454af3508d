"""torchtitan's own Trainer on whole models, for ``python -m bench.distributed.torchtitan --model 8b``.

The config is torchtitan's for the model. The text is replaced, which would be downloaded, and the attention is torch's
for every contender. Tokens a second, MFU and memory are what torchtitan logs.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor
from torch.autograd import DeviceType

from bench.contest.machine import write_results
from bench.models import sums_of, with_head
from tritonfp8.training import corpus, timers

PLAIN, PEER, HEAD = "bf16", "torchao ", " with head"
# torchtitan's module, its config and its flavor.
MODELS = {
    "debug": ("llama3", "llama3_debugmodel", "debugmodel"),
    "8b": ("llama3", "llama3_8b", "8B"),
    "70b": ("llama3", "llama3_70b", "70B"),
    "30b-a3b": ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "none": {"checkpointing": "none"},
    "full": {"checkpointing": "full"},
    "tp": {"tp": 2},
    "ep": {"ep": 2},
    "wide": {"gather": False},
}
LOGGED = 10
MOST = 40
# The first of them compiles.
WINDOWS = 2


@dataclass(frozen=True)
class Whole:
    """A whole model, trained by torchtitan's Trainer.

    Attributes:
        model: a name of :data:`MODELS`.
        contender: a recipe, also with ``" with head"``, ``"bf16"``, or ``"torchao "`` and a recipe of torchao.
        layers: of the model's layers so many; 0 for all.
        tp: degree of tensor parallelism; FSDP2 takes the other processes.
        ep: degree of expert parallelism.
        checkpointing: of activations: ``"none"``, ``"selective"`` or ``"full"``.
        gather: whether FSDP2 gathers weights in 8 bits.
        batch: sequences of a rank; 0 for torchtitan's.
        length: tokens of a sequence; 0 for torchtitan's.
        steps: optimizer steps.
        compiled: whether blocks and loss are compiled.
        processes: their number.
    """

    model: str
    contender: str
    layers: int = 0
    tp: int = 1
    ep: int = 1
    checkpointing: str = "selective"
    gather: bool = True
    batch: int = 0
    length: int = 0
    steps: int = LOGGED * (1 + WINDOWS)
    compiled: bool = True
    processes: int = 2


def text_of(vocabulary: int) -> tuple[Any, Any]:
    """The configs of a data loader of bytes of text, and of a tokenizer that is not used."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Bytes(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.sizes = {"batch_size": local_batch_size, "seq_len": seq_len, "steps": 1}
            self.rank, self.step, self.text = dp_rank, 0, corpus.load()

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            while True:
                (rows,) = corpus.batches(self.text, seed=1000 * self.step + self.rank, **self.sizes)
                self.step += 1
                yield {"input": rows[:, :-1].long()}, rows[:, 1:].long()

        def state_dict(self) -> dict[str, int]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.step = state["step"]

    class Unused(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        def encode(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

        def decode(self, *args: Any, **options: Any) -> Any:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return vocabulary

    return Bytes.Config(), Unused.Config()


def without_a_device() -> None:
    """Replace what CPUs lack: torchtitan logs the memory of the device, and waits at a barrier of devices."""
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **options: None
    stats = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor


def _converters(whole: Whole) -> list[Any]:
    if whole.contender == PLAIN:
        return []
    if not whole.contender.startswith(PEER):
        from tritonfp8.integrations.torchtitan import Float8Converter

        name = whole.contender.removesuffix(HEAD)
        recipe = with_head(name) if whole.contender.endswith(HEAD) else name
        return [Float8Converter.Config(recipe=recipe, all_gather=whole.gather)]
    from torchtitan.components.quantization import Float8GroupedExpertsConverter, Float8LinearConverter

    options: dict[str, Any] = {"model_compile_enabled": whole.compiled}
    linear = Float8LinearConverter.Config(
        recipe_name=whole.contender.removeprefix(PEER), filter_fqns=["lm_head", "router.gate"], **options
    )
    return [linear, *([Float8GroupedExpertsConverter.Config(**options)] if whole.model == "30b-a3b" else [])]


def use_torch_attention(spec: Any) -> None:
    """Flex attention needs a mask, and has no backward on CPUs."""
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())


def config_of(whole: Whole, folder: str) -> Any:
    """torchtitan's config of the model, with the contender's layers and layout.

    Raises:
        ValueError: there is no such model or policy.
    """
    import importlib

    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.tools.profiler import Profiler

    policies = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    if whole.model not in MODELS or whole.checkpointing not in policies:
        raise ValueError(
            f"the model must be one of {', '.join(MODELS)}, and checkpointing one of {', '.join(policies)}; got "
            f"{whole.model!r} and {whole.checkpointing!r}"
        )
    family, name, flavor = MODELS[whole.model]
    registry = importlib.import_module(f"torchtitan.models.{family}.config_registry")
    config = getattr(registry, name)()
    spec = registry.model_registry(flavor, converters=_converters(whole))
    use_torch_attention(spec)
    if whole.layers:
        spec.model.layers = spec.model.layers[: whole.layers]
    given = {"local_batch_size": whole.batch, "seq_len": whole.length}
    sizes = {name: size for name, size in given.items() if size}
    dataloader, tokenizer = text_of(spec.model.vocab_size)
    # Losses in chunks of tokens multiply by a weight that FSDP2 of earlier releases has freed before.
    loss = config.loss if Version(torch.__version__) >= Version("2.12") else config.loss.loss_fn
    return dataclasses.replace(
        config,
        dump_folder=folder,
        loss=loss,
        model_spec=spec,
        dataloader=dataloader,
        tokenizer=tokenizer,
        profiler=Profiler.Config(),
        metrics=MetricsProcessor.Config(log_freq=LOGGED),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", tensor_parallel_degree=whole.tp, expert_parallel_degree=whole.ep
        ),
        # The last two steps are not timed: one counts bytes, and one is profiled.
        training=dataclasses.replace(config.training, steps=whole.steps + 2, disable_cuda_graphs=True, **sizes),
        lr_scheduler=dataclasses.replace(config.lr_scheduler, warmup_steps=min(10, whole.steps)),
        validator=dataclasses.replace(config.validator, enable=False),
        checkpoint=dataclasses.replace(config.checkpoint, enable=False),
        activation_checkpoint=policies[whole.checkpointing],
        compile=CompileConfig(enable=whole.compiled),
        debug=DebugConfig(seed=0),
    )


def _cpu_dims(trainer: Any) -> Any:
    from torchtitan.distributed import ParallelDims

    dist.init_process_group("gloo")
    return ParallelDims.from_config(trainer.config.parallelism, dist.get_world_size())


def train(whole: Whole, device: str) -> dict[str, Any]:
    """Train, and return what torchtitan logs.

    Returns:
        ``losses`` of ``logged_steps``, in nats a token; ``tokens_per_second`` of a rank, the median of the windows
        after the first; ``tflops`` of a rank; the largest ``peak_gib`` (reserved) and ``active_gib``; ``bytes`` that
        each collective moved in one step; ``profile``, see :func:`kernels_of`; ``stuck``, parameters that did not
        change; ``converted`` layers; ``parameters`` of the model.
    """
    from torchtitan.trainer import Trainer

    from tritonfp8 import Float8Linear
    from tritonfp8.distributed import count_collective_bytes
    from tritonfp8.layers.moe import is_converted_experts

    logged: list[dict[str, float]] = []
    traffic: dict[str, int] = {}
    profiled: dict[str, Any] = {}

    class Measured(Trainer):  # type: ignore[misc]
        def train_step(self, batches: Any) -> None:
            if self.step <= whole.steps:
                super().train_step(batches)
                return
            if self.step == whole.steps + 1:
                with count_collective_bytes() as counted:
                    super().train_step(batches)
                traffic.update(counted.bytes)
                return
            with torch.profiler.profile() as profile:
                super().train_step(batches)
                timers.synchronize(self.device)
            profiled.update(kernels_of(profile))

    if device == "cpu":
        without_a_device()
        Measured.init_distributed = _cpu_dims
    with tempfile.TemporaryDirectory() as folder:
        trainer = Measured(config_of(whole, folder))
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
        found["stuck"] = [name for name, sums in after.items() if sums == before[name]]
        found["converted"] = sum(isinstance(m, Float8Linear) or is_converted_experts(m) for m in model.modules())
        found["parameters"] = sum(p.numel() for p in model.parameters())
        trainer.close()
    return found | {"bytes": traffic, "profile": profiled}


def kernels_of(profile: torch.profiler.profile) -> dict[str, Any]:
    """The GPU's time in a profile, in seconds.

    Returns:
        ``span`` from the first kernel to the end of the last; ``busy``, in which a kernel other than NCCL's ran;
        ``kernels``, by name the seconds and the number of calls of the :data:`MOST` that take longest.
    """
    # Ranges that a program names have times on the GPU too.
    events = (event for event in profile.events() if event.device_type == DeviceType.CUDA)
    ran = [event for event in events if not event.is_user_annotation]
    found: dict[str, list[float]] = {}
    for event in ran:
        each = found.setdefault(event.name[:120], [0.0, 0])
        each[0] += event.time_range.elapsed_us() / 1e6
        each[1] += 1
    spans = sorted((e.time_range.start, e.time_range.end) for e in ran if "nccl" not in e.name)
    busy, end = 0.0, -math.inf
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    longest = sorted(found.items(), key=lambda item: -item[1][0])[:MOST]
    return {"span": (end - spans[0][0]) / 1e6 if spans else 0.0, "busy": busy / 1e6, "kernels": dict(longest)}


def _summary(logged: list[dict[str, float]], flops_per_token: int) -> dict[str, Any]:
    timed = [row for row in logged if row["step"] > LOGGED] or logged[-1:]
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
    for whole in wholes:
        (found,) = launch("whole", [whole], whole.processes, device)
        rows.append({**asdict(whole), **found})
        write_results(path, {"rows": rows})
        named = f"{whole.model:<8} {whole.contender:<24} tp {whole.tp} ep {whole.ep} {whole.checkpointing:<9}"
        speed = f"{found['tokens_per_second']:>8.0f} tokens/s/GPU  MFU {found['mfu']:.1%}  {found['peak_gib']:.1f} GiB"
        print("BAD" if found["stuck"] else "ok ", named, speed, f"loss {found['losses'][-1]:.4f}", flush=True)
    return not any(row["stuck"] for row in rows)
