"""Train weights that are stored in 8 bits: losses beside float32 masters, bytes a parameter, speed of the step.

    python -m bench.training.stored loss --out bench/results/nvidia-h200
    python -m bench.training.stored speed --out bench/results/nvidia-h200

``loss`` trains one model on the same batches three times: with float32 weights, which are quantized for each use; with
stored weights that are rounded at random; and, as a control, with stored weights that are rounded to nearest.
``speed`` times the step of several weights without host time, in a CUDA graph, and a copy of as many bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import tritonfp8
from bench.contest.machine import results_folder, write_results
from tritonfp8.advice import captured
from tritonfp8.layers.stored import stored_part
from tritonfp8.optim import AdamW
from tritonfp8.training import Settings, TrainingStep, corpus, loop, lr_factor, prepare

MASTER, STOCHASTIC, NEAREST = "fp32 master", "stochastic", "nearest"
CONTESTANTS = (MASTER, STOCHASTIC, NEAREST)
# The loss of a step is the loss of its batch: means over so many are compared.
MEAN_STEPS = 50
LIMIT = 0.01
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
MOMENTS = ("fp32", "bf16", "fp8")
RECIPES = ("rowwise", "blockwise", "mxfp8", "tensorwise")
FASTEST_SHARE = 0.8
# Learning rates and random keys of a step are computed for all weights together: for one weight they take as long as
# its kernel.
WEIGHTS = 8
ROUNDS, CALLS = 7, 20

app = typer.Typer(add_completion=False, help=__doc__)


def training_step(model: nn.Module, settings: Settings, recipe: str, contestant: str, moments: str) -> TrainingStep:
    """The model converted, with its optimizer and schedule."""
    storage = "parameters" if contestant == MASTER else "quantized"
    tritonfp8.convert(model, recipe, weight_storage=storage)
    step = TrainingStep(model, settings)
    if contestant != MASTER:
        rounding = "stochastic" if contestant == STOCHASTIC else "nearest"
        groups = [
            {"params": group["params"], "weight_decay": group["weight_decay"]} for group in step.optimizer.param_groups
        ]
        step.optimizer = AdamW(
            groups, lr=settings.lr, betas=(0.9, 0.95), moments=moments, rounding=rounding, seed=settings.seed
        )
        step.lr = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda done: lr_factor(done, settings.steps))
    return step


def bytes_of(step: TrainingStep) -> dict[str, float]:
    """Bytes of weights and optimizer state for each parameter: of the linear layers, and of all."""
    sizes: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}
    linear = {id(layer.weight) for layer in step.model.modules() if isinstance(layer, tritonfp8.Float8Linear)}
    for param in step.model.parameters():
        part = stored_part(param)
        state = step.optimizer.state[param]
        found = sizes[id(param) in linear]
        found[0] += param.nbytes if part is None else part.nbytes
        found[0] += sum(x.nbytes for x in state.values() if isinstance(x, Tensor))
        found[1] += param.numel()
    (here, count), (others, rest) = sizes[True], sizes[False]
    return {"linear": here / max(count, 1), "all": (here + others) / max(count + rest, 1)}


def train(settings: Settings, recipe: str, contestant: str, moments: str) -> dict[str, Any]:
    """Train once; losses in nats a byte, seconds a step, and bytes a parameter."""
    job = prepare(settings)
    model = job.model.to(settings.device)
    step = training_step(model, settings, recipe, contestant, moments)
    sizes = {name: getattr(settings, name) for name in ("steps", "batch_size", "seq_len", "seed")}
    losses, times = [], []
    for batch in corpus.batches(job.text, **sizes):
        start = time.perf_counter()
        losses.append(step(batch.to(settings.device).long()).item())
        times.append(time.perf_counter() - start)
    return {
        "contestant": contestant, "recipe": recipe, "moments": "fp32" if contestant == MASTER else moments,
        "last": statistics.fmean(losses[-MEAN_STEPS:]), "held_out": loop.held_out_loss(job, model),
        "seconds": statistics.median(times), "bytes": bytes_of(step), "losses": losses,
    }  # fmt: skip


@app.command("loss")
def compare_losses(
    out: Annotated[Path | None, typer.Option(help="folder of the data")] = None,
    model: str = "160m",
    recipe: str = "rowwise",
    moments: str = "bf16",
    steps: int = 500,
    batch_size: int | None = None,
    seq_len: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    device: str | None = None,
) -> None:
    """Train with float32 masters, and with stored weights rounded at random and to nearest."""
    settings = Settings.resolve(
        model=model, steps=steps, batch_size=batch_size, seq_len=seq_len, lr=lr, seed=seed, device=device, compile=False
    )
    rows = []
    for contestant in CONTESTANTS:
        rows.append(train(settings, recipe, contestant, moments))
        last = rows[-1]
        print(f"{contestant:12} loss {last['last']:.4f} ({last['last'] / rows[0]['last'] - 1:+.2%}), {last['bytes']}")
    excess = rows[1]["last"] / rows[0]["last"] - 1
    write_results(
        (out or results_folder()) / f"stored-training-{model}-{recipe}.json",
        {"excess": excess, "limit": LIMIT, "passed": excess <= LIMIT, "rows": rows},
    )


def gpu_seconds(call: Callable[[], object]) -> float:
    """Median time of a call on the GPU, which takes long enough that the host is ahead."""
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000 / CALLS)
    return statistics.median(times)


def stepped_layers(shape: tuple[int, int], recipe: str, moments: str, device: str = "cuda") -> tuple[nn.Module, AdamW]:
    """Layers whose weights have gradients, and their optimizer after the first step."""
    layers = nn.Sequential(*(nn.Linear(shape[1], shape[0], bias=False, device=device) for _ in range(WEIGHTS)))
    tritonfp8.convert(layers, recipe, weight_storage="quantized")
    for weight in layers.parameters():
        weight.grad = torch.randn(shape, device=device)
    optimizer = AdamW(layers.parameters(), moments=moments)
    optimizer.step()
    return layers, optimizer


def moved_bytes(layers: nn.Module, optimizer: AdamW) -> int:
    """Bytes that a step must move: weights and state read and written, the gradients read."""
    moved = 0
    for weight in layers.parameters():
        part = stored_part(weight)
        assert weight.grad is not None
        assert part is not None
        moved += weight.grad.nbytes + 2 * (part.nbytes + sum(x.nbytes for x in optimizer.state[weight].values()))
    return moved


@app.command("speed")
def compare_speed(out: Annotated[Path | None, typer.Option(help="folder of the data")] = None) -> None:
    """Time the step of one weight, and a copy of as many bytes."""
    rows = []
    for shape in SHAPES:
        for recipe in RECIPES:
            for moments in MOMENTS:
                layers, optimizer = stepped_layers(shape, recipe, moments)
                moved = moved_bytes(layers, optimizer)
                source = torch.empty(moved // 4, dtype=torch.bfloat16, device="cuda")
                target = torch.empty_like(source)
                # In a CUDA graph, the copy would be one that the driver makes, which is a third slower.
                copy = gpu_seconds(lambda a=source, b=target: b.copy_(a))
                step = gpu_seconds(captured(optimizer.step)[0].replay)
                row = {"shape": shape, "recipe": recipe, "moments": moments, "weights": WEIGHTS, "bytes": moved}
                rows.append({**row, "step": step, "copy": copy, "share": copy / step})
                print(f"{shape!s:14} {recipe:10} {moments} {moved / step / 1e12:.2f} TB/s, {copy / step:.2f} of a copy")
    one_pass = [row["share"] for row in rows if row["recipe"] != "tensorwise"]
    write_results(
        (out or results_folder()) / "stored-training-speed.json",
        {"limit": FASTEST_SHARE, "lowest": min(one_pass), "passed": min(one_pass) >= FASTEST_SHARE, "rows": rows},
    )


if __name__ == "__main__":
    app()
