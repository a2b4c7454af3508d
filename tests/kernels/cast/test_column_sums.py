"""Casts that also sum columns: the casts to the bit, the sums within the rounding of float32, and of the result."""

import pytest
import torch
from cases import MATRICES, SPEC_OF_BLOCK, each_device, generator, normal

from tritonfp8 import reference
from tritonfp8.launch import casts
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def check(x, spec, spec_t):
    *operands, sums = casts.quantize_both_sum(x, *spec.args, *spec_t.args)
    assert_bitwise_equal(operands, list(casts.quantize_both(x, *spec.args, *spec_t.args)))
    exact = x.double().sum(0)
    assert (sums.dtype, sums.shape) == (x.dtype, exact.shape)
    # Each addition of float32 errs by half an ulp of a partial sum, and an element takes part in fewer than 64.
    bound = x.double().abs().sum(0) * 2**-24 * 64 + exact.abs() * torch.finfo(x.dtype).eps
    assert ((sums.double() - exact).abs() <= bound).all()


@each_device
@pytest.mark.parametrize("shape", MATRICES.values(), ids=MATRICES)
def test_sums_of_every_shape(device, shape):
    check(normal(*shape, dtype=torch.bfloat16).to(device), SPEC_OF_BLOCK[1], SPEC_OF_BLOCK[1])


@each_device
@pytest.mark.parametrize("spec", SPEC_OF_BLOCK, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_sums_beside_every_cast(device, spec, dtype):
    check(normal(160, 256, seed=1, dtype=dtype).to(device), spec, SPEC_OF_BLOCK[0])
    check(normal(160, 256, seed=2, dtype=dtype).to(device), SPEC_OF_BLOCK[0], spec)


@each_device
def test_sums_of_exact_values_are_exact(device):
    """Whole numbers up to 256 add up without rounding, so a row that is left out or counted twice shows."""
    x = torch.randint(-8, 9, (515, 130), generator=generator(3)).to(device, torch.bfloat16)
    *_, sums = casts.quantize_both_sum(x, *SPEC_OF_BLOCK[1].args, *SPEC_OF_BLOCK[1].args)
    assert torch.equal(sums, x.float().sum(0).bfloat16())


@each_device
def test_what_has_no_plan_is_summed_by_torch(device):
    spec = SPEC_OF_BLOCK[1]
    for x in (
        normal(96, 64).to(device).t(),
        normal(4, 8).to(device)[:0],
        normal(64, 40, dtype=torch.float64).to(device),
    ):
        found = casts.quantize_both_sum(x, *spec.args, *spec.args)
        assert_bitwise_equal(list(found), list(reference.quantize_both_sum(x, *spec.args, *spec.args)))


@each_device
def test_infinities_and_nans_reach_the_sum(device):
    x = normal(140, 64, dtype=torch.bfloat16)
    x[3, 0], x[130, 1], x[7, 2], x[139, 2] = torch.inf, torch.nan, torch.inf, -torch.inf
    *_, sums = casts.quantize_both_sum(x.to(device), *SPEC_OF_BLOCK[1].args, *SPEC_OF_BLOCK[1].args)
    assert sums[0] == torch.inf
    assert sums[1:3].isnan().all()
    assert sums[3:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPEC_OF_BLOCK, ids=str)
def test_sums_have_the_same_bits_in_each_run(spec):
    x = normal(4100, 3000, dtype=torch.bfloat16).cuda()
    first = casts.quantize_both_sum(x, *spec.args, *spec.args)
    for _ in range(100):
        assert_bitwise_equal(list(casts.quantize_both_sum(x, *spec.args, *spec.args)), list(first))
