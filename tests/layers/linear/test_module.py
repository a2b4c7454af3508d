"""Float8Linear is an nn.Linear in everything but the arithmetic of its products."""

import copy

import pytest
import torch
from cases import normal, with_gradients
from torch import nn

from tritonfp8 import Float8Linear, functional, recipes
from tritonfp8.specs.testing import assert_bitwise_equal

each_recipe = pytest.mark.parametrize("name", recipes.names())


def make(cls=Float8Linear, **kwargs):
    torch.manual_seed(0)
    if cls is Float8Linear:
        kwargs.setdefault("recipe", "rowwise")
    return cls(70, 20, dtype=torch.bfloat16, **kwargs)


def test_parameters_are_those_of_linear():
    ours, theirs = make(), make(nn.Linear)
    assert isinstance(ours, nn.Linear)
    assert_bitwise_equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert list(ours.state_dict()) == ["weight", "bias"]
    assert list(make(bias=False).state_dict()) == ["weight"]
    assert (ours.in_features, ours.out_features) == (70, 20)


@each_recipe
def test_forward_and_backward_are_those_of_the_function(name):
    layer, x = make(recipe=name), normal(2, 33, 70, dtype=torch.bfloat16).requires_grad_()
    wanted, grad = (x, layer.weight, layer.bias), normal(2, 33, 20, seed=1, dtype=torch.bfloat16)
    outs = layer(x), functional.linear(*wanted, name)
    assert_bitwise_equal(*(with_gradients(out, wanted, grad) for out in outs))


def test_recipe_by_name_or_object():
    variant = recipes.Recipe("mine", output=recipes.get("mxfp8").output)
    assert make(recipe="mxfp8").recipe is recipes.get("mxfp8")
    assert make(recipe=variant).recipe is variant
    with pytest.raises(ValueError, match="did you mean 'blockwise'"):
        make(recipe="blokwise")


def test_a_layer_without_a_recipe_is_an_error():
    """A class does not carry the recipe of the layer that somebody took it from."""
    layer = make(recipe="mxfp8")
    with pytest.raises(TypeError, match=r"needs recipe=.*type\(layer\).*recipe=layer\.recipe"):
        type(layer)(layer.in_features, layer.out_features)
    assert copy.copy(layer).recipe is layer.recipe


def test_repr_names_the_recipe():
    assert repr(make(recipe="mxfp8")) == "Float8Linear(in_features=70, out_features=20, bias=True, recipe='mxfp8')"


def test_copies_moves_and_casts_as_linear():
    layer = make()
    twin = copy.deepcopy(layer).float()
    assert type(twin) is Float8Linear
    assert twin.recipe is layer.recipe is recipes.get("rowwise")
    assert twin.weight.dtype == twin(normal(5, 70)).dtype == torch.float32
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.weight.any()


def test_meta_device_then_weights():
    layer, x = make(), normal(5, 70, dtype=torch.bfloat16)
    with torch.device("meta"):
        empty = make()
    assert empty.weight.is_meta
    assert empty(torch.empty(2, 3, 70, device="meta", dtype=torch.bfloat16)).shape == (2, 3, 20)
    empty.load_state_dict(layer.state_dict(), strict=True, assign=True)
    allocated = make(device="meta").to_empty(device="cpu")
    allocated.load_state_dict(layer.state_dict(), strict=True)
    assert_bitwise_equal([empty(x), allocated(x)], [layer(x)] * 2)


def test_state_dict_loads_with_weights_only(tmp_path):
    layer = make()
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    plain = make(nn.Linear).requires_grad_(False)
    plain.load_state_dict(state, strict=True)
    assert_bitwise_equal(dict(plain.state_dict()), dict(layer.state_dict()))


@each_recipe
def test_functional_call_and_hooks(name):
    """The parameters are read at each call, through the module."""
    layer = make(recipe=name)
    x = normal(5, 70, dtype=torch.bfloat16)
    zeros = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    assert not torch.func.functional_call(layer, zeros, (x,)).any()
    seen = []
    layer.register_forward_hook(lambda module, args, out: seen.append(out))
    out = layer(x)
    assert seen[0] is out
