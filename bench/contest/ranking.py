"""How well the cost model ranks the configurations of GEMMs: ``python -m bench.contest.ranking untuned``.

Each forward GEMM of the named sets (:mod:`bench.shapes`) runs at settled clocks in the configurations that the model
takes for the fastest. A row has the seconds of each, in the model's order, and how the model's first and the
launch's choice compare with the least.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.contest.cases import recipe_variants
from bench.contest.machine import results_folder, write_results
from bench.shapes import select
from tritonfp8 import Recipe
from tritonfp8.warmup import MATMUL, Call, gemm_of, record_linear, settled_seconds

VARIANTS = {n: r for n, r in recipe_variants(("rowwise", "blockwise")).items() if r.transposed_from == "values"}
CANDIDATES = 5
Timer = Callable[[Sequence[Callable[[], object]]], Sequence[float]]


def forward_call(size: Sequence[int], recipe: Recipe) -> Call:
    """The forward GEMM of a bf16 layer, ``size`` being ``(M, N, K)``."""
    m, n, k = size
    for call in record_linear((m, n, k), recipe, "bfloat16"):
        given = call.named()
        if call.op == MATMUL and (*given["a"].shape, given["b"].shape[0]) == (m, k, n):
            return call
    raise ValueError(f"a layer of {tuple(size)} records no forward GEMM")


def measured(call: Call, device: torch.device, timer: Timer = settled_seconds) -> dict[str, Any]:
    """Seconds of each candidate; how much longer than the fastest the model's first and the launch's choice take."""
    gemm = gemm_of(call, device)
    assert gemm is not None
    args, configs = gemm.operands(device), gemm.candidates(device)[:CANDIDATES]
    chosen = gemm.chosen(device)
    configs += [chosen] if chosen not in configs else []
    out = torch.empty_like(gemm.run(args, configs[0]))
    seconds = timer([partial(gemm.run, args, config, out) for config in configs])
    of = dict(zip((config.name for config in configs), seconds, strict=True))
    best = min(seconds)
    return {"seconds": of, "model_over_best": seconds[0] / best, "choice_over_best": of[chosen.name] / best}


def main(
    names: Annotated[list[str], typer.Argument(help="Sets of shapes.")],
    only: Annotated[list[str], typer.Option(help=f"Of: {', '.join(VARIANTS)}. [default: all]")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="File for the data. [default: in the results of this GPU]")] = None,
) -> None:
    """Measure, print a line for each GEMM, and write the data."""
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA GPU: it times kernels")
    rows = []
    for shape in select("gemm", names):
        for variant in only or VARIANTS:
            row = measured(forward_call(shape.size, VARIANTS[variant]), torch.device("cuda", 0))
            rows.append({"shape": list(shape.size), "variant": variant, **row})
            print(f"{variant} {shape.size}: {row['model_over_best']:.3f} {row['choice_over_best']:.3f}", flush=True)
    summary = {
        variant: {
            name: {"mean": statistics.geometric_mean(found), "worst": max(found)}
            for name in ("model_over_best", "choice_over_best")
            if (found := [row[name] for row in rows if row["variant"] == variant])
        }
        for variant in only or VARIANTS
    }
    print(summary)
    write_results(out or results_folder() / "ranking.json", {"summary": summary, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
