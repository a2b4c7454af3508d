"""Functions of each rank in the tests of weights that are swapped for their moving average and back."""

import contextlib
import copy

import torch
from fsdp_cases import Setup, build, digest, tokens_of
from fsdp_models import Llama, initialize
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather


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


def data_assignment(model, held, values):
    for name, p in held.items():
        p.data = values[name]


SWAPS = {
    "data_copy": data_copy,
    "counted_copy": counted_copy,
    "load": load,
    "load_assigned": load_assigned,
    "local_copy": local_copy,
}


def copies(held):
    return {name: p.detach().clone() for name, p in held.items()}


def evaluate(model, reshard, mode=torch.no_grad):
    """Losses of the model, and the output of a layer that is called past the model's forward."""
    with mode():
        found = [model(tokens_of(micro)).item() for micro in (3, 4)]
        # As many tokens as in the step: a compiled layer need not be compiled again.
        found.append(model.layers[0](torch.ones(2, 7, 42).cumsum(1)).float().sum().item())
    if reshard:
        # FSDP2 computes on with the weights that it left gathered: alone it does not see a swap.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    return found


def step(model, optimizer, average, held):
    loss = model(tokens_of(0))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, p in held.items():
            average[name].lerp_(p.detach(), 0.5)
    return loss.item()


def swapped(mesh, swap, setup, reshard=False, once=False, undisturbed=False):
    """Train; evaluate the weights, their average and the weights; train on. All losses and the final weights."""
    model, _ = build(mesh, setup)
    held = dict(model.named_parameters())
    optimizer, average = torch.optim.AdamW(held.values(), lr=1e-2), copies(held)
    losses = [step(model, optimizer, average, held) for _ in range(2)]
    evaluations = []
    if not undisturbed:
        block = tritonfp8.quantize_weights_once if once else lambda model: contextlib.nullcontext()
        stored = copies(held)
        for values in (None, average, stored):
            if values is not None:
                SWAPS[swap](model, held, values)
            with block(model):
                evaluations.append(evaluate(model, reshard))
    losses += [step(model, optimizer, average, held) for _ in range(2)]
    return losses, digest(model), evaluations


def gathered_during(mesh, setup, swap):
    """The number of all-gathers of an evaluation after another one: without a swap between them, and with one."""
    from tritonfp8.distributed import count_collective_bytes

    model, _ = build(mesh, setup)
    held = dict(model.named_parameters())
    evaluate(model, False)
    found = []
    for scale in (None, 1.5):
        if scale is not None:
            SWAPS[swap](model, held, {name: scale * x for name, x in copies(held).items()})
        with torch.no_grad(), count_collective_bytes() as counted:
            model(tokens_of(3))
        found.append(counted.calls["all_gather"])
    return found


def told(mesh, run):
    """The error of a swap that cannot work."""
    model, _ = build(mesh, Setup())
    held = dict(model.named_parameters())
    model(tokens_of(0)).backward()
    values = {name: 1.5 * x for name, x in copies(held).items()}
    try:
        {"assign": assign, "gathered": write_gathered, "inside": swap_inside, "deepcopy": deepcopy}[run](
            model, held, values
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def assign(model, held, values):
    data_assignment(model, held, values)
    model(tokens_of(0))


def write_gathered(model, held, values):
    """Write to what ``model.parameters()`` gives after an evaluation: some of it is gathered."""
    evaluate(model, False)
    model.last.weight.data.copy_(torch.zeros(67, 42))


def swap_inside(model, held, values):
    """Swap inside a block and back: what the block left is as before."""
    stored = copies(held)
    with tritonfp8.quantize_weights_once(model):
        evaluate(model, False)
        data_copy(model, held, values)
        evaluate(model, False)
        data_copy(model, held, stored)
        evaluate(model, False)


def deepcopy(model, held, values):
    copy.deepcopy(model)


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


def averaged(mesh, enabled):
    """Train with an AveragedModel that was made before sharding; its losses, its recipes, and its weights."""
    model = initialize(Llama())
    tritonfp8.convert(model, {"last": "tensorwise", "*.up": "blockwise", "*": "rowwise"})
    if enabled:
        enable_float8_all_gather(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for each in (model, average.module):
        for layer in each.layers:
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(each, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        loss = model(tokens_of(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            losses += [loss.item(), average(tokens_of(1)).item()]
        average.module.reshard()
    recipes = {name: m.recipe.name for name, m in average.module.named_modules() if hasattr(m, "recipe")}
    return losses, recipes, digest(average.module), digest(model)
