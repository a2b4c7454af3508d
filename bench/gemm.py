"""The GEMM of each recipe against torch's own, in one run: ``python -m bench.gemm``.

Random normal data, operands quantized by this package and shared with the peer, L2 flushed before each run, the median
of rounds in which all contenders take turns (a GPU slows down as it warms up). Nothing is timed before the precise
product of every recipe is within the tolerances on the same operands.
"""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType
from triton.testing import do_bench

import tritonfp8
from bench.machine import output_path, write_results
from tritonfp8 import Quantized, QuantSpec, recipes
from tritonfp8.testing import assert_matmul_close

SHAPES = [(8192, 8192, 8192), (16384, 14336, 4096)]
ROUNDS = 7


def torch_epilogue_scaled(a: Quantized, b: Quantized, fast: bool) -> torch.Tensor:
    """``torch._scaled_mm``, tensorwise or rowwise by the shapes of the scales."""
    scales = (a.scale, b.scale.t()) if a.scale.numel() > 1 else (a.scale.view(()), b.scale.view(()))
    return torch._scaled_mm(
        a.qdata, b.qdata.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def torch_block_scaled(a: Quantized, b: Quantized) -> torch.Tensor:
    """``F.scaled_mm`` on 1x128 x 128x128 or 1x128 x 1x128 operands."""
    square = b.spec.block == (128, 128)
    return F.scaled_mm(
        a.qdata, b.qdata.t(), a.scale, ScalingType.BlockWise1x128,
        b.scale.t() if square else b.scale,
        ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


def contenders(a: torch.Tensor, b: torch.Tensor) -> dict[str, tuple[Callable[[], torch.Tensor], str | None]]:
    """Name -> (function, name of the peer that it is compared with)."""
    cases: dict[str, tuple[Callable[[], torch.Tensor], str | None]] = {"bf16": (lambda: a @ b.t(), None)}

    def add(name: str, lhs: QuantSpec, rhs: QuantSpec, accumulation: str, peer: Callable) -> None:
        qa, qb = tritonfp8.quantize(a, lhs), tritonfp8.quantize(b, rhs)
        cases[f"torch {name}"] = (lambda: peer(qa, qb), None)
        cases[name] = (lambda: tritonfp8.scaled_matmul(qa, qb, accumulation=accumulation), f"torch {name}")

    for recipe in ("tensorwise", "rowwise"):
        gemm = recipes.get(recipe).output
        for accumulation in ("precise", "fast"):
            fast = accumulation == "fast"
            peer = lambda x, y, fast=fast: torch_epilogue_scaled(x, y, fast)  # noqa: E731
            add(f"{recipe} {accumulation}", gemm.lhs, gemm.rhs, accumulation, peer)
    blockwise = recipes.get("blockwise")
    add("blockwise", blockwise.output.lhs, blockwise.output.rhs, "precise", torch_block_scaled)
    add("blockwise grad_weight", blockwise.grad_weight.lhs, blockwise.grad_weight.rhs, "precise", torch_block_scaled)
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
