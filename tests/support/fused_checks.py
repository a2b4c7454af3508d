"""What the fused kernels are checked for: the bits of their references, and values close to float64."""

import torch
from cases import (
    normal,
    views,
)

from tritonfp8 import reference
from tritonfp8.launch import fused as launch_fused
from tritonfp8.reference import fused as reference_fused
from tritonfp8.specs import BLOCK_1X128, ORIENTATIONS, ROWWISE, TENSORWISE, QuantSpec
from tritonfp8.testing import assert_bitwise_equal

EPS = 1e-5
ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
TENSOR = QuantSpec("e4m3", TENSORWISE)
PRODUCERS = ("rms_norm", "silu_mul", "silu_mul_backward")


# A few units in the last place, of rstd and (for |gate| < 8) of float32 results.
RSTD_ULPS = 8
FLOAT32_RELATIVE = 2.0**-19


def ulps(actual, expected):
    """Largest distance in units in the last place; NaN only where NaN is expected."""
    assert torch.equal(actual.isnan(), expected.isnan())
    integer = torch.int32 if actual.dtype == torch.float32 else torch.int16
    a, e = (t.nan_to_num(0.0).contiguous().view(integer).long() for t in (actual, expected))
    # Bits as numbers on one line: those of negative values count down from zero.
    low = torch.iinfo(integer).min
    a, e = (torch.where(bits < 0, low - bits, bits) for bits in (a, e))
    return (a - e).abs().max().item() if a.numel() else 0


def assert_values_close(actual, expected, terms=None):
    """One unit in the last place of 16 bits, and FLOAT32_RELATIVE of the value, or of the terms that cancel in it."""
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), expected.isnan())
    a, e = actual.nan_to_num(0.0).double(), expected.nan_to_num(0.0).double()
    info = torch.finfo(actual.dtype)
    unit = 0.0 if actual.dtype == torch.float32 else info.eps
    bound = (
        unit * e.abs()
        + FLOAT32_RELATIVE * (e.abs() if terms is None else terms.double())
        + info.smallest_normal * info.eps
    )
    assert ((a == e) | ((a - e).abs() <= bound)).all()


def inputs(producer, m, n, dtype=torch.bfloat16, device="cpu", seed=0):
    """What a producer takes, before its specs: no gate beyond 8, where the sigmoid's error is stated."""
    x = normal(m, n, seed=seed, dtype=dtype, device=device)
    if producer == "rms_norm":
        return x, normal(n, seed=1, dtype=dtype, device=device), EPS, "output"
    other = normal(m, n, seed=seed + 1, dtype=dtype, device=device)
    return (x, other) if producer == "silu_mul" else (normal(m, n, seed=seed + 2, dtype=dtype, device=device), x, other)


def launch_of(producer):
    return getattr(launch_fused, f"{producer}_quantize")


def reference_of(producer):
    return getattr(reference_fused, f"{producer}_quantize")


def strides(tensors):
    return [[s for s, d in zip(t.stride(), t.shape, strict=True) if d > 1 and t.numel()] for t in tensors]


def quantized_alone(y, spec, spec_t, orientation):
    wanted, wanted_t = ORIENTATIONS[orientation]
    return [
        *(reference.quantize(y, *spec.args) if wanted else ()),
        *(reference.quantize(y, *spec_t.args, True) if wanted_t else ()),
    ]


def check(producer, args, spec, spec_t=None, orientation="both", values=True):
    """Quantization to the bit, values and layout against the reference; without ``keep`` the same bits."""
    spec_t = spec_t or spec
    specs = *spec.args, *spec_t.args, orientation
    actual = launch_of(producer)(*args, *specs, True)
    expected = reference_of(producer)(*args, *specs, True)
    assert [(t.dtype, t.shape) for t in actual] == [(t.dtype, t.shape) for t in expected]
    assert strides(actual) == strides(expected)
    kept = actual[-1]
    if producer == "rms_norm":
        rstd = actual[-2]
        x, weight, _, rounding = args
        assert ulps(rstd, expected[-2]) <= RSTD_ULPS
        y = (reference_fused._normalized(x, rstd, rounding) * weight.float()).to(x.dtype)
        assert_bitwise_equal(kept.nan_to_num(), y.nan_to_num())
        assert torch.equal(kept.isnan(), y.isnan())
        assert_bitwise_equal(actual[:-2], quantized_alone(kept, spec, spec_t, orientation))
    elif producer == "silu_mul":
        if values:
            assert_values_close(kept, expected[-1])
        assert_bitwise_equal(actual[:-1], quantized_alone(kept, spec, spec_t, orientation))
    else:
        grad, gate, up = (t.float().abs() for t in args)
        # 1 + gate (1 - sigmoid) cancels where SiLU has its minimum.
        terms = grad * up * (1 + gate), grad * gate
        for i, value in enumerate(kept):
            if values:
                assert_values_close(value, expected[-1][i], terms[i])
            assert_bitwise_equal([t[i] for t in actual[:-1]], quantized_alone(value, spec, spec_t, orientation))


def backward_args(m, n, dtype, device, weight_dtype=None):
    grad, x, residual = (normal(m, n, seed=seed, dtype=dtype, device=device) for seed in range(3))
    weight = normal(n, seed=3, dtype=weight_dtype or dtype, device=device)
    _, rstd = reference_fused.rms_norm(x, weight, EPS, "output")
    return grad, x, weight, rstd, residual


def check_backward(m, n, dtype, device, rounding="output", weight_dtype=None, layout=None):
    grad, x, weight, rstd, residual = backward_args(m, n, dtype, device, weight_dtype)
    if layout is not None:
        grad, x, residual = (views(t)[layout] for t in (grad, x, residual))
    for added, needs_weight in ((None, True), (residual, False)):
        args = grad, x, weight, rstd, rounding, added, needs_weight
        actual = launch_fused.rms_norm_backward(*args)
        expected = reference_fused.rms_norm_backward(*args)
        assert len(actual) == len(expected) == 1 + needs_weight
        scale = rstd.unsqueeze(1) * (1 + grad.abs() * weight.abs() + x.abs() * rstd.unsqueeze(1)) + residual.abs()
        assert_values_close(actual[0], expected[0], scale)
        if needs_weight:
            terms = (grad.float() * x.float() * rstd.unsqueeze(1)).abs().sum(0) + 1
            assert_values_close(actual[1], expected[1], terms)
