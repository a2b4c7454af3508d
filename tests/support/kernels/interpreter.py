"""Repairs Triton's CPU interpreter (3.6 to 3.9), so that kernels give the same results there as on a GPU.

The stock interpreter silently differs:

- Casts to 8-bit floats lose carries, round half up and wrap where ``cvt.rn.satfinite`` rounds to even and saturates.
- bfloat16 arithmetic, comparisons, casts to and from integers, and ``tl.dot`` run on the bits as integers.
- ``tl.maximum``, ``tl.minimum`` and ``tl.clamp`` propagate NaN where ``max.f32`` and ``min.f32`` drop it.

It fails on ``tl.dot_scaled``, and in 3.6.0 on loops over tensor bounds with numpy 2.4. Inline assembly and libdevice
stay unsupported.

It is slow: ``tl.reduce`` with a custom function goes element by element, each call of a device function patches
triton's library again, overflow checks of integers are computed but not used, and each tensor has its shape checked and
wrapped again.
"""

import dataclasses
import functools
import inspect
import types

import numpy as np
import torch
import triton
import triton.language as tl
from packaging.version import Version
from triton._C.libtriton import ir
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

TORCH_DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float64: torch.float64,
}  # fmt: skip
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_NAN = 0x7F  # what cvt.rn.satfinite writes, in both formats and for either sign
BITS = {size: (getattr(np, f"uint{8 * size}"), getattr(torch, f"uint{8 * size}")) for size in (1, 2, 4, 8)}
# numpy lacks these dtypes: the interpreter stores their bits in unsigned integers.
HELD_AS_BITS = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
READS_VALUES = Version(triton.__version__) < Version("3.8")
SCALED_DOT_TYPES = {
    ir.ScaleDotElemTypeTY.E4M3: tl.float8e4nv,
    ir.ScaleDotElemTypeTY.E5M2: tl.float8e5,
    ir.ScaleDotElemTypeTY.BF16: tl.bfloat16,
    ir.ScaleDotElemTypeTY.FP16: tl.float16,
}

_stock_convert_float = interpreter._convert_float
_stock_cast = interpreter.InterpreterBuilder.cast_impl
_stock_binary_op = interpreter.InterpreterBuilder.binary_op
_stock_create_dot = interpreter.InterpreterBuilder.create_dot
_stock_min_max = interpreter.ReduceOps.min_max
_stock_generic_reduce = interpreter.ReduceOps.generic_reduce
_stock_launch = interpreter.GridExecutor.__call__
_stock_patch_lang = interpreter._patch_lang
_stock_patch_lang_tensor = interpreter._patch_lang_tensor
_stock_dot_scaled = TritonSemantic.dot_scaled
_stock_unwrap = tl.core._unwrap_if_constexpr
_stock_same_dtype = tl.dtype.__eq__
_stock_broadcast = TritonSemantic.broadcast_impl_value
_NO_CONTAINERS = {int, float, bool, str, type(None), tl.dtype, tl.block_type, tl.pointer_type, tl.tensor}


def saturating_cast(x, dtype):
    """Cast ``x`` to ``dtype`` as the hardware does: round to nearest even; 8-bit results saturate, also infinities.

    fp64 is cast to 8 bits through fp32, as in the compiler.
    """
    if dtype not in FP8_DTYPES:
        return x.to(dtype)
    x = x.to(torch.float32)
    qmax = torch.finfo(dtype).max
    bits = x.clamp(-qmax, qmax).to(dtype).view(torch.uint8)
    return torch.where(x.isnan(), FP8_NAN, bits).view(dtype)


def _convert_float(data, source, target, rounding_mode):
    """Bits of float type ``source`` -> bits of float type ``target``, both as numpy arrays."""
    source, target = source.scalar, target.scalar
    if source not in TORCH_DTYPES or target not in TORCH_DTYPES:
        return _stock_convert_float(data, source, target, rounding_mode)
    if rounding_mode == ir.ROUNDING_MODE.RTZ:
        raise NotImplementedError("the repaired interpreter rounds to nearest even only")
    uint, _ = BITS[source.primitive_bitwidth // 8]
    bits = torch.from_numpy(np.ascontiguousarray(data).view(uint).reshape(-1).copy())
    out = saturating_cast(bits.view(TORCH_DTYPES[source]), TORCH_DTYPES[target])
    _, torch_uint = BITS[target.primitive_bitwidth // 8]
    return out.view(torch_uint).numpy().reshape(data.shape)


def _to_float32(data, dtype):
    if dtype.scalar in HELD_AS_BITS:
        return _convert_float(data, dtype, tl.float32, None).view(np.float32)
    return data.astype(np.float32)


def _cast(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if source not in HELD_AS_BITS and target not in HELD_AS_BITS:
        return _stock_cast(self, src, dst_type)
    values = _to_float32(src.data, source)
    if target in HELD_AS_BITS:
        return interpreter.TensorHandle(_convert_float(values, tl.float32, target, None), target)
    return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(target)), target)


def _binary_op(self, lhs, rhs, op):
    dtype = lhs.dtype.scalar
    if dtype not in HELD_AS_BITS:
        return _stock_binary_op(self, lhs, rhs, op)
    out = op(_to_float32(lhs.data, dtype), _to_float32(rhs.data, rhs.dtype))
    if out.dtype == bool:
        return interpreter.TensorHandle(out, tl.int1)
    # One rounding of an fp32 result is the bf16 result: fp32 has more than twice the bits.
    return interpreter.TensorHandle(_convert_float(out, tl.float32, dtype, None), dtype)


def _clamp(self, x, low, high, propagate_nan):
    if propagate_nan == ir.PROPAGATE_NAN.ALL:
        return self.create_minimumf(self.create_maximumf(x, low), high)
    return self.create_minnumf(self.create_maxnumf(x, low), high)


def _min_max(self, input, val_reduce_op, idx_reduce_op=None):
    # The same values as nanmax and nanmin, without numpy's warning about all-NaN slices.
    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    return _stock_min_max(self, input, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)


def _generic_reduce(self, input):
    """Reduce by halves, as on a GPU; the order of combinations is not defined."""
    if self.axis is None:
        return _stock_generic_reduce(self, input)
    arrays, dtypes = [np.moveaxis(arg.handle.data, self.axis, 0) for arg in input], [arg.dtype for arg in input]
    while len(arrays[0]) > 1:
        half = len(arrays[0]) // 2
        halves = [[self.to_tensor(part, t) for part, t in zip(p, dtypes, strict=True)]
                  for p in ([a[:half] for a in arrays], [a[half:] for a in arrays])]  # fmt: skip
        combined = self.combine_fn.fn(*halves[0], *halves[1])
        arrays = [t.handle.data for t in (combined if isinstance(combined, tuple) else (combined,))]
    found = [np.expand_dims(a[0], self.axis) if self.keep_dims else a[0] for a in arrays]
    return [self.to_tensor(a, dtype) for a, dtype in zip(found, dtypes, strict=True)]


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    if not a.dtype.scalar.is_floating() or d.dtype.scalar != tl.float32:
        return _stock_create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    out = np.matmul(_to_float32(a.data, a.dtype), _to_float32(b.data, b.dtype)) + d.data
    return interpreter.TensorHandle(out, tl.float32)


def decode_e8m0(exponents):
    """Bytes of e8m0 -> float32: 2^(byte - 127), NaN for 255 (OCP MX v1.0, section 5.4.1)."""
    exponents = exponents.view(np.uint8).astype(np.int32)
    return np.where(exponents == 255, np.float32(np.nan), np.ldexp(np.float32(1), np.minimum(exponents, 254) - 127))


def _scaled_operand(data, element_type, scale, k_axis):
    """``data`` in float32, times its scales ``[rows, K / group]``; ``k_axis`` of ``data`` is K."""
    if element_type not in SCALED_DOT_TYPES:
        raise NotImplementedError(f"the repaired interpreter has no dot_scaled of {element_type}")
    dtype = SCALED_DOT_TYPES[element_type]
    # Operands may be declared uint8: the element type decides.
    values = _to_float32(data.data.view(np.float16) if dtype == tl.float16 else data.data, dtype)
    if scale is None:
        return values
    factors = decode_e8m0(scale.data)
    factors = np.repeat(factors, values.shape[k_axis] // factors.shape[-1], axis=-1)
    return values * (factors if k_axis == -1 else np.swapaxes(factors, -1, -2))


def _create_dot_scaled(
    self, lhs, lhs_scale, lhs_type, rhs, rhs_scale, rhs_type, fast_math, lhs_k_pack, rhs_k_pack, acc
):
    a = _scaled_operand(lhs, lhs_type, lhs_scale, -1)
    b = _scaled_operand(rhs, rhs_type, rhs_scale, -2)
    return interpreter.TensorHandle(np.matmul(a, b) + acc.data, acc.dtype.scalar)


def _dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *args, **kwargs):
    # Before 3.8 the semantic layer reads `.value`, but the interpreter passes the kernel's plain str.
    formats = [tl.constexpr(f) if READS_VALUES and isinstance(f, str) else f for f in (lhs_format, rhs_format)]
    return _stock_dot_scaled(self, lhs, lhs_scale, formats[0], rhs, rhs_scale, formats[1], *args, **kwargs)


def _patch_lang(fn):
    """Patch triton's library only once. ``tl.load`` shows whether it is patched: then it is no builtin."""
    if not tl.core.is_builtin(tl.load):
        return interpreter._LangPatchScope()
    return _stock_patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _patch_lang_tensor(tensor, scope):
    _stock_patch_lang_tensor(tensor, scope)
    # A scalar is an array of one element, which numpy 2.4 no longer converts to an int.
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@functools.wraps(_stock_launch)
def _launch(self, *args, **kwargs):
    # Device arithmetic raises no warnings on division by zero, overflow or NaN.
    with np.errstate(all="ignore"):
        return _stock_launch(self, *args, **kwargs)


def _elementwise(op):
    return lambda self, lhs, rhs: self.binary_op(lhs, rhs, op)


_NUMPY_DTYPES = {
    kind.name: interpreter._get_np_dtype(kind)
    for kind in (
        tl.int1, tl.int8, tl.uint8, tl.int16, tl.uint16, tl.int32, tl.uint32, tl.int64, tl.uint64,
        tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5, tl.float8e4nv,
    )
}  # fmt: skip
_ADDRESS = np.dtype(np.uint64)


def _get_np_dtype(kind):
    """As the stock function, which makes its table in each call."""
    scalar = kind.scalar
    return _ADDRESS if isinstance(scalar, tl.pointer_type) else _NUMPY_DTYPES[scalar.name]


def _unwrapped(value):
    """As the stock function, which first asks whether a value is a list or a tuple."""
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _NO_CONTAINERS else _stock_unwrap(value)


class _Shape(tl.core.tuple):
    """The shape of a block type. All block types of one shape share it, with what tensors of this shape have."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.elements = validate_block_shape(sizes)
        self.text = str(self)
        self.of_tensor = tl.core.tuple([tl.constexpr(size) for size in sizes])
        self.numel = tl.constexpr(self.elements)


_shapes = {}
_NO_SHAPE, _ONE = tl.core.tuple([]), tl.constexpr(1)


def _shape_of(sizes):
    if type(sizes) is _Shape:
        return sizes
    sizes = tuple(map(_unwrapped, sizes))
    found = _shapes.get(sizes)
    if found is None:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        found = _shapes[sizes] = _Shape(sizes)
    return found


def _block_type(self, element_ty, shape):
    self.element_ty = element_ty
    self.shape = shape = _shape_of(shape)
    self.numel = shape.elements
    self.name = f"<{shape.text}, {element_ty}>"


def _same_block_type(self, other):
    if not isinstance(other, tl.block_type):
        return False
    return self.shape is other.shape and self.element_ty == other.element_ty


def _same_dtype(self, other):
    return self is other or (self.name == other.name if type(other) is tl.dtype else _stock_same_dtype(self, other))


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    shape = type.shape if type.is_block() else None
    self.numel, self.shape = (_ONE, _NO_SHAPE) if shape is None else (shape.numel, shape.of_tensor)


def _broadcast(self, lhs, rhs):
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
        return lhs, rhs
    return _stock_broadcast(self, lhs, rhs)


@functools.cache
def _builtins_of(package):
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package, builder, scope):
    for name, member in _builtins_of(package):
        interpreter._patch_attr(package, name, member, builder, scope)


def _patch_attr(owner, name, member, builder, scope):
    # Without the wrapper, which asks for the argument that is given here.
    member = getattr(member, "__wrapped__", member) if tl.core.is_builtin(member) else member

    def interpreted(*args, **kwargs):
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(owner, name, interpreted)


def _quicken():
    """Replace what Triton computes for each tensor again: its shape, of a handful of shapes in a kernel."""
    interpreter._patch_builtin, interpreter._patch_attr = _patch_builtin, _patch_attr
    tl.core._unwrap_if_constexpr = _unwrapped
    tl.block_type.__init__, tl.block_type.__eq__ = _block_type, _same_block_type
    tl.dtype.__eq__ = _same_dtype
    tl.tensor.__init__ = _tensor
    TritonSemantic.broadcast_impl_value = _broadcast


def repair():
    """Apply all repairs. Call it once, before the first launch."""
    _quicken()
    builder = interpreter.InterpreterBuilder
    options = interpreter.interpreter_builder.options
    # The check asserts only in debug mode, which the interpreter lacks.
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._convert_float = _convert_float
    interpreter._get_np_dtype = _get_np_dtype
    interpreter._patch_lang = _patch_lang
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter.ReduceOps.min_max = _min_max
    interpreter.ReduceOps.generic_reduce = _generic_reduce
    interpreter.GridExecutor.__call__ = _launch
    TritonSemantic.dot_scaled = _dot_scaled
    builder.cast_impl = _cast
    builder.binary_op = _binary_op
    builder.create_minnumf = _elementwise(np.fmin)
    builder.create_maxnumf = _elementwise(np.fmax)
    builder.create_clampf = _clamp
    builder.create_dot = _create_dot
    builder.create_dot_scaled = _create_dot_scaled
