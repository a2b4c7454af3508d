"""The report names every parameter that no converted layer has, with its share of the linear FLOPs and the reason."""

import dataclasses

import peft
import pytest
import torch
import transformers
from cases import each_recipe, llama
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from tritonfp8 import convert, recipes, swap_recipe

LLAMA = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}


def left(report):
    return {name: (each.flops, each.reason) for name, each in report.high_precision.items()}


def check_shares(report, model):
    """Each parameter with two dims or more is in a converted layer or in the report, and shares add up to 1."""
    converted = {
        f"{layer}.{key}"
        for layer in report.converted
        for key, parameter in model.get_submodule(layer).named_parameters()
        if parameter.ndim >= 2
    }
    names = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    assert converted | set(report.high_precision) == names | converted
    assert converted.isdisjoint(report.high_precision)
    assert sum(each.share for each in report.high_precision.values()) + report.fp8_share == pytest.approx(1)


def test_a_llama():
    model = llama()
    report = convert(model, "rowwise")
    head = 2 * 128 * 64
    assert left(report) == {
        "model.embed_tokens.weight": (0, "an embedding: its rows are looked up"),
        "lm_head.weight": (head, report.skipped["lm_head"]),
    }
    linears = sum(2 * m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    assert report.fp8_share == pytest.approx(1 - head / linears)
    assert str(report).splitlines()[0].endswith("; 92 % of the linear FLOPs run in FP8")
    assert "  skipped (8 % of the FLOPs): an output head" in str(report)
    check_shares(report, model)


def test_a_tied_head_counts_once():
    model = llama(tie_word_embeddings=True)
    report = convert(model, "rowwise")
    assert list(report.high_precision) == ["model.embed_tokens.weight"]
    assert report.high_precision["model.embed_tokens.weight"].flops == 2 * 128 * 64
    assert report.high_precision["model.embed_tokens.weight"].layer == "lm_head"
    check_shares(report, model)
    report = convert(model, {"lm_head": "rowwise"})
    assert report.high_precision == {}
    assert report.fp8_share == 1


@each_recipe
def test_gemms_in_high_precision_do_not_count(recipe):
    report = convert(nn.Sequential(nn.Linear(32, 32)), recipe)
    assert report.fp8_share == pytest.approx(recipes.get(recipe).quantized_share)


def test_experts_in_one_tensor():
    config = transformers.Qwen3MoeConfig(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, intermediate_size=32, **LLAMA
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    report = convert(model, "rowwise", ["*_proj"])
    at = "model.layers.0.mlp"
    assert left(report)[f"{at}.experts.gate_up_proj"] == (
        2 * 64 * 64 * 2,
        "no pattern of the filter matches it; 2 of 8 experts a token",
    )
    assert left(report)[f"{at}.gate.weight"] == (2 * 64 * 8, "of Qwen3MoeTopKRouter, which is no nn.Linear")
    check_shares(report, model)


class Experts(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 32, 16))
        self.linear = nn.Linear(32, 32)
        for name, value in attributes.items():
            setattr(self, name, value)


def test_experts_of_an_unknown_number_all_count():
    report = convert(Experts(), "rowwise")
    flops, reason = left(report)["weight"]
    assert flops == 2 * 4 * 32 * 16
    assert reason.endswith("all 4 experts counted, as the number that a token takes is not known")
    assert left(convert(Experts(top_k=1), "rowwise"))["weight"][0] == 2 * 32 * 16
    assert left(convert(Experts(top_k=9), "rowwise"))["weight"][0] == flops


@each_recipe
def test_experts_in_a_list(recipe):
    block = nn.Module()
    block.top_k = 1
    block.experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(32, 32), "small": nn.Linear(32, 8)}) for _ in range(4))
    report = convert(block, recipe)
    assert left(report)["experts.0.small.weight"] == (2 * 32 * 8 / 4, "out_features=8 below 16; 1 of 4 experts a token")
    assert report.fp8_share == pytest.approx(recipes.get(recipe).quantized_share * 32 / (32 + 8))


def test_modules_that_multiply_past_a_linear_layer():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(32, 2),
            "convolution": nn.Conv1d(16, 16, 3),
            "bilinear": nn.Bilinear(16, 16, 16),
            "linear": nn.Linear(32, 32),
            "lookup": nn.EmbeddingBag(10, 16),
        }
    )
    model.positions = nn.Parameter(torch.zeros(9, 32))
    model.class_row = nn.Parameter(torch.zeros(1, 1, 32))
    report = convert(model, "rowwise")
    assert left(report) == {
        "positions": (0, "of ModuleDict: added or looked up, by its name and shape"),
        "class_row": (0, "of ModuleDict: added or looked up, by its name and shape"),
        "attention.in_proj_weight": (2 * 96 * 32, "in_proj_weight of MultiheadAttention, which no layer multiplies by"),
        "attention.out_proj.weight": (2 * 32 * 32, report.skipped["attention.out_proj"]),
        "convolution.weight": (2 * 16 * 16 * 3, "a Conv1d, counted for one position"),
        "bilinear.weight": (2 * 16**3, "of Bilinear, which is no nn.Linear"),
        "lookup.weight": (0, "an embedding: its rows are looked up"),
    }
    check_shares(report, model)
    text = str(report)
    assert "parameters of no linear layer, with their share of the linear FLOPs:" in text
    assert "attention.out_proj  skipped (10 % of the FLOPs): a subclass" in text


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_a_subclass_is_named():
    model = nn.ModuleList([Doubled(64, 64), nn.Linear(64, 64)])
    report = convert(model, "rowwise")
    reasons = {each.reason for each in report.high_precision.values() if each.flops}
    assert reasons == {"a subclass of nn.Linear (Doubled), which may compute something else"}
    check_shares(report, model)


class Packed(nn.Linear):
    """As bitsandbytes' Linear4bit: two codes a byte, in one column."""

    def __init__(self):
        super().__init__(32, 32)
        self.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)


def test_lazy_and_packed_layers():
    report = convert(nn.Sequential(nn.Linear(32, 32), nn.LazyLinear(32), Packed()), "rowwise")
    assert {name: each.flops for name, each in report.high_precision.items()} == {"2.weight": 2 * 32 * 32}
    assert list(report.skipped) == ["1", "2"]


def test_parametrized_layers():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    parametrizations.orthogonal(model[0])
    report = convert(model, "rowwise")
    assert {each.layer for each in report.high_precision.values()} == {"0"}
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    assert not [name for name in convert(model, "rowwise").high_precision if name.startswith("1.")]


def test_adapters_count():
    model = peft.get_peft_model(llama(num_hidden_layers=1), peft.LoraConfig(r=16, target_modules=["up_proj"]))
    report = convert(model, "rowwise")
    assert sum("lora_" in name for name in report.high_precision) == 2
    check_shares(report, model)


def test_a_swap_reports_recipes_alone():
    model = llama()
    convert(model, "rowwise")
    report = swap_recipe(model, "blockwise")
    assert (report.high_precision, report.fp8_share) == ({}, None)
    assert "FLOPs" not in str(report)


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (1, "100 %"),
        (0.003, "0.3 %"),
        (0.997, "99.7 %"),
        (1e-4, "< 0.1 %"),
        (0.9999, "> 99.9 %"),
        (0.9142, "91 %"),
    ],
)
def test_shares_are_whole_percents_where_that_hides_nothing(share, text):
    report = dataclasses.replace(convert(nn.Sequential(nn.Linear(32, 32)), "rowwise"), fp8_share=share)
    assert str(report).splitlines()[0].endswith(f"; {text} of the linear FLOPs run in FP8")
