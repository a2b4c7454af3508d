"""Parts of gradients: kernels equal the reference to the bit, rounding has no bias, the order of sums is a tree."""

import math

import pytest
import torch
from cases import each_device, normal

from tritonfp8 import reference
from tritonfp8.launch import gradients as launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a part: less than a group, whole groups, a tail in the second tile.
SIZES = (1, 77, 256, 2500)


def gradient(parts, n, dtype=torch.float32, device="cpu", seed=0):
    """Values in many octaves, with zeros, and a whole group of them."""
    x = 1e-3 * normal(parts * n, seed=seed) * torch.exp(3 * normal(parts * n, seed=seed + 1))
    x[::7] = 0
    x[-1] = -0.0
    x[:128] = 0 if n >= 256 else x[:128]
    return x.to(dtype).to(device)


def poisoned(x, n):
    x[n // 2], x[-1] = math.nan, -math.inf
    return x


def bits(x):
    """The bits; of floats one NaN for all."""
    if x.dtype == torch.uint8:
        return x.cpu()
    return torch.where(x.isnan(), math.nan, x.float()).cpu().view(torch.int32)


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_codes_equal_the_reference(device, n, dtype):
    for parts, rank in ((1, 0), (3, 2)):
        for x in (gradient(parts, n, dtype), poisoned(gradient(parts, n, dtype), n)):
            found = launch.quantize_parts(x.to(device), parts, rank)
            assert torch.equal(found.cpu(), reference.quantize_parts(x, parts, rank))


@each_device
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 37])
def test_sums_equal_the_reference(device, parts, quantized):
    for n in SIZES:
        for dtype in DTYPES:
            x = poisoned(gradient(parts, n, dtype), n)
            each = reference.quantize_parts(x, parts, 0) if quantized else x.view(parts, n)
            out, expected = (torch.full((n,), -7.0, dtype=dtype, device=d) for d in (device, "cpu"))
            launch.sum_in_pairs(out, each.to(device), 1 / 3)
            reference.sum_in_pairs(expected, each, 1 / 3)
            assert torch.equal(bits(out), bits(expected))


def test_the_order_of_a_sum():
    each = [2.0**24, 1.0, 1.0, -(2.0**24), 3.0]
    out = torch.empty(1)
    reference.sum_in_pairs(out, torch.tensor(each)[:, None], 1.0)
    # Only the second pair keeps its 1. From left to right the sum is 3, as 2^24 + 1 rounds to 2^24.
    assert out.item() == 4.0
    reference.sum_in_pairs(out, torch.tensor([2.0**24, 1.0, 1.0])[:, None], 1.0)
    assert out.item() == 2.0**24


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_tree_of_ranks_is_a_part_of_the_tree_of_units(parts):
    x = gradient(8, 500).view(8, 500)
    whole, joined = torch.empty(500), torch.empty(500)
    reference.sum_in_pairs(whole, x, 1.0)
    sums = torch.empty(8 // parts, 500)
    for out, units in zip(sums, x.split(parts), strict=True):
        reference.sum_in_pairs(out, units, 1.0)
    reference.sum_in_pairs(joined, sums, 1.0)
    assert torch.equal(whole, joined)


def decoded(x, rank=0):
    out = torch.empty(len(x))
    reference.sum_in_pairs(out, reference.quantize_parts(x, 1, rank), 1.0)
    return out


def test_rounding_has_no_bias():
    """The mean of many roundings is the value. The step of a code is at most an eighth of a value, or 2^-16 of amax."""
    x = gradient(1, 256, seed=3)
    ranks = 2000
    found = torch.stack([decoded(x, rank) for rank in range(ranks)]).double()
    step = torch.maximum(x.abs() / 8, x.view(2, 128).abs().amax(1, keepdim=True).expand(2, 128).flatten() * 2.0**-16)
    assert ((found - x).abs() <= step).all()
    # A rounding's variance is at most a quarter of a squared step; five standard deviations.
    assert ((found.mean(0) - x).abs() <= 5 * step / 2 / ranks**0.5).all()
    assert (found.std(0)[x.abs() > 0] > 0).float().mean() > 0.8


def test_words_of_other_ranks_groups_and_gradients_differ():
    x = gradient(1, 256, seed=3)
    x[:128] = x[128:]
    first = reference.quantize_parts(x, 1, 0)
    assert torch.equal(first, reference.quantize_parts(x.clone(), 1, 0))
    assert not torch.equal(first, reference.quantize_parts(x, 1, 1))
    assert not torch.equal(first[0, :128], first[0, 128:256])
    changed = x.clone()
    changed[0] = torch.nextafter(x[0], x[1])
    moved = reference.quantize_parts(changed, 1, 0)
    assert (moved[0, 1:128] != first[0, 1:128]).any()
    assert torch.equal(moved[0, 128:256], first[0, 128:256])


def test_a_group_that_is_not_finite_is_nan():
    for value in (math.nan, math.inf, -math.inf):
        x = gradient(1, 384, seed=3)
        x[200] = value
        assert decoded(x).isnan().view(3, 128).all(1).tolist() == [False, True, False]
        assert decoded(x).isnan().sum() == 128


def test_bytes_of_a_part():
    """A quarter of float32 and 3 %; half of bfloat16 and 1 %, from some thousand elements on."""
    for n in (5000, 123_457):
        size = reference.part_sizes(n)[1]
        assert size <= 0.26 * 4 * n
    assert reference.part_sizes(123_457)[1] <= 0.51 * 2 * 123_457


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"gradients are quantized from torch\.float32.*got torch\.float64"):
        reference.quantize_parts(torch.ones(4, dtype=torch.float64), 2, 0)
    for x, parts in ((torch.ones(5), 2), (torch.ones(2, 2), 2), (torch.ones(4), 0)):
        with pytest.raises(ValueError, match="must be a vector of"):
            launch.quantize_parts(x, parts, 0)
    with pytest.raises(ValueError, match=r"must be \[parts, 4\]; got \(2, 5\)"):
        launch.sum_in_pairs(torch.empty(4), torch.ones(2, 5), 1.0)
