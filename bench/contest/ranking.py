"""How well configurations of GEMMs are chosen, and how fast they are then: ``python -m bench.contest.ranking untuned``.

Each forward GEMM of the named sets (:mod:`bench.shapes`) runs at settled clocks in the configurations that the cost
model takes for the fastest, in turn with torch's GEMM of the same operands. A row has the seconds of each, in the
model's order; how the model's first and the launch's choice compare with the least; and the speed of the choice over
torch's GEMM.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench.contest.cases import GEMM_CASES, recipe_variants
from bench.contest.machine import results_folder, write_results
from bench.shapes import select
from tritonfp8 import Quantized, Recipe
from tritonfp8.specs import spec_of
from tritonfp8.warmup import MATMUL, Call, gemm_of, record_linear, settled_seconds

# One kernel reads rowwise and tensorwise scales, and torch has a kernel for each. A recipe is named first.
NAMES = ("rowwise precise", "rowwise fast", "tensorwise precise", "blockwise precise")
VARIANTS = {name: recipe_variants((name.split()[0],))[name] for name in NAMES}
PEERS = {case.name: case.peer for case in GEMM_CASES}
CANDIDATES = 5
RATIOS = ("model_over_best", "choice_over_best", "over_torch")
Timer = Callable[[Sequence[Callable[[], object]]], Sequence[float]]


def forward_call(size: Sequence[int], recipe: Recipe) -> Call:
    """The forward GEMM of a bf16 layer, ``size`` being ``(M, N, K)``."""
    m, n, k = size
    for call in record_linear((m, n, k), recipe, "bfloat16"):
        given = call.named()
        if call.op == MATMUL and (*given["a"].shape, given["b"].shape[0]) == (m, k, n):
            return call
    raise ValueError(f"a layer of {tuple(size)} records no forward GEMM")


def peer_of(variant: str, call: Call, args: Sequence[Any]) -> Callable[[], object] | None:
    """torch's GEMM of the arguments of ``call``; None if torch has none for these sizes."""
    named = dict(zip(call.named(), args, strict=True))
    make = PEERS[variant.split()[0]]
    assert make is not None
    a, b = (Quantized(named[x], named[f"{x}_scale"], spec_of(named[f"{x}_spec"])) for x in "ab")
    try:
        function = make(a, b, named["accumulation"])
        function()
    except (RuntimeError, ValueError):
        return None
    return function


def measured(
    variant: str, call: Call, device: torch.device, timer: Timer = settled_seconds, candidates: int = CANDIDATES
) -> dict[str, Any]:
    """Seconds of each candidate and of torch's GEMM, and the ratios (see the module's docstring)."""
    gemm = gemm_of(call, device)
    assert gemm is not None
    args, configs = gemm.operands(device), gemm.candidates(device)[:candidates]
    chosen = gemm.chosen(device)
    configs += [chosen] if chosen not in configs else []
    out = torch.empty_like(gemm.run(args, configs[0]))
    functions: list[Callable[[], object]] = [partial(gemm.run, args, config, out) for config in configs]
    peer = peer_of(variant, call, args)
    seconds = timer([*functions, *([peer] if peer else [])])
    of = dict(zip((config.name for config in configs), seconds, strict=False))
    return ratios(of, configs[0].name, chosen.name, seconds[-1] if peer else None)


def ratios(of: dict[str, float], first: str, choice: str, peer: float | None) -> dict[str, Any]:
    """A row of seconds ``of`` configurations: the model's ``first``, the launch's ``choice``, and torch's ``peer``."""
    best = min(of.values())
    over = None if peer is None else peer / of[choice]
    row = {"seconds": of, "torch": peer, "choice": choice}
    return row | dict(zip(RATIOS, (of[first] / best, of[choice] / best, over), strict=True))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Geometric mean, least and largest of each ratio, by set and variant."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for name in RATIOS:
            if row[name] is not None:
                found.setdefault((f"{row['set']}, {row['variant']}", name), []).append(row[name])
    table: dict[str, dict[str, dict[str, float]]] = {}
    for (of, name), values in found.items():
        figures = {"mean": statistics.geometric_mean(values), "least": min(values), "largest": max(values)}
        table.setdefault(of, {})[name] = figures
    return table


def main(
    names: Annotated[list[str], typer.Argument(help="Sets of shapes.")],
    only: Annotated[list[str], typer.Option(help=f"Of: {', '.join(VARIANTS)}. [default: all]")] = [],  # noqa: B006
    candidates: Annotated[int, typer.Option(help="Configurations of each GEMM.")] = CANDIDATES,
    out: Annotated[Path | None, typer.Option(help="File for the data. [default: in the results of this GPU]")] = None,
) -> None:
    """Measure, print a line for each GEMM, and write the data."""
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA GPU: it times kernels")
    rows = []
    for shape in select("gemm", names):
        for variant in only or VARIANTS:
            call = forward_call(shape.size, VARIANTS[variant])
            row = measured(variant, call, torch.device("cuda", 0), candidates=candidates)
            rows.append({"set": shape.set, "shape": list(shape.size), "variant": variant, **row})
            print(variant, shape.size, *(f"{name} {row[name]:.3f}" for name in RATIOS if row[name]), flush=True)
    write_results(out or results_folder() / "ranking.json", {"summary": summary(rows), "rows": rows})


if __name__ == "__main__":
    typer.run(main)
