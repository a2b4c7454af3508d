"""A layer of a mixture of experts, forward and backward, compiled: recipes against torch's grouped GEMMs in bf16.

    python -m bench.experts.layers --out bench/results/nvidia-h200

The layer is a router, the way to the experts, SwiGLU experts and the way back. The peer has the same code around
``torch._grouped_mm``.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import tritonfp8
from bench.contest.machine import results_folder, write_results
from tritonfp8.layers.moe import Routing, combine, gather

TORCH = "torch bf16"
RECIPES = ("rowwise", "blockwise", "tensorwise", "mxfp8")
STEPS = 10


class Sizes(NamedTuple):
    """Tokens, experts of each, experts, features outside and inside of an expert."""

    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int


MODELS: Mapping[str, Sizes] = {
    "DeepSeek-V3, 8 local experts": Sizes(4096, 8, 8, 7168, 2048),
    "Qwen3-30B-A3B": Sizes(16384, 8, 128, 2048, 768),
    "Mixtral-8x7B": Sizes(16384, 2, 8, 4096, 14336),
}


class TorchExperts(nn.Module):
    """SwiGLU experts by torch's grouped GEMM."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        shape = (sizes.experts, 2 * sizes.intermediate, sizes.hidden)
        self.gate_up_proj = nn.Parameter(torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.02))
        shape = (sizes.experts, sizes.hidden, sizes.intermediate)
        self.down_proj = nn.Parameter(torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.02))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As :meth:`tritonfp8.Float8Experts.forward`."""
        routing = Routing.of(index, self.down_proj.shape[0])
        rows = torch._grouped_mm(gather(hidden, routing), self.gate_up_proj.transpose(1, 2), offs=routing.offsets)
        gate, up = rows.chunk(2, dim=-1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=routing.offsets)
        return combine(rows, routing, weights, hidden.dtype)


class Layer(nn.Module):
    """A router and its experts."""

    def __init__(self, sizes: Sizes, experts: nn.Module) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False, device="cuda", dtype=torch.bfloat16)
        self.experts, self.top_k = experts, sizes.top_k

    def forward(self, hidden: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same shape."""
        weights, index = self.router(hidden).softmax(-1, dtype=torch.float32).topk(self.top_k, -1)
        out: Tensor = self.experts(hidden, index, weights.to(hidden.dtype))
        return out


def layer_of(sizes: Sizes, recipe: str) -> Layer:
    """The layer of a contestant."""
    if recipe == TORCH:
        return Layer(sizes, TorchExperts(sizes))
    options: dict[str, Any] = {"recipe": recipe, "device": "cuda", "dtype": torch.bfloat16}
    return Layer(sizes, tritonfp8.Float8Experts(sizes.experts, sizes.hidden, sizes.intermediate, **options))


def measure(sizes: Sizes, recipe: str) -> dict[str, float]:
    """Seconds of forward and backward, and the most memory that they take."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    layer = layer_of(sizes, recipe)
    compiled = torch.compile(layer, fullgraph=True)
    hidden = torch.randn(sizes.tokens, sizes.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(hidden)

    def step() -> None:
        compiled(hidden).backward(grad)
        layer.zero_grad()
        hidden.grad = None

    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return {"seconds": statistics.median(times), "bytes": torch.cuda.max_memory_allocated()}


def main(
    models: Annotated[str, typer.Option(help="names that begin like one of these, by commas; all without")] = "",
    recipes: Annotated[str, typer.Option(help="by commas")] = ",".join(RECIPES),
    out: Annotated[Path | None, typer.Option(help="folder of the data")] = None,
) -> None:
    """Measure, and write the data."""
    rows = []
    for name, sizes in MODELS.items():
        if not name.startswith(tuple(models.split(","))):
            continue
        plain = measure(sizes, TORCH)
        for recipe in (TORCH, *recipes.split(",")):
            found = plain if recipe == TORCH else measure(sizes, recipe)
            speed, memory = plain["seconds"] / found["seconds"], found["bytes"] / plain["bytes"]
            rows.append({"model": name, "recipe": recipe, **found, "speed_over_bf16": speed, "bytes_of_bf16": memory})
            print(f"{name} {recipe}: {found['seconds'] * 1e3:.2f} ms, {speed:.3f}x, memory {memory:.2f}", flush=True)
    write_results((out or results_folder()) / "experts-layers.json", {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
