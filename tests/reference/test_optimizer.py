"""The random bits of the optimizer step, and the rounding by them."""

import itertools

import pytest
import torch
from cases import normal

from tritonfp8.reference.optimizer import (
    GENERATOR,
    MULTIPLIERS,
    RANDOM_BITS,
    RANDOM_GROUP,
    hash32,
    random_bits,
    round_to_bfloat16,
    round_to_code,
    rounding_keys,
)
from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS

N, K = 256, 512


def bits(seed=0, step=1, weight=0, shape=(N, K), place=(0, 0)):
    keys = rounding_keys(seed, torch.tensor([float(step)]), torch.tensor([weight]))
    return random_bits(keys[0], shape, place)


def test_parts_of_a_weight_have_the_bits_of_the_whole():
    for found, whole in zip(bits(shape=(40, 70), place=(100, 200)), bits(), strict=True):
        assert torch.equal(found, whole[100:140, 200:270])


def uniform(x):
    return (x.double() + 0.5) / 2**RANDOM_BITS


@pytest.mark.parametrize("which", range(3))
def test_bits_are_uniform(which):
    u = uniform(bits()[which])
    # 131,072 numbers: a mean of uniform ones has a deviation of 0.0008.
    assert abs(u.mean() - 0.5) < 0.004
    counts = torch.histc(u.float(), 64, 0, 1)
    chi2 = ((counts - N * K / 64).square() / (N * K / 64)).sum()
    assert 25 < chi2 < 120
    every = bits()[which]
    for i in range(RANDOM_BITS):
        assert abs((every >> i & 1).double().mean() - 0.5) < 0.007, i
    assert (u.mean(0) - 0.5).abs().max() < 0.09
    assert (u.mean(1) - 0.5).abs().max() < 0.064


def dependence(a, b):
    """The largest Fourier coefficient of the pairs, in its deviation by chance: in one of a million cases above 4.5."""
    first, second = (waves(x) for x in (a, b))
    sums = torch.cat([first @ second.T, first @ second.mH])
    return (sums.abs().max() / a.numel() ** 0.5).item()


def waves(x):
    wave = torch.polar(torch.ones_like(x), 2 * torch.pi * x).flatten()
    return torch.stack([wave, wave**2, wave**2 * wave])


def other_steps():
    """Numbers of keys that differ by one bit or little more."""
    changes = {"step": 2}, {"step": 3}, {"weight": 1}, {"seed": 1}, {"seed": 1 << 32}
    return [uniform(bits(**change)[0]) for change in changes]


def test_numbers_do_not_depend_on_each_other():
    found = u, v, w = [uniform(x) for x in bits()]
    others = [(u, v), (u, w), (v, w), *((u, x) for x in other_steps())]
    for x in found:
        others += [(x[1:], x[:-1]), *((x[:, by:], x[:, :-by]) for by in (1, 2, 3, 7, 8, 9, 16, 128))]
    others += [(v[:, 1:], u[:, :-1]), (w[:, 1:], u[:, :-1]), (u[:, 1:], w[:, :-1])]
    for i, (a, b) in enumerate(others):
        assert dependence(a, b) < 4.5, i


def test_columns_of_a_group_do_not_depend_on_each_other():
    powers = [pow(GENERATOR, i, 1 << 32) for i in range(3 * RANDOM_GROUP)]
    # The words of a state are on a lattice, and depend on each other by their sums ``i a + j b`` that are always whole.
    i = torch.arange(1, 4097)
    for power in powers[1:]:
        rest = i * power % 2**32
        assert torch.minimum(rest, 2**32 - rest).min() > 4096
    few = torch.arange(-4, 5)
    for first, second in itertools.combinations(powers[1:], 2):
        # Of three words; relative to the first one of them.
        sums = few[:, None, None] + few[:, None] * first + few * second
        assert (sums % 2**32 == 0).sum() == 1


def test_rows_whose_sequences_overlap_do_not_depend_on_each_other():
    # As random_states has the sequence, rows 10,000 apart or less share a part of it with some other one.
    keys = rounding_keys(0, torch.tensor([1.0]), torch.tensor([0]))[0]
    starts = hash32(torch.arange(10000) ^ (keys[0].long() & 0xFFFFFFFF)) * pow(MULTIPLIERS[2], -1, 1 << 32) & 0xFFFFFFFF
    order = starts.argsort()
    gaps = starts[order].diff()
    closest = gaps.argmin()
    first, second, by = order[closest].item(), order[closest + 1].item(), gaps[closest].item() * RANDOM_GROUP
    for which in range(3):
        later, earlier = (uniform(random_bits(keys, (1, 1 << 17), (row, col))[which])
                          for row, col in ((first, by), (second, 0)))  # fmt: skip
        assert dependence(later, earlier) < 4.5
        assert ((later - earlier) % 1).std() > 0.28


@pytest.mark.parametrize("columns", [RANDOM_GROUP, 64, K])
def test_sums_have_the_variance_of_independent_numbers(columns):
    for x in bits():
        sums = (uniform(x) - 0.5).view(-1, columns).sum(1)
        assert abs(sums.var() * 12 / columns - 1) < 4 * (2 / len(sums)) ** 0.5


@pytest.mark.parametrize("name", BYTE_FORMATS)
def test_rounding(name):
    fmt = FORMATS[name]
    every = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    every = every[every.isfinite()]
    # Values of the format stay, whatever the bits are.
    for value in (0, 1, 2**RANDOM_BITS - 1, None):
        drawn = None if value is None else torch.full_like(every, value, dtype=torch.int64)
        assert torch.equal(round_to_code(every, fmt, drawn), every)
    x = (normal(N, K) * torch.exp(3 * normal(N, K, seed=1))).clamp(-fmt.qmax, fmt.qmax)
    rounded = round_to_code(x, fmt, bits()[0])
    assert torch.equal(rounded, rounded.to(fmt.dtype).float())
    steps = every.unique()
    lower = steps[(torch.searchsorted(steps, x, right=True) - 1).clamp(0, len(steps) - 1)]
    upper = steps[torch.searchsorted(steps, x).clamp(0, len(steps) - 1)]
    assert ((rounded == lower) | (rounded == upper)).all()
    assert (round_to_code(x, fmt, None) - x).abs().le((upper - lower) / 2).all()
    # The mean error, in spacings, is zero: 1 / sqrt(12 N K) is 0.0008.
    error = ((rounded - x) / (upper - lower))[upper > lower]
    assert error.mean().abs() < 0.004
    assert error.abs().max() <= 1


def test_rounding_to_bfloat16():
    x = normal(N, K)
    rounded = round_to_bfloat16(x, bits()[1]).float()
    assert ((rounded - x) / x.abs()).mean().abs() < 1e-4
    assert ((rounded - x) / x).abs().max() < 2**-7
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.5])
    drawn = torch.full(special.shape, 2**RANDOM_BITS - 1)
    assert torch.equal(round_to_bfloat16(special, drawn).view(torch.int16), special.bfloat16().view(torch.int16))
    # Any NaN; a GPU gives the last one.
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_to_bfloat16(nan, drawn[:3]).isnan().all()
    assert round_to_bfloat16(nan, None).isnan().all()
