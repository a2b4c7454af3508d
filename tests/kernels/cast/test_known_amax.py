"""Casts that return the amax of a matrix: to the bit, and the cast of the transpose by that amax."""

import pytest
import torch
from cases import MATRICES, SPEC_OF_BLOCK, each_device, normal

from tritonfp8 import reference
from tritonfp8.launch import cast
from tritonfp8.launch.casts import known_amax
from tritonfp8.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
WHOLE, ROWS = SPEC_OF_BLOCK[:2]
SHAPES = {**MATRICES, "empty": (0, 8)}


def check(x):
    *pair, amax = known_amax.quantize_with_amax(x, *WHOLE.args)
    assert_bitwise_equal(pair, list(reference.quantize(x, *WHOLE.args)))
    expected = reference.amax(x, WHOLE.block)
    assert (amax.dtype, amax.shape) == (torch.float32, (1, 1))
    assert torch.equal(amax, expected) or (amax.isnan().all() and expected.isnan().all())
    assert_bitwise_equal(list(cast.quantize(x, *WHOLE.args, True, amax)), list(cast.quantize(x, *WHOLE.args, True)))


@each_device
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_shape(device, shape, dtype):
    check(normal(*shape, dtype=dtype).to(device))


@each_device
def test_a_matrix_along_columns_and_a_part_of_one(device):
    x = normal(96, 160, dtype=torch.bfloat16).to(device)
    check(x.t())
    check(x[:, 8:88])


@each_device
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, -0.0, 1e-40])
def test_values_that_are_no_usual_numbers(device, value):
    x = torch.zeros(70, 40, dtype=torch.bfloat16)
    check(x.to(device))
    x[69, 39] = value
    check(x.to(device))


@each_device
def test_a_spec_with_more_scales_is_left_to_the_reference(device):
    x = normal(48, 40).to(device)
    found = known_amax.quantize_with_amax(x, *ROWS.args)
    assert_bitwise_equal(list(found), list(reference.quantize_with_amax(x, *ROWS.args)))
