"""Validate, allocate, choose a configuration, launch: the Triton twin of each function in :mod:`tritonfp8.reference`.

On CPU tensors the kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested without a
GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tritonfp8 import hardware, reference
from tritonfp8.formats import FORMATS, SCALE_FORMATS, stacked
from tritonfp8.kernels.cast import quantize as quantize_kernels
from tritonfp8.launch.kernel_cache import run
from tritonfp8.launch.matmul import product_kind
from tritonfp8.launch.matmul import scaled_matmul as _scaled_matmul
from tritonfp8.launch.partial_maxima import Parts, row_chunks
from tritonfp8.launch.plan import replayed
from tritonfp8.specs import COLUMNWISE, ROWWISE, TENSORWISE, QuantSpec, empty_scale, scale_shape, spec_of, transposed
from tritonfp8.tuning import VECTOR_BYTES, CastTile, cast_tiles

__all__ = ["amax", "dequantize", "product_kind", "quantize", "quantize_both", "scaled_matmul", "transpose"]

MOST_PARTS_AT_ONCE = 1024
MOST_PARTS_IN_A_CAST = 32

Block = Sequence[int]
# Spec, block in the coordinates of x, parts of the amax at once.
Numerics = tuple[QuantSpec, tuple[int, int], int]


def _rows(x: Tensor) -> Tensor:
    """``[..., K]`` as ``[rows, K]``."""
    if x.ndim == 2:
        return x
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(math.prod(x.shape[:-1]), 0)


def _is_folded(x: Tensor, block: Block) -> bool:
    """Whether the blocks of ``x`` are those of ``x`` folded to 2-D: no block of several rows crosses a matrix."""
    return x.ndim <= 2 or block[0] <= 1 or x.shape[-2] % block[0] == 0


def _joins(parts: int, block: cast_tiles.Block, normal: bool, transposes: bool) -> bool:
    """Whether a launch joins the parts of an amax, or the cast into one or two results does: what took less time.

    A transposing cast waits for what it reads; one that does not hides it, and ends before a launch more would. Few
    parts of columns are read in less time than a launch takes.
    """
    if normal and transposes:
        return True
    return transposes if block == TENSORWISE else parts > MOST_PARTS_IN_A_CAST


def _whole_dim_amax(
    x: Tensor, blocks: Collection[cast_tiles.Block], normal: bool = True, transposes: bool = False
) -> dict[cast_tiles.Block, Tensor]:
    """``[parts, groups_m, groups_n]`` for each block, magnitudes or amax bits: the amax is the maximum over parts.

    ``blocks`` of ``x [m, n]``, in the coordinates of ``x``, are whole in a dim: (1, -1), (-1, 1) or (-1, -1). They are
    for results that are ``normal``, transposed, or both.
    """
    m, n = x.shape
    row, col, whole = (block in blocks for block in (ROWWISE, COLUMNWISE, TENSORWISE))
    tile, programs = cast_tiles.amax_pass(n, blocks)
    strips = -(-n // tile.n)
    rows, columns = m if row else 0, n if col else 0
    chunks = row_chunks((m, n), tile.m, strips, programs * hardware.abilities(x.device).num_sms, rows + columns)
    lines = Parts.of(x, rows, columns, strips, chunks) if row or col else None
    of_whole = Parts.of(x, 0, 1, 0, chunks * strips) if whole else None
    run(
        quantize_kernels.partial_amax_kernel,
        chunks * strips,
        (x, *((x, x) if lines is None else lines.pointers()), x if of_whole is None else of_whole.buffer),
        (m, n, *x.stride(), chunks, 0 if lines is None else lines.groups),
        {
            "ROW": row, "COL": col, "WHOLE": whole, "EVEN": tile.holds_whole(m, n), "TILE_M": tile.m,
            "TILE_N": tile.n, "R": tile.rows_a_thread(VECTOR_BYTES // x.element_size()),
            "STAGES": cast_tiles.PARTIAL_AMAX_STAGES,
        },
        **tile.options(),
    )  # fmt: skip
    found: dict[cast_tiles.Block, Tensor] = {}
    for block, parts in ((TENSORWISE, of_whole), (COLUMNWISE, lines)):
        if parts is not None:
            joined = _joins(len(parts.buffer), block, normal, transposes)
            of_rows, of_columns = parts.amax() if joined else parts.unjoined()
            found |= {ROWWISE: of_rows.unsqueeze(2), block: of_columns.unsqueeze(1)}
    return found


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """amax bits, int32, of blocks of ``x [m, n]`` that are whole in no dim."""
    m, n = x.shape
    out = torch.empty(scale_shape((m, n), block), dtype=torch.int32, device=x.device)
    tile = cast_tiles.holding(block)
    run(
        quantize_kernels.amax_kernel,
        tile.programs(m, n),
        (x, out),
        (m, n, *x.stride(), *out.shape, *out.stride()),
        {"ROWS": block[0], "COLS": block[1], "TILE_M": tile.m, "TILE_N": tile.n},
        **tile.options(),
    )
    return out


@replayed
def amax(x: Tensor, block: Block) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.amax`."""
    if not x.numel():
        return reference.amax(x, block)
    if not _is_folded(x, block):
        return torch.stack([amax(matrix, block) for matrix in x])
    matrix, block = _rows(x), (block[0], block[1])
    if -1 in block:
        found = _whole_dim_amax(matrix, [block])[block].amax(0)
        found = found.view(x.dtype if found.dtype == torch.int16 else torch.float32).float()
    else:
        found = _block_amax(matrix, block).view(torch.float32)
    # One NaN, as in the reference: the kernel keeps the bits of the NaN that it met.
    return torch.where(found.isnan(), torch.nan, found).reshape(scale_shape(x.shape, block))


class _Side(NamedTuple):
    """One result of a cast: tensors and strides in the coordinates of ``x``.

    ``amax``, where the kernel does not find it: ``[parts, groups_m, groups_n]``, float32 bits or magnitudes. ``given``
    says that it is a caller's.
    """

    qdata: Tensor
    scale: Tensor
    amax: Tensor | None
    block: tuple[int, int]
    spec: QuantSpec
    given: bool = False

    def runtime_args(self) -> list[int]:
        parts = [0, 0, 0, 0]
        if self.amax is not None:
            part, *groups = self.amax.stride()
            parts = [*groups, self.amax.shape[0], part]
        return [*self.scale.shape, *self.qdata.stride(), *self.scale.stride(), *parts]

    def tensors(self) -> list[Tensor]:
        scale = self.scale.view(torch.uint8) if SCALE_FORMATS[self.spec.scale_format].exponent_only else self.scale
        return [self.qdata, scale, scale if self.amax is None else self.amax]

    def parts_at_once(self) -> int:
        """How many parts of the amax the kernel reduces in one step; 0 where it finds the amax itself.

        For one that a caller gave, the kernel's mark of it.
        """
        if self.given:
            return int(quantize_kernels.GIVEN.value)
        if self.amax is None or self.amax.shape[0] == 1:
            return 0 if self.amax is None else 1
        return min(triton.next_power_of_2(self.amax.shape[0]), MOST_PARTS_AT_ONCE)

    def numerics(self) -> Numerics:
        """What decides the compile-time arguments of this side."""
        return self.spec, self.block, self.parts_at_once()

    def t(self) -> _Side:
        """The same result in the coordinates of ``x.T``."""
        amax = None if self.amax is None else self.amax.transpose(1, 2)
        return self._replace(qdata=self.qdata.t(), scale=self.scale.t(), amax=amax, block=transposed(self.block))


def _side_constants(suffix: str, spec: QuantSpec, block: tuple[int, int], parts: int) -> dict[str, object]:
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
        "PARTS": parts,
    }
    return {f"{name}{suffix}": value for name, value in values.items()}


@functools.cache
def _constants(
    tile: CastTile, numerics: Numerics | None, numerics_t: Numerics | None, even: bool, direct_cast: bool
) -> dict[str, object]:
    """Every compile-time argument of a cast; of a side that is not there, those of the other."""
    first, second = numerics or numerics_t, numerics_t or numerics
    assert first is not None
    assert second is not None
    return {
        **_side_constants("", *first),
        **_side_constants("_T", *second),
        "NORMAL": numerics is not None,
        "TRANSPOSED": numerics_t is not None,
        "DIRECT_CAST": direct_cast,
        "EVEN": even,
        "TILE_M": tile.m,
        "TILE_N": tile.n,
        "R": tile.rows_a_thread(VECTOR_BYTES) if numerics_t else 1,
        "GROUP": tile.group,
    }


def _with_amax(x: Tensor, tile: CastTile, sides: Sequence[_Side | None]) -> list[_Side | None]:
    """``sides`` with the amax of each block that no tile holds whole, in one pass over ``x [m, n]``."""
    missing = [s is not None and s.amax is None and not tile.fits(s.block, *x.shape) for s in sides]
    if not any(missing):
        return list(sides)
    blocks = {s.block for s, lacks in zip(sides, missing, strict=True) if lacks and s is not None}
    parts = _whole_dim_amax(x, blocks, *(side is not None for side in sides))
    return [
        s._replace(amax=parts[s.block]) if lacks and s is not None else s
        for s, lacks in zip(sides, missing, strict=True)
    ]


def _quantize(x: Tensor, side: _Side | None, side_t: _Side | None) -> None:
    """Fill one or two sides from ``x [m, n]``."""
    if x.stride(1) != 1 and x.stride(0) == 1:
        # The kernel reads along rows.
        x, side, side_t = x.t(), side_t and side_t.t(), side and side.t()
    m, n = x.shape
    tile = cast_tiles.choose(m, n, side and side.block, side_t and transposed(side_t.block))
    side, side_t = _with_amax(x, tile, (side, side_t))
    first, second = side or side_t, side_t or side
    assert first is not None
    assert second is not None
    constants = _constants(
        tile,
        None if side is None else side.numerics(),
        None if side_t is None else side_t.numerics(),
        tile.holds_whole(m, n),
        hardware.abilities(x.device).has_direct_cast,
    )
    run(
        quantize_kernels.quantize_kernel,
        tile.programs(m, n),
        (x, *first.tensors(), *second.tensors()),
        (m, n, *x.stride(), *first.runtime_args(), *second.runtime_args()),
        constants,
        **tile.options(),
    )


def _side(x: Tensor, spec: QuantSpec, transpose: bool, amax: Tensor | None) -> tuple[_Side, Tensor, Tensor]:
    """Allocate one result of casting ``x``: the side, and its tensors as the caller gets them."""
    shape = x.shape[::-1] if transpose else x.shape
    qdata = torch.empty(shape, dtype=FORMATS[spec.format].dtype, device=x.device)
    scale = empty_scale(shape, spec.block, spec.scale_format, x.device)
    matrix, scales = qdata, scale
    if qdata.ndim != 2:
        matrix = _rows(qdata)
        scales = scale.view(scale_shape(matrix.shape, spec.block))
    bits = None if amax is None else amax.reshape(1, *scales.shape).view(torch.int32)
    side = _Side(matrix, scales, bits, spec.block, spec, bits is not None)
    return side.t() if transpose else side, qdata, scale


@replayed
def quantize(x: Tensor, spec: str, transpose: bool = False, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize`."""
    if not x.numel():
        return reference.quantize(x, spec, transpose, amax)
    if not _is_folded(x, spec_of(spec).block):
        amaxes = [None] * len(x) if amax is None else amax
        pairs = [quantize(m, spec, False, a) for m, a in zip(x, amaxes, strict=True)]
        return stacked([q for q, _ in pairs]), stacked([s for _, s in pairs])
    side, qdata, scale = _side(x, spec_of(spec), transpose, amax)
    _quantize(_rows(x), None if transpose else side, side if transpose else None)
    return qdata, scale


@replayed
def quantize_both(x: Tensor, spec: str, spec_t: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_both`."""
    if not x.numel():
        return reference.quantize_both(x, spec, spec_t)
    side, qdata, scale = _side(x, spec_of(spec), False, None)
    side_t, qdata_t, scale_t = _side(x, spec_of(spec_t), True, None)
    _quantize(x, side, side_t)
    return qdata, scale, qdata_t, scale_t


@replayed
def dequantize(qdata: Tensor, scale: Tensor, spec: str, dtype: torch.dtype) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.dequantize`."""
    if not qdata.numel():
        return qdata.new_empty(qdata.shape, dtype=dtype)
    rows, cols = block = spec_of(spec).block
    if not _is_folded(qdata, block):
        return torch.stack([dequantize(q, s, spec, dtype) for q, s in zip(qdata, scale, strict=True)])
    q = _rows(qdata)
    exponent_only = SCALE_FORMATS[spec_of(spec).scale_format].exponent_only
    s = (scale.view(torch.uint8) if exponent_only else scale).reshape(scale_shape(q.shape, block))
    m, n = q.shape
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    tile = CastTile(64, 128, 4)
    run(
        quantize_kernels.dequantize_kernel,
        tile.programs(m, n),
        (q, s, out),
        (m, n, *q.stride(), *s.stride()),
        {"ROWS": rows, "COLS": cols, "E8M0": exponent_only, "TILE_M": tile.m, "TILE_N": tile.n},
        **tile.options(),
    )
    return out.view(qdata.shape)


@replayed
def transpose(qdata: Tensor) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.transpose`."""
    m, n = qdata.shape
    out = qdata.new_empty((n, m))
    if not qdata.numel():
        return out
    tile = cast_tiles.TRANSPOSE
    run(
        quantize_kernels.transpose_kernel,
        tile.programs(m, n),
        (qdata.view(torch.uint8), out.view(torch.uint8)),
        (m, n, *qdata.stride()),
        {
            "EVEN": tile.holds_whole(m, n), "TILE_M": tile.m, "TILE_N": tile.n,
            "R": tile.rows_a_thread(VECTOR_BYTES), "GROUP": tile.group,
        },
        **tile.options(),
    )  # fmt: skip
    return out


scaled_matmul = replayed(_scaled_matmul)
