"""What enable_float8_all_gather does to a model before it is sharded, in one process."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.distributed.gathered_weight import ShardedWeight


def model_of(recipe="rowwise"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32, bias=False))
    tritonfp8.convert(model, recipe)
    return model


def loss_of(model):
    loss = model(torch.linspace(-1, 1, 320).view(5, 64)).square().mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("recipe", recipes.names())
def test_report_names_every_converted_layer(recipe):
    if recipe == "bf16":
        with pytest.raises(ValueError, match="reads it in high precision"):
            enable_float8_all_gather(model_of(recipe))
        return
    report = enable_float8_all_gather(model_of(recipe))
    assert list(report.converted) == ["0", "2"]
    assert report.skipped == {}


def test_layers_that_read_the_values_are_skipped():
    model = model_of({"0": "bf16", "2": "rowwise"})
    report = enable_float8_all_gather(model)
    assert report.skipped == {"0": "recipe 'bf16' reads it in high precision"}
    assert not isinstance(model[0].weight, ShardedWeight)
    assert isinstance(model[2].weight, ShardedWeight)


def test_a_weight_shared_with_an_embedding_is_skipped():
    model = nn.ModuleDict({"embed": nn.Embedding(40, 32), "head": nn.Linear(32, 40), "other": nn.Linear(32, 32)})
    model["head"].weight = model["embed"].weight
    tritonfp8.convert(model, "rowwise")
    report = enable_float8_all_gather(model)
    assert report.skipped == {"head": "shared with embed.weight, which needs it in high precision"}
    assert model["head"].weight is model["embed"].weight


def test_tied_layers_stay_tied_or_are_skipped():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    other = copy.deepcopy(model)
    tritonfp8.convert(model, "rowwise")
    enable_float8_all_gather(model)
    assert model[0].weight is model[1].weight
    tritonfp8.convert(other, {"0": "rowwise", "*": "tensorwise"})
    report = enable_float8_all_gather(other)
    assert list(report.skipped) == ["0", "1"]
    assert "0, 1" in report.skipped["0"]


def test_what_it_computes_is_the_same_before_it_is_sharded():
    plain, model = model_of(), model_of()
    enable_float8_all_gather(model)
    assert loss_of(model) == loss_of(plain)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_state_dict_is_that_of_the_model_before():
    plain, model = model_of(), model_of()
    enable_float8_all_gather(model)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert pickle.loads(pickle.dumps(state)).keys() == state.keys()
    nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32, bias=False)).load_state_dict(state, strict=True)
    bf16 = {name: 2 * value.bfloat16() for name, value in plain.state_dict().items()}
    model.load_state_dict(bf16, strict=True)
    assert torch.equal(model.state_dict()["0.weight"], bf16["0.weight"].float())


def test_assign_keeps_the_weight_prepared():
    model = model_of()
    enable_float8_all_gather(model)
    state = model_of().state_dict()
    model.load_state_dict(state, assign=True)
    assert isinstance(model[0].weight, ShardedWeight)
    assert isinstance(model[0].weight, nn.Parameter)


def test_meta_and_dtype_changes_keep_the_weight_prepared():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 48))
    tritonfp8.convert(model, "rowwise")
    enable_float8_all_gather(model)
    model.to_empty(device="cpu").to(torch.bfloat16)
    assert isinstance(model[0].weight, ShardedWeight)
    assert model[0].weight.dtype == torch.bfloat16
    assert model[0].weight.device.type == "cpu"


def test_deepcopy_is_a_model_of_its_own():
    model = model_of()
    model[2].weight.requires_grad_(False)
    enable_float8_all_gather(model)
    other = copy.deepcopy(model)
    assert other[0].weight.source is other[2].weight.source
    assert other[0].weight.source is not model[0].weight.source
    assert other[0].weight.source.model is other
    assert isinstance(other[0].weight, nn.Parameter)
    assert [p.requires_grad for p in other.parameters()] == [True, True, False]
    with torch.no_grad():
        other[0].weight.zero_()
    assert model[0].weight.abs().max() > 0


def test_revert_gives_plain_parameters():
    model = model_of()
    weight = model[0].weight.detach().clone()
    model[2].weight.requires_grad_(False)
    enable_float8_all_gather(model)
    tritonfp8.revert(model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [True, True, False]
    assert torch.equal(model[0].weight, weight)
    tritonfp8.convert(model, "rowwise")
    assert list(enable_float8_all_gather(model).converted) == ["0", "2"]


def test_optimizers_work_on_prepared_weights():
    plain, model = model_of(), model_of()
    enable_float8_all_gather(model)
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        digests = []
        for each in (plain, model):
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.01, **options)
            loss_of(each)
            optimizer.step()
            digests.append([value.clone() for value in each.state_dict().values()])
        assert all(torch.equal(a, b) for a, b in zip(*digests, strict=True))
        assert not any(isinstance(x, ShardedWeight) for s in optimizer.state.values() for x in s.values())


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="convert the model first"):
        enable_float8_all_gather(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="cast must be one of 'param_dtype', 'master'"):
        enable_float8_all_gather(model_of(), "fp8")
    model = model_of()
    enable_float8_all_gather(model)
    with pytest.raises(ValueError, match="once"):
        enable_float8_all_gather(model)
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(model)
    with pytest.raises(TypeError, match="plain tensor"), tritonfp8.quantize_weights_once(model):
        pass


def test_copies_of_a_weight_keep_its_type_and_results_do_not():
    model = model_of()
    enable_float8_all_gather(model)
    weight = model[0].weight
    for same in (weight.detach(), weight.clone(), weight[:3], weight.bfloat16(), torch.empty_like(weight)):
        assert type(same) is ShardedWeight
    for plain in (weight + 1, weight.view(-1), torch.zeros_like(weight), weight.sum(), weight.t()):
        assert type(plain) is torch.Tensor
    assert weight.untyped_storage().data_ptr() == weight.view(-1).untyped_storage().data_ptr()
    assert "ShardedWeight(" in repr(weight)
