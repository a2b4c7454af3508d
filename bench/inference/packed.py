"""Time of GEMMs on weights of MXFP4 codes, over the same GEMMs on e4m3 codes and in bf16.

    python -m bench.inference.packed --out bench/results/nvidia-h200

Weights are read in turn, so that none is in cache. The scales of expanded rows are known, as a stored weight has them.
Each contestant is captured in a CUDA graph. Of experts those have tokens that a row says, each as many.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from bench.contest.machine import results_folder, write_results
from tritonfp8 import ops
from tritonfp8.advice import captured
from tritonfp8.recipes import get
from tritonfp8.specs import EXPANDED, MXFP4

SHAPES = ((28672, 4096), (4096, 14336))
TOKENS = (1, 4, 16, 64, 256, 512, 1024, 4096)
EXPERTS, EXPERT_SHAPE = 32, (2880, 2880)
# Tokens of each expert that has any, and how many have.
TOKENS_OF_EXPERTS = ((1, 4), (1, 32), (4, 32), (16, 32), (64, 32), (256, 32), (512, 32))
WEIGHTS, ROUNDS, REPLAYS = 8, 5, 5
(PACKED,), (ROWS,) = MXFP4.args, EXPANDED.args
CODES, EXPANDED_CODES, EXPANDED_FIRST, BF16 = "mxfp4", "e4m3", "expanded first", "bf16"


def seconds(calls: dict[str, list[Callable[[], Tensor]]]) -> dict[str, float]:
    """The median time of a call of each contestant, in rounds that go through all of them."""
    graphs = {name: captured(lambda each=each: [call() for call in each])[0] for name, each in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / REPLAYS / len(calls[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def row(what: dict[str, Any], found: dict[str, float]) -> dict[str, Any]:
    """Times, and the speed of MXFP4 over the others."""
    over = {f"speed_over_{name}": found[name] / found[CODES] for name in found if name != CODES}
    return {**what, **{f"{name}_seconds": value for name, value in found.items()}, **over}


def dense(n: int, k: int) -> list[dict[str, Any]]:
    """A row for each number of tokens."""
    spec = get("rowwise").output.lhs
    assert spec is not None
    values = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(WEIGHTS)]
    packed = [ops.quantize(each, PACKED) for each in values]
    rows = [ops.expand_codes(*each, PACKED) for each in packed]
    found = []
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
        a = ops.quantize(x, *spec.args)
        times = seconds({
            CODES: [
                partial(ops.packed_matmul, *a, *spec.args, *w, PACKED, b_row_scale=scale)
                for w, (_, scale) in zip(packed, rows, strict=True)
            ],
            EXPANDED_CODES: [partial(ops.scaled_matmul, *a, *spec.args, *w, ROWS) for w in rows],
            BF16: [partial(torch.matmul, x, w.t()) for w in values],
        })  # fmt: skip
        found.append(row({"kind": "dense", "tokens": tokens, "n": n, "k": k}, times))
    return found


def grouped() -> list[dict[str, Any]]:
    """A row for each number of tokens an expert, and of experts that have tokens."""
    spec = get("rowwise").output.lhs
    assert spec is not None
    n, k = EXPERT_SHAPE
    values = [torch.randn(EXPERTS, n, k, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    packed = [ops.quantize(each, PACKED) for each in values]
    rows = [ops.expand_codes(*each, PACKED) for each in packed]
    found = []
    for tokens, active in TOKENS_OF_EXPERTS:
        ends = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32).clamp(max=active) * tokens
        x = torch.randn(active * tokens, k, device="cuda", dtype=torch.bfloat16)
        a = ops.quantize(x, *spec.args)

        def multiply(codes: Tensor, scale: Tensor, a: Any = a, ends: Tensor = ends) -> Tensor:
            out: Tensor = ops.scaled_grouped_matmul(*a, *spec.args, codes, scale, ROWS, ends)
            return out

        times = seconds({
            CODES: [
                partial(ops.packed_grouped_matmul, *a, *spec.args, *w, PACKED, ends, b_row_scale=scale)
                for w, (_, scale) in zip(packed, rows, strict=True)
            ],
            EXPANDED_CODES: [lambda w=w: multiply(*w) for w in rows],
            EXPANDED_FIRST: [
                lambda w=w, scale=scale, ends=ends: multiply(*ops.expand_codes(*w, PACKED, scale, ends))
                for w, (_, scale) in zip(packed, rows, strict=True)
            ],
            BF16: [partial(ops.grouped_matmul, x, w, ends) for w in values],
        })  # fmt: skip
        found.append(row({"kind": "grouped", "tokens": tokens, "n": n, "k": k, "experts": active}, times))
    return found


def main(
    out: Annotated[Path | None, typer.Option(help="Folder for packed.json.")] = None,
    experts: Annotated[bool, typer.Option(help="Also grouped GEMMs.")] = True,
) -> None:
    """Measure, print each row, and write."""
    rows = [each for n, k in SHAPES for each in dense(n, k)] + (grouped() if experts else [])
    for each in rows:
        over = "  ".join(f"{name[11:]} {each[name]:.2f}" for name in each if name.startswith("speed_over_"))
        of = f"{each['experts']} of {EXPERTS} " if "experts" in each else ""
        what, us = f"{each['kind']} {of}{each['n']}x{each['k']}", 1e6 * each[f"{CODES}_seconds"]
        print(f"{what:<27}{each['tokens']:>6} tokens {us:8.1f} us  over {over}")
    write_results((out or results_folder()) / "packed.json", {"rows": rows})


if __name__ == "__main__":
    typer.run(main)
