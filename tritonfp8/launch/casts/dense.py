"""Casts of one tensor: the Triton twin of each in :mod:`tritonfp8.reference`.

A planner (``plan_...``) makes the plan of a call. The function of the op's name runs it, and serves in plain Python the
calls that no plan serves: empty tensors, and inputs of several matrices that are cast one by one.

On CPU tensors the kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested without a
GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.cast import quantize as quantize_kernels
from tritonfp8.launch.casts import packed
from tritonfp8.launch.casts.lines import plan_columns, run_together
from tritonfp8.launch.casts.partial_maxima import PartialMaxima, row_chunks
from tritonfp8.launch.casts.side import META, Side, both, side_constants
from tritonfp8.launch.executor import planned
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View
from tritonfp8.specs import (
    COLUMNWISE,
    READ_SPECS,
    ROWWISE,
    TENSORWISE,
    QuantSpec,
    empty_scale,
    scale_shape,
    spec_of,
    transposed,
)
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS, stacked
from tritonfp8.tuning import VECTOR_BYTES, BlockShape, cast_tiles


def _is_folded(shape: Sequence[int], block: Sequence[int]) -> bool:
    """Whether a tensor has the blocks of the tensor folded to 2-D: no block of several rows crosses a matrix."""
    return len(shape) <= 2 or block[0] <= 1 or shape[-2] % block[0] == 0


def _folded(x: View, block: Sequence[int]) -> View | None:
    """``x`` as a matrix with the same blocks; None if it has no elements, other blocks, or must be copied for that."""
    return x.folded() if x.numel() and _is_folded(x.shape, block) else None


def whole_dim_amax(
    plan: Planner,
    x: View,
    blocks: Collection[BlockShape],
    normal: bool = True,
    transposes: bool = False,
    out: View | None = None,
) -> dict[BlockShape, View]:
    """``[parts, groups_m, groups_n]`` for each block, magnitudes or amax bits: the amax is the maximum over parts.

    ``blocks`` of ``x [m, n]``, in the coordinates of ``x``, are whole in a dim: (1, -1), (-1, 1) or (-1, -1). They are
    for results that are ``normal``, transposed, or both. ``out`` takes what a launch of its own reduces them to.
    """
    m, n = x.shape
    row, col, whole = (block in blocks for block in (ROWWISE, COLUMNWISE, TENSORWISE))
    tile, programs = cast_tiles.amax_pass(n, blocks)
    strips = -(-n // tile.n)
    rows, columns = m if row else 0, n if col else 0
    chunks = row_chunks((m, n), tile.m, strips, programs * plan.device.num_sms, rows + columns)
    lines = PartialMaxima.allocate(plan, x, rows, columns, strips, chunks) if row or col else None
    of_whole = PartialMaxima.allocate(plan, x, 0, 1, 0, chunks * strips) if whole else None
    plan.launch(
        quantize_kernels.partial_amax_kernel,
        chunks * strips,
        (x, *((x, x) if lines is None else lines.pointers()), x if of_whole is None else of_whole.buffer),
        (m, n, *x.strides, chunks, 0 if lines is None else lines.lines),
        {
            "ROW": row, "COL": col, "WHOLE": whole, "EVEN": tile.holds_whole(m, n), **tile.sizes(),
            "R": tile.rows_a_thread(VECTOR_BYTES // x.itemsize),
            "STAGES": cast_tiles.PARTIAL_AMAX_STAGES,
        },
        **tile.options(),
    )  # fmt: skip
    found: dict[BlockShape, View] = {}
    for block, maxima in ((TENSORWISE, of_whole), (COLUMNWISE, lines)):
        if maxima is not None:
            reduced = cast_tiles.has_own_reduce(maxima.parts, block, normal, transposes)
            of_rows, of_columns = maxima.reduce(plan, out) if reduced else maxima.unreduced()
            found |= {ROWWISE: _groups(of_rows, 2), block: _groups(of_columns, 1)}
    return found


def _groups(maxima: View, dim: int) -> View:
    """``[parts, lines]`` with a dim of size 1 before ``dim``."""
    (parts, lines), (part, line) = maxima.shape, maxima.strides
    # The stride that torch gives such a dim.
    stride = 1 if dim == 2 else lines * line
    shape, strides = [parts, lines], [part, line]
    shape.insert(dim, 1)
    strides.insert(dim, stride)
    return maxima.strided(shape, strides)


def _block_amax(plan: Planner, x: View, block: BlockShape) -> View:
    """amax bits, int32, of blocks of ``x [m, n]`` that are whole in no dim."""
    m, n = x.shape
    out = plan.empty(scale_shape((m, n), block), torch.int32)
    tile = cast_tiles.holding(block)
    plan.launch(
        quantize_kernels.amax_kernel,
        tile.programs(m, n),
        (x, out),
        (m, n, *x.strides, *out.shape, *out.strides),
        {"ROWS": block[0], "COLS": block[1], **tile.sizes()},
        **tile.options(),
    )
    return out


def plan_amax(plan: Planner, x: View, block: BlockShape) -> list[View] | None:
    """One output, ``[parts, groups_m, groups_n]`` or without the first dim: bits or magnitudes of (partial) maxima."""
    matrix = _folded(x, block)
    if matrix is None:
        return None
    return [whole_dim_amax(plan, matrix, [block])[block] if -1 in block else _block_amax(plan, matrix, block)]


def amax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.amax`."""
    block = (block[0], block[1])
    results = planned(plan_amax, (x,), (block,))
    if results is None:
        if not x.numel():
            return reference.amax(x, block)
        if not _is_folded(x.shape, block):
            return torch.stack([amax(matrix, block) for matrix in x])
        return amax(x.contiguous(), block)
    (found,) = results
    if found.ndim == 3:
        found = found.amax(0)
    found = found.view(x.dtype if found.dtype == torch.int16 else torch.float32).float()
    # One NaN, as in the reference: the kernel keeps the bits of the NaN that it met.
    return torch.where(found.isnan(), torch.nan, found).reshape(scale_shape(x.shape, block))


def _runtime_args(side: Side) -> list[int]:
    *lines, part = side.amax_strides
    return [*side.scale_sizes, *side.q_strides[:2], *side.scale_strides[:2], *lines, side.parts, part]


def _with_amax(plan: Planner, x: View, tile: cast_tiles.CastTile, sides: Sequence[Side | None]) -> list[Side | None]:
    """``sides`` with the amax of each block that no tile holds whole, in one pass over ``x [m, n]``."""
    m, n = x.shape
    missing = [s is not None and s.amax is None and not tile.fits(s.block, m, n) for s in sides]
    if not any(missing):
        return list(sides)
    blocks = {s.block for s, lacks in zip(sides, missing, strict=True) if lacks and s is not None}
    normal, transposes = (side is not None for side in sides)
    maxima = whole_dim_amax(plan, x, blocks, normal, transposes)
    return [
        s.with_parts(maxima[s.block]) if lacks and s is not None else s for s, lacks in zip(sides, missing, strict=True)
    ]


def reads_along_columns(x: View) -> bool:
    """Whether the kernel, which reads along rows, casts the transpose of ``x [m, n]``."""
    return x.strides[1] != 1 and x.strides[0] == 1


def _plan_columns(plan: Planner, x: View, side: Side | None, side_t: Side | None) -> bool:
    """Fill one side from ``x [m, n]`` if its scales are of whole columns and one read of ``x`` pays; else False."""
    one = side or side_t
    if one is None or (side and side_t) or one.block != COLUMNWISE or one.amax is not None or not x.is_contiguous():
        return False
    m, n = x.shape
    if m * n < cast_tiles.COLUMNS_LEAST or not run_together(m, plan.device.num_sms):
        return False
    plan_columns(plan, x, 1, one, side_t is not None)
    return True


def plan_sides(plan: Planner, x: View, side: Side | None, side_t: Side | None, with_sums: bool = False) -> View | None:
    """Fill one or two sides from ``x [m, n]``; with sums return ``[parts, n]``, float32, partial sums of rows."""
    if reads_along_columns(x):
        x, side, side_t = x.t(), side_t and side_t.swapped(), side and side.swapped()
    m, n = x.shape
    if not with_sums and _plan_columns(plan, x, side, side_t):
        return None
    tile = cast_tiles.choose(m, n, side and side.block, side_t and transposed(side_t.block))
    side, side_t = _with_amax(plan, x, tile, (side, side_t))
    first, second = both(side, side_t)
    sums = plan.empty((-(-m // tile.m), n), torch.float32) if with_sums else None
    plan.launch(
        quantize_kernels.quantize_kernel,
        tile.programs(m, n),
        (x, *first.pointers(), *second.pointers(), x if sums is None else sums),
        (m, n, *x.strides, *_runtime_args(first), *_runtime_args(second)),
        {
            **side_constants(side, side_t),
            "SUM": with_sums,
            "DIRECT_CAST": plan.device.has_direct_cast,
            "EVEN": tile.holds_whole(m, n),
            **tile.stores(side_t is not None),
            "GROUP": tile.group,
        },
        **tile.options(),
    )
    return sums


def side_of(qdata: View, scale: View, spec: QuantSpec) -> Side:
    """The result of casting a matrix, in memory that exists."""
    return Side(qdata, (*qdata.strides, 0), scale, (*scale.strides, 0), scale.shape, spec.block, spec)


def new_side(
    plan: Planner, shape: Sequence[int], spec: QuantSpec, transpose: bool, amax: View | None = None
) -> tuple[Side, View, View]:
    """Allocate one result of casting a tensor of ``shape``: the side, and its views as the caller gets them."""
    sizes = shape[::-1] if transpose else shape
    qdata = plan.empty(sizes, FORMATS[spec.format].dtype)
    scale = plan.like(empty_scale(sizes, spec.block, spec.scale_format, META))
    # Contiguous buffers have a view in every shape.
    matrix = qdata.folded()
    assert matrix is not None
    scales = scale if matrix is qdata else scale.viewed(scale_shape(matrix.shape, spec.block))
    assert scales is not None
    side = side_of(matrix, scales, spec)
    if amax is not None:
        side = side.with_parts(amax, given=True)
    return side.swapped() if transpose else side, qdata, scale


def plan_quantize(plan: Planner, x: View, amax: View | None, spec: str, transpose: bool) -> list[View] | None:
    """Outputs: qdata, scale."""
    found = spec_of(spec, packed=True)
    matrix = _folded(x, found.block)
    if matrix is None:
        return None
    if FORMATS[found.format].codes_a_byte > 1:
        of, shape = (matrix.t(), x.shape[::-1]) if transpose else (matrix, x.shape)
        return None if amax is not None else packed.plan_quantize(plan, of, shape, found)
    bits = None
    if amax is not None:
        bits = amax.viewed((1, *scale_shape((matrix.t() if transpose else matrix).shape, found.block)))
        if bits is None:
            return None
        bits = bits.retyped(torch.int32)
    side, qdata, scale = new_side(plan, x.shape, found, transpose, bits)
    plan_sides(plan, matrix, None if transpose else side, side if transpose else None)
    return [qdata, scale]


def plan_quantize_into(plan: Planner, qdata: View, scale: View, x: View, spec: str) -> list[View] | None:
    """No output. No plan where a view of codes, scales or values would be a copy."""
    found = spec_of(spec, packed=True)
    matrix, codes = _folded(x, found.block), qdata.folded()
    if matrix is None or codes is None:
        return None
    scales = scale if codes is qdata else scale.viewed(scale_shape(matrix.shape, found.block))
    if scales is None:
        return None
    if FORMATS[found.format].codes_a_byte > 1:
        packed.add_quantize(plan, matrix, codes, scales, found)
    else:
        plan_sides(plan, matrix, side_of(codes, scales, found), None)
    return []


def quantize_into(qdata: Tensor, scale: Tensor, x: Tensor, spec: str) -> None:
    """Launch the twin of :func:`tritonfp8.reference.quantize_into`."""
    if planned(plan_quantize_into, (qdata, scale, x), (spec,)) is None:
        for target, found in zip((qdata, scale), quantize(x, spec), strict=True):
            target.copy_(found)


def _quantize_matrices(x: Tensor, spec: str, transpose: bool, amax: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Several matrices with a block that crosses the rows of two, one by one; None for another tensor."""
    if not x.numel() or _is_folded(x.shape, spec_of(spec, packed=True).block):
        return None
    amaxes = [None] * len(x) if amax is None else amax
    pairs = [quantize(m, spec, False, a) for m, a in zip(x, amaxes, strict=True)]
    return stacked([q for q, _ in pairs]), stacked([s for _, s in pairs])


quantize = launcher(plan_quantize, reference.quantize, _quantize_matrices)


def plan_dequantize(plan: Planner, qdata: View, scale: View, spec: str, dtype: torch.dtype) -> list[View] | None:
    """One output, of the shape that was quantized."""
    found = spec_of(spec, packed=True, read=True)
    if spec in READ_SPECS:
        # A checkpoint is read once: the reference runs on any device.
        return None
    if FORMATS[found.format].codes_a_byte > 1:
        return packed.plan_dequantize(plan, qdata, scale, found, dtype)
    rows, cols = block = found.block
    q = _folded(qdata, block)
    if q is None:
        return None
    scales = scale.viewed(scale_shape(q.shape, block))
    if scales is None:
        return None
    exponent_only = SCALE_FORMATS[found.scale_format].exponent_only
    m, n = q.shape
    out = plan.empty(qdata.shape, dtype)
    tile = cast_tiles.DEQUANTIZE
    plan.launch(
        quantize_kernels.dequantize_kernel,
        tile.programs(m, n),
        (q, scales.retyped(torch.uint8) if exponent_only else scales, out),
        (m, n, *q.strides, *scales.strides),
        {"ROWS": rows, "COLS": cols, "E8M0": exponent_only, **tile.sizes()},
        **tile.options(),
    )
    return [out]


def _dequantize_matrices(qdata: Tensor, scale: Tensor, spec: str, dtype: torch.dtype) -> Tensor | None:
    if not qdata.numel() or _is_folded(qdata.shape, spec_of(spec, packed=True, read=True).block):
        return None
    return torch.stack([dequantize(q, s, spec, dtype) for q, s in zip(qdata, scale, strict=True)])


dequantize = launcher(plan_dequantize, reference.dequantize, _dequantize_matrices)


def plan_transpose(plan: Planner, qdata: View) -> list[View]:
    """One output, ``[n, m]``."""
    m, n = qdata.shape
    out = plan.empty((n, m), qdata.dtype)
    if not qdata.numel():
        return [out]
    tile = cast_tiles.TRANSPOSE
    plan.launch(
        quantize_kernels.transpose_kernel,
        tile.programs(m, n),
        (qdata.retyped(torch.uint8), out.retyped(torch.uint8)),
        (m, n, *qdata.strides),
        {"EVEN": tile.holds_whole(m, n), **tile.stores(True), "GROUP": tile.group},
        **tile.options(),
    )
    return [out]


transpose = launcher(plan_transpose, reference.transpose)
