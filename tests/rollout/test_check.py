"""check: no difference where both models compute the same, and the module by which planted causes differ."""

import math

import pytest
import torch
from planted_causes import CAUSES, instead, padded_row, quantized_twice, split_by_rows
from rollout_models import FAMILIES, IDS, MASK, OPTIONS, RECIPES, exact_trainer, step

from tritonfp8.rollout import Rollout, check


def checked(model, rollout, **options):
    return check(model, rollout, IDS, MASK, **OPTIONS | options)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_difference(recipe, kind):
    model = exact_trainer(kind, recipe)
    rollout = Rollout(model)
    for _ in range(2):
        step(model, 0.1)
        rollout.refresh()
        found = checked(model, rollout, temperature=0.9)
        assert found.max_difference == 0
        assert (found.module, found.reads, found.codes) == (None, None, ())
        assert found.tokens == found.generated.mask.sum() > 12
        assert str(found) == f"largest difference of the log-probs of {found.tokens} tokens: 0"


def test_the_trainer_runs_as_it_trains():
    """In its own mode, with gradients: what these change is a difference."""
    model = exact_trainer()
    rollout, modes = Rollout(model), []
    model.register_forward_hook(lambda module, args, out: modes.append((module.training, out.logits.requires_grad)))
    assert checked(model, rollout).max_difference == 0
    model.eval()
    assert checked(model, rollout).max_difference == 0
    assert modes == [(True, True), (False, True)]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named(cause):
    plant, kind = CAUSES[cause]
    model = exact_trainer(kind)
    rollout = Rollout(model)
    module, reads, codes = plant(rollout)
    found = checked(model, rollout, max_new_tokens=8)
    assert found.max_difference > 0
    assert (found.module, found.reads, found.codes) == (module, reads, codes)
    assert f"first difference: {module} computes another output from the same input" in str(found)
    assert ("codes that the trainer's forward does not make" in str(found)) == bool(codes)


def test_a_padded_row_is_no_cause_without_padding():
    model = exact_trainer()
    rollout = Rollout(model)
    padded_row(rollout, MASK[2:])
    assert check(model, rollout, IDS[2:], **OPTIONS).max_difference == 0


def test_one_weight_that_was_written():
    model = exact_trainer("moe")
    rollout = Rollout(model)
    own = next(each for each in rollout.own if each.name == "model.layers.1.mlp.experts.down_proj")
    own.tensor._qdata.view(torch.uint8)[..., :64] = 0
    found = checked(model, rollout)
    assert found.max_difference > 0
    assert found.codes == (own.name,)
    assert found.module == "model.layers.1.mlp.experts"
    rollout.refresh()
    assert checked(model, rollout).codes == ()


def test_other_codes_of_the_same_values():
    """A block whose largest code is rounded down to 224 gets twice the codes and half the scale the second time."""
    model = exact_trainer()
    rollout = Rollout(model)
    codes = {each.name: (each.tensor._qdata, each.tensor._qdata.view(torch.uint8).clone()) for each in rollout.own}
    quantized_twice(rollout, first="mxfp8")
    changed = {name for name, (now, before) in codes.items() if not torch.equal(now.view(torch.uint8), before)}
    assert changed
    found = checked(model, rollout)
    assert found.max_difference == 0
    assert found.module is None
    assert set(found.codes) == changed
    assert "codes that the trainer's forward does not make" in str(found)


def test_a_difference_between_modules():
    """What a module computes by itself, as attention does, is its own fault, and not the next module's."""
    model = exact_trainer()
    rollout = Rollout(model)
    attention = rollout.model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **options: (attention.o_proj(attention.v_proj(hidden_states) * 1.5), None)
    found = checked(model, rollout)
    assert found.max_difference > 0
    assert (found.module, found.reads) == ("model.layers.1.self_attn", "model.layers.1.self_attn.o_proj")
    assert "model.layers.1.self_attn computes other input for model.layers.1.self_attn.o_proj" in str(found)


def test_a_difference_outside_of_all_lists_of_modules():
    model = exact_trainer()
    rollout = Rollout(model)
    # What comes before a layer belongs to the model that has the list.
    rollout.model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    found = checked(model, rollout)
    assert (found.module, found.reads) == ("model", "model.layers.1")


def test_a_difference_of_compiled_code(monkeypatch):
    """Eager modules agree: nothing is named, and the text says so."""
    model = exact_trainer()
    rollout = Rollout(model)
    real = Rollout.generate

    def generate(self, *args, compile=None, **options):
        found = real(self, *args, **options)
        return found if compile is False else found._replace(log_probs=found.log_probs + found.mask * 0.25)

    monkeypatch.setattr(Rollout, "generate", generate)
    found = checked(model, rollout)
    assert found.max_difference == pytest.approx(0.25, abs=1e-5)
    assert found.module is None
    assert "no module differs in single calls" in str(found)


def test_a_nan_is_a_difference():
    model = exact_trainer()
    rollout = Rollout(model)
    instead(rollout, "model.norm", lambda own, x: own(x) if x.shape[1] > 1 else own(x) + torch.nan)
    found = checked(model, rollout, do_sample=False)
    assert math.isnan(found.max_difference)
    assert found.module == "model.norm"


def test_several_sequences_of_a_prompt_are_checked():
    model = exact_trainer()
    rollout = Rollout(model)
    assert checked(model, rollout, num_return_sequences=2).max_difference == 0
    split_by_rows(rollout)
    assert checked(model, rollout, num_return_sequences=2).module == "model.layers.1.mlp.down_proj"


def test_mistakes():
    model, other = exact_trainer(), exact_trainer()
    rollout = Rollout(model)
    with pytest.raises(ValueError, match="the rollout was made of another model than the one that is checked"):
        checked(other, rollout)
    with pytest.raises(TypeError, match=r"rollout must be a tritonfp8.rollout.Rollout"):
        checked(model, model)
    step(model)
    with pytest.raises(RuntimeError, match="call rollout.refresh"):
        checked(model, rollout)
