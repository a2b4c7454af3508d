"""Checkpoints as DeepSeek, Qwen, Kimi and GLM publish them go in by one door, train adapters, and come out."""

import logging

import peft
import pytest
import torch
from layouts import FAMILIES, published
from pretrained_cases import IDS, differing, train, values

import tritonfp8
from tritonfp8.integrations.transformers import from_pretrained
from tritonfp8.layers.stored import is_stored


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_checkpoint_loads_trains_and_comes_out_to_the_bit(tmp_path, caplog, family):
    expected = published(tmp_path / "it", family)
    with caplog.at_level(logging.INFO, "tritonfp8"):
        model = from_pretrained(tmp_path / "it", train="adapters")
    recipe = "rowwise" if "GLM" in family else "blockwise"
    assert {m.recipe.name for m in model.modules() if getattr(m, "recipe", None) is not None} == {recipe}
    # A recipe keeps codes whose scales are powers of two, and rounds others again.
    assert ("rounded again" in caplog.text) == ("scale_fmt" not in (FAMILIES[family][2] or {}))
    further = FAMILIES[family][-1]
    assert (f"{further}." in caplog.text) == (further is not None)
    tritonfp8.convert(expected, recipe, mode="inference")
    assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in expected.named_parameters()}
    mine, theirs = values(model), values(expected)
    assert mine.keys() == theirs.keys()
    assert [name for name, x in mine.items() if not torch.equal(x, theirs[name])] == []
    # Of the biases by which tokens choose experts, too.
    mine, theirs = (dict(each.named_buffers()) for each in (model, expected))
    assert {name: x.dtype for name, x in mine.items()} == {name: x.dtype for name, x in theirs.items()}
    assert all(torch.equal(x, theirs[name]) for name, x in mine.items())
    assert sum(map(is_stored, model.modules())) == sum(map(is_stored, expected.modules())) >= 10
    # DeepSeek-V4 of transformers has norms in float32 beside weights in bfloat16.
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=family == "DeepSeek-V4"):
        assert torch.equal(model.eval()(IDS).logits, expected.eval()(IDS).logits)
    model.train()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=r".*\.o(_b)?_proj", init_lora_weights=False))
    losses = train(adapted, tmp_path / "trainer", steps=2, bf16=family == "DeepSeek-V4")
    assert len(set(losses)) == 2
    tritonfp8.export.save(adapted.unload(), tmp_path / "out")
    assert differing(tmp_path / "out", tmp_path / "it") == []
