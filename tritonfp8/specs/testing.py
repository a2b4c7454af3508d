"""The tolerance policy: how close a result must be to its reference, in one place.

A cast is bitwise equal to the reference. A GEMM must reach a signal-to-quantization-noise ratio (SQNR) over the whole
output and in its worst tile: a global figure hides one tile that was never written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonfp8.specs.checks import require

TILE = 128
REPORTED_MISMATCHES = 8


@dataclass(frozen=True)
class MatmulTolerance:
    """The least SQNR of a GEMM, in dB.

    Attributes:
        overall: over the whole output.
        worst_tile: in each 128x128 tile of the output.
    """

    overall: float
    worst_tile: float


MATMUL_TOLERANCES: Mapping[torch.dtype, MatmulTolerance] = MappingProxyType(
    {
        torch.float32: MatmulTolerance(overall=60.0, worst_tile=58.0),
        # Rounding a float32 result to bf16 leaves 55.6 dB.
        torch.bfloat16: MatmulTolerance(overall=53.0, worst_tile=50.0),
        torch.float16: MatmulTolerance(overall=53.0, worst_tile=50.0),
    }
)
"""By output dtype, for ``accumulation="precise"`` against a float32 GEMM of the dequantized operands."""

FAST_TOLERANCE = MatmulTolerance(overall=30.0, worst_tile=27.0)
"""For ``accumulation="fast"`` with any K, when configurations are tuned. Fast accumulation has 65 dB at K = 1024 on
normal data and loses about 4 dB an octave of K; less than this is a defect."""

FAST_SQNR = 40.0
"""dB, overall and in the worst tile, for ``accumulation="fast"`` at the sizes of the benchmarks. It has 50 dB at
K = 16384 on normal data (bench/results/nvidia-h200/accumulation.json); a wrong or unwritten tile leaves 10 at most."""

MODEL_SQNR = 14.0
"""dB, for outputs and each gradient of a model of bench/models.py in FP8 against bf16: the format's noise through all
layers, in the worst gradient. A weight that is zero, negated or another layer's leaves 0 dB at most. Every recipe is
above with room to spare (tests/bench/test_contest.py)."""

SAME_BYTES = 0.99
"""Share of equal bytes of two casts that find a power of two in different ways."""


def sqnr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio ``10 log10(sum(expected^2) / sum((actual - expected)^2))``.

    Args:
        actual: the result, of any shape and floating dtype.
        expected: the reference, of the same shape.

    Returns:
        dB, computed in float64. ``inf`` if both are equal; ``-inf`` if one has a NaN or an infinity that the other does
        not have, or if ``expected`` is all zero and ``actual`` is not. NaN equals NaN.

    Raises:
        ValueError: the shapes differ.
    """
    signal, noise = _energies(actual, expected)
    return _decibels(signal.sum(), noise.sum()).item()


def worst_tile_sqnr(actual: torch.Tensor, expected: torch.Tensor, tile: int = TILE) -> float:
    """The least :func:`sqnr` of all ``tile`` x ``tile`` tiles of the last two dims; tiles at the edges may be smaller.

    Args:
        actual: the result ``[..., M, N]``; a vector is one row.
        expected: the reference, of the same shape.
        tile: rows and columns of a tile.

    Returns:
        dB; ``-inf`` if a tile that should be zero is not; ``inf`` for tensors without elements.

    Raises:
        ValueError: the shapes differ, or ``tile`` is below 1.
    """
    if tile < 1:
        raise ValueError(f"tile must be at least 1; got {tile}")
    signal, noise = (_tile_sums(energy, tile) for energy in _energies(actual, expected))
    ratios = _decibels(signal, noise)
    return ratios.min().item() if ratios.numel() else math.inf


def assert_bitwise_equal(actual: Any, expected: Any) -> None:
    """Assert that two tensors, or two pytrees of tensors, have the same bytes.

    Any dtype, 8-bit floats included. Bytes are compared, not values: 0.0 differs from -0.0, and a NaN equals only a NaN
    of the same bits. Strides may differ.

    Raises:
        AssertionError: with the number of elements that differ, and the index, values and bytes of the first ones; or
            with the difference in structure, dtype or shape.
    """
    leaves, structure = pytree.tree_flatten_with_path(actual)
    expected_leaves, expected_structure = pytree.tree_flatten_with_path(expected)
    if structure != expected_structure:
        raise AssertionError(f"structures differ: {structure} but expected {expected_structure}")
    reports = [
        f"{pytree.keystr(path) or 'tensor'}: {report}"
        for (path, leaf), (_, expected_leaf) in zip(leaves, expected_leaves, strict=True)
        if (report := _mismatch_report(leaf, expected_leaf))
    ]
    if reports:
        raise AssertionError("\n".join(reports))


def canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """``x`` with one bit pattern for all NaNs: the payload that arithmetic leaves in a NaN differs by device."""
    return torch.where(x.isnan(), torch.nan, x)


def assert_matmul_close(actual: torch.Tensor, expected: torch.Tensor, out_dtype: torch.dtype) -> None:
    """Assert that a GEMM is within :data:`MATMUL_TOLERANCES`, over the output and in its worst tile.

    Args:
        actual: the result ``[M, N]``, of dtype ``out_dtype``.
        expected: the float32 or float64 GEMM of the dequantized operands, ``[M, N]``.
        out_dtype: bfloat16, float16 or float32.

    Raises:
        AssertionError: with both figures and both tolerances.
        ValueError: the shapes differ, or ``out_dtype`` has no tolerance.
    """
    require("out_dtype", out_dtype, tuple(MATMUL_TOLERANCES))
    if actual.dtype != out_dtype:
        raise AssertionError(f"the result must be {out_dtype}; got {actual.dtype}")
    tolerance = MATMUL_TOLERANCES[out_dtype]
    overall, worst = sqnr(actual, expected), worst_tile_sqnr(actual, expected)
    # Negated, so that a NaN fails too.
    if not (overall >= tolerance.overall and worst >= tolerance.worst_tile):
        raise AssertionError(
            f"SQNR of a {tuple(actual.shape)} GEMM in {out_dtype}: {overall:.2f} dB overall, {worst:.2f} dB in the "
            f"worst tile; required {tolerance.overall} and {tolerance.worst_tile}"
        )


def _energies(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elementwise energies of signal and noise, float64; infinite noise where only one value is finite."""
    for name, x in (("actual", actual), ("expected", expected)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
        if x.layout is not torch.strided or x.is_nested or x.is_quantized:
            raise TypeError(f"{name} must be a dense tensor; got {x.dtype} with layout {x.layout}")
        if x.device != actual.device:
            raise ValueError(f"both tensors must be on one device; got {actual.device} and {x.device}")
    if actual.shape != expected.shape:
        raise ValueError(f"shapes must be equal; got {tuple(actual.shape)} and {tuple(expected.shape)}")
    a, e = actual.detach().to(torch.float64), expected.detach().to(torch.float64)
    noise = (a - e).square()
    equal = (a == e) | (a.isnan() & e.isnan())
    finite = a.isfinite() & e.isfinite()
    noise = torch.where(finite, noise, torch.where(equal, 0.0, math.inf))
    return torch.where(finite, e.square(), 0.0), noise


def _decibels(signal: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    ratio = 10 * torch.log10(signal / noise)
    return torch.where(noise == 0, math.inf, torch.where((signal == 0) | noise.isinf(), -math.inf, ratio))


def _tile_sums(x: torch.Tensor, tile: int) -> torch.Tensor:
    """``[..., M, N]`` -> ``[..., ceil(M / tile), ceil(N / tile)]``."""
    if x.ndim < 2:
        x = x.reshape(1, -1)
    rows, cols = x.shape[-2:]
    x = torch.nn.functional.pad(x, (0, -cols % tile, 0, -rows % tile))
    rows, cols = x.shape[-2:]
    return x.reshape(*x.shape[:-2], rows // tile, tile, cols // tile, tile).sum((-3, -1))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    # A single element is contiguous with any stride; a view as another dtype needs a stride of 1.
    flat = x.detach().contiguous().as_strided((x.numel(),), (1,))
    return flat.view(torch.uint8).view(-1, x.element_size())


def _mismatch_report(actual: Any, expected: Any) -> str | None:
    for name, x in (("actual", actual), ("expected", expected)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor or a pytree of tensors; got {type(x).__name__}")
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"got {actual.dtype} {tuple(actual.shape)} but expected {expected.dtype} {tuple(expected.shape)}"
    actual_bytes, expected_bytes = _bytes(actual), _bytes(expected).to(actual.device)
    wrong = (actual_bytes != expected_bytes).any(1).nonzero().squeeze(1)
    if not len(wrong):
        return None
    lines = [f"{len(wrong)} of {actual.numel()} elements differ; the first:"]
    for i in wrong[:REPORTED_MISMATCHES].tolist():
        index = tuple(int(j) for j in torch.unravel_index(torch.tensor(i), actual.shape))
        shown = [
            f"{x.reshape(-1)[i].item()!r} (0x{bytes(b[i].tolist()[::-1]).hex()})"
            for x, b in ((actual, actual_bytes), (expected, expected_bytes))
        ]
        lines.append(f"  {list(index)}: {shown[0]} but expected {shown[1]}")
    return "\n".join(lines)
