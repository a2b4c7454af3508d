"""Allocate, choose a configuration, launch: the Triton twin of each op in :mod:`tritonfp8.reference.fused`.

Passes over memory, in bytes an element of a 16-bit dtype (N of the normal result, T of the transposed one):

    rms_norm    rows [read x 2, write N 1], then tiles [read x 2, write T 1]; tensorwise writes both in the second
    silu_mul    tiles [read 4, write N 1, T 1]; a pass [read 4] before it where a scale takes in a whole dim; rows
                [read 4, write N 1] where only the normal result is wanted, whatever its scale
    backward    tiles [read 6, write 2 N, 2 T]; a pass [read 6] before it likewise
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tritonfp8 import hardware, reference
from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.kernels.fused import rms_norm as rms_norm_kernels
from tritonfp8.kernels.fused import swiglu as kernels
from tritonfp8.launch import cast
from tritonfp8.launch.kernel_cache import run, within_32_bits
from tritonfp8.launch.partial_maxima import Parts, row_chunks
from tritonfp8.launch.plan import replayed
from tritonfp8.reference import empty_results
from tritonfp8.specs import BLOCK_128X128, COLUMNWISE, ORIENTATIONS, ROWWISE, TENSORWISE, QuantSpec, spec_of, transposed

__all__ = ["rms_norm_backward", "rms_norm_quantize", "silu_mul_backward_quantize", "silu_mul_quantize"]

MAX_ROW = 16384
"""Longest row that a rows kernel holds. Beyond it RMSNorm runs as plain torch and a cast."""

WIDEST_TILE_ITEMSIZE = 2
LONG_BLOCK = 128


class Rows(NamedTuple):
    """How a rows kernel runs: rows a step, warps, programs a multiprocessor, whether the next step is prefetched.

    ``hold``: whether a program keeps the weight in registers, in place of reading it from the cache for each row.
    ``writing_parts``: programs a multiprocessor, at most, where each of them also writes a maximum of each column.
    """

    rows: int
    warps: int
    per_sm: int
    prefetch: bool
    hold: bool = False
    writing_parts: int = 4


class Tiles(NamedTuple):
    """How a tile kernel runs: with ``per_sm`` programs a multiprocessor that walk over tiles (0: one for each tile).

    ``stages`` above 1 reads ahead by so many tiles less one.
    """

    m: int
    n: int
    warps: int
    per_sm: int = 0
    stages: int = 1


# By the longest row that a configuration serves.
RMS_NORM = {
    1024: Rows(4, 4, 4, False),
    2048: Rows(1, 4, 8, True, hold=True),
    4096: Rows(1, 4, 4, True, hold=True, writing_parts=3),
    8192: Rows(1, 8, 2, True, hold=True),
    MAX_ROW: Rows(1, 8, 2, True, hold=True),
}
RMS_NORM_BACKWARD = {
    1024: Rows(4, 4, 4, False),
    4096: Rows(1, 8, 2, False),
    8192: Rows(1, 16, 1, False),
    MAX_ROW: Rows(1, 16, 1, False),
}
SILU_MUL_ROWS = {
    1024: Rows(4, 4, 1, False),
    4096: Rows(1, 4, 1, False),
    8192: Rows(1, 8, 1, False),
    MAX_ROW: Rows(1, 32, 1, False),
}
# By producer and by what is written: the normal result alone, the transposed one, both where the amax of the normal one
# is given, both where a tile holds the blocks.
QUANTIZE_TILES = {
    ("rms_norm", "normal"): Tiles(128, 128, 8),
    ("rms_norm", "transposed"): Tiles(128, 32, 4),
    ("rms_norm", "both"): Tiles(128, 64, 4),
    ("silu_mul", "normal"): Tiles(32, 128, 4),
    ("silu_mul", "transposed"): Tiles(128, 32, 4),
    ("silu_mul", "both"): Tiles(128, 64, 4),
    ("silu_mul", "both in blocks"): Tiles(32, 128, 4),
    ("silu_mul_backward", "normal"): Tiles(64, 128, 8),
    ("silu_mul_backward", "transposed"): Tiles(128, 32, 4),
    ("silu_mul_backward", "both"): Tiles(32, 64, 2),
    ("silu_mul_backward", "both in blocks"): Tiles(32, 64, 2),
}
SQUARE_TILES = Tiles(128, 128, 16)
# Of the pass that finds amax values.
AMAX_TILES = {
    "silu_mul": Tiles(8, 256, 2, 16),
    "silu_mul_backward": Tiles(8, 256, 2, 16),
}
SUM_TILES = Tiles(32, 32, 4)
MIN_ROW_TILE = 128


def _rows_config(table: dict[int, Rows], n: int) -> tuple[Rows, int]:
    """Configuration for rows of ``n``, and the width of its tile."""
    return next(config for limit, config in table.items() if n <= limit), max(triton.next_power_of_2(n), MIN_ROW_TILE)


class _Side(NamedTuple):
    """One orientation of the results: blocks, amax and strides in the coordinates of the input."""

    qdata: Tensor
    scale: Tensor
    block: tuple[int, int]
    spec: QuantSpec
    amax: Tensor | None

    @property
    def whole(self) -> bool:
        """Whether a scale takes in a whole dim, so that its amax must be known before."""
        return -1 in self.block

    def pointers(self) -> list[Tensor]:
        scale = self.scale.view(torch.uint8) if SCALE_FORMATS[self.spec.scale_format].exponent_only else self.scale
        return [self.qdata, scale, scale if self.amax is None else self.amax]


def _sides(
    results: list[Tensor], spec: QuantSpec, spec_t: QuantSpec, orientation: str
) -> tuple[_Side | None, _Side | None]:
    """Results as allocated, ``[O, ...]`` or without that dim."""
    normal, both = ORIENTATIONS[orientation][0], len(results) > 2
    side = side_t = None
    if normal:
        side = _Side(results[0], results[1], spec.block, spec, None)
    if both or not normal:
        qdata, scale = results[-2:]
        side_t = _Side(qdata, scale.transpose(-1, -2), transposed(spec_t.block), spec_t, None)
    return side, side_t


@functools.cache
def _constants(suffix: str, block: tuple[int, int], spec: QuantSpec) -> dict[str, object]:
    fmt = FORMATS[spec.format]
    values = {
        "ROWS": block[0],
        "COLS": block[1],
        "QMAX": fmt.qmax,
        "EMAX": fmt.emax,
        "QMAX_MANTISSA": fmt.qmax_mantissa,
        "MANTISSA_BITS": fmt.mantissa_bits,
        "EMIN": fmt.emin,
        "E8M0": SCALE_FORMATS[spec.scale_format].exponent_only,
        "POW2": spec.scale_rounding == "pow2",
    }
    return {f"{name}{suffix}": value for name, value in values.items()}


def _side_constants(suffix: str, side: _Side) -> dict[str, object]:
    return _constants(suffix, side.block, side.spec)


class _Inputs(NamedTuple):
    """What a tile kernel reads: three tensors, and row and column strides of each."""

    producer: str
    tensors: tuple[Tensor, Tensor, Tensor]
    strides: tuple[int, ...]
    shape: tuple[int, int]
    round_normalized: bool = False


def _programs(tiles: Tiles, m: int, n: int, device: torch.device) -> int:
    count = -(-m // tiles.m) * -(-n // tiles.n)
    return min(count, hardware.abilities(device).num_sms * tiles.per_sm) if tiles.per_sm else count


def _tiles(producer: str, side: _Side | None, side_t: _Side | None) -> Tiles:
    if any(s is not None and s.block == BLOCK_128X128 for s in (side, side_t)):
        return SQUARE_TILES
    if side is None or side_t is None:
        return QUANTIZE_TILES[producer, "transposed" if side is None else "normal"]
    if side.whole:
        return QUANTIZE_TILES[producer, "both"]
    return QUANTIZE_TILES[producer, "both in blocks"]


def _find_amax(inputs: _Inputs, side: _Side | None, side_t: _Side | None) -> tuple[_Side | None, _Side | None]:
    """The sides with the amax of their whole-dim blocks, in one more pass over the inputs."""
    blocks = {s.block for s in (side, side_t) if s is not None and s.whole}
    if not blocks:
        return side, side_t
    m, n = inputs.shape
    x = inputs.tensors[0]
    results = 2 if inputs.producer == "silu_mul_backward" else 1
    row, col, all_of_it = (block in blocks for block in (ROWWISE, COLUMNWISE, TENSORWISE))
    tiles = AMAX_TILES[inputs.producer]
    strips = -(-n // tiles.n)
    programs = hardware.abilities(x.device).num_sms * tiles.per_sm
    rows, columns = m if row else 0, n if col else 0
    chunks = row_chunks((m, n), tiles.m, strips, programs, rows + columns)
    lines = Parts.of(x, results * rows, results * columns, strips, chunks) if row or col else None
    totals = Parts.of(x, 0, results, 0, chunks * strips) if all_of_it else None
    run(
        kernels.partial_amax_of_result_kernel,
        chunks * strips,
        (*inputs.tensors, *((x, x) if lines is None else lines.pointers()), x if totals is None else totals.buffer),
        (m, n, *inputs.strides, chunks, 0 if lines is None else lines.groups),
        {
            "ROW": row, "COL": col, "WHOLE": all_of_it,
            "PRODUCER": inputs.producer, "TILE_M": tiles.m, "TILE_N": tiles.n,
        },
        num_warps=tiles.warps,
    )  # fmt: skip
    found = {} if totals is None else {TENSORWISE: totals.amax()[1]}
    if lines is not None:
        found |= dict(zip((ROWWISE, COLUMNWISE), lines.amax(), strict=True))
    given = [s._replace(amax=found[s.block]) if s is not None and s.whole else s for s in (side, side_t)]
    return given[0], given[1]


def _side_strides(side: _Side) -> list[int]:
    """Of scales: from one result to the next, rows, columns."""
    lead = side.scale.stride(0) if side.scale.ndim > 2 else 0
    return [lead, *side.scale.stride()[-2:]]


def _amax_stride(side: _Side) -> int:
    return 0 if side.amax is None or side.qdata.ndim < 3 else side.amax.numel() // side.qdata.shape[0]


def _takes_two_launches(inputs: _Inputs, side: _Side, side_t: _Side) -> bool:
    """Whether no tile serves both sides well: blocks of 128, which want tiles that are long in the direction of each;
    blocks of a tile of 4-byte elements, which takes more registers and shared memory than there are.
    """
    wide = inputs.tensors[0].element_size() > WIDEST_TILE_ITEMSIZE
    return LONG_BLOCK in (*side.block, *side_t.block) or (wide and not side.whole)


def _quantize_tiles(inputs: _Inputs, side: _Side | None, side_t: _Side | None, kept: Tensor | None) -> None:
    """Fill what is wanted, all by tiles; the amax of whole-dim blocks is given."""
    if side is not None and side_t is not None and _takes_two_launches(inputs, side, side_t):
        _quantize_tiles(inputs, side, None, kept)
        _quantize_tiles(inputs, None, side_t, None)
        return
    m, n = inputs.shape
    first, second = side or side_t, side_t or side
    assert first is not None
    assert second is not None
    tiles = _tiles(inputs.producer, side, side_t)
    packed = m % 4 == 0
    run(
        kernels.quantize_tile_kernel,
        _programs(tiles, m, n, inputs.tensors[0].device),
        (*inputs.tensors, first.qdata if kept is None else kept, *first.pointers(), *second.pointers()),
        (
            m, n, m // 4, m * n, *inputs.strides, *_side_strides(first), *_side_strides(second),
            _amax_stride(first), _amax_stride(second),
        ),
        {
            **_side_constants("", first),
            **_side_constants("_T", second),
            "NORMAL": side is not None,
            "TRANSPOSED": side_t is not None,
            "KEEP": kept is not None,
            "PACKED": packed,
            "DIRECT_CAST": hardware.abilities(first.qdata.device).has_direct_cast,
            "PRODUCER": inputs.producer,
            "ROUND_NORMALIZED": inputs.round_normalized,
            "TILE_M": tiles.m,
            "TILE_N": tiles.n,
            "STAGES": tiles.stages,
        },
        num_warps=tiles.warps,
    )  # fmt: skip


def _row_programs(config: Rows, m: int, device: torch.device) -> int:
    """As many as run at once: each walks over rows."""
    return min(-(-m // config.rows), hardware.abilities(device).num_sms * config.per_sm)


def _rms_norm_rows(
    x: Tensor, weight: Tensor, rstd: Tensor, eps: float, round_normalized: bool, side: _Side | None,
    kept: Tensor | None, blocks: Collection[tuple[int, int]],
) -> dict[tuple[int, int], Tensor]:  # fmt: skip
    """rstd; the rows quantized by ``side``; ``y`` kept. Returns the amax of ``blocks`` that take in whole columns."""
    m, n = x.shape
    config, width = _rows_config(RMS_NORM, n)
    sizes = {COLUMNWISE: n, TENSORWISE: 1}
    if COLUMNWISE in blocks:
        config = config._replace(per_sm=min(config.per_sm, config.writing_parts))
    programs = _row_programs(config, m, x.device)
    parts = {block: Parts.of(x, 0, size, 0, programs) for block, size in sizes.items() if block in blocks}
    columns, tensor = (parts[block].buffer if block in parts else rstd for block in sizes)
    unused = _constants("", ROWWISE, QuantSpec("e4m3", ROWWISE, "fp32", "pow2"))
    constants, pointers, strides = unused, [x, x], [0, 0]
    if side is not None:
        constants = _side_constants("", side)
        pointers, strides = side.pointers()[:2], _side_strides(side)[1:]
    run(
        rms_norm_kernels.rms_norm_rows_kernel,
        programs,
        (x, weight, rstd, x if kept is None else kept, *pointers, columns, tensor),
        (m, n, *x.stride(), weight.stride(0), *strides),
        {
            **{name: value for name, value in constants.items() if name != "ROWS"},
            "EPS": eps,
            "ROUND_NORMALIZED": round_normalized,
            "NORMAL": side is not None,
            "KEEP": kept is not None,
            "COLUMN_AMAX": COLUMNWISE in parts,
            "TENSOR_AMAX": TENSORWISE in parts,
            "DIRECT_CAST": hardware.abilities(x.device).has_direct_cast,
            "PREFETCH": config.prefetch,
            "HOLD_WEIGHT": config.hold,
            "TILE_M": config.rows,
            "TILE_N": width,
        },
        num_warps=config.warps,
    )
    return {block: of_block.amax()[1] for block, of_block in parts.items()}


@replayed
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, rounding: str, spec: str, spec_t: str, orientation: str, keep: bool
) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.rms_norm_quantize`."""
    m, n = x.shape
    if not x.numel():
        return reference.rms_norm_quantize(x, weight, eps, rounding, spec, spec_t, orientation, keep)
    if n > MAX_ROW:
        return _rms_norm_then_quantize(x, weight, eps, rounding, spec, spec_t, orientation, keep)
    weight = within_32_bits(weight)
    specs = spec_of(spec), spec_of(spec_t)
    results = empty_results(0, (m, n), *specs, orientation, x.device)
    side, side_t = _sides(results, *specs, orientation)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device) if keep else None
    by_rows = side if side is not None and side.block[0] == 1 else None
    by_tiles = side if by_rows is None else None
    blocks = {s.block for s in (by_tiles, side_t) if s is not None}
    found = _rms_norm_rows(x, weight, rstd, eps, rounding == "normalized", by_rows, y, blocks)
    if by_tiles is not None or side_t is not None:
        inputs = _Inputs(
            "rms_norm", (x, rstd, weight), (*x.stride(), 1, 1, 1, weight.stride(0)), (m, n), rounding == "normalized"
        )
        by_tiles, side_t = (None if s is None else s._replace(amax=found.get(s.block)) for s in (by_tiles, side_t))
        _quantize_tiles(inputs, by_tiles, side_t, None)
    return [*results, rstd, *([] if y is None else [y])]


def _rms_norm_then_quantize(
    x: Tensor, weight: Tensor, eps: float, rounding: str, spec: str, spec_t: str, orientation: str, keep: bool
) -> list[Tensor]:
    y, rstd = reference.rms_norm(x, weight, eps, rounding)
    normal, transpose = ORIENTATIONS[orientation]
    if normal and transpose:
        results = list(cast.quantize_both(y, spec, spec_t))
    else:
        results = list(cast.quantize(y, spec if normal else spec_t, not normal))
    return [*results, rstd, *([y] if keep else [])]


@replayed
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, rounding: str, residual: Tensor | None, needs_weight: bool
) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.rms_norm_backward`."""
    m, n = x.shape
    if not x.numel() or n > MAX_ROW:
        return reference.rms_norm_backward(grad, x, weight, rstd, rounding, residual, needs_weight)
    weight = within_32_bits(weight)
    config, width = _rows_config(RMS_NORM_BACKWARD, n)
    programs = _row_programs(config, m, x.device)
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    partial = torch.empty((programs, n) if needs_weight else (1, 1), dtype=torch.float32, device=x.device)
    added = x if residual is None else residual
    run(
        rms_norm_kernels.rms_norm_backward_kernel,
        programs,
        (grad, x, weight, rstd, added, out, partial),
        (m, n, *grad.stride(), *x.stride(), weight.stride(0), *added.stride()),
        {
            "ROUND_NORMALIZED": rounding == "normalized",
            "HAS_RESIDUAL": residual is not None,
            "GRAD_WEIGHT": needs_weight,
            "PREFETCH": config.prefetch,
            "TILE_M": config.rows,
            "TILE_N": width,
        },
        num_warps=config.warps,
    )
    if not needs_weight:
        return [out]
    grad_weight = torch.empty(n, dtype=weight.dtype, device=x.device)
    run(
        rms_norm_kernels.sum_partials_kernel,
        -(-n // SUM_TILES.n),
        (partial, grad_weight),
        (programs, n),
        {"TILE_P": SUM_TILES.m, "TILE_N": SUM_TILES.n},
        num_warps=SUM_TILES.warps,
    )
    return [out, grad_weight]


def _silu_mul_rows(gate: Tensor, up: Tensor, side: _Side, kept: Tensor | None) -> None:
    m, n = gate.shape
    config, width = _rows_config(SILU_MUL_ROWS, n)
    constants = _side_constants("", side)
    run(
        kernels.silu_mul_rows_kernel,
        -(-m // config.rows),
        (gate, up, gate if kept is None else kept, *side.pointers()[:2]),
        (m, n, *gate.stride(), *up.stride(), *_side_strides(side)[1:]),
        {
            **{name: value for name, value in constants.items() if name not in ("ROWS", "COLS")},
            "KEEP": kept is not None,
            "DIRECT_CAST": hardware.abilities(gate.device).has_direct_cast,
            "TILE_M": config.rows,
            "TILE_N": width,
        },
        num_warps=config.warps,
    )


@replayed
def silu_mul_quantize(gate: Tensor, up: Tensor, spec: str, spec_t: str, orientation: str, keep: bool) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.silu_mul_quantize`."""
    if not gate.numel():
        return reference.silu_mul_quantize(gate, up, spec, spec_t, orientation, keep)
    m, n = gate.shape
    specs = spec_of(spec), spec_of(spec_t)
    results = empty_results(0, (m, n), *specs, orientation, gate.device)
    side, side_t = _sides(results, *specs, orientation)
    kept = torch.empty((m, n), dtype=gate.dtype, device=gate.device) if keep else None
    if side is not None and side_t is None and side.block == (1, -1) and n <= MAX_ROW:
        _silu_mul_rows(gate, up, side, kept)
    else:
        # The third input is of no use here.
        inputs = _Inputs("silu_mul", (gate, up, gate), (*gate.stride(), *up.stride(), 0, 0), (m, n))
        _quantize_tiles(inputs, *_find_amax(inputs, side, side_t), kept)
    return [*results, *([] if kept is None else [kept])]


@replayed
def silu_mul_backward_quantize(
    grad: Tensor, gate: Tensor, up: Tensor, spec: str, spec_t: str, orientation: str, keep: bool
) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.silu_mul_backward_quantize`."""
    if not gate.numel():
        return reference.silu_mul_backward_quantize(grad, gate, up, spec, spec_t, orientation, keep)
    m, n = gate.shape
    specs = spec_of(spec), spec_of(spec_t)
    results = empty_results(2, (m, n), *specs, orientation, gate.device)
    kept = torch.empty((2, m, n), dtype=gate.dtype, device=gate.device) if keep else None
    inputs = _Inputs("silu_mul_backward", (gate, up, grad), (*gate.stride(), *up.stride(), *grad.stride()), (m, n))
    _quantize_tiles(inputs, *_find_amax(inputs, *_sides(results, *specs, orientation)), kept)
    return [*results, *([] if kept is None else [kept])]
