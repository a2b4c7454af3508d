"""Transposes from codes: exact where a code stays normal, and as close to the values as transposes from values."""

import pytest
import torch
from cases import normal, random_bits

from tritonfp8 import recipes, reference
from tritonfp8.specs import ROWWISE, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

each_name = pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
DISTRIBUTIONS = {
    "normal": lambda x: x,
    "tokens of other magnitudes": lambda x: x * torch.exp(2 * normal(len(x), 1, seed=1)),
    "channels a hundred times larger": lambda x: x * torch.where(normal(1, x.shape[1], seed=2) > 2, 100.0, 1.0),
    "elements of other magnitudes": lambda x: x * torch.exp(2 * normal(*x.shape, seed=3)),
}


def specs(name):
    how = recipes.get(name)
    assert how.grad_weight.rhs is not None
    return how.output.lhs.args[0], how.grad_weight.rhs.args[0]


def values(q, spec):
    return reference.dequantize(*q, spec, torch.float32)


@each_name
@pytest.mark.parametrize("make", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_a_transpose_from_codes_is_as_close_as_one_from_values(name, make):
    """The bound by which ``transposed_from="codes"`` may be a default: 0.05 dB, of x.T and of grad_weight."""
    spec, spec_t = specs(name)
    x, grad = make(normal(512, 384, seed=0)).bfloat16(), make(normal(512, 256, seed=4)).bfloat16()
    found = {}
    for codes in (False, True):
        transposed = [values(reference.quantize_both(each, spec, spec_t, codes)[2:], spec_t) for each in (x, grad)]
        found[codes] = (
            sqnr(transposed[0], x.float().t()),
            sqnr(transposed[1] @ transposed[0].t(), grad.float().t() @ x.float()),
        )
    for from_codes, from_values in zip(found[True], found[False], strict=True):
        assert from_codes > from_values - 0.05


@each_name
def test_values_stay_where_the_new_scale_leaves_a_code_normal(name):
    spec, spec_t = specs(name)
    x = normal(256, 192).bfloat16()
    first = reference.quantize(x, spec)
    before = values(first, spec).t()
    second = reference.transpose_codes(*first, spec, spec_t)
    after = values(second, spec_t)
    # In codes: from 2^-6 on a code is normal.
    stays = second[0].float().abs() >= 2.0**-6
    assert torch.equal(after[stays], before[stays])
    assert stays.float().mean() > 0.9


def test_the_definition_is_a_cast_of_the_values_in_float32():
    spec = QuantSpec("e4m3", ROWWISE, "fp32", "pow2").args[0]
    for x in (random_bits(128, 96), torch.full((40, 40), 2.0**-130) * torch.exp2(normal(1, 40) * 3)):
        first = reference.quantize(x, spec)
        exact = (first[0].double() * first[1].double()).t()
        expected = reference.quantize(exact.contiguous(), spec)
        assert_bitwise_equal(list(reference.transpose_codes(*first, spec, spec)), list(expected))


def test_what_is_not_finite():
    """A NaN spoils its row of codes, and then each column; 2^128, which a code may stand for, is an infinity."""
    spec = QuantSpec("e4m3", ROWWISE, "fp32", "pow2").args[0]
    x = normal(8, 16)
    x[3, 5] = torch.nan
    _, scale = reference.transpose_codes(*reference.quantize(x, spec), spec, spec)
    assert scale.isnan().all()
    x = torch.zeros(4, 6)
    x[2, 1] = torch.finfo(torch.float32).max
    qdata, scale = reference.transpose_codes(*reference.quantize(x, spec), spec, spec)
    assert scale.isnan().flatten().tolist() == [False, True, False, False, False, False]
    assert qdata[0].float().eq(0).all()
