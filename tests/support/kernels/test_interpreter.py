"""The repaired interpreter computes what the GPU computes. Skipped where kernels really compile."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from cases import generator

from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels are compiled in this process, not interpreted"
)

ALL_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
ALL_FP16 = ALL_BF16.view(torch.float16)
BLOCK = 1024


@triton.jit
def cast_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


@triton.jit
def binary_kernel(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    if OP == "add":
        out = x + y
    elif OP == "mul":
        out = x * y
    elif OP == "less":
        out = x < y
    elif OP == "maximum":
        out = tl.maximum(x, y)
    elif OP == "maximum_nan":
        out = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "minimum":
        out = tl.minimum(x, y)
    elif OP == "clamp":
        out = tl.clamp(x, -y, y)
    elif OP == "clamp_nan":
        out = tl.clamp(x, -y, y, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + offsets, out)


@triton.jit
def max_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.program_id(0), tl.max(tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0))


@triton.jit
def dot_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
):  # fmt: skip
    m, n, k, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[None, :] * K + k[:, None])
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + s[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + s[None, :])
    acc = tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, tl.zeros((M, N), tl.float32))
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)


def cast(x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(x.numel() // BLOCK,)](x, out, BLOCK=BLOCK)
    return out


def binary(op, x, y, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    binary_kernel[(1,)](x, y, out, OP=op, BLOCK=x.numel())
    return out


def expected_fp8(x, fmt):
    """By torch, which rounds to nearest even; the range is clamped first because torch does not saturate."""
    expected = x.float().clamp(-fmt.qmax, fmt.qmax).to(fmt.dtype).view(torch.uint8)
    expected[x.isnan()] = fmt.nan
    return expected


@pytest.mark.parametrize("name", BYTE_FORMATS)
@pytest.mark.parametrize("x", [ALL_BF16, ALL_FP16], ids=["bf16", "fp16"])
def test_every_16_bit_pattern_casts_to_fp8_as_in_torch(x, name):
    fmt = FORMATS[name]
    got = cast(x, fmt.dtype).view(torch.uint8)
    assert torch.equal(got, expected_fp8(x, fmt))
    finite = got[x.isfinite()].view(fmt.dtype).float()
    assert finite.isfinite().all(), "a finite value became NaN or infinite"
    assert (finite.abs() == fmt.qmax).sum() > 2, "nothing saturated: the patterns do not cover the range"


@pytest.mark.parametrize("name", BYTE_FORMATS)
def test_random_fp32_patterns_cast_to_fp8_as_in_torch(name):
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=generator(0))
    x = bits.to(torch.int32).view(torch.float32)
    # Random exponents almost always saturate or vanish: half of the values get one near the format's range.
    x[::2] = torch.ldexp(x[::2].frexp().mantissa, torch.randint(-20, 18, (2**17,), generator=generator(1)))
    fmt = FORMATS[name]
    assert torch.equal(cast(x, fmt.dtype).view(torch.uint8), expected_fp8(x, fmt))


@pytest.mark.parametrize("name", BYTE_FORMATS)
def test_fp8_casts_up_exactly(name):
    codes = torch.arange(256, dtype=torch.uint8).repeat(BLOCK // 256).view(FORMATS[name].dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(cast(codes, dtype).isnan(), codes.float().isnan())
        assert torch.equal(cast(codes, dtype).nan_to_num(), codes.to(dtype).nan_to_num())


def test_bf16_casts():
    assert torch.equal(cast(ALL_BF16, torch.float32).view(torch.int32), ALL_BF16.float().view(torch.int32))
    x = torch.randn(BLOCK, generator=generator(0)) * 100
    assert torch.equal(cast(x, torch.bfloat16), x.to(torch.bfloat16))
    assert torch.equal(cast(x.double(), torch.bfloat16), x.to(torch.bfloat16))
    assert torch.equal(cast(x.to(torch.bfloat16), torch.int32), x.to(torch.bfloat16).to(torch.int32))
    assert torch.equal(cast(x.to(torch.int32), torch.bfloat16), x.to(torch.int32).to(torch.bfloat16))


def test_rounding_toward_zero_is_refused_not_ignored():
    @triton.jit
    def toward_zero(x_ptr, out_ptr):
        tl.store(out_ptr, tl.load(x_ptr).to(tl.float8e4nv, fp_downcast_rounding="rtz"))

    with pytest.raises(Exception, match="nearest even only"):
        toward_zero[(1,)](torch.ones(1), torch.ones(1).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("op", "reference"),
    [("add", torch.add), ("mul", torch.mul), ("less", torch.lt), ("maximum", torch.fmax), ("minimum", torch.fmin)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_arithmetic_is_that_of_the_dtype(op, reference, dtype):
    g = generator(0)
    x, y = (torch.randn(BLOCK, generator=g).mul(3).to(dtype) for _ in range(2))
    x[0], y[1] = torch.nan, torch.nan
    expected = reference(x, y)
    got = binary(op, x, y, expected.dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_nan_is_dropped_or_propagated_as_on_the_gpu():
    x = torch.tensor([torch.nan, 1.0, torch.nan, -5.0])
    y = torch.tensor([2.0, torch.nan, torch.nan, 3.0])
    assert binary("maximum", x, y, x.dtype).nan_to_num(-1).tolist() == [2.0, 1.0, -1.0, 3.0]
    assert binary("maximum_nan", x, y, x.dtype).nan_to_num(-1).tolist() == [-1.0, -1.0, -1.0, 3.0]
    x = torch.tensor([torch.nan, 1.0, 9.0, -9.0])
    y = torch.full((4,), 2.0)
    # max(NaN, low) is low.
    assert binary("clamp", x, y, x.dtype).tolist() == [-2.0, 1.0, 2.0, -2.0]
    assert binary("clamp_nan", x, y, x.dtype).nan_to_num(7).tolist() == [7.0, 1.0, 2.0, -2.0]


@pytest.mark.filterwarnings("error")
def test_max_drops_nan_and_neither_it_nor_overflow_warns():
    x = torch.tensor([[1.0, torch.nan, 3.0, -4.0], [torch.nan] * 4])
    out = torch.zeros(2)
    max_kernel[(2,)](x, out, BLOCK=4)
    assert out[0] == 3.0
    assert out[1].isnan()
    huge = torch.full((BLOCK,), 3e38)
    assert binary("mul", huge, huge, torch.float32).isinf().all()
    assert cast(huge, torch.float16).isinf().all()


def decoded(scale):
    return torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127))


@pytest.mark.parametrize(("a_name", "b_name"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_dot_scaled_multiplies_by_powers_of_two(a_name, b_name):
    """Each 32 of K has a scale 2^(byte - 127), the rhs scale given as [N, K / 32]."""
    g = generator(0)
    m, n, k = 16, 32, 128
    a, b = (torch.randint(-4, 5, (rows, k), generator=g).float() for rows in (m, n))
    a_scale, b_scale = (torch.randint(124, 131, (rows, k // 32), generator=g).to(torch.uint8) for rows in (m, n))
    out = torch.full((m, n), torch.nan)
    dot_scaled_kernel[(1,)](
        a.to(FORMATS[a_name].dtype), a_scale, b.to(FORMATS[b_name].dtype), b_scale, out,
        M=m, N=n, K=k, A_FORMAT=a_name, B_FORMAT=b_name,
    )  # fmt: skip
    expected = (a * decoded(a_scale).repeat_interleave(32, 1)) @ (b * decoded(b_scale).repeat_interleave(32, 1)).T
    assert torch.equal(out.double(), expected)


def test_dot_scaled_reads_the_ends_of_e8m0():
    """Byte 0 is 2^-127, 254 is 2^127, 255 is NaN and stays in its row."""
    a = torch.ones(16, 32).to(torch.float8_e4m3fn)
    a_scale = torch.full((16, 1), 127, dtype=torch.uint8)
    a_scale[:4, 0] = torch.tensor([0, 1, 254, 255])
    b_scale = torch.full((16, 1), 127, dtype=torch.uint8)
    out = torch.full((16, 16), -1.0)
    dot_scaled_kernel[(1,)](a, a_scale, a, b_scale, out, M=16, N=16, K=32, A_FORMAT="e4m3", B_FORMAT="e4m3")
    assert out[:3, 0].tolist() == [32 * 2.0**-127, 32 * 2.0**-126, np.inf]
    assert out[3].isnan().all()
    assert (out[4:] == 32).all()


def test_block_types_of_one_shape_share_it_and_are_checked():
    shape = (4, tl.constexpr(8))
    one, other = tl.block_type(tl.float32, [4, 8]), tl.block_type(tl.float32, shape)
    assert one == other
    assert one.shape is other.shape
    assert (one.numel, one.name) == (32, "<['4', '8'], fp32>")
    assert one != tl.block_type(tl.float32, [8, 4])
    assert one != one.with_element_ty(tl.int32)
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [4, 6])
    with pytest.raises(TypeError, match="0d"):
        tl.block_type(tl.float32, [])
