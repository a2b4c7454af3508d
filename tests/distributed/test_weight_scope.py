"""quantize_weights_once on sharded weights: the bits of the plain run, with fewer casts, and never stale codes."""

import contextlib

import pytest
import torch
from cases import CODES, QUANTIZED
from cast_counts import Casts
from fsdp_cases import Setup, build, digest, tokens_of
from mlp import MLP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonfp8
from tritonfp8 import recipes

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]
PROCESSES = 2
MICRO = 3
# Casts of a micro-batch that are not of weights: four inputs a block and one of the head, 15 gradients of outputs.
CASTS = 2 * 4 + 1 + 15


def fsdp(mesh, once, **options):
    """Losses, digest of the trained weights, and the number of casts in all but the first micro-batch of each step."""
    model, _ = build(mesh, Setup(**options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, later = [], 0
    for _ in range(2):
        with tritonfp8.quantize_weights_once(model) if once else contextlib.nullcontext():
            for micro in range(MICRO):
                model.set_requires_gradient_sync(micro == MICRO - 1)
                with Casts() as casts:
                    loss = model(tokens_of(micro))
                    loss.backward()
                losses.append(loss.item())
                later += len(casts.shapes) if micro else 0
        optimizer.step()
        optimizer.zero_grad()
    return (losses, digest(model)), later


SHARDED = {
    "FSDP2": {"recipe": "rowwise"},
    "FSDP2 hp": {"recipe": "rowwise_hp_grad_weight"},
    "FSDP2 blockwise": {"recipe": "blockwise"},
    "together": {"recipe": "tensorwise", "reshard": False},
    "FSDP2 codes": {"recipe": CODES["rowwise"]},
    "HSDP": {"recipe": "mxfp8", "copies": 2},
    "HSDP codes": {"recipe": CODES["mxfp8"], "copies": 2},
}


# Plainly gathered weights are the weights of one process, where each recipe is tested.
@pytest.mark.parametrize(("enabled", "how"), [*((True, how) for how in SHARDED), (False, "FSDP2"), (False, "together")])
def test_fsdp(ranks, enabled, how):
    (on, casts), (off, most) = (
        ranks.run(2, fsdp, once=once, enabled=enabled, **SHARDED[how])[0] for once in (True, False)
    )
    assert on == off
    # The casts of inputs and of gradients of outputs, in two micro-batches of each of two steps.
    assert casts == 2 * 2 * CASTS < most


def fsdp_changed(mesh, how, **options):
    """The error of a change of weights inside the block; or the two losses that follow a change, inside and after."""
    model, _ = build(mesh, Setup(**options))
    model(tokens_of(0)).backward()
    found = []
    try:
        with tritonfp8.quantize_weights_once(model):
            model(tokens_of(0)).backward()
            for p in model.parameters():
                if how == "counted":
                    with torch.no_grad():
                        p.mul_(1.5)
                else:
                    p.data._local_tensor.data.mul_(1.5)
            loss = model(tokens_of(0))
            loss.backward()
            found.append(loss.item())
    except RuntimeError as error:
        return str(error)
    found.append(model(tokens_of(0)).item())
    return found


@pytest.mark.parametrize("how", ["counted", "uncounted"])
@pytest.mark.parametrize("enabled", [True, False], ids=["gather", "plain"])
def test_a_change_inside_the_block(ranks, enabled, how):
    told = ranks.run(2, fsdp_changed, how=how, enabled=enabled)[0]
    if enabled and how == "counted":
        assert told[0] == told[1]
    else:
        assert "changed inside quantize_weights_once" in told


def tensor_parallel(mesh, recipe, compiled):
    """Outputs and gradients inside the block are the bits outside; returns the casts saved in a pass."""
    torch.manual_seed(0)
    model = MLP()
    tritonfp8.convert(model, recipe)
    names = [name for name, _ in model.named_children()]
    styles = {name: RowwiseParallel() if name.startswith("down") else ColwiseParallel() for name in names}
    parallelize_module(model, mesh, styles)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    x = torch.randn(6, 64)

    def step():
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        with contextlib.nullcontext() if compiled else Casts() as casts:
            out = run(leaf)
            out.sum().backward()
        return [out.detach(), leaf.grad, *(p.grad.full_tensor() for p in model.parameters())], casts

    expected, without = step()
    with tritonfp8.quantize_weights_once(model):
        (found, casts), (again, _) = step(), step()
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, found, again, strict=True))
    return 0 if compiled else len(without.shapes) - len(casts.shapes)


# Compiled layers of each recipe are tested in one process (tests/layers/linear/test_compile.py).
@pytest.mark.one_in(6)
@pytest.mark.parametrize(("recipe", "compiled"), [*((recipe, False) for recipe in QUANTIZED), ("rowwise", True)])
def test_tensor_parallel(ranks, recipe, compiled):
    # Each layer casts its weight for output and for grad_input, perhaps to MXFP4 first.
    casts = 6 if recipes.get(recipe).weights is None else 12
    assert ranks.run(2, tensor_parallel, recipe, compiled) == [0 if compiled else casts] * 2
