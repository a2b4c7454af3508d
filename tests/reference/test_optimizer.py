"""The random bits of the optimizer step, and the rounding by them."""

import pytest
import torch
from cases import normal

from tritonfp8.formats import FORMATS
from tritonfp8.reference.optimizer import RANDOM_BITS, random_bits, round_to_bfloat16, round_to_code, rounding_keys

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
    # One word serves both moments: the second one has 16 bits.
    for i in range(RANDOM_BITS - 16 if which == 2 else 0, RANDOM_BITS):
        assert abs((every >> i & 1).double().mean() - 0.5) < 0.007, i
    assert (u.mean(0) - 0.5).abs().max() < 0.09
    assert (u.mean(1) - 0.5).abs().max() < 0.064


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs()


def test_numbers_do_not_depend_on_each_other():
    u, v, w = map(uniform, bits())
    others = [
        (u, v), (u, w), (v, w), (u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[:, 128:], u[:, :-128]),
        *((u, uniform(bits(**change)[0])) for change in ({"step": 2}, {"weight": 1}, {"seed": 1}, {"seed": 1 << 32})),
    ]  # fmt: skip
    for i, (a, b) in enumerate(others):
        assert correlation(a, b) < 0.015, i


@pytest.mark.parametrize("name", FORMATS)
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
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.5])
    drawn = torch.full(special.shape, 2**RANDOM_BITS - 1)
    assert torch.equal(round_to_bfloat16(special, drawn).view(torch.int16), special.bfloat16().view(torch.int16))
