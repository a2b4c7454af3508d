"""Shared cases of the GEMM tests: pairs of specs, operands, and runs that must not write out of bounds."""

import math

import torch
from cases import generator, normal

from tritonfp8 import reference
from tritonfp8.compat import hardware
from tritonfp8.launch import gemms
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, QuantSpec, matmul_family, scale_shape
from tritonfp8.specs.formats import FORMATS
from tritonfp8.specs.testing import assert_matmul_close
from tritonfp8.tuning.matmul_space import supports

TENSOR = QuantSpec("e4m3")
TENSOR_E5M2 = QuantSpec("e5m2")
ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
ROW_E5M2 = QuantSpec("e5m2", ROWWISE, "fp32", "none")
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
VECTOR_E5M2 = QuantSpec("e5m2", BLOCK_1X128, "fp32", "none")
SQUARE = QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2")
MX = QuantSpec("e4m3", BLOCK_1X32, "e8m0", "pow2")
MX_E5M2 = QuantSpec("e5m2", BLOCK_1X32, "e8m0", "floor")

PAIRS = {
    "rowwise": (ROW, ROW),
    "e5m2 tensorwise x e4m3 tensorwise": (TENSOR_E5M2, TENSOR),
    "1x128 x 128x128": (VECTOR, SQUARE),
    "1x128 x 1x128": (VECTOR, VECTOR),
    "128x128 x 128x128": (SQUARE, SQUARE),
    "mx": (MX, MX),
}
OTHER_PAIRS = {
    "tensorwise": (TENSOR, TENSOR),
    "rowwise x tensorwise": (ROW, TENSOR),
    "tensorwise x rowwise": (TENSOR, ROW),
    "e5m2 rowwise x rowwise": (ROW_E5M2, ROW),
    "128x128 x 1x128": (SQUARE, VECTOR),
    "e5m2 1x128 x 128x128": (VECTOR_E5M2, SQUARE),
    "e5m2 mx x mx": (MX_E5M2, MX),
}

GUARD = 64
GUARD_VALUE = 12345.0


# Each option occurs with each value of the others at least once.
EPILOGUES = [
    ("bias", None, "residual", torch.float32),
    (None, None, "residual", torch.bfloat16),
    ("bias", "relu", None, torch.float16),
    ("bias", "gelu", "residual", torch.bfloat16),
    (None, "gelu", None, torch.float32),
    ("bias", "silu", None, torch.bfloat16),
    (None, "silu", "residual", torch.float16),
    (None, "relu", "residual", torch.float32),
]


def family(pair):
    return matmul_family(pair[0].block, pair[1].block)


def integers(*shape, seed):
    """Integers so small that every partial sum is exact in the tensor core's accumulator."""
    return torch.randint(-2, 3, shape, generator=generator(seed)).float()


def quantize_exactly(x, spec):
    """Quantize integers without error, with scales that differ by powers of two between blocks."""
    shape = scale_shape(x.shape, spec.block)
    exponents = torch.arange(math.prod(shape), device=x.device).view(shape) % 3 - 1
    amax = exponents.float().exp2() * FORMATS[spec.format].qmax
    q = reference.quantize(x, *spec.args, amax=amax)
    assert torch.equal(reference.dequantize(*q, *spec.args, torch.float32), x)
    return q


class Product:
    """Two quantized operands of a GEMM, and the expected result."""

    def __init__(self, pair, a, b, device, quantize=lambda x, spec: reference.quantize(x, *spec.args)):
        self.specs = pair
        (self.a, self.a_scale), (self.b, self.b_scale) = (
            quantize(x.to(device), spec) for x, spec in zip((a, b), pair, strict=True)
        )

    @classmethod
    def of(cls, data, pair, shape, device):
        m, n, k = shape
        quantize = {"quantize": quantize_exactly} if data is integers else {}
        return cls(pair, data(m, k, seed=1), data(n, k, seed=2), device, **quantize)

    def expected(self, bias=None, activation=None, residual=None):
        a, b = (
            reference.dequantize(q, scale, *spec.args, torch.float32).double()
            for q, scale, spec in zip((self.a, self.b), (self.a_scale, self.b_scale), self.specs, strict=True)
        )
        y = a @ b.t()
        if bias is not None:
            y = y + bias.double()
        if activation:
            # In fp64, with torch's erf and exp.
            y = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}[activation](y)
        return y if residual is None else y + residual.double()

    def run(self, accumulation="precise", out_dtype=torch.float32, epilogue=(None, None, None), **kwargs):
        m, n = self.a.shape[0], self.b.shape[0]
        buffer = torch.full((GUARD + m * n + GUARD,), math.nan, dtype=out_dtype, device=self.a.device)
        guards = buffer[:GUARD], buffer[GUARD + m * n :]
        for guard in guards:
            guard.fill_(GUARD_VALUE)
        out = buffer[GUARD : GUARD + m * n].view(m, n)
        self.launch(accumulation, out_dtype, epilogue, out=out, **kwargs)
        for guard in guards:
            assert (guard == torch.tensor(GUARD_VALUE, dtype=out_dtype)).all(), "wrote beyond the output"
        return out

    def launch(self, accumulation="precise", out_dtype=torch.bfloat16, epilogue=(None, None, None), **kwargs):
        """Launch the GEMM as a user's call does: into new memory, without synchronization."""
        return gemms.scaled_matmul(
            self.a, self.a_scale, *self.specs[0].args, self.b, self.b_scale, *self.specs[1].args,
            *epilogue, out_dtype, accumulation, **kwargs,
        )  # fmt: skip

    def check_epilogue(self, epilogue, **options):
        """Run with one of :data:`EPILOGUES`, and compare within the tolerance."""
        bias, activation, residual, dtype = epilogue
        m, n, device = self.a.shape[0], self.b.shape[0], self.a.device
        bias = None if bias is None else normal(n, seed=3, dtype=torch.bfloat16, device=device) * 10
        residual = None if residual is None else normal(m, n, seed=4, dtype=dtype, device=device) * 10
        found = self.run(out_dtype=dtype, epilogue=(bias, activation, residual), **options)
        assert_matmul_close(found, self.expected(bias, activation, residual), dtype)

    def with_layout(self, layout):
        self.a, self.b = layout(self.a), layout(self.b)
        return self


def runs(config, pair, device, tma=True, out_dtype=torch.float32, bare=True):
    abilities = hardware.abilities(device)
    specialized = tma and abilities.has_warpgroup_mma
    return supports(config, family(pair), out_dtype.itemsize, bare, specialized, abilities.max_shared_bytes)
