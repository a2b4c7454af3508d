"""Blocks of one kind, and a model with one of each."""

import pytest
import torch
from torch import nn

from tritonfp8.advice import blocks


def test_a_list_ends_with_the_first_block_of_the_last_kind(model, x):
    cut = blocks.shortened(model)
    assert [(kind.names, kind.kept) for kind in cut.kinds] == [
        (("blocks.0", "blocks.4"), 1),
        (("blocks.1", "blocks.2", "blocks.3"), 1),
    ]
    assert [kind.left_out for kind in cut.kinds] == [1, 2]
    assert len(cut.model.blocks) == 2
    assert len(model.blocks) == 5
    cut.model(x)


def test_the_copy_has_weights_of_its_own(model):
    cut = blocks.shortened(model).model
    assert torch.equal(cut.blocks[1].up.weight, model.blocks[1].up.weight)
    assert not {id(p) for p in cut.parameters()} & {id(p) for p in model.parameters()}


def test_all_blocks_stay_in_the_whole_model(model):
    whole = blocks.whole(model)
    assert [kind.left_out for kind in whole.kinds] == [0, 0]
    assert len(whole.model.blocks) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda block: setattr(block, "window", 128),
        lambda block: setattr(block, "is_causal", True),
        lambda block: block.up.weight.requires_grad_(False),
        lambda block: block.up.register_parameter("bias", None),
        lambda block: setattr(block, "norm", nn.LayerNorm(32)),
    ],
    ids=["setting", "flag", "frozen", "no bias", "another module"],
)
def test_a_block_that_computes_something_else_is_of_another_kind(model, change):
    change(model.blocks[3])
    assert ("blocks.3",) in [kind.names for kind in blocks.shortened(model).kinds]


def test_numbers_of_places_and_rates_are_no_kind(model):
    for i, block in enumerate(model.blocks):
        block.drop_prob, block.layer_index = i / 10, i
    assert len(blocks.shortened(model).kinds) == 2


def test_a_model_without_repetition_has_no_kinds():
    cut = blocks.shortened(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))
    assert cut.kinds == ()
    assert len(cut.model) == 2


def test_layers_are_counted_over_the_whole_model(model):
    groups = {group.label: group for group in blocks.layer_groups(model)}
    assert groups["blocks.1-3.up (3x)"].count == 3
    assert groups["blocks.1-3.up (3x)"].features == (32, 64)
    assert groups["blocks.1-3.up (3x)"].pattern == "blocks.*.up"
    assert groups["lm_head"].count == 1


def test_calls_are_leaves_and_need_a_gradient_as_before(model, x):
    found = blocks.calls_of(model, ["embed", "blocks.1"], lambda: model(x))
    (first, second) = (found[name][0][0] for name in ("embed", "blocks.1"))
    assert not first.requires_grad
    assert second.requires_grad
    assert second.is_leaf
    assert found["blocks.1"][1] == {"scale": 0.5}
