"""quantize, dequantize, scaled_matmul on :class:`Quantized`, and the layer of :mod:`tritonfp8.layers.linear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.linear import (
    SharedInput,
    linear,
    quantize_weight,
)
from tritonfp8.layers.moe import check_offsets, grouped_linear
from tritonfp8.specs import (
    ACCUMULATIONS,
    ACTIVATIONS,
    BLOCKS,
    SPECS,
    QuantSpec,
    check_group_spec,
    grouped_columns,
    matmul_family,
    scale_shape,
    spec_of,
)
from tritonfp8.specs.checks import check_floating, check_strided, require, require_flag, require_type
from tritonfp8.specs.formats import BYTE_FORMATS, HIGH_PRECISION_DTYPES
from tritonfp8.specs.quantized import Quantized, QuantizedGroups, unchecked

__all__ = [
    "SharedInput",
    "amax",
    "grouped_linear",
    "linear",
    "quantize_groups",
    "quantize_matrices",
    "quantize_weight",
]


# What the arguments are called in messages.
_SPEC, _QUANTIZED = "a tritonfp8.QuantSpec", "a tritonfp8.Quantized (see tritonfp8.quantize)"


def _without_grad(x: Tensor) -> Tensor:
    return x.detach() if x.requires_grad else x


def _check_matrix(x: Tensor, what: str) -> None:
    if x.ndim != 2:
        raise ValueError(f"{what} needs a 2-D tensor; got shape {tuple(x.shape)}. Flatten the leading dims first.")


def amax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Largest magnitude of each block of ``x``.

    Args:
        x: ``[..., K]``, bfloat16, float16, float32 or float64.
        block: ``(rows, cols)`` of the last two dims; -1 is the whole dimension, and rows of -1 include all leading
            dims.

    Returns:
        float32, one value a block. 0 for an empty block, infinite or NaN if the block has such a value.

    Raises:
        TypeError: ``x`` is not a tensor of one of these dtypes.
        ValueError: an unsupported block, or ``x`` has too few dims for it.
    """
    check_floating("x", x)
    require_type("block", block, Sequence, "a pair of ints (rows, cols)")
    require("block", tuple(block), tuple(BLOCKS))
    scale_shape(x.shape, block)
    return ops.amax(_without_grad(x), list(block))


def quantize(x: Tensor, spec: QuantSpec, transpose: bool = False, amax: Tensor | None = None) -> Quantized:
    """Quantize ``x``, or its transpose.

    Args:
        x: ``[..., K]``, bfloat16, float16, float32 or float64, of any strides. 2-D if ``transpose``.
        spec: format, block and scale of the result.
        transpose: quantize ``x.T`` instead, contiguous: K-major for a contraction over the rows of ``x``.
        amax: float32, one value for each block of the result, used in place of the block's own amax: for example the
            amax of the whole tensor, if ``x`` is a shard of it. Larger values of ``x`` saturate. The sign of an amax is
            ignored, also the sign of zero, infinity and NaN.

    Returns:
        A :class:`Quantized` of the shape of ``x`` (or ``x.T``); formats of 4 bits have two codes a byte of its last
        dim. It has no gradient; gradients flow through :func:`linear`.

    Raises:
        TypeError: ``x`` is not a tensor of one of these dtypes, or ``spec`` is not a QuantSpec.
        ValueError: too few or too many dims, an ``amax`` of another shape or dtype, or columns that do not fill the
            bytes of a format of several codes a byte.

    :mod:`tritonfp8.reference.casts` has the formulas.
    """
    check_floating("x", x)
    require_type("spec", spec, QuantSpec, _SPEC)
    require_flag("transpose", transpose)
    if transpose:
        _check_matrix(x, "quantize(transpose=True)")
    if amax is not None or x.ndim < 2:
        expected = scale_shape(x.shape[::-1] if transpose else x.shape, spec.block)
        if amax is not None:
            require_type("amax", amax, Tensor, "a torch.Tensor or None")
            check_strided("amax", amax)
            if amax.device != x.device:
                raise ValueError(f"amax must be on {x.device}, where x is; got {amax.device}")
        if amax is not None and (tuple(amax.shape) != expected or amax.dtype != torch.float32):
            raise ValueError(f"amax must be float32 of shape {expected}; got {amax.dtype} of shape {tuple(amax.shape)}")
    qdata, scale = ops.quantize(_without_grad(x), *spec.args, transpose, amax)
    return unchecked(qdata, scale, spec)


def quantize_both(x: Tensor, spec: QuantSpec, spec_t: QuantSpec) -> tuple[Quantized, Quantized]:
    """``(quantize(x, spec), quantize(x, spec_t, transpose=True))``, in one pass over ``x`` where the scales allow it.

    Blocks of a whole dimension (tensorwise, rowwise) need the amax first: one more pass over ``x``, shared by both
    results.

    Args:
        x: ``[M, K]``, bfloat16, float16, float32 or float64, of any strides.
        spec: spec of the first result, ``[M, K]``.
        spec_t: spec of the second result, ``[K, M]``, in the coordinates of ``x.T``.

    Raises:
        TypeError, ValueError: as :func:`quantize`.
    """
    check_floating("x", x)
    require_type("spec", spec, QuantSpec, _SPEC)
    require_type("spec", spec_t, QuantSpec, _SPEC)
    _check_matrix(x, "quantize_both")
    qdata, scale, qdata_t, scale_t = ops.quantize_both(_without_grad(x), *spec.args, *spec_t.args)
    return unchecked(qdata, scale, spec), unchecked(qdata_t, scale_t, spec_t)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """``float32(qdata) * float32(scale)``, rounded to ``dtype`` (bfloat16, float16 or float32), in the shape of ``q``.

    Infinite where the result is beyond ``dtype``. This includes the largest finite float32 values if the scale is a
    power of two: their code and scale stand for 2^128 (see :class:`~tritonfp8.QuantSpec`).

    Raises:
        TypeError: ``q`` is not a Quantized.
        ValueError: an unsupported ``dtype``.
    """
    require_type("q", q, Quantized, _QUANTIZED)
    require("dtype", dtype, HIGH_PRECISION_DTYPES)
    return ops.dequantize(q.qdata, q.scale, *q.spec.args, dtype)


_ACTIVATIONS = (None, *ACTIVATIONS)
_PRECISE = ACCUMULATIONS[0]
# Family of GEMM kernels, by the text of a spec; None for codes that no kernel multiplies.
_FAMILIES = {t: BLOCKS[spec.block].family if spec.format in BYTE_FORMATS else None for t, spec in SPECS.items()}


def _check_options(activation: object, accumulation: object, out_dtype: object, batch_invariant: object) -> None:
    require("activation", activation, _ACTIVATIONS)
    require("accumulation", accumulation, ACCUMULATIONS)
    require("out_dtype", out_dtype, HIGH_PRECISION_DTYPES)
    require_flag("batch_invariant", batch_invariant)


def _check_operand(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    check_floating(name, x)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, where a is; got {x.device}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"scaled_matmul is not differentiable and would drop the gradient of {name}: use "
            f"tritonfp8.functional.linear, or torch.no_grad(), or pass {name}.detach()"
        )


def scaled_matmul(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: str = _PRECISE,
    batch_invariant: bool = False,
) -> Tensor:
    """``activation(a @ b.T + bias) + residual`` on quantized operands, computed in float32 and rounded once.

    Args:
        a, b: ``[M, K]`` and ``[N, K]``: both operands are K-major.
        bias: ``[N]``, floating.
        activation: None, ``"relu"``, ``"gelu"`` (exact, by erf) or ``"silu"``.
        residual: ``[M, N]``, floating, added after the activation.
        out_dtype: bfloat16, float16 or float32.
        accumulation: ``"precise"`` promotes the tensor core's sums to float32 at least every 128 of K; ``"fast"``
            leaves the whole K to the tensor core, which loses precision as K grows, most on data of one sign.
            Operands scaled along K are always promoted.
        batch_invariant: whether a row of the result depends only on this row of ``a``. Else, up to M = 256, its last
            bits depend on M, which decides how K is split. Slower there, and for MX without MX tensor cores.

    Returns:
        ``[M, N]`` in ``out_dtype``. The same shapes give the same bits on every run.

    Raises:
        TypeError: an operand is not a Quantized.
        ValueError: shapes, devices or specs that do not match, an unknown option, or an operand that requires grad.
    """
    # Host time of an eager call: each function call and each attribute access counts.
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        require_type("a", a, Quantized, _QUANTIZED)
        require_type("b", b, Quantized, _QUANTIZED)
    # By identity: faster, and safe for arrays. An equal text that is another object only takes the slower path below.
    plain = bias is None and residual is None and activation is None
    plain = plain and out_dtype is torch.bfloat16 and accumulation is _PRECISE and batch_invariant is False
    if not plain:
        _check_options(activation, accumulation, out_dtype, batch_invariant)
    lhs, rhs, (a_spec,), (b_spec,) = a.qdata, b.qdata, a.spec.args, b.spec.args
    if _FAMILIES[a_spec] != _FAMILIES[b_spec]:
        matmul_family(spec_of(a_spec).block, spec_of(b_spec).block)
    a_shape, b_shape, device = lhs.shape, rhs.shape, lhs.device
    if len(a_shape) != 2 or len(b_shape) != 2 or a_shape[1] != b_shape[1]:
        raise ValueError(f"scaled_matmul needs a [M, K] and b [N, K]; got {tuple(a_shape)} and {tuple(b_shape)}")
    if device != rhs.device:
        raise ValueError(f"both operands must be on one device; got a on {device} and b on {rhs.device}")
    if bias is not None:
        _check_operand("bias", bias, (b_shape[0],), device)
    if residual is not None:
        _check_operand("residual", residual, (a_shape[0], b_shape[0]), device)
    if plain:
        # Defaults are left out: the dispatcher takes time for each argument.
        return ops.scaled_matmul(lhs, a.scale, a_spec, rhs, b.scale, b_spec)
    return ops.scaled_matmul(
        lhs, a.scale, a_spec, rhs, b.scale, b_spec, bias, activation, residual, out_dtype, accumulation,
        *((True,) if batch_invariant else ()),
    )  # fmt: skip


def quantize_groups(x: Tensor, offsets: Tensor, spec: QuantSpec, transpose: bool = False) -> QuantizedGroups:
    """Quantize each group of rows of ``x``, or its transpose, to the bits of a separate :func:`quantize` of the group.

    Args:
        x: ``[T, K]``, bfloat16, float16, float32 or float64; the rows of a group are adjacent.
        offsets: ``[groups]``, int32, on the device of ``x``: the end of each group. Rows from the last end on belong to
            no group.
        spec: format, block and scale of the result. Blocks of several rows need ``transpose``.
        transpose: quantize the transpose of each group: K-major for a contraction over its rows.

    Returns:
        A :class:`~tritonfp8.QuantizedGroups` in ``"rows"``, or in ``"columns"`` if ``transpose``.

    Raises:
        TypeError: ``x`` is not a tensor of one of these dtypes, ``spec`` is not a QuantSpec, or offsets are not int32.
        ValueError: other dims, a block of several rows of tokens; offsets of another device, or on a CPU that decrease
            or end beyond T.
    """
    check_floating("x", x)
    require_type("spec", spec, QuantSpec, _SPEC)
    require_flag("transpose", transpose)
    _check_matrix(x, "quantize_groups")
    _check_offsets(offsets, None, x.shape[0], x.device)
    layout = "columns" if transpose else "rows"
    check_group_spec(spec, layout)
    qdata, scale = ops.quantize_groups(_without_grad(x), offsets, *spec.args, transpose)
    return QuantizedGroups(qdata, scale, spec, layout, len(offsets))


def quantize_matrices(x: Tensor, spec: QuantSpec, transpose: bool = False) -> QuantizedGroups:
    """Quantize each matrix of ``x [groups, N, K]``, or its transpose, like :func:`quantize` of that matrix.

    Args:
        x: ``[groups, N, K]``, bfloat16, float16, float32 or float64, of any strides: the weights of experts.
        spec: format, block and scale of the result.
        transpose: quantize the transpose of each matrix, ``[groups, K, N]``.

    Returns:
        A :class:`~tritonfp8.QuantizedGroups` in ``"matrices"``.

    Raises:
        TypeError: ``x`` is not a tensor of one of these dtypes, or ``spec`` is not a QuantSpec.
        ValueError: not three dims, or no matrix.
    """
    check_floating("x", x)
    require_type("spec", spec, QuantSpec, _SPEC)
    require_flag("transpose", transpose)
    if x.ndim != 3 or x.shape[0] == 0:
        raise ValueError(f"quantize_matrices needs [groups, N, K] with a group or more; got shape {tuple(x.shape)}")
    qdata, scale = ops.quantize_matrices(_without_grad(x), *spec.args, transpose)
    return QuantizedGroups(qdata, scale, spec, "matrices", x.shape[0])


def _check_offsets(offsets: Tensor, groups: int | None, tokens: int, device: torch.device) -> None:
    require_type("offsets", offsets, Tensor, "a torch.Tensor")
    if offsets.device != device:
        raise ValueError(f"offsets must be on {device}, where the groups are; got {offsets.device}")
    check_offsets(offsets, offsets.numel() if groups is None else groups, tokens)


def _check_groups(a: QuantizedGroups, b: QuantizedGroups, bias: Tensor | None, tokens: int | None) -> None:
    for name, operand in (("a", a), ("b", b)):
        require_type(name, operand, QuantizedGroups, "a tritonfp8.QuantizedGroups (see functional.quantize_groups)")
    matmul_family(a.spec.block, b.spec.block)
    layouts = (a.layout, b.layout)
    if layouts not in (("rows", "matrices"), ("columns", "columns")) or a.groups != b.groups:
        raise ValueError(
            "scaled_grouped_matmul multiplies rows by matrices, or columns by columns, of as many groups; got "
            f"{a.groups} groups in {a.layout} and {b.groups} in {b.layout}"
        )
    if a.shape[1] != b.shape[-1]:
        raise ValueError(f"both operands must have the same K or columns; got {tuple(a.shape)} and {tuple(b.shape)}")
    if b.device != a.device:
        raise ValueError(f"both operands must be on one device; got a on {a.device} and b on {b.device}")
    if a.layout == "rows":
        if tokens not in (None, a.shape[0]):
            raise ValueError(f"tokens are for columns only; got {tokens} with {a.shape[0]} rows")
        if bias is not None:
            _check_operand("bias", bias, tuple(b.shape[:2]), a.device)
    elif bias is not None:
        raise ValueError("a GEMM over groups of columns takes no bias; got one")
    elif type(tokens) is not int or tokens < 0 or grouped_columns(tokens, a.groups) != a.shape[1]:
        raise ValueError(
            f"tokens must be the rows that were quantized, for which {a.groups} groups have {a.shape[1]} columns; got "
            f"{tokens!r}"
        )


def scaled_grouped_matmul(
    a: QuantizedGroups,
    b: QuantizedGroups,
    offsets: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: str = _PRECISE,
    *,
    bias: Tensor | None = None,
    tokens: int | None = None,
) -> Tensor:
    """A GEMM for each group on quantized operands, computed in float32 and rounded once.

    Args:
        a: in ``"rows"``, ``[T, K]``; or in ``"columns"``, ``[M, columns]``.
        b: in ``"matrices"``, ``[groups, N, K]``; or in ``"columns"``, ``[N, columns]``.
        offsets: ``[groups]``, int32: the end of each group, with which ``a`` was quantized.
        out_dtype, accumulation: see :func:`scaled_matmul`.
        bias: ``[groups, N]``, floating, or None. Not for columns.
        tokens: for columns: T, the rows of the tensor that was quantized.

    Returns:
        ``[T, N]``: ``a @ b[g].T + bias[g]`` for the rows of each group g, zero in rows of no group. Of columns,
        ``[groups, M, N]``: ``a @ b.T`` over the columns of each group, zero for an empty one.

    Raises:
        TypeError: an operand is not a QuantizedGroups, or offsets are not int32.
        ValueError: layouts, shapes, devices or specs that do not match, an unknown option, ``tokens`` that do not fit
            the columns, or a bias that requires grad.
    """
    _check_options(None, accumulation, out_dtype, False)
    _check_groups(a, b, bias, tokens)
    _check_offsets(offsets, a.groups, a.shape[0] if tokens is None else tokens, a.device)
    return ops.scaled_grouped_matmul(
        a.qdata, a.scale, *a.spec.args, b.qdata, b.scale, *b.spec.args, offsets, bias, out_dtype, accumulation, False,
        tokens or 0,
    )  # fmt: skip
