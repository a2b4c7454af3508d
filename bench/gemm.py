"""The GEMM of each recipe against torch's own, in one run: ``python -m bench.gemm``.

Random normal data, operands quantized by this package and shared with the peer, L2 flushed before each run, the median
of rounds in which all contenders take turns (a GPU slows down as it warms up). Nothing is timed before the precise
product of every recipe is within the tolerances on the same operands.
"""

import statistics
from collections.abc import Callable

import torch
from triton.testing import do_bench

import tritonfp8
from bench.cases import PRODUCTS, gemm_bytes, gemm_flops
from bench.machine import output_path, write_results
from bench.peers import block_scaled, epilogue_scaled
from bench.shapes import SHAPES as SETS
from tritonfp8 import QuantSpec, recipes
from tritonfp8.testing import assert_matmul_close

SHAPES = [(8192, 8192, 8192), (16384, 14336, 4096)]
ROUNDS = 7


def contenders(a: torch.Tensor, b: torch.Tensor) -> dict[str, tuple[Callable[[], torch.Tensor], str | None]]:
    """Name -> (function, name of the peer that it is compared with)."""
    cases: dict[str, tuple[Callable[[], torch.Tensor], str | None]] = {"bf16": (lambda: a @ b.t(), None)}

    def add(name: str, lhs: QuantSpec, rhs: QuantSpec, accumulation: str, peer: Callable) -> None:
        qa, qb = tritonfp8.quantize(a, lhs), tritonfp8.quantize(b, rhs)
        cases[f"torch {name}"] = (peer(qa, qb, accumulation), None)
        cases[name] = (lambda: tritonfp8.scaled_matmul(qa, qb, accumulation=accumulation), f"torch {name}")

    for recipe in ("tensorwise", "rowwise"):
        gemm = recipes.get(recipe).output
        for accumulation in ("precise", "fast"):
            add(f"{recipe} {accumulation}", gemm.lhs, gemm.rhs, accumulation, epilogue_scaled)
    blockwise = recipes.get("blockwise")
    add("blockwise", blockwise.output.lhs, blockwise.output.rhs, "precise", block_scaled)
    add("blockwise grad_weight", blockwise.grad_weight.lhs, blockwise.grad_weight.rhs, "precise", block_scaled)
    mx = recipes.get("mxfp8").output
    qa, qb = tritonfp8.quantize(a, mx.lhs), tritonfp8.quantize(b, mx.rhs)
    cases["mxfp8 (emulated before sm_100)"] = (lambda: tritonfp8.scaled_matmul(qa, qb), None)
    return cases


def check(a: torch.Tensor, b: torch.Tensor) -> None:
    """Every recipe's product is right on these operands, or AssertionError."""
    for name in ("tensorwise", "rowwise", "blockwise", "mxfp8"):
        for gemm in (recipes.get(name).output, recipes.get(name).grad_weight):
            qa, qb = tritonfp8.quantize(a, gemm.lhs), tritonfp8.quantize(b, gemm.rhs)
            expected = tritonfp8.dequantize(qa) @ tritonfp8.dequantize(qb).t()
            assert_matmul_close(tritonfp8.scaled_matmul(qa, qb), expected, torch.bfloat16)


def measure(shape: tuple[int, int, int]) -> list[dict]:
    """One row a contender: TFLOP/s, and the ratio to its peer."""
    m, n, k = shape
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    check(a, b)
    cases = contenders(a, b)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, (function, _) in cases.items():
            times[name].append(do_bench(function, warmup=10, rep=40, return_mode="median"))
    median = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "shape": list(shape),
            "gemm": name,
            "tflops": round(2 * m * n * k / median[name] / 1e9, 1),
            "over_peer": peer and round(median[peer] / median[name], 3),
        }
        for name, (_, peer) in cases.items()
    ]


def as_rows(data: dict) -> list[dict]:
    """What this command wrote, as rows of the suite ``scaled_matmul``, which measures the same on more shapes."""
    return [_as_row(row, case) for row in data["rows"] if (case := _case(row["gemm"].removeprefix("torch ")))]


def _case(gemm: str) -> str | None:
    return max((case.name for case in PRODUCTS if gemm.startswith(case.name)), key=len, default=None)


def _as_row(row: dict, case: str) -> dict:
    shape = next(shape for shape in SETS["gemm"] if list(shape.size) == row["shape"])
    accumulation = "fast" if row["gemm"].endswith("fast") else "precise"
    own = not row["gemm"].startswith("torch")
    flops = gemm_flops(*shape.size)
    return {
        "suite": "scaled_matmul",
        "case": case,
        "set": shape.set,
        "name": shape.name,
        "shape": row["shape"],
        "contender": f"{'tritonfp8' if own else 'torch'} {accumulation}",
        "own": own,
        "peer": f"torch {accumulation}" if row["over_peer"] else None,
        "seconds": flops / row["tflops"] / 1e12,
        "flops": flops,
        "bytes": gemm_bytes(*shape.size),
    }


def main() -> None:
    """Measure, print, write."""
    out = output_path("gemm", __doc__)
    torch.manual_seed(0)
    rows = [row for shape in SHAPES for row in measure(shape)]
    for row in rows:
        ratio = f"{row['over_peer']:.3f} x torch" if row["over_peer"] else ""
        print(f"{row['shape']!s:<22} {row['gemm']:<32} {row['tflops']:>7} TFLOP/s  {ratio}")
    write_results(out, {"rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
