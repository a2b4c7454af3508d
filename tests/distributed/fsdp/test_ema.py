"""Weights that are swapped for their moving average and back, as EMA does: no evaluation and no step uses old ones."""

import contextlib
import copy
import functools
from dataclasses import replace

import covering
import pytest
import torch
from cases import QUANTIZED
from fsdp_cases import BFLOAT16, Setup, build, digest, same_as_without, step, tokens_of
from fsdp_models import Llama, initialize
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tritonfp8
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(4)]
PROCESSES = 2


def data_copy(model, held, values):
    """As EMAModel of diffusers does in store, copy_to and restore."""
    for name, p in held.items():
        p.data.copy_(values[name].data)


@torch.no_grad()
def counted_copy(model, held, values):
    for name, p in held.items():
        p.copy_(values[name])


def load(model, held, values):
    model.load_state_dict(dict(values))


def load_assigned(model, held, values):
    """Puts other parameters into the model; last the optimizer's own, with their old values."""
    stored = values is not held and all(torch.equal(p.to_local(), values[n].to_local()) for n, p in held.items())
    model.load_state_dict(held if stored else dict(values), assign=True)


def local_copy(model, held, values):
    for name, p in held.items():
        p.to_local().data.copy_(values[name].to_local())


SWAPS = {each.__name__: each for each in (data_copy, counted_copy, load, load_assigned, local_copy)}


def copies(held, factor=1):
    return {name: factor * p.detach().clone() for name, p in held.items()}


def evaluate(model, reshard=False):
    """Losses of the model, and the output of a layer that is called past the model's forward."""
    with torch.no_grad():
        found = [model(tokens_of(micro)).item() for micro in (3, 4)]
        # As many tokens as in the step: a compiled layer need not be compiled again.
        found.append(model.layers[0](torch.ones(2, 7, 42).cumsum(1)).float().sum().item())
    if reshard:
        # FSDP2 computes on with the weights that it left gathered: by itself it does not see a swap.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return found


def swapped(mesh, swap, setup, reshard=False, once=False, undisturbed=False):
    """Train; evaluate the weights, their average and the weights; train on. All losses and the final weights."""
    model, _ = build(mesh, setup)
    held = dict(model.named_parameters())
    optimizer, average = torch.optim.AdamW(held.values(), lr=1e-2), copies(held)
    losses, evaluations = [], []

    def train():
        for _ in range(2):
            losses.append(step(model, optimizer, tokens_of(0)))
            with torch.no_grad():
                for name, p in held.items():
                    average[name].lerp_(p.detach(), 0.5)

    train()
    if not undisturbed:
        block = tritonfp8.quantize_weights_once if once else lambda model: contextlib.nullcontext()
        stored = copies(held)
        for values in (None, average, stored):
            if values is not None:
                SWAPS[swap](model, held, values)
            with block(model):
                evaluations.append(evaluate(model, reshard))
    train()
    return losses, digest(model), evaluations


@pytest.fixture(scope="module")
def known(ranks):
    """Runs that several tests compare with, each made once."""
    return functools.cache(functools.partial(ranks.run, 2, swapped))


def check(ranks, known, swap, setup, once=False):
    """The losses, also of evaluations, are the losses of plain FSDP2, and of training without any evaluation."""
    on = ranks.run(2, swapped, swap, setup, once=once)
    assert on == known(swap, replace(setup, enabled=False), reshard=True)
    # Plain FSDP2 trains on undisturbed, and a third run of compiled code would take seconds.
    if not setup.compile:
        assert [run[:2] for run in on] == [run[:2] for run in known(None, setup, undisturbed=True)]
    for _, _, (before, average, after) in on:
        assert before == after
        assert all(a != b for a, b in zip(before, average, strict=True))


# A swap is seen before any recipe is read: the tests below have each swap with one of them.
@pytest.mark.parametrize(("swap", "recipe"), covering.each(list(SWAPS), QUANTIZED))
def test_evaluations_are_those_of_the_weights_that_were_swapped_in(ranks, known, swap, recipe):
    check(ranks, known, swap, Setup(recipe))


# With and without a block of quantize_weights_once around an evaluation, each swap with one of them.
@pytest.mark.parametrize(("swap", "once"), [*((swap, True) for swap in SWAPS), ("data_copy", False)])
def test_of_weights_that_fsdp2_leaves_gathered(ranks, known, swap, once):
    check(ranks, known, swap, Setup(reshard=False), once)


@pytest.mark.parametrize(
    "setup", [Setup(tied=True), Setup("tensorwise", compile="block"), Setup(offload=True)], ids=str
)
def test_options(ranks, known, setup):
    check(ranks, known, "data_copy", setup)


# Weights that FSDP2 reshards. The test above has weights that stay gathered, with each swap.
def test_a_block_of_quantize_weights_once_for_each_set_of_weights(ranks, known):
    check(ranks, known, "data_copy", Setup(), once=True)


def gathered_during(mesh, swap):
    """The number of all-gathers of an evaluation after another one: without a swap between them, and with one."""
    model, _ = build(mesh, Setup())
    held = dict(model.named_parameters())
    evaluate(model)
    found = []
    for factor in (None, 1.5):
        if factor is not None:
            SWAPS[swap](model, held, copies(held, factor))
        with torch.no_grad(), count_collective_bytes() as counted:
            model(tokens_of(3))
        found.append(counted.calls["all_gather"])
    return found


@pytest.mark.parametrize("swap", SWAPS)
def test_weights_stay_gathered_where_none_was_swapped(ranks, swap):
    # Those of two blocks; after a swap, of the outermost module as well.
    assert ranks.run(2, gathered_during, swap) == [[2, 3]] * 2


def assign(model, held, values):
    for name, p in held.items():
        p.data = values[name]
    model(tokens_of(0))


def write_gathered(model, held, values):
    """Write to what ``model.parameters()`` gives after an evaluation: some of it is gathered."""
    evaluate(model)
    model.last.weight.data.copy_(torch.zeros(67, 42))


def swap_inside(model, held, values):
    """Swap inside a block and back: what the block left is as before."""
    stored = copies(held)
    with tritonfp8.quantize_weights_once(model):
        evaluate(model)
        for each in (values, stored):
            data_copy(model, held, each)
            evaluate(model)


def deepcopy(model, held, values):
    copy.deepcopy(model)


def told(mesh, swap):
    """The error of a swap that cannot work."""
    model, _ = build(mesh, Setup())
    held = dict(model.named_parameters())
    model(tokens_of(0)).backward()
    try:
        swap(model, held, copies(held, 1.5))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    ("swap", "words"),
    [
        (assign, ("RuntimeError", "layers.0-1.down", "torch ignores", "param.data.copy_")),
        (write_gathered, ("NotImplementedError", "model.reshard()")),
        (swap_inside, ("RuntimeError", "weights changed inside quantize_weights_once", "last")),
        (deepcopy, ("AssertionError", "FSDP does not support deepcopy")),
    ],
)
def test_swaps_that_cannot_work_are_errors(ranks, swap, words):
    for message in ranks.run(2, told, swap):
        assert all(word in message for word in words), message


def not_assigned(mesh):
    """Changes that put other tensors in place of the shards and are no lost assignment."""
    model, _ = build(mesh, Setup())
    losses = [model(tokens_of(0)).item()]
    for change in (
        lambda: model.to("cpu"),
        lambda: model.to(torch.float64),
        lambda: model.to(torch.float32),
        lambda: model.load_state_dict(model.state_dict(), assign=True),
        lambda: model.requires_grad_(False),
        lambda: model.cpu(),
    ):
        model.reshard()
        change()
        losses.append(model(tokens_of(0)).item())
    return losses


def test_other_changes_are_no_lost_assignment(ranks):
    for losses in ranks.run(2, not_assigned):
        assert len(set(losses)) == 1


def averaged(mesh, enabled):
    """Train with an AveragedModel that was made before sharding; its losses, its recipes, and its weights."""
    model = initialize(Llama())
    tritonfp8.convert(model, {"last": "tensorwise", "*.up": "blockwise", "*": "rowwise"})
    if enabled:
        enable_float8_all_gather(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for each in (model, average.module):
        for module in (*each.layers, each):
            fully_shard(module, mesh=mesh, mp_policy=BFLOAT16)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        losses.append(step(model, optimizer, tokens_of(0)))
        average.update_parameters(model)
        with torch.no_grad():
            losses.append(average(tokens_of(1)).item())
        average.module.reshard()
    recipes = {name: m.recipe.name for name, m in average.module.named_modules() if hasattr(m, "recipe")}
    return losses, recipes, digest(average.module), digest(model)


def test_an_averaged_model_made_before_sharding_follows_the_recipes(ranks):
    [(losses, recipes, average, trained), _], _ = same_as_without(ranks, 2, averaged)
    assert set(recipes.values()) == {"tensorwise", "blockwise", "rowwise"}
    assert len(set(losses)) == len(losses)
    assert average != trained
