"""Fused norms and MLPs on many devices: FSDP2 as without, and the order for tensor parallelism."""

import fused_cases
import pytest

from tritonfp8 import recipes
from tritonfp8.layers.linear import is_fusable

PROCESSES = 3

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]

FUSABLE = [name for name in recipes.names() if is_fusable(recipes.get(name))]
# Two layers: in each both norms and the MLP.
FUSED = 6
ORDER = "Call parallelize_module before tritonfp8.convert(model, recipe, fuse=True)"


@pytest.mark.parametrize("recipe", FUSABLE)
def test_losses_with_fp8_all_gather_equal_those_without(ranks, recipe):
    on, off = (ranks.run(3, fused_cases.train, recipe=recipe, gathers=gathers) for gathers in (True, False))
    assert on == off
    assert [fused for *_, fused in on] == [FUSED] * 3
    assert all(losses[-1] < losses[0] for losses, *_ in on)


def test_losses_are_not_those_of_the_model_that_is_not_fused(ranks, without_options):
    """SiLU and product round once."""
    assert ranks.run(2, fused_cases.train, recipe="rowwise", fuse=False)[0][0] != without_options[0][0]


@pytest.fixture(scope="module")
def without_options(ranks):
    return ranks.run(2, fused_cases.train, recipe="rowwise", gathers=False)


@pytest.mark.parametrize("options", [{"compile": True}, {"recompute": True}], ids=["compile", "recompute"])
def test_options_of_fused_layers_leave_losses_alone(ranks, without_options, options):
    """With the gather. Without it they are FSDP2 around the layers that tests/layers/fused compiles and recomputes."""
    assert ranks.run(2, fused_cases.train, recipe="rowwise", gathers=True, **options) == without_options


@pytest.mark.parametrize("swap", ["tensorwise", "bf16"])
def test_recipe_of_fused_layers_is_swapped_between_steps(ranks, swap):
    on, off, kept = (
        ranks.run(2, fused_cases.train, recipe="rowwise", gathers=gathers, swap=to)
        for gathers, to in ((True, swap), (False, swap), (True, None))
    )
    assert on == off
    assert on[0][0][0] == kept[0][0][0]
    assert on[0][0][1:] != kept[0][0][1:]


def test_fused_layers_are_assigned_sharded_weights(ranks):
    on, off = (ranks.run(2, fused_cases.assigned, recipe="rowwise", gathers=gathers) for gathers in (True, False))
    assert on == off


@pytest.mark.parametrize("recipe", FUSABLE)
def test_sharding_fused_layers_is_an_error_that_says_the_order(ranks, recipe):
    for found in ranks.run(2, fused_cases.errors_of_shards, recipe=recipe):
        refused = {name for name, error in found.items() if error is not None and ORDER in error}
        # Nothing fused reads these two or is read by them.
        assert refused == found.keys() - {"model.layers.1.self_attn.o_proj", "model.norm"}
        assert {name for name, error in found.items() if error is None} == found.keys() - refused


@pytest.mark.parametrize("float8", [False, True])
def test_layers_that_are_sharded_first_are_not_fused(ranks, float8):
    assert ranks.run(2, fused_cases.shards_first, recipe="rowwise", float8=float8) == [[]] * 2
