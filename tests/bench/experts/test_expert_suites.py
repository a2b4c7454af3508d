"""The benchmarks of experts: their distributions, and their summary."""

import pytest
import torch

from bench.experts import gemms, layers
from bench.experts.routings import DISTRIBUTIONS, MULTIPLE, SHAPES, offsets_of


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_token_has_an_expert(name, distribution):
    shape = SHAPES[name]
    offsets = offsets_of(distribution, shape, "cpu")
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    assert offsets.dtype == torch.int32
    assert offsets[-1] == shape.tokens
    assert (sizes >= 0).all()
    if distribution != "uniform":
        assert not (sizes % MULTIPLE).any()


def test_distributions_are_what_they_are_called():
    shape = SHAPES["DeepSeek-V3 down"]
    sizes = {name: sorted(make(shape.tokens, shape.experts)) for name, make in DISTRIBUTIONS.items()}
    assert sizes["uniform"][0] == sizes["uniform"][-1]
    assert sizes["zipf"][-1] > 7 * sizes["zipf"][0] > 0
    assert sizes["zipf, one empty"][:2] == [0, pytest.approx(sizes["zipf"][0], rel=0.1)]
    assert sizes["one expert"][-2:] == [0, shape.tokens]


def test_ratios():
    def row(precise, fast, peer):
        own = {"rowwise precise": precise, "rowwise fast": fast, "blockwise": 3.0}
        return {"gemm": "output", **own, gemms.FAST: peer, gemms.PRECISE: 1.0}

    rows = [row(2.0, 1.0, 1.0), row(1.0, 4.0, 2.0), {"cast": "rowwise"}]
    assert gemms.ratios(rows) == {
        "output: rowwise precise over torch FP8 fast": {"geometric mean": 1.0, "least": 0.5},
        "output: rowwise fast over torch FP8 fast": {"geometric mean": 1.414, "least": 1.0},
        "output: blockwise over torch FP8 precise": {"geometric mean": 3.0, "least": 3.0},
    }


def test_models_fit_their_names():
    assert {len(sizes) for sizes in layers.MODELS.values()} == {5}
    assert all(sizes.top_k <= sizes.experts for sizes in layers.MODELS.values())
