"""A loss that multiplies by the weight of the head outside of its layer, as losses in chunks do."""

import chunked_loss_cases as cases
import covering
import pytest
import torch
import torch.nn.functional as F
from cases import QUANTIZED, each_recipe

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]

HEADS = {"head in high precision": False, "converted head": True}
HOW = {"inside forward": {}, "after forward": {"outside": True}, "autocast": {"autocast": True}}


def skip_if_missing(loss):
    if loss == "of_torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(
    ("loss", "how", "head", "recipe"), covering.pairs(list(cases.LOSSES), list(HOW), list(HEADS), QUANTIZED)
)
def test_the_gather_changes_no_bit(ranks, loss, how, head, recipe):
    skip_if_missing(loss)
    head, options = HEADS[head], {"loss": loss, "recipe": recipe, **HOW[how]}
    on, off = (ranks.run(2, cases.train, head=head, enabled=enabled, **options) for enabled in (True, False))
    for name in ("losses", "weights"):
        assert [row[name] for row in on] == [row[name] for row in off]
    assert all(row["stuck"] == [] for row in on + off)
    assert len(set(on[0]["losses"])) == 3
    told = [message for message in on[0]["warnings"] if "outside of last" in message]
    assert len(told) == head, on[0]
    # The chunks share one gather of the values.
    assert on[0]["gathers"] - off[0]["gathers"] <= head + 2
    assert not off[0]["warnings"]


@each_recipe
@pytest.mark.parametrize("loss", cases.LOSSES)
def test_without_sharding_a_converted_head_is_the_matrix_of_the_loss(loss, recipe):
    skip_if_missing(loss)
    found = []
    for head in (False, True):
        model = cases.build(loss, head, recipe=recipe)
        value = cases.loss_of(model, torch.arange(24).view(2, 12))
        value.backward()
        found.append([value.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
