"""quantize_weights_once on sharded weights: the bits of the plain run, with fewer casts, and never stale codes."""

import pytest
import weight_scope_cases
from cases import QUANTIZED

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]
PROCESSES = 2
# Casts of a micro-batch that are not of weights: four inputs a block and that of the head, 15 gradients of outputs.
CASTS = 2 * 4 + 1 + 15


SHARDED = {
    "FSDP2": {"recipe": "rowwise"},
    "FSDP2 hp": {"recipe": "rowwise_hp_grad_weight"},
    "FSDP2 blockwise": {"recipe": "blockwise"},
    "together": {"recipe": "tensorwise", "reshard": False},
    "HSDP": {"recipe": "mxfp8", "copies": 2},
}


# Plainly gathered weights are those of one process, where each recipe is tested.
@pytest.mark.parametrize(("enabled", "how"), [*((True, how) for how in SHARDED), (False, "FSDP2"), (False, "together")])
def test_fsdp(ranks, enabled, how):
    options = SHARDED[how]
    on, off = (
        ranks.run(2, weight_scope_cases.fsdp, once=once, enabled=enabled, **options)[0] for once in (True, False)
    )
    assert on[:2] == off[:2]
    # The casts of inputs and of gradients of outputs, in two micro-batches of each of two steps.
    assert on[2] == 2 * 2 * CASTS < off[2]


@pytest.mark.parametrize("how", ["counted", "uncounted"])
@pytest.mark.parametrize("enabled", [True, False], ids=["gather", "plain"])
def test_a_change_inside_the_block(ranks, enabled, how):
    told = ranks.run(2, weight_scope_cases.fsdp_changed, how=how, enabled=enabled)[0]
    if enabled and how == "counted":
        assert told[0] == told[1]
    else:
        assert "changed inside quantize_weights_once" in told


# Compiled layers of each recipe are tested in one process (tests/layers/linear/test_compile.py).
@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("recipe", "compiled"), [*((recipe, False) for recipe in QUANTIZED), ("rowwise", True)])
def test_tensor_parallel(ranks, recipe, compiled):
    for same, saved in ranks.run(2, weight_scope_cases.tensor_parallel, recipe=recipe, compiled=compiled):
        assert same
        # Each layer casts its weight for output and for grad_input.
        assert saved == (0 if compiled else 6)
