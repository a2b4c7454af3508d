"""Rows that lie more than 2^31 elements apart: kernels take their offsets in 64 bits, or get a copy."""

import mmap

import pytest
import torch
from cases import INTERPRETER, normal
from matmul_cases import PAIRS, Product, family

from tritonfp8 import reference
from tritonfp8.launch import casts
from tritonfp8.launch.gemms import dense, operands
from tritonfp8.launch.plan import View
from tritonfp8.specs import BLOCK_1X128, ROWWISE, QuantSpec, empty_scale
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning import chooser

STRIDE = 2**30
HALF = 2**31
# Of Linux; Python names it since 3.13.
MAP_NORESERVE = 0x4000
ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR = "e4m3:1x128:fp32:pow2"

interpreted = pytest.mark.parametrize("device", [INTERPRETER])


@pytest.fixture
def far():
    """Copies a tensor to where a dim of it has a stride of 2^30.

    The address space takes no memory before it is written. Where an offset wraps around at 2^31 there are zeros.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE

    def spread(x, dim):
        strides = [1] * x.ndim
        strides[dim] = STRIDE
        if x.ndim == 2:
            strides[1 - dim] = 1
        reach = HALF + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) + 1
        memory = mmap.mmap(-1, reach * x.element_size(), flags=flags)
        buffer = torch.frombuffer(memory, dtype=x.dtype)
        return buffer.as_strided(x.shape, strides, HALF).copy_(x)

    return spread


def smallest(pair, split):
    configs = chooser.space(family(pair), "precise")
    return next(c for c in reversed(configs) if not c.specialized and (c.split_k > 1) == split)


@interpreted
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [("rowwise", (3, 3, 160), 0), ("1x128 x 128x128", (2, 3, 640), 1), ("1x128 x 1x128", (2, 3, 640), 1)],
)
def test_scales_of_rows_and_along_k(device, far, name, shape, dim, split):
    product = Product.of(normal, PAIRS[name], shape, device)
    options = {"config": smallest(PAIRS[name], split), "tma": False}
    expected = product.run(**options)
    product.a_scale, product.b_scale = far(product.a_scale, dim), far(product.b_scale, dim)
    assert_bitwise_equal(product.run(**options), expected)


@interpreted
@pytest.mark.parametrize("dim", [0, 1])
def test_casts(device, far, dim):
    x = normal(3, 3).bfloat16()
    assert_bitwise_equal(casts.quantize(far(x, dim), *ROW.args), reference.quantize(x, *ROW.args))


def test_scales_beyond_the_coordinates_of_tma_are_copied(far):
    """A step's rows are found by one int32: here the fourth step begins beyond it."""
    scale = empty_scale((8, 4 * 128), BLOCK_1X128, "fp32", "cpu").copy_(normal(8, 4))
    assert dense.readable_along_k(scale, VECTOR) is scale
    copied = dense.readable_along_k(far(scale, 1), VECTOR)
    assert copied.stride() == scale.stride()
    assert_bitwise_equal(copied, scale)
    map, row, step = operands.scale_along_k(View.of(copied), 1, 32)
    assert (row, step) == (1, scale.stride(1))
    assert (map.view.shape, map.block) == ((3 * step + 8,), (32,))
