"""Grouped GEMMs and casts against torch's grouped GEMMs, and against casts of one matrix of the same bytes.

    python -m bench.experts.gemms --out bench/results/nvidia-h200

torch's FP8 GEMM has scales of rows ("rowwise"). Its operands get the scales of ours; for the gradient of the weight,
whose groups it wants without space between them, scales of one.
"""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from bench.contest.machine import results_folder, write_results
from bench.experts.routings import DISTRIBUTIONS, SHAPES, Shape, interleaved_seconds, offsets_of
from tritonfp8 import ops, recipes
from tritonfp8.testing import sqnr

GEMM_RECIPES = {"rowwise precise": ("rowwise", "precise"), "rowwise fast": ("rowwise", "fast")}
GEMM_RECIPES["blockwise"] = ("blockwise", "precise")
CAST_RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
BF16, FAST, PRECISE = "torch bf16", "torch FP8 fast", "torch FP8 precise"
# A ratio of geometric means, by name: contestant and peer.
RATIOS = {
    "output: rowwise precise over torch FP8 fast": ("output", "rowwise precise", FAST),
    "output: rowwise fast over torch FP8 fast": ("output", "rowwise fast", FAST),
    "output: blockwise over torch FP8 precise": ("output", "blockwise", PRECISE),
    "grad_weight: rowwise precise over torch FP8 fast": ("grad_weight", "rowwise precise", FAST),
    "grad_weight: blockwise over torch FP8 fast": ("grad_weight", "blockwise", FAST),
}
ROUNDS, REPEATS = 5, 3
# Of results in bf16, against torch's product in bf16 of what was not quantized.
LEAST_DECIBELS = 20

Calls = dict[str, Callable[[], Tensor]]


def output_calls(shape: Shape, offsets: Tensor) -> Calls:
    """The GEMM of forward by each contestant."""
    x, weight = _normal(shape.tokens, shape.k), _normal(shape.experts, shape.n, shape.k)
    calls: Calls = {BF16: lambda: torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets)}
    for name, (recipe, accumulation) in GEMM_RECIPES.items():
        gemm = recipes.get(recipe).output
        a, b = ops.quantize_groups(x, offsets, *gemm.lhs.args), ops.quantize_matrices(weight, *gemm.rhs.args)
        args = (*a, *gemm.lhs.args, *b, *gemm.rhs.args, offsets, None, None, accumulation)
        calls[name] = lambda args=args: ops.scaled_grouped_matmul(*args)
        if name == "rowwise precise":
            for peer, fast in ((FAST, True), (PRECISE, False)):
                calls[peer] = lambda a=a, b=b, fast=fast: torch._scaled_grouped_mm(
                    a[0], b[0].transpose(1, 2), a[1].flatten(), b[1].view(shape.experts, shape.n), offs=offsets,
                    out_dtype=torch.bfloat16, use_fast_accum=fast,
                )  # fmt: skip
    return calls


def grad_weight_calls(shape: Shape, offsets: Tensor) -> Calls:
    """The GEMM of the weight's gradient by each contestant."""
    x, grad = _normal(shape.tokens, shape.k), _normal(shape.tokens, shape.n)
    calls: Calls = {BF16: lambda: torch._grouped_mm(grad.t(), x, offs=offsets)}
    for name, (recipe, accumulation) in GEMM_RECIPES.items():
        gemm = recipes.get(recipe).grad_weight
        pairs = [(ops.quantize_groups(t, offsets, *s.args, True), s) for t, s in ((grad, gemm.lhs), (x, gemm.rhs))]
        operands = [each for (pair, spec) in pairs for each in (*pair, *spec.args)]
        args = (*operands, offsets, None, None, accumulation, False, shape.tokens)
        calls[name] = lambda args=args: ops.scaled_grouped_matmul(*args)
    a, b = (t.t().contiguous().to(torch.float8_e4m3fn) for t in (grad, x))
    ones = [torch.ones(shape.experts * rows, device="cuda") for rows in (shape.n, shape.k)]
    calls[FAST] = lambda: torch._scaled_grouped_mm(
        a, b.t(), *ones, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return calls


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _checked(calls: Mapping[str, Callable[[], Tensor]]) -> None:
    """Raise unless every product is that of bf16 but for the noise of 8 bits, or of groups without tokens."""
    expected = calls[BF16]()
    for name, call in calls.items():
        # torch leaves the gradient of an empty group unset.
        wanted = torch.where(expected.isfinite(), expected, 0)
        if (found := sqnr(call(), wanted)) < LEAST_DECIBELS:
            raise RuntimeError(f"{name} differs from torch's bf16 product: {found:.1f} dB")


def gemm_rows(shapes: list[str], distributions: list[str]) -> list[dict[str, Any]]:
    """A row for each GEMM: teraflops a second by contestant."""
    rows = []
    for name in shapes:
        shape = SHAPES[name]
        for distribution in distributions:
            offsets = offsets_of(distribution, shape, "cuda")
            for gemm, make in (("output", output_calls), ("grad_weight", grad_weight_calls)):
                if gemm == "grad_weight" and shape.tokens < shape.experts * 16:
                    continue
                calls = make(shape, offsets)
                if gemm == "output":
                    _checked(calls)
                seconds = interleaved_seconds(calls, ROUNDS, REPEATS)
                flops = 2 * shape.tokens * shape.n * shape.k
                found = {contestant: round(flops / each / 1e12, 1) for contestant, each in seconds.items()}
                rows.append({"gemm": gemm, "shape": name, "distribution": distribution, **found})
                print(*rows[-1].values(), flush=True)
                del calls
    return rows


def cast_rows(shapes: list[str]) -> list[dict[str, Any]]:
    """A row for each cast of tokens to both orientations: seconds, and the ungrouped cast's over them."""
    rows = []
    for name in shapes:
        shape = SHAPES[name]
        x, offsets = _normal(shape.tokens, shape.k), offsets_of("zipf", shape, "cuda")
        for recipe in CAST_RECIPES:
            specs = (*recipes.get(recipe).output.lhs.args, *recipes.get(recipe).grad_weight.rhs.args)
            calls = {
                "groups": functools.partial(ops.quantize_groups_both, x, offsets, *specs),
                "one matrix": functools.partial(ops.quantize_both, x, *specs),
            }
            seconds = interleaved_seconds(calls, ROUNDS, REPEATS)
            ratio = round(seconds["one matrix"] / seconds["groups"], 3)
            rows.append({"cast": recipe, "shape": name, "seconds": seconds["groups"], "over one matrix": ratio})
            print(*rows[-1].values(), flush=True)
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric mean and least of the ratios of :data:`RATIOS`."""
    found = {}
    for name, (gemm, own, peer) in RATIOS.items():
        each = [row[own] / row[peer] for row in rows if row.get("gemm") == gemm]
        if each:
            mean = math.exp(sum(map(math.log, each)) / len(each))
            found[name] = {"geometric mean": round(mean, 3), "least": round(min(each), 3)}
    return found


def main(
    shapes: Annotated[str, typer.Option(help="names that begin like one of these, by commas; all without")] = "",
    distributions: Annotated[str, typer.Option(help="by semicolons")] = ";".join(DISTRIBUTIONS),
    casts: Annotated[bool, typer.Option(help="measure casts, too")] = True,
    out: Annotated[Path | None, typer.Option(help="folder of the data")] = None,
) -> None:
    """Measure, and write the data."""
    torch.manual_seed(0)
    chosen = [name for name in SHAPES if name.startswith(tuple(shapes.split(",")))]
    rows = gemm_rows(chosen, distributions.split(";"))
    of_casts = cast_rows([name for name in chosen if "decode" not in name]) if casts else []
    summary = ratios(rows)
    for name, figures in summary.items():
        print(name, figures)
    write_results((out or results_folder()) / "experts-gemms.json", {"ratios": summary, "rows": [*rows, *of_casts]})


if __name__ == "__main__":
    typer.run(main)
