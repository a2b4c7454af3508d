"""The shapes, dtypes and devices of the ops' results, without their values; one function an op, named as the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.specs import (
    EXPANDED,
    amax_shape,
    empty_grouped_scale,
    empty_scale,
    group_amax_sizes,
    grouped_columns,
    scale_shape,
    spec_of,
    transposed,
)
from tritonfp8.specs.formats import FORMATS


def amax(x: Tensor, block: Sequence[int]) -> Tensor:
    return x.new_empty(scale_shape(x.shape, block), dtype=torch.float32)


def quantize(x: Tensor, spec: str, transpose: bool = False, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    s = spec_of(spec, packed=True)
    shape = x.shape[::-1] if transpose else x.shape
    qdata = torch.empty(s.qdata_shape(shape), dtype=FORMATS[s.format].dtype, device=x.device)
    return qdata, empty_scale(shape, s.block, s.scale_format, x.device)


def quantize_both(x: Tensor, spec: str, spec_t: str, codes: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *quantize(x, spec), *quantize(x.t(), spec_t)


def quantize_both_sum(
    x: Tensor, spec: str, spec_t: str, codes: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *quantize_both(x, spec, spec_t), x.new_empty((x.shape[1],))


def quantize_with_amax(x: Tensor, spec: str, spec_t: str, codes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    amax = x.new_empty(scale_shape(x.shape[::-1], spec_of(spec_t).block), dtype=torch.float32)
    return *quantize(x, spec), amax


def transpose_codes(
    x: Tensor, scale: Tensor, spec: str, spec_t: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return quantize_matrices(x, spec_t, True) if x.ndim == 3 else quantize(x, spec_t, True)


def transpose_group_codes(x: Tensor, scale: Tensor, offsets: Tensor, spec: str, spec_t: str) -> tuple[Tensor, Tensor]:
    return quantize_groups(x, offsets, spec_t, True)


def quantize_weights(x: Tensor, others: Sequence[Tensor], spec: str, *args: Any) -> list[Tensor]:
    return [tensor for each in (x, *others) for tensor in quantize(each, spec, True)]


def chain(x: Tensor, others: Sequence[Tensor], chain: str) -> list[Tensor]:
    return reference.Chain.of(chain).run((x, *others), globals().__getitem__)


def adamw(*args: Any) -> None:
    return None


def quantize_at_random(*args: Any) -> None:
    return None


def adamw_amax(qdata: Tensor, scale: Tensor, *args: Any) -> Tensor:
    return torch.empty(amax_shape(qdata.shape, spec_of(args[4]).block, args[6]), device=qdata.device)


def quantize_into(*args: Any) -> None:
    return None


def amax_of_shards(*args: Any) -> None:
    return None


def quantize_shards(*args: Any) -> None:
    return None


def quantize_parts(x: Tensor, parts: int, rank: int) -> Tensor:
    size = reference.part_sizes(x.shape[0] // parts)[1]
    return torch.empty(parts, size, dtype=torch.uint8, device=x.device)


def sum_in_pairs(*args: Any) -> None:
    return None


def dequantize(qdata: Tensor, scale: Tensor, spec: str, dtype: torch.dtype) -> Tensor:
    return torch.empty(spec_of(spec, packed=True, read=True).shape_of(qdata.shape), dtype=dtype, device=qdata.device)


def expand_codes(qdata: Tensor, scale: Tensor, spec: str, *args: Any) -> tuple[Tensor, Tensor]:
    return quantize(dequantize(qdata, scale, spec, torch.float32), *EXPANDED.args)


def measure_rows(qdata: Tensor, scale: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    _, scales = expand_codes(qdata, scale, spec)
    return scales, torch.empty_like(scales, dtype=torch.int32)


def transpose(qdata: Tensor) -> Tensor:
    return qdata.new_empty(qdata.shape[::-1])


def scaled_matmul(a: Tensor, *args: Any) -> Tensor:
    b, out_dtype = args[2], (args[8] if len(args) > 8 else None) or torch.bfloat16
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


packed_matmul = scaled_matmul


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    b, heads, t, d = q.shape
    return q.new_empty((b, t, heads, d)), q.new_empty((b, heads, t), dtype=_wide(q))


def exact_attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> tuple[Tensor, Tensor]:
    dtype = x.dtype if unit_offset else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((x.shape[:-1].numel(),), dtype=_wide(x))


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def row_logsumexp(x: Tensor, temperature: float = 1.0) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=_wide(x))


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return gate.new_empty(gate.shape)


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def rotary_tables(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, 2 * inv_freq.shape[0])
    return positions.new_empty(shape, dtype=torch.float32), positions.new_empty(shape, dtype=torch.float32)


def _groups(shape: Sequence[int], spec: str, layout: str, groups: int, device: torch.device) -> tuple[Tensor, Tensor]:
    s = spec_of(spec)
    qdata = torch.empty(shape, dtype=FORMATS[s.format].dtype, device=device)
    return qdata, empty_grouped_scale(shape, s, layout, groups, device)


def quantize_groups(
    x: Tensor,
    offsets: Tensor,
    spec: str,
    transpose: bool = False,
    rows: Tensor | None = None,
    factors: Tensor | None = None,
    swiglu: bool = False,
) -> tuple[Tensor, Tensor]:
    groups, tokens = offsets.shape[0], (x if rows is None else rows).shape[0]
    width = x.shape[1] // 2 if swiglu else x.shape[1]
    if transpose:
        return _groups((width, grouped_columns(tokens, groups)), spec, "columns", groups, x.device)
    return _groups((tokens, width), spec, "rows", groups, x.device)


def quantize_groups_both(
    x: Tensor,
    offsets: Tensor,
    spec: str,
    spec_t: str,
    rows: Tensor | None = None,
    factors: Tensor | None = None,
    swiglu: bool = False,
    amax: Tensor | None = None,
    codes: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sources = (rows, factors, swiglu)
    return *quantize_groups(x, offsets, spec, False, *sources), *quantize_groups(x, offsets, spec_t, True, *sources)


def swiglu(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def swiglu_backward_amax(
    grad: Tensor, gate_up: Tensor, offsets: Tensor, spec: str, spec_t: str
) -> tuple[Tensor, Tensor]:
    blocks = (spec_of(spec).block, transposed(spec_of(spec_t).block))
    sizes = group_amax_sizes(gate_up.shape[0], gate_up.shape[1], offsets.shape[0], blocks)
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty((sum(sizes.values()),), dtype=torch.int32)


def sum_of_rows(x: Tensor, places: Tensor, factors: Tensor | None = None) -> Tensor:
    dtype = x.dtype if factors is None else torch.promote_types(x.dtype, factors.dtype)
    return x.new_empty((places.shape[0], x.shape[1]), dtype=dtype)


def dots_of_rows(grad: Tensor, x: Tensor, places: Tensor, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(places.shape, dtype=out_dtype)


def quantize_matrices(
    x: Tensor, spec: str, transpose: bool = False, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[2], x.shape[1]) if transpose else x.shape
    return _groups(shape, spec, "matrices", x.shape[0], x.device)


def quantize_matrices_with_amax(
    x: Tensor, spec: str, spec_t: str, codes: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    groups, n, k = x.shape
    amax = x.new_empty((groups, *scale_shape((k, n), spec_of(spec_t).block)), dtype=torch.float32)
    return *quantize_matrices(x, spec), amax


def _grouped_product(a: Tensor, b: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    shape = (a.shape[0], b.shape[1]) if b.ndim == 3 else (groups, a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=dtype)


def scaled_grouped_matmul(a: Tensor, *args: Any) -> Tensor:
    b, offsets, out_dtype = args[2], args[5], args[7] if len(args) > 7 else None
    return _grouped_product(a, b, offsets.shape[0], out_dtype or torch.bfloat16)


packed_grouped_matmul = scaled_grouped_matmul


def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    return _grouped_product(a, b, offsets.shape[0], a.dtype)


def routed(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


def grouped_sum(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1]))


def operand_figures(x: Tensor, whole: Tensor, *args: Any) -> Tensor:
    return whole.new_empty((x.shape[0], reference.FIGURES), dtype=torch.float64)


def whole_linear(input: Tensor, weight: Tensor, *args: Any) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def whole_linear_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, recipe: str, *needs_and_cached: Any
) -> list[Tensor]:
    shapes = input.shape, weight.shape, weight.shape[:1]
    return [input.new_empty(shape) for shape, need in zip(shapes, needs_and_cached[:3], strict=True) if need]


def without_backward(out: Tensor, *sources: Tensor | None) -> Tensor:
    return out.clone()


def gathered_matrices(
    codes: Tensor,
    scales: Tensor,
    tag: Tensor,
    experts: int,
    rows: int,
    cols: int,
    spec: str,
    index: int,
    grad_output: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _groups((experts, rows, cols), spec, "matrices", experts, codes.device)


def gathered_operand(
    buffer: Tensor,
    scale: Tensor | None,
    tag: Tensor,
    rows: int,
    cols: int,
    above: int,
    left: int,
    spec: str,
    transposed: bool,
    grad_output: Tensor | None = None,
) -> list[Tensor]:
    s = spec_of(spec)
    shape, scaled = (rows, cols), (above + rows, left + cols)
    if transposed:
        shape, scaled = shape[::-1], scaled[::-1]
    qdata = buffer.new_empty(shape, dtype=FORMATS[s.format].dtype)
    return [qdata] if scale is not None else [qdata, empty_scale(scaled, s.block, s.scale_format, buffer.device)]
