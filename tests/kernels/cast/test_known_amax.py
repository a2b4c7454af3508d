"""Casts that return the amaxes of the transpose: to the bit, and the cast of the transpose by them."""

import pytest
import torch
from cases import MATRICES, SPEC_OF_BLOCK, banded, each_block, each_device, normal

from tritonfp8 import reference
from tritonfp8.launch import casts, executor
from tritonfp8.specs import scale_shape
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning import cast_tiles

pytestmark = [pytest.mark.usefixtures("poisoned_outputs"), pytest.mark.one_in(2)]
WHOLE, ROWS = SPEC_OF_BLOCK[:2]
SHAPES = {**MATRICES, "empty": (0, 8)}
each_spec = pytest.mark.parametrize("spec", [WHOLE, ROWS], ids=["tensorwise", "rowwise"])


def check(x, spec):
    *pair, amax = casts.quantize_with_amax(x, *spec.args, *spec.args)
    assert_bitwise_equal(pair, list(reference.quantize(x, *spec.args)))
    expected = reference.amax(x.t(), spec.block)
    assert (amax.dtype, amax.shape) == (torch.float32, scale_shape(x.shape[::-1], spec.block))
    assert torch.equal(amax.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    assert_bitwise_equal(list(casts.quantize(x, *spec.args, True, amax)), list(casts.quantize(x, *spec.args, True)))


@each_device
@each_spec
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_shape(device, spec, shape, dtype):
    check(normal(*shape, dtype=dtype).to(device), spec)


@each_device
@each_spec
def test_a_matrix_along_columns_and_a_part_of_one(device, spec):
    x = normal(96, 160, dtype=torch.bfloat16).to(device)
    check(x.t(), spec)
    check(x[:, 8:88], spec)
    check(x[::2, ::2], spec)


@each_device
@each_spec
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -0.0, 1e-40])
def test_values_that_are_no_usual_numbers(device, spec, value):
    x = torch.zeros(70, 40, dtype=torch.bfloat16)
    check(x.to(device), spec)
    x[69, 39] = value
    check(x.to(device), spec)


@each_device
@pytest.mark.parametrize("shape", [(300, 40), (257, 200), (64, 1030)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("warps", [0, 4, 4096], ids=["one program", "few", "a program a tile"])
def test_any_number_of_rows_a_program(device, shape, dtype, warps, monkeypatch):
    monkeypatch.setattr(cast_tiles, "ROWS_WARPS", warps)
    executor.forget()
    try:
        check(normal(*shape, dtype=dtype).to(device), ROWS)
    finally:
        executor.forget()


@each_device
@pytest.mark.parametrize("columns", [max(cast_tiles.ROWS_WITH_COLUMNS), max(cast_tiles.ROWS_WITH_COLUMNS) + 8])
def test_rows_that_fit_in_no_tile(device, columns):
    check(normal(3, columns, dtype=torch.bfloat16).to(device), ROWS)


@each_device
def test_blocks_that_one_pass_does_not_find_are_left_to_the_reference(device):
    x = normal(48, 40).to(device)
    args = (*WHOLE.args, *ROWS.args)
    assert_bitwise_equal(list(casts.quantize_with_amax(x, *args)), list(reference.quantize_with_amax(x, *args)))


@each_device
@each_block
@pytest.mark.parametrize("shape", [(130, 70), (256, 256), (3, 128, 64)], ids=str)
def test_quantize_into_memory_that_exists(device, spec, shape):
    x = banded(*shape, dtype=torch.bfloat16).to(device)
    found = reference.quantize(x * 0, *spec.args)
    before = [y.data_ptr() for y in found]
    casts.quantize_into(*found, x, *spec.args)
    assert_bitwise_equal(found, reference.quantize(x, *spec.args))
    assert [y.data_ptr() for y in found] == before
    # Codes and scales that a kernel cannot address by rows are written all the same.
    turned = tuple(y.mT.contiguous().mT for y in reference.quantize(x * 0, *spec.args))
    casts.quantize_into(*turned, x, *spec.args)
    assert_bitwise_equal(turned, found)
