"""why_inexact names each module and setting by which a token's bits may depend on others, and nothing else."""

import copy
import pickle
import re

import pytest
import torch
import transformers
from exact_models import OTHERS, exact, of_family, sequences, together
from rollout_models import FAMILIES
from torch import nn

import tritonfp8
from tritonfp8.rollout import make_exact, why_inexact

FIRST = "model.layers.0"


@pytest.mark.parametrize("kind", [*FAMILIES, *OTHERS])
def test_all_that_is_changed_is_named_before(kind):
    model = of_family(kind)
    tritonfp8.convert(model, "rowwise", batch_invariant=True)
    classes = {name: type(module) for name, module in model.named_modules()}
    named = set(why_inexact(model))
    make_exact(model)
    changed = {name for name, module in model.named_modules() if type(module) is not classes[name]}
    attention = {f"model.layers.{i}.self_attn" for i in range(2)}
    assert named == changed | attention
    assert why_inexact(model) == {}
    assert all(isinstance(module, classes[name]) for name, module in model.named_modules())


def test_a_model_that_make_exact_did_not_see():
    found = why_inexact(of_family("qwen3"))
    assert found["lm_head"] == found["model.norm"]
    assert "call make_exact" in found["lm_head"]
    assert found[f"{FIRST}.self_attn"] == "its attention is 'sdpa': call make_exact"


def test_make_exact_twice_changes_nothing():
    model = make_exact(of_family("moe"))
    classes = [type(module) for module in model.modules()]
    assert make_exact(model) is model
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_before_and_after_convert_are_the_same(kind):
    before, after = of_family(kind), of_family(kind)
    make_exact(before)
    names = tritonfp8.convert(before, "rowwise", batch_invariant=True).converted
    assert names == tritonfp8.convert(after, "rowwise", batch_invariant=True).converted
    make_exact(after)
    assert why_inexact(before) == why_inexact(after) == {}
    rows = sequences()
    for one, two in zip(*(together(model, rows, "left") for model in (before, after)), strict=True):
        assert torch.equal(one, two)
    # Layers compute exactly in high precision then.
    tritonfp8.revert(before)
    tritonfp8.revert(after)
    assert set(why_inexact(before)) == {f"model.layers.{i}.mlp.experts" for i in range(2) if kind == "moe"}
    assert f"{FIRST}.self_attn.q_proj" in why_inexact(after)


def test_copies_pickles_and_checkpoints(tmp_path):
    model = exact("moe")
    rows = sequences()
    expected = together(model, rows, "left")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert why_inexact(other) == {}
        assert all(map(torch.equal, together(other, rows, "left"), expected))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.config._attn_implementation == "sdpa"
    # Frequencies are in no checkpoint: the first model rounded them to bfloat16.
    loaded.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq
    tritonfp8.convert(loaded, "rowwise", batch_invariant=True)
    make_exact(loaded)
    assert all(map(torch.equal, together(loaded, rows, "left"), expected))


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def with_other_norm(model):
    model.model.norm = nn.LayerNorm(128)
    return "model.norm", "LayerNorm of torch.nn.modules.normalization is not known"


def with_other_module(model):
    model.model.layers[0].mlp.extra = Doubled()
    return f"{FIRST}.mlp.extra", "Doubled of .*test_coverage is not known"


def with_replaced_forward(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x
    return f"{FIRST}.mlp", "its forward was replaced on the instance"


def with_dropout(model):
    model.model.layers[0].self_attn.attention_dropout = 0.1
    return f"{FIRST}.self_attn", r"dropout of attention \(0.1\) changes training only"


def with_module_of_dropout(model):
    model.model.layers[0].mlp.drop = nn.Dropout(0.2)
    return f"{FIRST}.mlp.drop", r"dropout \(0.2\) changes training only"


def without_causality(model):
    model.model.layers[0].self_attn.is_causal = False
    return f"{FIRST}.self_attn", "it is not causal"


def with_max_norm(model):
    model.model.embed_tokens.max_norm = 1.0
    return "model.embed_tokens", "an embedding with max_norm changes its weight"


SETTINGS = (
    with_other_norm, with_other_module, with_replaced_forward, with_dropout, with_module_of_dropout, without_causality,
    with_max_norm,
)  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("comes_first", [False, True])
def test_a_setting_is_named(setting, comes_first):
    model = of_family("qwen3")
    if not comes_first:
        make_exact(model)
    name, reason = setting(model)
    if comes_first:
        make_exact(model)
    tritonfp8.convert(model, "rowwise", batch_invariant=True)
    found = why_inexact(model)
    assert list(found) == [name]
    assert re.search(reason, found[name])


CONFIGS = {
    "activation": ("qwen3", {"hidden_act": "gelu_new"}, f"{FIRST}.mlp", "activation NewGELUActivation is not known"),
    "rotary": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "model.rotary_emb",
        "rotary embeddings of kind 'dynamic' depend on the length",
    ),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, f"{FIRST}.mlp", "noise on routers"),
    "caps": ("gemma3", {"final_logit_softcapping": 30.0}, "", "its logits are capped by tanh"),
}


@pytest.mark.parametrize("setting", CONFIGS)
def test_a_config_is_named(setting):
    kind, options, name, reason = CONFIGS[setting]
    model = of_family(kind, **options)
    tritonfp8.convert(model, "rowwise", batch_invariant=True)
    assert reason in why_inexact(make_exact(model))[name]


def test_recipes_are_named():
    model = make_exact(of_family("moe"))
    assert why_inexact(model)[f"{FIRST}.mlp.experts"].startswith("experts in high precision add in the order of")
    tritonfp8.convert(model, {"*.q_proj": "bf16", "*": "rowwise"})
    found = why_inexact(model)
    assert "its recipe 'bf16' is not batch-invariant: use" in found[f"{FIRST}.self_attn.q_proj"]
    assert "its recipe 'rowwise' is not batch-invariant" in found[f"{FIRST}.self_attn.k_proj"]
    assert "their recipe 'rowwise' is not batch-invariant" in found[f"{FIRST}.mlp.experts"]


def test_a_family_that_is_not_known():
    sizes = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    found = why_inexact(make_exact(model))
    for name in ("", "transformer", "transformer.h.0.attn", "transformer.h.0.attn.c_attn", "transformer.ln_f"):
        assert "is not known" in found[name], name


def test_a_model_of_other_kind():
    with pytest.raises(TypeError, match="a causal model of transformers is needed; got Linear"):
        make_exact(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="model must be an nn.Module"):
        why_inexact("model")
