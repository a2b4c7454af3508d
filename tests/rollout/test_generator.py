"""A generator reads the codes that the trainer's forward reads, and gives tokens with their log-probs."""

import signal

import peft
import pytest
import torch
from checkpoints import are_equal
from rollout_models import (
    FAMILIES,
    IDS,
    MASK,
    OPTIONS,
    RECIPES,
    addresses_of,
    bits_of,
    exact_trainer,
    generate,
    plain,
    step,
    trainer,
)
from torch import nn

import tritonfp8
from tritonfp8.layers.stored import StoredMatrices, StoredWeight
from tritonfp8.rollout import Rollout, log_probs, sharing

NAMES = {"qwen3": 14, "llama": 14, "moe": 12}


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_after_each_step_a_rollout_has_the_codes_and_logits_of_the_trainer(recipe, kind):
    model = trainer(kind, recipe)
    rollout = Rollout(model)
    assert len(rollout.own) == NAMES[kind]
    places, seen = addresses_of(rollout), []
    for _ in range(3):
        step(model)
        rollout.refresh()
        with tritonfp8.quantize_weights_once(model), torch.no_grad():
            for each in rollout.own:
                cached = getattr(each.source, "cached_weights", None) or {each.key: each.source.cached_weight}
                operand = cached[each.key].operands[0]
                assert each.tensor.spec == each.source.recipe.storage
                read = each.tensor.read_operand(operand.spec, False)
                for x, y in zip((operand.qdata, operand.scale), read, strict=True):
                    assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), each.name
        seen.append(logits(rollout.model))
        assert torch.equal(seen[-1], logits(model))
    assert not torch.equal(seen[0], seen[1])
    # CUDA graphs that were captured before read the new weights.
    assert addresses_of(rollout) == places


def test_what_is_not_quantized_is_the_trainers():
    model = trainer("moe", tie_word_embeddings=True)
    rollout = Rollout(model)
    own = {each.name for each in rollout.own}
    assert all(isinstance(each.tensor, StoredWeight) for each in rollout.own)
    assert any(isinstance(each.tensor, StoredMatrices) for each in rollout.own)
    theirs = dict(rollout.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert (theirs[name] is parameter) == (name not in own), name
    assert rollout.model.lm_head.weight is rollout.model.model.embed_tokens.weight
    assert [x is y for x, y in zip(model.buffers(), rollout.model.buffers(), strict=True)] == [True] * 2
    assert model.training
    assert not rollout.model.training
    assert "12 weights as codes, 0 of them the trainer's" in repr(rollout)
    assert generate(rollout).log_probs.shape == (3, 6)


def test_a_trainer_that_stores_its_weights_shares_them():
    model = plain(dtype=torch.float32)
    tritonfp8.convert(model, "rowwise", weight_storage="quantized", batch_invariant=True)
    rollout = Rollout(model, autocast=torch.bfloat16)
    assert rollout.own == []
    assert "14 weights as codes, 14 of them the trainer's; 0 bytes of its own" in repr(rollout)
    optimizer, before = tritonfp8.optim.AdamW(model.parameters(), lr=0.1), logits(rollout.model)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    # Without a refresh.
    assert rollout.changed() == []
    assert not torch.equal(logits(rollout.model), before)
    assert torch.equal(logits(rollout.model), logits(model))
    assert generate(rollout).mask.any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_float32_weights_are_rounded_as_autocast_rounds_them(recipe):
    model = trainer(recipe=recipe, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        # The autocast around it is found.
        rollout = Rollout(model)
    assert rollout.autocast is torch.bfloat16
    step(model)
    rollout.refresh()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(rollout.model), logits(model))
    assert generate(rollout).mask.any()
    # Without autocast a layer quantizes float32.
    exact = Rollout(model)
    assert torch.equal(logits(exact.model), logits(model))
    assert not are_equal(bits_of(exact), bits_of(rollout))


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_log_probs_are_those_of_the_trainers_forward(recipe, kind):
    model = exact_trainer(kind, recipe)
    found = generate(Rollout(model), temperature=0.7, max_new_tokens=9)
    assert found.sequences.dtype == torch.int64
    assert found.log_probs.dtype == torch.float32
    assert found.sequences.shape == (3, 15)
    scored = log_probs(model, found.sequences, found.attention_mask, 9, 0.7)
    assert scored.requires_grad
    assert torch.equal(scored, found.log_probs)
    # Independently, from the logits of all tokens.
    each = torch.log_softmax(logits_of(model, found.sequences).float() / 0.7, -1)[:, 5:-1]
    expected = each.gather(2, found.sequences[:, 6:, None])[..., 0]
    torch.testing.assert_close(found.log_probs, expected * found.mask)
    assert (found.log_probs[found.mask] < 0).all()


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_attention_with_padding_and_a_cache_is_close_to_the_trainers_forward():
    """Not equal to the bit: torch's attention sums in another order for other shapes."""
    model = trainer("llama", dtype=torch.float32)
    found = generate(Rollout(model))
    scored = log_probs(model, found.sequences, found.attention_mask, 6)
    torch.testing.assert_close(scored, found.log_probs, atol=1e-3, rtol=0)
    # The tokens of padding change nothing.
    others = IDS.where(MASK == 1, 50)
    again = Rollout(model).generate(others, MASK, **OPTIONS)
    assert torch.equal(again.sequences[:, 6:], found.sequences[:, 6:])


def test_log_probs_do_not_depend_on_what_changes_the_choice():
    rollout = Rollout(exact_trainer())
    found = generate(rollout, top_k=3, top_p=0.9, repetition_penalty=1.3, temperature=0.5)
    scored = log_probs(rollout.trainer, found.sequences, found.attention_mask, 6, 0.5)
    assert torch.equal(scored, found.log_probs)


def test_sampling_repeats_by_its_seed_and_leaves_torchs_state():
    rollout = Rollout(trainer())
    before = torch.get_rng_state()
    one, two, other = (generate(rollout, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert not torch.equal(one.sequences, other.sequences)
    greedy = [generate(rollout, do_sample=False, seed=seed).sequences for seed in (1, None)]
    assert torch.equal(*greedy)
    torch.manual_seed(1)
    assert torch.equal(generate(rollout, seed=None).sequences, one.sequences)


def test_behind_an_end_of_sequence_is_padding():
    rollout = Rollout(exact_trainer())
    free = generate(rollout, max_new_tokens=8, eos_token_id=None)
    assert free.mask.all()
    end = int(free.sequences[0, 6 + 2])
    found = generate(rollout, max_new_tokens=8, eos_token_id=[end, 63])
    assert found.mask[0].tolist() == [True] * 3 + [False] * (found.mask.shape[1] - 3)
    assert torch.equal(found.attention_mask[0], torch.cat([MASK[0], found.mask[0].long()]))
    assert (found.sequences[0, 9:] == 0).all()
    assert (found.log_probs[0, 3:] == 0).all()
    assert torch.equal(found.log_probs[0, :3], free.log_probs[0, :3])
    # All have ended: fewer tokens than asked for.
    every = generate(rollout, max_new_tokens=8, eos_token_id=list(range(64)))
    assert every.sequences.shape == (3, 7)
    assert every.mask.all()


def test_several_sequences_of_a_prompt():
    model = exact_trainer()
    found = generate(Rollout(model), num_return_sequences=2)
    assert found.sequences.shape == (6, 12)
    assert torch.equal(found.attention_mask[:, :6], MASK.repeat_interleave(2, 0))
    assert torch.equal(log_probs(model, found.sequences, found.attention_mask, 6), found.log_probs)


def test_a_cache_is_kept_and_starts_empty():
    rollout = Rollout(trainer())
    one = generate(rollout)
    cache = rollout._cache[1]
    assert torch.equal(generate(rollout).log_probs, one.log_probs)
    assert generate(rollout, max_new_tokens=3).sequences.shape == (3, 9)
    assert rollout._cache[1] is cache
    generate(rollout, max_new_tokens=12)
    assert rollout._cache[1] is not cache
    dynamic = generate(rollout, cache_implementation="dynamic")
    torch.testing.assert_close(dynamic.log_probs, one.log_probs, atol=0.1, rtol=0)
    rollout.release()
    assert rollout._cache is None


def test_stale_weights_are_an_error():
    model = trainer()
    rollout = Rollout(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert rollout.changed() == ["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match=r"1 weights changed .* model.layers.1.mlp.up_proj.weight: call rollout.ref"):
        generate(rollout)
    rollout.refresh()
    assert rollout.changed() == []
    generate(rollout)
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.ones(256, 128, dtype=torch.bfloat16))
    assert rollout.changed() == ["model.layers.0.mlp.up_proj.weight"]
    rollout.refresh()
    assert torch.equal(logits(rollout.model), logits(model))


def _new_norm(model):
    model.model.norm.weight = nn.Parameter(torch.ones(128, dtype=torch.bfloat16))


CHANGES = {
    "norm": (_new_norm, "model.norm has other Parameters or another recipe than when the Rollout was made"),
    "recipe": (lambda model: tritonfp8.swap_recipe(model, "blockwise"), "q_proj has other Parameters or another rec"),
    "dtype": (lambda model: model.float(), "q_proj.weight was moved, cast or resized since the Rollout was made"),
    "device": (lambda model: model.to("meta"), "q_proj.weight was moved, cast or resized since the Rollout was made"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_needs_another_rollout(change):
    model = trainer()
    rollout = Rollout(model)
    make, message = CHANGES[change]
    make(model)
    for call in (rollout.refresh, lambda: generate(rollout)):
        with pytest.raises(ValueError, match=f"{message}.*: make another Rollout"):
            call()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("place", "is_new"), [("read", False), ("write", True), ("cast", True)])
def test_ctrl_c_leaves_the_old_or_the_new_weights(monkeypatch, place, is_new):
    model = trainer()
    rollout = Rollout(model)
    if place != "cast":
        # As what FSDP2 gathers.
        monkeypatch.setattr(sharing.OwnWeight, "is_cast_in_place", False)
    before = bits_of(rollout)
    step(model)
    real, calls = getattr(sharing.OwnWeight, place), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(sharing.OwnWeight, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        rollout.refresh()
    monkeypatch.undo()
    assert are_equal(bits_of(rollout), bits_of(Rollout(model)) if is_new else before)
    assert len(rollout.changed()) == (0 if is_new else 14)


def test_an_error_in_a_refresh_is_no_refresh(monkeypatch):
    model = trainer()
    rollout = Rollout(model)
    step(model)

    def fails(self, dtype):
        raise torch.OutOfMemoryError("of the test")

    monkeypatch.setattr(sharing.OwnWeight, "cast", fails)
    with pytest.raises(torch.OutOfMemoryError):
        rollout.refresh()
    assert len(rollout.changed()) == 14


def test_adapters_are_the_trainers():
    model = trainer()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    rollout = Rollout(adapted)
    assert len(rollout.own) == 14
    assert torch.equal(logits(rollout.model), logits(adapted.eval()))
    before = logits(rollout.model)
    step(adapted)
    # Only adapters train.
    assert rollout.changed() == []
    assert not torch.equal(logits(rollout.model), before)
    found = generate(rollout)
    scored = log_probs(adapted, found.sequences, found.attention_mask, 6)
    torch.testing.assert_close(scored, found.log_probs, atol=0.1, rtol=0)


@pytest.mark.parametrize(("recipe", "others"), [("bf16", "rowwise"), ("bf16", "bf16")])
def test_layers_of_a_recipe_in_high_precision_are_shared(recipe, others):
    model = plain()
    tritonfp8.convert(model, {"*.down_proj": recipe, "*": others})
    rollout = Rollout(model)
    assert len(rollout.own) == (12 if others == "rowwise" else 0)
    layer = rollout.model.model.layers[0].mlp.down_proj
    assert layer.weight is model.model.layers[0].mlp.down_proj.weight
    step(model)
    rollout.refresh()
    assert torch.equal(logits(rollout.model), logits(model))


@pytest.mark.slow
def test_compiled_decoding():
    rollout = Rollout(exact_trainer())
    found, eager = (generate(rollout, compile=compile, max_new_tokens=3) for compile in (True, False))
    assert rollout.model._compiled_call is not None
    assert torch.equal(found.sequences, eager.sequences)
    # Compiled norms add in another order.
    torch.testing.assert_close(found.log_probs, eager.log_probs, atol=0.1, rtol=0)


MISTAKES = {
    "float": (lambda r: r.generate(IDS.float(), **OPTIONS), TypeError, "ids must be int64"),
    "no tensor": (lambda r: r.generate([[1]], **OPTIONS), TypeError, "ids must be a torch.Tensor"),
    "dims": (lambda r: r.generate(IDS[0], **OPTIONS), ValueError, r"ids must be \[B, P\], not empty; got shape \(6,\)"),
    "mask": (lambda r: r.generate(IDS, MASK[:2], **OPTIONS), ValueError, r"attention_mask must be \(3, 6\)"),
    "right": (lambda r: r.generate(IDS, MASK.flip(1), **OPTIONS), ValueError, "must be padded on the left"),
    "hole": (lambda r: r.generate(IDS[:1], MASK[1:2].roll(2, 1), **OPTIONS), ValueError, "padded on the left"),
    "temperature": (lambda r: generate(r, temperature=0.0), ValueError, r"temperature must be above 0 \(greedy"),
    "beams": (lambda r: generate(r, num_beams=2), ValueError, "generate does not take num_beams"),
    "config": (lambda r: generate(r, generation_config=None), ValueError, "does not take generation_config"),
    "new": (lambda r: log_probs(r.trainer, IDS, MASK, 6), ValueError, "new must be between 1 and T - 1 = 5; got 6"),
    "shapes": (lambda r: log_probs(r.trainer, IDS, MASK[:1], 2), ValueError, r"must both be \[B, T\]"),
    "scored": (lambda r: log_probs(r.trainer, IDS, MASK, 2, -1.0), ValueError, "temperature must be above 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_call(mistake):
    call, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message):
        call(Rollout(trainer()))


def on_meta():
    with torch.device("meta"):
        return trainer()


def parametrized():
    model = trainer()
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    return model


MODELS = {
    "plain": (plain, ValueError, "the model has no converted layer and is not exact"),
    "layers": (lambda: tritonfp8.Float8Linear(64, 64, recipe="rowwise"), TypeError, "a causal model of transformers"),
    "no module": (lambda: "model", TypeError, "model must be an nn.Module"),
    "meta": (on_meta, ValueError, "weights in memory, whole or sharded by FSDP2; .* is on the meta device"),
    "computed": (parametrized, ValueError, r"its weight is computed \(parametrized or pruned\)"),
    "float16": (lambda: trainer(dtype=torch.float16), ValueError, "its weight is torch.float16"),
}


@pytest.mark.parametrize("mistake", MODELS)
def test_models_that_have_no_rollout(mistake):
    model, kind, message = MODELS[mistake]
    with pytest.raises(kind, match=message):
        Rollout(model())


@pytest.mark.parametrize("recipe", ["tensorwise"])
def test_a_recipe_that_has_no_rollout(recipe):
    model = plain()
    tritonfp8.convert(model, recipe)
    with pytest.raises(ValueError, match=f"recipe {recipe!r} scales the weight of .* no powers of two"):
        Rollout(model)


def test_autocast_is_a_dtype():
    tritonfp8.convert(other := plain(), "rowwise")
    with pytest.raises(TypeError, match="autocast must be a torch.dtype or None"):
        Rollout(other, autocast="bfloat16")
