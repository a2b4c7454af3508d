"""The reference of a GEMM is the float32 product of the dequantized operands, with the epilogue in its order."""

import math

import pytest
import torch
from cases import each_spec, normal

from tritonfp8 import reference
from tritonfp8.specs import ROWWISE, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal


def dequantize(q, spec):
    return reference.dequantize(*q, *spec.args, torch.float32)


class TestMatmul:
    def operands(self, spec, m=33, n=20, k=150):
        return (reference.quantize(normal(rows, k, seed=i), *spec.args) for i, rows in enumerate((m, n)))

    def run(self, a, b, spec, bias=None, activation=None, residual=None, out_dtype=torch.float32):
        return reference.scaled_matmul(*a, *spec.args, *b, *spec.args, bias, activation, residual, out_dtype, "precise")

    @each_spec
    def test_is_the_product_of_the_dequantized(self, spec):
        a, b = self.operands(spec)
        expected = dequantize(a, spec).double() @ dequantize(b, spec).double().t()
        torch.testing.assert_close(self.run(a, b, spec).double(), expected, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
    def test_epilogue_in_order(self, activation, out_dtype):
        spec = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
        a, b = self.operands(spec)
        bias, residual = normal(20, seed=2, dtype=torch.bfloat16), normal(33, 20, seed=3, dtype=torch.bfloat16)
        y = self.run(a, b, spec).double() + bias.double()
        gelu, silu = y * 0.5 * (1 + torch.erf(y / math.sqrt(2))), y / (1 + torch.exp(-y))
        y = {None: y, "relu": y.clamp(min=0), "gelu": gelu, "silu": silu}[activation]
        out = self.run(a, b, spec, bias, activation, residual, out_dtype)
        assert out.dtype == out_dtype
        torch.testing.assert_close(out.double(), (y + residual.double()).to(out_dtype).double(), rtol=1e-2, atol=1e-5)

    def test_high_precision_product_is_in_the_operands_dtype(self):
        a, b = normal(5, 7, dtype=torch.bfloat16), normal(3, 7, seed=1, dtype=torch.bfloat16)
        assert_bitwise_equal(reference.matmul(a, b), a @ b.t())

    def test_autocast_leaves_the_reference_in_float32(self):
        spec = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
        a, b = self.operands(spec)
        with torch.autocast("cpu", torch.bfloat16):
            inside = self.run(a, b, spec)
        assert_bitwise_equal(inside, self.run(a, b, spec))
