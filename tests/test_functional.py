"""The public functions on Quantized: they are the ops, and bad input gets an error that names what was required."""

import pytest
import torch
import torch.nn.functional as F
from cases import banded, cpu_and_cuda, normal

import tritonfp8
from tritonfp8 import QuantSpec, functional, reference
from tritonfp8.functional import linear
from tritonfp8.specs import BLOCK_1X128, BLOCK_128X128, ROWWISE
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES
from tritonfp8.specs.testing import assert_bitwise_equal, assert_matmul_close

ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")


def q(m=4, k=40, spec=ROW):
    return tritonfp8.quantize(normal(m, k), spec)


ERRORS = {
    "quantize no tensor": (lambda: tritonfp8.quantize([1.0], ROW), TypeError, "torch.Tensor; got list"),
    "quantize integers": (lambda: tritonfp8.quantize(torch.ones(2, 2).int(), ROW), TypeError, "float.*int32.*Cast"),
    "quantize by a name": (lambda: tritonfp8.quantize(normal(2, 2), "e4m3"), TypeError, "QuantSpec; got str"),
    "quantize 0-D": (lambda: tritonfp8.quantize(torch.ones(()), ROW), ValueError, "at least 1 dims; got 0"),
    "quantize 1-D in squares": (
        lambda: tritonfp8.quantize(torch.ones(5), QuantSpec("e4m3", BLOCK_128X128)),
        ValueError,
        "at least 2 dims; got 1",
    ),
    "quantize 3-D transposed": (
        lambda: tritonfp8.quantize(torch.ones(2, 3, 4), ROW, transpose=True),
        ValueError,
        r"2-D.*\(2, 3, 4\).*Flatten",
    ),
    "quantize amax of another shape": (
        lambda: tritonfp8.quantize(torch.ones(2, 3), ROW, amax=torch.ones(3, 1)),
        ValueError,
        r"float32 of shape \(2, 1\); got torch.float32 of shape \(3, 1\)",
    ),
    "quantize amax of another dtype": (
        lambda: tritonfp8.quantize(torch.ones(2, 3), ROW, amax=torch.ones(2, 1).half()),
        ValueError,
        "float32.*got torch.float16",
    ),
    "quantize_both 1-D": (lambda: tritonfp8.quantize_both(torch.ones(5), ROW, ROW), ValueError, "2-D.*Flatten"),
    "quantize_both one spec": (lambda: tritonfp8.quantize_both(torch.ones(2, 2), ROW, None), TypeError, "got NoneType"),
    "amax of no such block": (lambda: functional.amax(torch.ones(2, 2), (3, 5)), ValueError, r"block.*\(3, 5\)"),
    "amax of integers": (lambda: functional.amax(torch.ones(2, 2).int(), (1, -1)), TypeError, "torch.int32"),
    "dequantize a tensor": (lambda: tritonfp8.dequantize(torch.ones(2)), TypeError, "Quantized.*quantize.*got Tensor"),
    "dequantize to integers": (lambda: tritonfp8.dequantize(q(), torch.int8), ValueError, "bfloat16.*got torch.int8"),
    "matmul of tensors": (lambda: tritonfp8.scaled_matmul(q(), normal(4, 40)), TypeError, "b must be.*got Tensor"),
    "matmul of two K": (lambda: tritonfp8.scaled_matmul(q(), q(4, 41)), ValueError, r"\(4, 40\) and \(4, 41\)"),
    "matmul of two families": (lambda: tritonfp8.scaled_matmul(q(), q(spec=VECTOR)), ValueError, "rowwise by 1x128"),
    "matmul of 3-D": (
        lambda: tritonfp8.scaled_matmul(tritonfp8.quantize(torch.ones(2, 3, 40), ROW), q()),
        ValueError,
        r"\[M, K\].*\(2, 3, 40\)",
    ),
    "matmul option": (lambda: tritonfp8.scaled_matmul(q(), q(), activation="tanh"), ValueError, "'gelu'.*got 'tanh'"),
    "matmul accumulation": (lambda: tritonfp8.scaled_matmul(q(), q(), accumulation="slow"), ValueError, "got 'slow'"),
    "matmul out_dtype": (lambda: tritonfp8.scaled_matmul(q(), q(), out_dtype=torch.int8), ValueError, "torch.int8"),
    "matmul bias": (lambda: tritonfp8.scaled_matmul(q(), q(), torch.ones(3)), ValueError, r"bias.*\(4,\); got \(3,\)"),
    "matmul residual": (
        lambda: tritonfp8.scaled_matmul(q(), q(), residual=torch.ones(4)),
        ValueError,
        r"residual.*\(4, 4\); got \(4,\)",
    ),
    "matmul bias with grad": (
        lambda: tritonfp8.scaled_matmul(q(), q(), torch.ones(4, requires_grad=True)),
        ValueError,
        "not differentiable.*linear.*detach",
    ),
    "linear of two K": (lambda: linear(normal(2, 3), normal(4, 5)), ValueError, r"\(2, 3\) and \(4, 5\)"),
    "linear of a scalar": (lambda: linear(torch.ones(()), normal(4, 5)), ValueError, r"\(\) and \(4, 5\)"),
    "linear 1-D weight": (lambda: linear(normal(2, 5), normal(5)), ValueError, r"\(2, 5\) and \(5,\)"),
    "linear bias": (lambda: linear(normal(2, 5), normal(4, 5), normal(5)), ValueError, r"bias.*\(4,\); got \(5,\)"),
    "linear of float64": (lambda: linear(normal(2, 5).double(), normal(4, 5).double()), TypeError, "float64.*Cast"),
    "linear of two dtypes": (
        lambda: linear(normal(2, 5).bfloat16(), normal(4, 5)),
        TypeError,
        "weight of torch.float32 with input of torch.bfloat16.*autocast",
    ),
    "linear recipe": (lambda: linear(normal(2, 5), normal(4, 5), recipe="rowise"), ValueError, "mean 'rowwise'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_was_required_and_what_came(case):
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        call()


class TestQuantized:
    def test_functions_are_the_ops(self):
        x = banded(130, 70)
        for spec in (ROW, VECTOR):
            a = tritonfp8.quantize(x, spec)
            assert a.spec is spec
            assert_bitwise_equal((a.qdata, a.scale), reference.quantize(x, *spec.args))
            t = tritonfp8.quantize(x, spec, transpose=True)
            assert_bitwise_equal((t.qdata, t.scale), reference.quantize(x, *spec.args, transpose=True))
            both = tritonfp8.quantize_both(x, spec, VECTOR)
            assert_bitwise_equal(both, (a, tritonfp8.quantize(x, VECTOR, transpose=True)))
            assert_bitwise_equal(functional.amax(x, spec.block), reference.amax(x, spec.block))
            for dtype in HIGH_PRECISION_DTYPES:
                expected = reference.dequantize(a.qdata, a.scale, *spec.args, dtype)
                assert_bitwise_equal(tritonfp8.dequantize(a, dtype), expected)
        given = tritonfp8.quantize(x, ROW, amax=torch.full((130, 1), 3.0))
        assert (given.scale == given.scale[0]).all()

    @cpu_and_cuda
    def test_scaled_matmul(self, device):
        a, b = (tritonfp8.quantize(normal(m, 150, seed=m, device=device), ROW) for m in (33, 20))
        bias, residual = normal(20, seed=3, device=device), normal(33, 20, seed=4, device=device)
        out = tritonfp8.scaled_matmul(a, b, bias, "gelu", residual)
        product = tritonfp8.dequantize(a).double() @ tritonfp8.dequantize(b).double().t()
        assert_matmul_close(out, F.gelu(product + bias) + residual, torch.bfloat16)

    def test_results_carry_no_gradient(self):
        x = normal(4, 40).requires_grad_()
        a = tritonfp8.quantize(x, ROW)
        assert not any(t.requires_grad for t in (a.qdata, a.scale, functional.amax(x, (1, -1))))
        assert not tritonfp8.scaled_matmul(a, a).requires_grad
        with torch.no_grad():
            tritonfp8.scaled_matmul(a, a, bias=torch.ones(4, requires_grad=True))
