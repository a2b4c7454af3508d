"""Functions of each rank in the tests of quantize_weights_once on sharded weights."""

import contextlib

import torch
from cast_counts import Casts
from fsdp_cases import Setup, build, digest, tokens_of
from mlp import MLP
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonfp8

MICRO = 3


def fsdp(mesh, once, steps=2, change="", **options):
    """Losses, digest of the trained weights, and the number of casts in all but the first micro-batch of each step."""
    model, _ = build(mesh, Setup(**options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, later = [], 0
    for _ in range(steps):
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
    return losses, digest(model), later


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


def tensor_parallel(mesh, recipe, compiled):
    """Whether outputs and gradients inside the block are those outside; and the casts saved in a pass."""
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
        grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
        return [out.detach(), leaf.grad, *grads], 0 if compiled else len(casts.shapes)

    expected, without = step()
    with tritonfp8.quantize_weights_once(model):
        (found, casts), (again, _) = step(), step()
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, found, again, strict=True))
    return same, without - casts
