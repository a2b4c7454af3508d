"""Casts of formats of two codes a byte: to codes, to values, and to 8-bit codes with a scale a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonfp8 import reference
from tritonfp8.kernels.cast import packed as kernels
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.specs import EXPANDED, QuantSpec, scale_shape, spec_of
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS
from tritonfp8.tuning import cast_tiles


def add_quantize(plan: Planner, x: View, qdata: View, scale: View, spec: QuantSpec) -> None:
    """Add the launch that fills ``qdata [m, k / 2]`` and ``scale`` from ``x [m, k]``."""
    m, k = x.shape
    tile = cast_tiles.PACKED.narrowed(k)
    plan.launch(
        kernels.quantize_packed_kernel,
        tile.programs(m, k),
        (x, qdata, scale.retyped(torch.uint8)),
        (m, k, *x.strides, *qdata.strides, *scale.strides),
        {**kernel_constants(spec, spec.block), **tile.sizes()},
        **tile.options(),
    )


def plan_quantize(plan: Planner, x: View, shape: Sequence[int], spec: QuantSpec) -> list[View]:
    """Codes and scales of a tensor of ``shape``, which is the matrix ``x`` when its rows are joined."""
    qdata = plan.empty(spec.qdata_shape(shape), FORMATS[spec.format].dtype)
    scale = plan.empty(spec.scale_shape(shape), SCALE_FORMATS[spec.scale_format].dtype)
    codes, scales = qdata.folded(), scale.folded()
    # Contiguous buffers have a view in every shape.
    assert codes is not None
    assert scales is not None
    add_quantize(plan, x, codes, scales, spec)
    return [qdata, scale]


def _read(qdata: View, scale: View, spec: QuantSpec) -> tuple[tuple[int, int], View, View] | None:
    """Sizes ``(m, k)``, and codes and scales as matrices; None if there is nothing, or if a view would be a copy."""
    q = qdata.folded() if qdata.numel() else None
    scales = None if q is None else scale.viewed(scale_shape(spec.shape_of(q.shape), spec.block))
    if q is None or scales is None:
        return None
    m, k = spec.shape_of(q.shape)
    return (m, k), q, scales.retyped(torch.uint8)


def _constants(spec: QuantSpec) -> dict[str, int]:
    fmt = FORMATS[spec.format]
    return {"COLS": spec.block[1], "MANTISSA_BITS": fmt.mantissa_bits, "EMIN": fmt.emin}


def plan_dequantize(plan: Planner, qdata: View, scale: View, spec: QuantSpec, dtype: torch.dtype) -> list[View] | None:
    """One output, of the shape that was quantized."""
    found = _read(qdata, scale, spec)
    if found is None:
        return None
    (m, k), q, scales = found
    out = plan.empty(spec.shape_of(qdata.shape), dtype)
    tile = cast_tiles.PACKED.narrowed(k)
    plan.launch(
        kernels.dequantize_packed_kernel,
        tile.programs(m, k),
        (q, scales, out),
        (m, k, *q.strides, *scales.strides),
        {**_constants(spec), **tile.sizes()},
        **tile.options(),
    )
    return [out]


def _expanded_constants(spec: QuantSpec) -> dict[str, object]:
    fmt = FORMATS[EXPANDED.format]
    out = {"OUT_QMAX": fmt.qmax, "OUT_MANTISSA_BITS": fmt.mantissa_bits, "OUT_EMIN": fmt.emin}
    return {**_constants(spec), **out}


def plan_expand_codes(
    plan: Planner, qdata: View, scale: View, row_scale: View | None, offsets: View | None, spec: str
) -> list[View] | None:  # fmt: skip
    """Outputs: qdata, scale."""
    of = spec_of(spec, packed=True)
    found = _read(qdata, scale, of)
    if found is None or any(x is not None and not x.is_contiguous() for x in (row_scale, offsets)):
        return None
    (m, k), q, scales = found
    shape = of.shape_of(qdata.shape)
    out = plan.empty(shape, FORMATS[EXPANDED.format].dtype)
    scale_out = plan.empty(scale_shape(shape, EXPANDED.block), torch.float32)
    words = has_words(q, of)
    tile = (cast_tiles.EXPANDED if words else cast_tiles.PACKED).narrowed(k)
    rows = shape[-2] if offsets is not None else 0
    grouped = rows > 0 and rows % tile.m == 0
    plan.launch(
        kernels.expand_codes_kernel,
        -(-m // tile.m),
        (q, scales, row_scale, offsets if grouped else None, out, scale_out),
        (m, k, *q.strides, *scales.strides, rows),
        {
            **_expanded_constants(of), "DIRECT_CAST": plan.device.has_direct_cast, "WORDS": words,
            "KNOWN": row_scale is not None, "GROUPED": grouped, **tile.sizes(),
        },
        **tile.options(),
    )  # fmt: skip
    return [out, scale_out]


def has_words(q: View, spec: QuantSpec) -> bool:
    """Whether kernels can read eight codes at a time: rows are aligned, and their blocks whole."""
    return 2 * q.shape[1] % spec.block[1] == 0 and q.has_tma_layout()


def add_row_scales(plan: Planner, q: View, scales: View, spec: QuantSpec) -> View:
    """Add the launch that finds the scales of rows, float32 ``[m, 1]``, of codes ``[m, k / 2]`` that have words."""
    m, k = q.shape[0], 2 * q.shape[1]
    out = plan.empty((m, 1), torch.float32)
    tile = cast_tiles.EXPANDED.narrowed(k)
    plan.launch(
        kernels.scale_rows_kernel,
        -(-m // tile.m),
        (q, scales, out),
        (m, k, q.strides[0], *scales.strides),
        {"COLS": spec.block[1], "OUT_QMAX": FORMATS[EXPANDED.format].qmax, **tile.sizes()},
        **tile.options(),
    )
    return out


def plan_measure_rows(plan: Planner, qdata: View, scale: View, spec: str) -> list[View] | None:
    """Outputs: scale, rounded."""
    of = spec_of(spec, packed=True)
    found = _read(qdata, scale, of)
    if found is None:
        return None
    (m, k), q, scales = found
    of_rows = scale_shape(of.shape_of(qdata.shape), EXPANDED.block)
    outputs = [plan.empty(of_rows, torch.float32), plan.empty(of_rows, torch.int32)]
    tile = cast_tiles.MEASURED.narrowed(k)
    plan.launch(
        kernels.measure_rows_kernel,
        -(-m // tile.m),
        (q, scales, *outputs),
        (m, k, *q.strides, *scales.strides),
        {**_expanded_constants(of), **tile.sizes()},
        **tile.options(),
    )
    return outputs


expand_codes = launcher(plan_expand_codes, reference.expand_codes)
measure_rows = launcher(plan_measure_rows, reference.measure_rows)
