"""Kernels of norms, logsumexp, gates and GEMMs in high precision: a row has the same bits in every batch."""

import math

import pytest
import torch
from cases import CUDA, INTERPRETER, each_device, normal

from tritonfp8 import reference
from tritonfp8.launch.exact import gemm, rows
from tritonfp8.launch.executor import planned

# Device, numbers of rows, and sizes of a row.
CASES = [
    pytest.param(*INTERPRETER.values, (1, 7, 65), (1, 77, 1030), id=INTERPRETER.id, marks=INTERPRETER.marks),
    pytest.param(*CUDA.values, (1, 7, 64, 65, 128, 300, 4096), (1, 77, 1030, 4096, 9000), id=CUDA.id, marks=CUDA.marks),
]
each_case = pytest.mark.parametrize(("device", "counts", "sizes"), CASES)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def tolerance(dtype):
    return {"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 2e-5}


def assert_rows_alone(function, x, counts):
    """Check that rows have the bits of a larger batch, and of other memory; return the results of all rows."""
    whole = function(x)
    for count in counts:
        start = len(x) - count
        assert torch.equal(function(x[start:]), whole[start:])
    spread = x.new_zeros(len(x), x.shape[1] + 3)[:, 1 : 1 + x.shape[1]].copy_(x)
    assert torch.equal(function(spread), whole)
    return whole


@each_case
@each_dtype
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm(device, counts, sizes, dtype, unit_offset):
    for n in sizes:
        x, weight = normal(counts[-1] + 1, n, dtype=dtype, device=device), normal(n, seed=1, device=device)
        found = assert_rows_alone(lambda x, w=weight: rows.rms_norm(x, w, 1e-5, unit_offset)[0], x, counts)
        expected, rstd = reference.rms_norm(x.double(), weight.double(), 1e-5, unit_offset)
        torch.testing.assert_close(found.double(), expected, **tolerance(dtype))
        torch.testing.assert_close(rows.rms_norm(x, weight, 1e-5, unit_offset)[1].double(), rstd, rtol=1e-6, atol=1e-6)
        grad = normal(*x.shape, seed=2, dtype=dtype, device=device)
        found = rows.rms_norm_backward(grad, x, weight, rstd.float(), unit_offset)
        expected = reference.rms_norm_backward(grad.double(), x.double(), weight.double(), rstd, unit_offset)
        torch.testing.assert_close(found[0].double(), expected[0], **tolerance(dtype))
        # Of a bfloat16 row the normalized values are rounded before they meet the weight.
        scale = len(x) ** 0.5 * (4e-3 if dtype == torch.bfloat16 else 1e-6)
        torch.testing.assert_close(found[1].double(), expected[1], rtol=0, atol=4 * scale)


@each_case
@each_dtype
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_row_logsumexp(device, counts, sizes, dtype, temperature):
    for n in sizes:
        x = normal(counts[-1] + 1, n, dtype=dtype, device=device) * 8
        x[1] = -math.inf
        x[0, n // 2 :] = -math.inf
        found = assert_rows_alone(lambda x: rows.row_logsumexp(x, temperature), x, counts)
        expected = reference.row_logsumexp(x.double(), temperature)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-6)
        assert torch.equal(rows.row_logsumexp(x.float(), temperature), found)


@each_device
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite(device, value):
    x = normal(5, 300, device=device)
    x[2, 7] = value
    expected = reference.rms_norm(x, x[0], 1e-5)[0]
    torch.testing.assert_close(rows.rms_norm(x, x[0], 1e-5)[0], expected, equal_nan=True)
    found = rows.row_logsumexp(x)
    assert found.isnan().tolist() == [False, False, True, False, False]


@each_device
@pytest.mark.parametrize("magnitude", [1e-25, 1e-12, 1e12, 1e25])
def test_rms_norm_of_any_magnitude(device, magnitude):
    x, weight = normal(5, 300, device=device) * magnitude, torch.ones(300, device=device)
    expected = reference.rms_norm(x, weight, 1e-20)[0]
    torch.testing.assert_close(rows.rms_norm(x, weight, 1e-20)[0], expected, rtol=1e-5, atol=0)


@each_case
@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_gated(device, counts, sizes, dtype, activation):
    n = sizes[-1]
    x = normal(counts[-1], 2 * n, dtype=dtype, device=device) * 2
    found = assert_rows_alone(lambda x: rows.gated(*x.chunk(2, -1), activation), x, counts)
    gate, up = (part.double() for part in x.chunk(2, -1))
    torch.testing.assert_close(found.double(), reference.gated(gate, up, activation), **tolerance(dtype))
    grad = normal(*found.shape, seed=2, dtype=dtype, device=device)
    of_both = rows.gated_backward(grad, *x.chunk(2, -1), activation)
    expected = reference.gated_backward(grad.double(), gate, up, activation)
    for got, want in zip(of_both, expected, strict=True):
        torch.testing.assert_close(got.double(), want, **tolerance(dtype))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("device", "counts", "n", "k"),
    [
        pytest.param(*INTERPRETER.values, (1, 7, 65), 40, 300, id=INTERPRETER.id, marks=INTERPRETER.marks),
        pytest.param(*CUDA.values, (1, 7, 64, 65, 128, 300, 4095), 1000, 4096, id="cuda", marks=CUDA.marks),
        pytest.param(*CUDA.values, (1, 64, 65, 300), 96, 1001, id="cuda tails", marks=CUDA.marks),
    ],
)
@each_dtype
def test_matmul(device, counts, n, k, dtype, has_bias):
    a, b = normal(counts[-1] + 1, k, dtype=dtype, device=device), normal(n, k, seed=1, dtype=dtype, device=device)
    bias = normal(n, seed=2, dtype=dtype, device=device) if has_bias else None
    whole = gemm.matmul(a, b, bias, True)
    expected = a.double() @ b.double().t() + (0 if bias is None else bias.double())
    # bfloat16 is rounded once, by 2^-9 at most; K float32 sums in a row drift apart by about sqrt(K) roundings.
    error = (whole.double() - expected).norm() / expected.norm()
    assert error < (2**-9 if dtype == torch.bfloat16 else 4 * k**0.5 * 2**-24)
    if device == "cpu":
        # The interpreter multiplies tiles by a BLAS, which on some CPUs sums tiles of another shape in another order.
        return
    for count in counts:
        assert torch.equal(gemm.matmul(a[-count:].clone(), b, bias, True), whole[-count:])
    # Other tiles, and loads by pointers.
    for tile in (gemm._NARROW, gemm._WIDE) if dtype == torch.bfloat16 else (gemm._FLOAT32,):
        for tma in (False, True):
            (found,) = planned(gemm.plan_tiles, (a, b, bias), (tile, tma))
            assert torch.equal(found, whole)
    assert torch.equal(gemm.matmul(a, b, bias), reference.matmul(a, b, bias))
