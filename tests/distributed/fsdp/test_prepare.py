"""What enable_float8_all_gather does to a model before it is sharded, in one process."""

import copy
import pickle

import pytest
import torch
from torch import nn

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import enable_float8_all_gather


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
    assert list(report.converted) == ["2"]


def test_a_weight_shared_with_an_embedding_is_skipped():
    model = nn.ModuleDict({"embed": nn.Embedding(40, 32), "head": nn.Linear(32, 40), "other": nn.Linear(32, 32)})
    model["head"].weight = model["embed"].weight
    tritonfp8.convert(model, {"head": "rowwise", "*": "rowwise"})
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


def test_deepcopy_is_a_model_of_its_own():
    model = model_of()
    model[2].weight.requires_grad_(False)
    enable_float8_all_gather(model)
    other = copy.deepcopy(model)
    sources = [layer.on_revert.__self__ for layer in (other[0], other[2], model[0])]
    assert sources[0] is sources[1]
    assert sources[0] is not sources[2]
    assert sources[0].model is other
    assert {name: weight.owners for name, weight in sources[0].weights.items()} == {
        "0": [(other[0], "weight")],
        "2": [(other[2], "weight")],
    }
    assert [p.requires_grad for p in other.parameters()] == [True, True, False]


def test_revert_gives_the_model_before():
    model = model_of()
    before = dict(model.named_parameters())
    model[2].weight.requires_grad_(False)
    enable_float8_all_gather(model)
    tritonfp8.revert(model)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert [p.requires_grad for p in model.parameters()] == [True, True, False]
    tritonfp8.convert(model, "rowwise")
    assert list(enable_float8_all_gather(model).converted) == ["0", "2"]


def test_every_parameter_stays_the_object_that_it_was():
    """Whoever holds it (an optimizer, an EMA, a client that finds parameters by pointer) goes on with the same one."""
    model = model_of()
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters()}
    hooks = [p.register_hook(lambda grad: None) for p in model.parameters()]
    enable_float8_all_gather(model)
    assert len(hooks) == len(before)
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert type(p) is nn.Parameter
        assert p.data_ptr() == before[name][1] == p.untyped_storage().data_ptr()
    assert len({p.data_ptr() for p in model.parameters()}) == len(before)


def test_an_optimizer_made_before_steps_the_weights_of_the_model():
    plain, model = model_of(), model_of()
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        states = []
        for each in (plain, model):
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.01, **options)
            if each is model and options.get("foreach"):
                enable_float8_all_gather(model)
            before = [p.detach().clone() for p in each.parameters()]
            loss_of(each)
            optimizer.step()
            assert not any(torch.equal(p, old) for p, old in zip(each.parameters(), before, strict=True))
            states.append([p.detach().clone() for p in each.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_memory_is_that_of_a_plain_parameter(tmp_path):
    """What dlpack, safetensors, sharing between processes and torch.save look at."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = model_of()
    enable_float8_all_gather(model)
    weight = model[0].weight
    shared = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach()))
    assert shared.data_ptr() == weight.data_ptr()
    safetensors.save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], p) for name, p in model.named_parameters())
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.save(copies, tmp_path / "ema.pt")
    assert torch.load(tmp_path / "ema.pt", weights_only=True).keys() == copies.keys()
    assert not weight.is_shared()
    model.share_memory()
    assert weight.is_shared()
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16)
    assert model(torch.ones(3, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="convert the model first"):
        enable_float8_all_gather(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="cast must be one of 'param_dtype', 'master'"):
        enable_float8_all_gather(model_of(), "fp8")
    model = model_of()
    enable_float8_all_gather(model)
    with pytest.raises(ValueError, match="once"):
        enable_float8_all_gather(model)
