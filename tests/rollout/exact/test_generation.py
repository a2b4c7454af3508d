"""Log-probs that a Rollout gives and log-probs of the trainer's forward differ by exactly 0."""

import peft
import pytest
import torch
from exact_models import DEVICES, OTHERS, exact, grpo_steps, of_family
from rollout_models import FAMILIES, IDS, MASK, OPTIONS

import tritonfp8
from tritonfp8.rollout import Rollout, check, make_exact, why_inexact


def differs(model, rollout, **options):
    """check on the prompts, which are padded to different lengths; the largest difference."""
    device = next(rollout.model.parameters()).device
    found = check(model, rollout, IDS.to(device), MASK.to(device), **{**OPTIONS, "max_new_tokens": 12, **options})
    assert found.tokens > 12
    return found.max_difference, str(found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", None])
@pytest.mark.parametrize("kind", FAMILIES)
def test_no_difference_before_and_after_steps(kind, recipe, device):
    if kind == "moe" and recipe is None:
        pytest.skip("experts need a recipe")
    model = exact(kind, recipe, device=device)
    rollout = Rollout(model)
    before = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in grpo_steps(model, rollout))
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert differs(model, rollout, temperature=0.9)[0] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "recipe"), [("qwen3", "rowwise"), ("llama", "blockwise"), ("moe", "rowwise")])
def test_fifty_steps(kind, recipe, device):
    model = exact(kind, recipe, device=device)
    rollout = Rollout(model)
    ratios = grpo_steps(model, rollout, 50, 2e-3)
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in ratios)
    assert differs(model, rollout)[0] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_families(kind, device):
    model = exact(kind, device=device)
    assert differs(model, Rollout(model))[0] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_autocast(kind, device):
    model = exact(kind, "rowwise", torch.float32, device)
    rollout = Rollout(model, autocast=torch.bfloat16)
    assert all(torch.equal(ratio, torch.ones_like(ratio)) for ratio in grpo_steps(model, rollout))
    assert differs(model, rollout)[0] == 0


def test_float32():
    model = exact("qwen3", "rowwise", torch.float32)
    assert differs(model, Rollout(model))[0] == 0


@pytest.mark.parametrize("options", [{"cache_implementation": "dynamic"}, {"prefill_chunk_size": 4}])
def test_other_caches(options):
    model = exact("mistral")
    if "cache_implementation" not in options:
        options = options | {"compile": False}
    assert differs(model, Rollout(model), **options)[0] == 0


def test_weights_that_are_stored_in_8_bits():
    model = of_family("qwen3", torch.float32)
    tritonfp8.convert(model, "rowwise", weight_storage="quantized", batch_invariant=True)
    rollout = Rollout(make_exact(model))
    assert rollout.own == []
    assert differs(model, rollout)[0] == 0


@pytest.mark.parametrize("adapts_first", [False, True])
def test_adapters(adapts_first):
    model = of_family("qwen3", torch.float32)
    tritonfp8.convert(model, "rowwise", batch_invariant=True)
    if not adapts_first:
        make_exact(model)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    missing = why_inexact(adapted)
    assert sum("lora_" in name for name in missing) == 8
    assert why_inexact(make_exact(adapted)) == {}
    assert differs(adapted, Rollout(adapted))[0] == 0


def test_without_make_exact_there_is_a_difference():
    """What the tests above see."""
    model = of_family("qwen3", torch.float32)
    tritonfp8.convert(model, "rowwise", batch_invariant=True)
    assert differs(model, Rollout(model))[0] > 0
