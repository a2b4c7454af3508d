"""Weights that are swapped for their moving average and back, in one process: no output is of old ones."""

import contextlib

import pytest
import torch
from cases import normal
from mlp import MLP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tritonfp8
from tritonfp8 import Float8Linear, recipes

MIXED = {"up_proj": "blockwise", "down_proj": "mxfp8", "*": "rowwise"}


def data_copy(model, values):
    for name, p in model.named_parameters():
        p.data.copy_(values[name])


@torch.no_grad()
def counted_copy(model, values):
    for name, p in model.named_parameters():
        p.copy_(values[name])


def data_assignment(model, values):
    for name, p in model.named_parameters():
        p.data = values[name].clone()


def load(model, values):
    model.load_state_dict(values)


def load_assigned(model, values):
    model.load_state_dict({name: x.clone() for name, x in values.items()}, assign=True)


SWAPS = [data_copy, counted_copy, data_assignment, load, load_assigned]


def converted(recipe, values=None):
    torch.manual_seed(0)
    model = MLP()
    tritonfp8.convert(model, recipe)
    if values is not None:
        model.load_state_dict(values)
    return model


def copies(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def step(run, model):
    """A step that is the same for the same weights; without an optimizer, which an assigned parameter would leave."""
    run(normal(8, 64)).square().sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1e-3 * p.grad)
    model.zero_grad()


def digest(model):
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("once", [False, True], ids=["", "quantize_weights_once"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
def test_evaluations_are_those_of_the_weights_that_were_swapped_in(swap, compiled, once):
    recipe, x = "rowwise", normal(5, 64)
    model, undisturbed = converted(recipe), converted(recipe)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    step(run, model)
    stored = copies(model)
    average = {name: 0.5 * value for name, value in stored.items()}
    found = []
    for values in (stored, average, stored):
        swap(model, values)
        with tritonfp8.quantize_weights_once(model) if once else contextlib.nullcontext(), torch.no_grad():
            found.append(run(x))
    assert torch.equal(found[0], found[2])
    with torch.no_grad():
        assert torch.equal(found[1], converted(recipe, average)(x))
    assert not torch.equal(found[0], found[1])
    step(run, model)
    for _ in range(2):
        step(undisturbed, undisturbed)
    assert digest(model) == digest(undisturbed)


@torch.no_grad()
def swap_inside(model, swap, values, stored):
    """Swap inside a block and back: what the block leaves is as before."""
    x = normal(5, 64)
    with tritonfp8.quantize_weights_once(model):
        model(x)
        swap(model, values)
        model(x)
        swap(model, stored)


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
def test_a_swap_inside_quantize_weights_once_is_an_error(swap):
    model, x = converted("rowwise"), normal(5, 64)
    stored = copies(model)
    average = {name: 0.5 * value for name, value in stored.items()}
    with pytest.raises(RuntimeError, match="changed inside quantize_weights_once"):
        swap_inside(model, swap, average, stored)
    # Nothing is left of the block.
    swap(model, average)
    with torch.no_grad():
        assert torch.equal(model(x), converted("rowwise", average)(x))


@pytest.mark.parametrize("recipe", [*recipes.names(), MIXED], ids=str)
def test_averaged_model_keeps_the_recipes_and_follows_the_weights(recipe):
    model, plain, x = converted(recipe), MLP(), normal(5, 64)
    plain.load_state_dict(model.state_dict())
    average, expected = (AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (model, plain))
    layers = {name: m for name, m in average.module.named_modules() if isinstance(m, Float8Linear)}
    assert {name: m.recipe for name, m in layers.items()} == {
        name: m.recipe for name, m in model.named_modules() if isinstance(m, Float8Linear)
    }
    for _ in range(3):
        step(model, model)
        plain.load_state_dict(model.state_dict())
        average.update_parameters(model)
        expected.update_parameters(plain)
        with torch.no_grad():
            assert torch.equal(average(x), converted(recipe, expected.module.state_dict())(x))
    assert digest(average.module) == digest(expected.module) != digest(model)


def test_an_averaged_model_made_inside_a_block_does_not_read_what_it_cached():
    model, x = converted("rowwise"), normal(5, 64)
    with tritonfp8.quantize_weights_once(model), torch.no_grad():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.module.up_proj.weight.mul_(2)
        assert torch.equal(average(x), converted("rowwise", average.module.state_dict())(x))
        assert torch.equal(model(x), converted("rowwise")(x))
