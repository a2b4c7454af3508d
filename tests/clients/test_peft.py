"""LoRA of peft on a converted base: adapters train in high precision, the frozen base computes in FP8."""

from contextlib import nullcontext

import peft
import pytest
import torch
from callback_cases import llama as llama_of
from cases import each_recipe
from mixtures import model_of
from transformers import LlamaForCausalLM

import tritonfp8
from tritonfp8 import Float8Linear
from tritonfp8.compat.counting import count_gemms
from tritonfp8.layers.stored import StoredWeight
from tritonfp8.specs.testing import assert_bitwise_equal

LORA = {"r": 16, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "up_proj"], "lora_dropout": 0.0}
EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
TOKENS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


def llama():
    return llama_of(64, use_cache=True)


def adapted(order, recipe):
    """The model and the report of convert, which comes before the adapters or after them."""
    model, lora = llama(), peft.LoraConfig(**LORA)
    if order == "convert first":
        report = tritonfp8.convert(model, recipe)
        torch.manual_seed(1)
        return peft.get_peft_model(model, lora), report
    torch.manual_seed(1)
    model = peft.get_peft_model(model, lora)
    return model, tritonfp8.convert(model, recipe)


def train(model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        verified = tritonfp8.verify_training(model, optimizer, on_failure="warn") if step == 0 else nullcontext()
        with verified:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.one_in(3)
@each_recipe
@pytest.mark.parametrize("order", ["convert first", "convert last"])
def test_adapters_train_and_the_base_stays(order, recipe):
    model, report = adapted(order, recipe)
    assert not [name for name in report.converted if "lora" in name]
    # The adapters of three projections a layer.
    assert len([n for n, m in model.named_modules() if "lora_" in n and type(m) is torch.nn.Linear]) == 2 * 3 * 2
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    assert len([m for m in model.modules() if isinstance(m, Float8Linear)]) == 2 * 7


def test_the_order_of_convert_and_adapters_leaves_the_bits():
    results = [train(adapted(order, "rowwise")[0]) for order in ("convert first", "convert last")]
    assert_bitwise_equal(*results)


def test_every_layer_of_the_base_is_verified():
    model, report = adapted("convert last", "rowwise")
    found = tritonfp8.verify(model, input_ids=TOKENS, labels=TOKENS)
    assert found.layers.keys() == report.converted.keys()
    # A frozen weight has no gradient to compute.
    assert all("grad_weight" not in layer.gemms for layer in found.layers.values())


def test_adapters_follow_a_recipe_if_a_pattern_names_them():
    model = peft.get_peft_model(llama(), peft.LoraConfig(**LORA))
    report = tritonfp8.convert(model, {"*lora_*": "rowwise", "*": "rowwise"})
    assert [name for name in report.converted if "lora_A" in name]


def test_merged_adapters_are_in_the_converted_weights():
    model, _ = adapted("convert first", "rowwise")
    train(model)
    model.eval()
    merged = model.merge_and_unload()
    assert len([m for m in merged.modules() if isinstance(m, Float8Linear)]) == 2 * 7
    # All weights of a merged model are frozen.
    assert tritonfp8.verify(merged, backward=False, input_ids=TOKENS).ok


def stored(model, recipe):
    """The base's weights in 8 bits; adapters and everything else stay as they are."""
    tritonfp8.convert(model, recipe, mode="inference")
    return model


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("order", ["stored first", "stored last"])
def test_adapters_on_a_stored_base_train_as_on_a_plain_base_of_its_values(order, recipe):
    torch.manual_seed(1)
    if order == "stored first":
        model = peft.get_peft_model(stored(llama(), recipe), peft.LoraConfig(**LORA))
    else:
        model = stored(peft.get_peft_model(llama(), peft.LoraConfig(**LORA)), recipe)
    plain, _ = adapted("convert last", recipe)
    plain.load_state_dict(model.state_dict())
    codes = {name: p for name, p in model.named_parameters() if type(p) is StoredWeight}
    assert len(codes) == 14
    assert not [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    before = {name: p.quantized.qdata.clone() for name, p in codes.items()}
    assert_bitwise_equal([train(model)], [train(plain)])
    trained = [{n: p.detach() for n, p in each.named_parameters() if "lora_" in n} for each in (model, plain)]
    assert trained[0].keys() == trained[1].keys()
    assert_bitwise_equal(list(trained[0].values()), list(trained[1].values()))
    for name, p in codes.items():
        assert_bitwise_equal([p.quantized.qdata], [before[name]])


def test_adapters_are_not_merged_into_codes():
    model = stored(peft.get_peft_model(llama(), peft.LoraConfig(**LORA)), "rowwise")
    with pytest.raises(NotImplementedError, match="would round a frozen weight that is stored in 8 bits"):
        model.merge_and_unload()
    tritonfp8.revert(model)
    assert type(model.merge_and_unload()) is LlamaForCausalLM


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_adapters_on_the_parameters_of_experts_train(recipe):
    """peft computes the weights of experts from base and adapters; the experts quantize the sum, in both orders."""
    losses = {}
    for order in ("convert first", "adapters first"):
        model = model_of("mixtral")
        if order == "convert first":
            tritonfp8.convert(model, recipe)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, **EXPERTS))
        if order == "adapters first":
            tritonfp8.convert(model, recipe)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        for _ in range(2):
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.setdefault(order, []).append(loss.item())
        assert sum(p.requires_grad for p in model.parameters()) == 8
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) != p.requires_grad, name
        with count_gemms() as counts:
            model(input_ids=TOKENS)
        # Four projections of attention and two grouped GEMMs in each of two layers.
        assert counts.calls == {"reference": 12}
    assert losses["convert first"] == losses["adapters first"]


@pytest.mark.parametrize("targets", [{"target_modules": ["q_proj", "v_proj"]}, EXPERTS], ids=["attention", "experts"])
def test_adapters_train_over_stored_experts(targets):
    """As on plain experts of the same values."""
    models = model_of("qwen3_moe"), model_of("qwen3_moe")
    tritonfp8.convert(models[0], "rowwise", mode="inference")
    models[1].load_state_dict(models[0].state_dict())
    models[1].requires_grad_(False)
    tritonfp8.convert(models[1], "rowwise")
    losses, adapters = [], []
    for model in models:
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, **targets))
        losses.append(train(model))
        adapters.append([p.detach() for name, p in model.named_parameters() if "lora_" in name])
    assert losses[0][-1] < losses[0][0]
    assert_bitwise_equal([losses[0], *adapters[0]], [losses[1], *adapters[1]])
