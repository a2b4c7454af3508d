"""Casts into codes that exist, which a GPU replays as a CUDA graph."""

import pytest
import torch
from checkpoints import are_equal
from rollout_models import FAMILIES, addresses_of, bits_of, step, trainer

from tritonfp8.rollout import Rollout, casting


@pytest.fixture
def captures(monkeypatch):
    """The weights of each capture."""
    found, before = [], casting._captured

    def counted(weights, dtype):
        found.append(len(weights))
        return before(weights, dtype)

    monkeypatch.setattr(casting, "_captured", counted)
    return found


def fresh(model, **options):
    return bits_of(Rollout(model, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_a_graph_writes_the_codes_of_single_casts(recipe, kind, captures):
    model = trainer(kind, recipe).cuda()
    rollout = Rollout(model)
    places = addresses_of(rollout)
    for _ in range(4):
        step(model)
        rollout.refresh()
        assert are_equal(bits_of(rollout), fresh(model))
    assert captures == [len(rollout.own)]
    assert addresses_of(rollout) == places


@pytest.mark.gpu
def test_a_weight_at_another_address_is_cast_from_there(captures):
    model = trainer().cuda()
    rollout = Rollout(model)
    for _ in range(2):
        rollout.refresh()
    before = [each.parameter.data for each in rollout.own]
    for each in rollout.own:
        each.parameter.data = each.parameter.data * 2
    for _ in range(3):
        rollout.refresh()
        assert are_equal(bits_of(rollout), fresh(model))
    assert len(captures) == 2
    del before


@pytest.mark.gpu
def test_what_autocast_casts_is_in_no_graph(captures):
    model = trainer(dtype=torch.float32).cuda()
    rollout = Rollout(model, autocast=torch.bfloat16)
    for _ in range(3):
        step(model)
        rollout.refresh()
        assert are_equal(bits_of(rollout), fresh(model, autocast=torch.bfloat16))
    assert captures == []


def test_a_cpu_has_no_graph(captures):
    model = trainer()
    rollout = Rollout(model)
    for _ in range(3):
        step(model)
        rollout.refresh()
        assert are_equal(bits_of(rollout), fresh(model))
    assert captures == []
