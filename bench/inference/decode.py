"""Memory of weights, and time to decode a token, with weights in bf16 and stored in 8 bits.

    python -m bench.inference.decode [--model qwen3-moe] --out bench/results/nvidia-h200

The layers are the linear layers of Llama-8B's decoder layers, with SwiGLU and without attention; or the mixtures of
experts of Qwen3-30B-A3B, which in bf16 run torch's grouped GEMM. Each contestant is captured in a CUDA graph, so host
time does not count. Rounds go through the contestants in turn. The outputs of the replayed graph must equal a call's
to the bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import tritonfp8
from bench.contest.machine import results_folder, write_results
from tritonfp8.advice import captured

HIDDEN, HEADS, FFN = 4096, 1024, 14336
TOKENS = (1, 2, 4, 8, 16, 32, 64)
PLAIN, INVARIANT = "bf16", " batch-invariant"
ROUNDS, REPLAYS = 5, 20


class Layer(nn.Module):
    """The linear layers of a decoder layer of Llama-8B; the queries stand for the result of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k, self.v = nn.Linear(HIDDEN, HEADS, bias=False), nn.Linear(HIDDEN, HEADS, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, HIDDEN]`` to the same shape."""
        y = F.rms_norm(x, (HIDDEN,))
        # Attention of one token reads its key and value.
        others = self.k(y).mean(-1, keepdim=True) + self.v(y).mean(-1, keepdim=True)
        x = x + self.o(self.q(y) + others)
        y = F.rms_norm(x, (HIDDEN,))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Mixture(nn.Module):
    """The router and the experts of a decoder layer of Qwen3-30B-A3B."""

    hidden, inside, experts, active = 2048, 768, 128, 8

    def __init__(self) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            hidden_size=self.hidden, moe_intermediate_size=self.inside, num_experts=self.experts,
            num_experts_per_tok=self.active,
        )  # fmt: skip
        # As models that are loaded have it; a block that is made by itself is not told.
        config._experts_implementation = "grouped_mm"
        self.block = Qwen3MoeSparseMoeBlock(config)
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=config.initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same shape."""
        out: Tensor = self.block(x.unsqueeze(0))
        return x + out.squeeze(0)


@dataclass(frozen=True)
class Decoded:
    """A model to decode with.

    Attributes:
        layer: makes one of its layers.
        count: of them.
        hidden: features of a token.
    """

    layer: Callable[[], nn.Module]
    count: int
    hidden: int


MODELS = {"llama-8b": Decoded(Layer, 8, HIDDEN), "qwen3-moe": Decoded(Mixture, 4, Mixture.hidden)}


def model_of(decoded: Decoded, recipe: str) -> tuple[nn.Module, int]:
    """The layers, and the bytes that they allocated on the GPU; a recipe may end in :data:`INVARIANT`."""
    torch.manual_seed(0)
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = nn.Sequential(*(decoded.layer() for _ in range(decoded.count))).bfloat16()
    if recipe != PLAIN:
        name, found, _ = recipe.partition(INVARIANT)
        tritonfp8.convert(model, name, mode="inference", batch_invariant=bool(found))
    torch.cuda.synchronize()
    return model.eval(), torch.cuda.memory_allocated() - before


class Captured:
    """A call of ``model`` in a CUDA graph."""

    def __init__(self, model: nn.Module, tokens: int, hidden: int) -> None:
        # A graph does not own what it reads, so the input lives as long as the graph does.
        self.input = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        with torch.inference_mode():
            expected = model(self.input)
            self.graph, self.out = captured(lambda: model(self.input))
        self.graph.replay()
        self.same = torch.equal(self.out, expected)

    def seconds(self) -> float:
        """Mean of some replays."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / REPLAYS


def measure(decoded: Decoded, recipes: list[str]) -> list[dict[str, Any]]:
    """A row for each contestant and number of tokens, and its ratios to bf16."""
    models = {recipe: model_of(decoded, recipe) for recipe in (PLAIN, *recipes)}
    rows = []
    for tokens in TOKENS:
        calls = {recipe: Captured(model, tokens, decoded.hidden) for recipe, (model, _) in models.items()}
        times: dict[str, list[float]] = {recipe: [] for recipe in calls}
        for _ in range(ROUNDS):
            for recipe, call in calls.items():
                times[recipe].append(call.seconds())
        base = statistics.median(times[PLAIN])
        for recipe, call in calls.items():
            seconds, size = statistics.median(times[recipe]), models[recipe][1]
            row = {"recipe": recipe, "tokens": tokens, "seconds": seconds, "bytes": size, "same_bits": call.same}
            rows.append({**row, "speed_over_bf16": base / seconds, "bytes_of_bf16": size / models[PLAIN][1]})
    return rows


def main(
    names: Annotated[str, typer.Option("--recipes", help="Comma-separated.")] = "rowwise,blockwise,mxfp8,tensorwise",
    name: Annotated[str, typer.Option("--model", help=", ".join(MODELS))] = "llama-8b",
    batch_invariant: Annotated[bool, typer.Option(help="Also each recipe with batch_invariant=True.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for decode.json, or decode-<model>.json.")] = None,
) -> None:
    """Measure, print each row, and write."""
    if name not in MODELS:
        raise typer.BadParameter(f"--model must be one of {', '.join(MODELS)}; got {name}")
    decoded, recipes = MODELS[name], names.split(",")
    if batch_invariant:
        per_row = [each for each in recipes if tritonfp8.recipes.get(each).output.lhs.block[0] == 1]
        recipes += [each + INVARIANT for each in per_row]
    rows = measure(decoded, recipes)
    for row in rows:
        print(
            f"{row['recipe']:<26}{row['tokens']:>4} tokens {1e6 * row['seconds']:8.1f} us  {row['speed_over_bf16']:.2f}"
            f"  memory {row['bytes_of_bf16']:.3f}  {'same bits' if row['same_bits'] else 'OTHER BITS'}"
        )
    path = (out or results_folder()) / ("decode.json" if name == "llama-8b" else f"decode-{name}.json")
    write_results(path, {"layers": decoded.count, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
