"""Weights of experts that are stored in 8 bits: what differs from weights of linear layers, and whole models."""

import pytest
import torch
from cases import QUANTIZED, cpu_and_cuda, normal
from mixtures import experts_of, model_of
from stored_layers import EXPERTS, EXPERTS_KIND, HIDDEN, MXFP4, check_bits, stored, stored_and_plain
from torch import nn

import tritonfp8
from tritonfp8.layers.stored import MatricesShard, StoredMatrices, store
from tritonfp8.specs.testing import assert_bitwise_equal

each_recipe = pytest.mark.parametrize("name", [*QUANTIZED, MXFP4])
IDS = torch.arange(24).reshape(2, 12) * 7 % 96


@cpu_and_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_recipe
def test_the_bits_of_plain_experts(name, dtype, device):
    check_bits(EXPERTS_KIND, name, dtype, device)


@each_recipe
def test_codes_and_values_are_those_of_each_matrix_single(name):
    weight, plain = stored(EXPERTS_KIND, name).gate_up_proj, EXPERTS_KIND.of_recipe(name).gate_up_proj.detach()
    for i, matrix in enumerate(plain):
        single = store(matrix, weight.spec)
        assert_bitwise_equal([weight._qdata[i]], [single._qdata])
        assert torch.equal(weight._scale[i].float(), single._scale.float())
        assert_bitwise_equal([weight.dequantize()[i]], [single.dequantize()])
    again = StoredMatrices.of(weight.dequantize(), weight.spec)
    assert_bitwise_equal([again.dequantize()], [weight.dequantize()])


@pytest.mark.parametrize("before", [False, True], ids=["converted now", "converted before"])
def test_a_report_names_experts_that_keep_their_weights(before):
    """Experts that train follow their recipe, and cannot do so by stored weights."""
    model = model_of("mixtral")
    if before:
        assert tritonfp8.convert(model, "rowwise").unstored_experts == {}
    report = tritonfp8.convert(model, "tensorwise", weight_storage="quantized")
    why = "they train: requires_grad_(False) or mode='inference' lets them be stored"
    assert report.unstored_experts == dict.fromkeys(experts_of(model), why)
    assert "model.layers.0-1.mlp.experts (2x)" in str(report)
    assert f"4 experts, weights in high precision: {why}" in str(report)
    for each in experts_of(model).values():
        assert {type(p) for p in each.parameters()} == {nn.Parameter}
        assert each.recipe.name == ("rowwise" if before else "tensorwise")
        assert each.down_proj.requires_grad
    assert report.stored_bytes[0] > 0
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(each.down_proj.grad is not None for each in experts_of(model).values())
    assert tritonfp8.convert(model, "rowwise", mode="inference").unstored_experts == {}


def test_weights_that_lie_transposed_have_their_codes_in_the_order_of_rows():
    model = model_of("gpt_oss", torch.bfloat16)
    before = next(iter(experts_of(model).values())).gate_up_proj.detach().clone()
    tritonfp8.convert(model, "rowwise", mode="inference")
    weight = next(iter(experts_of(model).values())).gate_up_proj
    expected = StoredMatrices.of(before.mT, weight.spec)
    assert weight.is_transposed
    assert weight.shape == before.shape
    assert_bitwise_equal([weight._qdata], [expected._qdata])
    assert_bitwise_equal([weight.dequantize()], [expected.dequantize().mT])


def test_initialization_is_in_high_precision():
    module, plain = stored_and_plain(EXPERTS_KIND, "rowwise")
    for each in (module, plain):
        torch.manual_seed(3)
        each.reset_parameters()
    assert type(module.down_proj) is StoredMatrices
    expected = StoredMatrices.of(plain.down_proj, module.down_proj.spec)
    assert_bitwise_equal([module.down_proj._qdata], [expected._qdata])


def test_others_read_the_values_and_write_to_them():
    weight = stored(EXPERTS_KIND, "rowwise").gate_up_proj
    x, values = normal(EXPERTS, 3, HIDDEN, dtype=torch.bfloat16), weight.dequantize()
    assert torch.equal(torch.bmm(x, weight.mT), torch.bmm(x, values.mT))
    assert torch.equal(nn.functional.linear(x[0], weight[1]), nn.functional.linear(x[0], values[1]))
    with torch.no_grad():
        weight[2].fill_(2.0)
    assert (weight.dequantize()[2] == 2).all()
    assert torch.equal(weight.dequantize()[:2], values[:2])


def test_experts_that_were_trained_are_stored_later():
    model = model_of("mixtral", torch.bfloat16)
    tritonfp8.convert(model, "tensorwise")
    report = tritonfp8.convert(model, "rowwise", mode="inference")
    for name, each in experts_of(model).items():
        assert type(each.down_proj) is StoredMatrices
        assert report.already[name].name == each.recipe.name == "tensorwise_stored"
    now, before = report.stored_bytes
    assert now < 0.51 * before


def test_revert_gives_plain_weights_of_the_values():
    model = model_of("qwen3_moe", torch.bfloat16)
    before = {name: type(each) for name, each in experts_of(model).items()}
    tritonfp8.convert(model, "rowwise", mode="inference")
    values = model.state_dict()
    tritonfp8.revert(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_bitwise_equal(list(model.state_dict().values()), list(values.values()))
    for name, each in experts_of(model).items():
        assert type(each) is before[name]
        assert not each._state_dict_hooks
        assert not each._load_state_dict_pre_hooks
        assert not {"on_revert", "on_reset", "on_assign", "recipe"} & each.__dict__.keys()


def test_a_base_that_is_frozen_is_stored_beside_weights_that_train():
    model = model_of("qwen3_moe")
    for each in experts_of(model).values():
        each.requires_grad_(False)
    tritonfp8.convert(model, "rowwise", weight_storage="quantized")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    optimizer = tritonfp8.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    moved = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert moved == {name for name in before if ".experts." not in name}


@each_recipe
def test_shards_are_whole_experts(name):
    weight = stored(EXPERTS_KIND, name).gate_up_proj.detach()
    first, second = torch.split(weight, 3)
    assert type(first) is type(second) is MatricesShard
    assert (len(first), len(second)) == (3, 1)
    joined = [torch.cat(each) for each in zip(first.as_bytes(), second.as_bytes(), strict=True)]
    assert_bitwise_equal(list(weight.of_bytes(*joined)), list(weight._both()))
    assert_bitwise_equal([torch.cat([first.dequantize(), second.dequantize()])], [weight.dequantize()])
    assert weight.new_zeros((0, *weight.shape[1:])).dequantize().shape == (0, *weight.shape[1:])
    for dim in (1, 2):
        with pytest.raises(NotImplementedError, match="are sharded over experts only"):
            torch.split(weight, 16, dim)
    with pytest.raises(NotImplementedError, match="cut between experts only"):
        first[:, 3:8]
