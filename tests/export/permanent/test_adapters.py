"""Adapters of peft: an export has the tensors that merge_and_unload leaves, and the model stays as it is."""

import copy

import peft
import pytest
import torch
from checkpoints import config_of, files_of, loaded, model_of, same
from mixtures import model_of as mixture_of
from torch import nn
from transformers import LlamaForCausalLM

import tritonfp8
from tritonfp8 import export
from tritonfp8.specs.testing import assert_bitwise_equal

TARGETS = ["q_proj", "up_proj", "down_proj"]
METHODS = {
    "lora": lambda: peft.LoraConfig(r=8, target_modules=TARGETS),
    "dora": lambda: peft.LoraConfig(r=8, target_modules=TARGETS, use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(r=8, target_modules=TARGETS),
    "vera": lambda: peft.VeraConfig(r=8, target_modules=["q_proj"]),
    "oft": lambda: peft.OFTConfig(oft_block_size=32, target_modules=TARGETS),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
    "head and embedding": lambda: peft.LoraConfig(
        r=8, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head", "norm"]
    ),
    "tokens": lambda: peft.LoraConfig(r=8, target_modules=["q_proj"], trainable_token_indices=[1, 5, 9]),
}
each_method = pytest.mark.parametrize("method", METHODS)


def trained(model, seed=3):
    """As after training: every tensor of the adapters has values of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and "base_layer" not in name and "original_module" not in name:
                p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.05)
    return model


def adapted(method="lora", base=None, **options):
    torch.manual_seed(1)
    model = model_of(**options) if base is None else base
    return trained(peft.get_peft_model(model, METHODS[method]()))


def exported(model, **options):
    return dict(export.tensors(model, "fine_grained", **options))


def unchanged(model):
    """What a model is: names, the objects that are its parameters, their bits, and flags."""
    return (
        [(name, type(module), module.training) for name, module in model.named_modules()],
        [(name, id(p), p.requires_grad) for name, p in model.named_parameters()],
        [x.clone() for x in model.state_dict().values()],
    )


@pytest.mark.parametrize("recipe", [None, "rowwise"])
@each_method
def test_the_merged_weights_are_exported(method, recipe):
    model = adapted(method)
    if recipe is not None:
        tritonfp8.convert(model, recipe)
    before = unchanged(model)
    ours = exported(model, adapters="merged")
    after = unchanged(model)
    assert after[:2] == before[:2]
    assert_bitwise_equal(after[2], before[2])
    base = exported(model_of())
    assert ours.keys() == base.keys()
    assert any(not torch.equal(ours[name].view(torch.uint8), x.view(torch.uint8)) for name, x in base.items())
    same(ours, exported(model.merge_and_unload()))


def test_errors_name_both_ways():
    model = adapted()
    for call in (export.plan, lambda *args: export.tensors(*args)):
        with pytest.raises(ValueError, match=r'adapters of peft in 3 modules.*adapters="merged".*merge_and_unload'):
            call(model, "fine_grained")
    with pytest.raises(ValueError, match="adapters must be one of None, 'merged'; got 'active'"):
        export.plan(model, "fine_grained", adapters="active")
    with model.disable_adapter(), pytest.raises(ValueError, match=r"q_proj are disabled.*model\.unload"):
        exported(model, adapters="merged")
    prompts = peft.get_peft_model(model_of(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    for adapters in (None, "merged"):
        with pytest.raises(ValueError, match="learns prompts.*get_base_model"):
            export.plan(prompts, "fine_grained", adapters=adapters)
    # A model without adapters has nothing to merge.
    same(exported(model_of(), adapters="merged"), exported(model_of()))


def test_adapters_that_transformers_added():
    # peft casts adapters of bfloat16 to float32, and transformers does not.
    model = model_of(dtype=torch.float32)
    model.add_adapter(METHODS["lora"]())
    trained(model)
    with pytest.raises(ValueError, match="adapters of peft"):
        export.plan(model, "fine_grained")
    wrapped = adapted(dtype=torch.float32)
    for theirs, p in zip(wrapped.parameters(), model.parameters(), strict=True):
        theirs.data.copy_(p)
    same(exported(model, adapters="merged"), exported(wrapped.merge_and_unload()))


def test_several_adapters():
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.base_model.set_adapter(["default", "second"])
    trained(model, seed=4)
    both = exported(model, adapters="merged")
    model.base_model.set_adapter("second")
    second = exported(model, adapters="merged")
    merged = copy.deepcopy(model).merge_and_unload(adapter_names=["second"])
    same(second, exported(merged))
    same(both, exported(model.merge_and_unload(adapter_names=["default", "second"])))
    assert any(not torch.equal(both[name].view(torch.uint8), x.view(torch.uint8)) for name, x in second.items())


def test_adapters_that_are_merged_already():
    model = adapted()
    expected = exported(model, adapters="merged")
    model.merge_adapter()
    same(exported(model, adapters="merged"), expected)


def test_a_stored_base_is_merged_in_its_values():
    model = model_of()
    tritonfp8.convert(model, "blockwise", mode="inference")
    values = model_of()
    values.load_state_dict(model.state_dict())
    model, plain = (trained(peft.get_peft_model(each, METHODS["lora"]())) for each in (model, values))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if theirs.requires_grad:
            ours.data.copy_(theirs)
    before = [p.quantized.qdata.clone() for p in model.parameters() if hasattr(p, "quantized")]
    assert len(before) == 7
    ours, theirs = exported(model, adapters="merged"), exported(plain.merge_and_unload())
    # Layers without adapters keep their codes: of the same values, and maybe others.
    layers = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")]
    names = [name for name in theirs if not name.startswith("model.layers") or name.startswith(tuple(layers))]
    assert len(names) == 3 + 2 * 3
    same({name: ours[name] for name in names}, {name: theirs[name] for name in names})
    assert_bitwise_equal([p.quantized.qdata for p in model.parameters() if hasattr(p, "quantized")], before)


def test_adapters_on_the_weights_of_experts():
    model = mixture_of("qwen3_moe", torch.bfloat16)
    tritonfp8.convert(model, "rowwise")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=targets)
    model = trained(peft.get_peft_model(model, lora))
    ours = dict(export.tensors(model, "compressed_channel", adapters="merged"))
    assert "model.layers.0.mlp.experts.0.up_proj.weight_scale" in ours
    same(ours, dict(export.tensors(model.merge_and_unload(), "compressed_channel")))


def test_the_report_and_the_folder_are_as_of_the_merged_model(tmp_path):
    model = adapted("head and embedding")
    report = export.save(model, tmp_path / "ours", "fine_grained", adapters="merged", filter=["*_proj"])
    merged = model.merge_and_unload()
    theirs = export.save(merged, tmp_path / "theirs", "fine_grained", filter=["*_proj"])
    assert report == theirs
    same(files_of(tmp_path / "ours"), files_of(tmp_path / "theirs"))
    assert config_of(tmp_path / "ours") == config_of(tmp_path / "theirs")
    read = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    same(read.state_dict(), loaded(tmp_path / "ours")[0].state_dict())


def test_one_layer_is_merged_at_a_time():
    model = adapted(sizes={"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256})
    stream = export.tensors(model, "fine_grained", adapters="merged")
    last = model.base_model.model.model.layers[2].mlp.down_proj
    next(stream)
    # A layer is merged when its turn comes.
    with torch.no_grad():
        last.lora_B["default"].weight.zero_()
    found = dict(stream)
    plain = exported(last.get_base_layer().requires_grad_(False))
    assert torch.equal(found["model.layers.2.mlp.down_proj.weight_scale_inv"], plain["weight_scale_inv"])


def test_adapters_on_a_tied_weight_are_an_error():
    with pytest.warns(UserWarning, match="tie"):
        model = adapted("head and embedding", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"embed_tokens.*are one tensor.*tie_word_embeddings=False"):
        export.plan(model, "fine_grained", adapters="merged")


def test_trained_tokens_of_a_tied_embedding_stay_tied():
    model = adapted("tokens", tie_word_embeddings=True)
    ours = exported(model, adapters="merged")
    assert "lm_head.weight" not in ours
    same(ours, exported(model.merge_and_unload()))


def test_adapters_on_a_computed_weight_are_an_error():
    base = model_of()
    nn.utils.parametrizations.weight_norm(base.model.layers[0].mlp.gate_proj)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert "model.layers.0.mlp.gate_proj.weight" in exported(model, adapters="merged")
    nn.utils.parametrizations.weight_norm(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer)
    with pytest.raises(ValueError, match="q_proj is computed.*make that permanent"):
        exported(model, adapters="merged")
