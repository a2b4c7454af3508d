"""check names the module of an exact model that has a planted fault, and the faults of an order show themselves."""

import pytest
import torch
from exact_models import exact
from planted_causes import CAUSES
from rollout_models import IDS, MASK, OPTIONS

from tritonfp8.rollout import Rollout, check


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(cause):
    plant, kind = CAUSES[cause]
    model = exact(kind)
    rollout = Rollout(model)
    assert check(model, rollout, IDS, MASK, **OPTIONS).max_difference == 0
    module, reads, codes = plant(rollout)
    if codes:
        # The first of all weights.
        module = codes[0].removesuffix(".weight") if kind == "qwen3" else "model.layers.0.self_attn.q_proj"
    found = check(model, rollout, IDS, MASK, **OPTIONS | {"max_new_tokens": 8})
    assert found.max_difference > 0
    assert (found.module, found.reads) == (module, reads)
    # Values that a power of two scales keep their codes.
    assert bool(codes) == bool(found.codes)
    assert {*found.codes} <= {*codes}


def test_attention_of_torch_is_named():
    # Casts to FP8 hide most differences: all but one kind of layers has float32.
    model = exact("qwen3", {"*.up_proj": "rowwise"}, torch.float32)
    rollout = Rollout(model)
    rollout.model.set_attn_implementation("sdpa")
    found = check(model, rollout, IDS, MASK, **OPTIONS)
    assert found.max_difference > 0
    assert (found.module, found.reads) == ("model.layers.0.self_attn", "model.layers.0.self_attn.o_proj")
