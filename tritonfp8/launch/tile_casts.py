"""The pass over tiles that the fused kernels share: it computes a result and quantizes it in one or both orientations.

Passes over memory, in bytes an element of a 16-bit dtype (N of the normal result, T of the transposed one):

    rms_norm    rows [read x 2, write N 1], then tiles [read x 2, write T 1]; tensorwise writes both in the second
    silu_mul    tiles [read 4, write N 1, T 1]; a pass [read 4] before it if a scale spans a whole dim; rows
                [read 4, write N 1] if only the normal result is wanted, whatever its scale
    backward    tiles [read 6, write 2 N, 2 T]; a pass [read 6] before it likewise
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from tritonfp8.formats import SCALE_FORMATS
from tritonfp8.kernels.fused import swiglu as kernels
from tritonfp8.launch.partial_maxima import PartialMaxima, row_chunks
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.reference import empty_results
from tritonfp8.specs import COLUMNWISE, ORIENTATIONS, ROWWISE, TENSORWISE, QuantSpec, transposed
from tritonfp8.tuning import BlockShape, fused_tiles

META = torch.device("meta")


def results_of(
    plan: Planner, count: int, shape: tuple[int, int], spec: QuantSpec, spec_t: QuantSpec, orientation: str
) -> list[View]:
    """Allocate the results of a producer: see :func:`tritonfp8.reference.empty_results`."""
    return [plan.like(layout) for layout in empty_results(count, shape, spec, spec_t, orientation, META)]


class Side(NamedTuple):
    """One orientation of the results, in the coordinates of the input.

    Attributes:
        qdata: ``[n, k]`` or its transpose, as allocated.
        scale: its scale, in the coordinates of the input.
        block: of the scale, likewise.
        spec: of the result.
        amax: of the blocks; None if the kernel finds it.
    """

    qdata: View
    scale: View
    block: BlockShape
    spec: QuantSpec
    amax: View | None

    @property
    def is_whole(self) -> bool:
        """Whether a scale spans a whole dim, so that its amax must be known before."""
        return -1 in self.block

    def pointers(self) -> list[View]:
        """The pointers of qdata, scale and amax."""
        exponent_only = SCALE_FORMATS[self.spec.scale_format].exponent_only
        scale = self.scale.retyped(torch.uint8) if exponent_only else self.scale
        return [self.qdata, scale, scale if self.amax is None else self.amax]

    def constants(self, suffix: str = "") -> Mapping[str, object]:
        """Compile-time arguments of this side."""
        return kernel_constants(self.spec, self.block, suffix)

    def scale_strides(self) -> list[int]:
        """From one result to the next, rows, columns."""
        lead = self.scale.strides[0] if self.scale.ndim > 2 else 0
        return [lead, *self.scale.strides[-2:]]

    def amax_stride(self) -> int:
        """From the amaxes of one result to those of the next."""
        return 0 if self.amax is None or self.qdata.ndim < 3 else self.amax.numel() // self.qdata.shape[0]


Sides = tuple[Side | None, Side | None]


def sides_of(results: Sequence[View], spec: QuantSpec, spec_t: QuantSpec, orientation: str) -> Sides:
    """The sides of results as allocated, ``[O, ...]`` or without that dim."""
    normal, both = ORIENTATIONS[orientation][0], len(results) > 2
    side = side_t = None
    if normal:
        side = Side(results[0], results[1], spec.block, spec, None)
    if both or not normal:
        qdata, scale = results[-2:]
        side_t = Side(qdata, scale.transposed(-1, -2), transposed(spec_t.block), spec_t, None)
    return side, side_t


class Inputs(NamedTuple):
    """The inputs of a tile kernel: three tensors, and row and column strides of each."""

    producer: str
    tensors: tuple[View, View, View]
    strides: tuple[int, ...]
    shape: tuple[int, int]
    round_normalized: bool = False


def plan_amax(plan: Planner, inputs: Inputs, side: Side | None, side_t: Side | None) -> Sides:
    """The sides with the amax of their whole-dim blocks, in one more pass over the inputs."""
    blocks = {s.block for s in (side, side_t) if s is not None and s.is_whole}
    if not blocks:
        return side, side_t
    m, n = inputs.shape
    x = inputs.tensors[0]
    results = 2 if inputs.producer == "silu_mul_backward" else 1
    row, col, all_of_it = (block in blocks for block in (ROWWISE, COLUMNWISE, TENSORWISE))
    tiles = fused_tiles.AMAX_TILES[inputs.producer]
    strips = -(-n // tiles.n)
    programs = plan.device.num_sms * tiles.per_sm
    rows, columns = m if row else 0, n if col else 0
    chunks = row_chunks((m, n), tiles.m, strips, programs, rows + columns)
    lines = PartialMaxima.allocate(plan, x, results * rows, results * columns, strips, chunks) if row or col else None
    totals = PartialMaxima.allocate(plan, x, 0, results, 0, chunks * strips) if all_of_it else None
    plan.launch(
        kernels.partial_amax_of_result_kernel,
        chunks * strips,
        (*inputs.tensors, *((x, x) if lines is None else lines.pointers()), x if totals is None else totals.buffer),
        (m, n, *inputs.strides, chunks, 0 if lines is None else lines.lines),
        {
            "ROW": row, "COL": col, "WHOLE": all_of_it,
            "PRODUCER": inputs.producer, "TILE_M": tiles.m, "TILE_N": tiles.n,
        },
        num_warps=tiles.warps,
    )  # fmt: skip
    found = {} if totals is None else {TENSORWISE: totals.reduce(plan)[1]}
    if lines is not None:
        found |= dict(zip((ROWWISE, COLUMNWISE), lines.reduce(plan), strict=True))
    given = [s._replace(amax=found[s.block]) if s is not None and s.is_whole else s for s in (side, side_t)]
    return given[0], given[1]


def plan_tiles(plan: Planner, inputs: Inputs, side: Side | None, side_t: Side | None, kept: View | None) -> None:
    """Fill the wanted results and ``kept``, all by tiles; the amax of whole-dim blocks is given."""
    itemsize = inputs.tensors[0].itemsize
    if side and side_t and fused_tiles.takes_two_launches(itemsize, side.block, side_t.block):
        plan_tiles(plan, inputs, side, None, kept)
        plan_tiles(plan, inputs, None, side_t, None)
        return
    m, n = inputs.shape
    first, second = side or side_t, side_t or side
    assert first is not None
    assert second is not None
    tiles = fused_tiles.choose(inputs.producer, side and side.block, side_t and side_t.block)
    packed = m % 4 == 0
    plan.launch(
        kernels.quantize_tile_kernel,
        tiles.programs(m, n, plan.device.num_sms),
        (*inputs.tensors, first.qdata if kept is None else kept, *first.pointers(), *second.pointers()),
        (
            m, n, m // 4, m * n, *inputs.strides, *first.scale_strides(), *second.scale_strides(),
            first.amax_stride(), second.amax_stride(),
        ),
        {
            **first.constants(),
            **second.constants("_T"),
            "NORMAL": side is not None,
            "TRANSPOSED": side_t is not None,
            "KEEP": kept is not None,
            "PACKED": packed,
            "DIRECT_CAST": plan.device.has_direct_cast,
            "PRODUCER": inputs.producer,
            "ROUND_NORMALIZED": inputs.round_normalized,
            "TILE_M": tiles.m,
            "TILE_N": tiles.n,
            "STAGES": tiles.stages,
        },
        num_warps=tiles.warps,
    )  # fmt: skip
