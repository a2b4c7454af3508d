"""Functions of each rank in the tests of trained weights that are stored in 8 bits and sharded."""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from process_group import made_mesh
from raised import raised
from stored_models import data, is_base, plain_model, shard, tp_plan, whole
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tritonfp8
from tritonfp8.distributed import count_collective_bytes
from tritonfp8.layers.stored import StoredWeight, direct, stored_part, whole_weight
from tritonfp8.optim import AdamW, with_masters


def trained_model(recipe, recompute=None, high_precision=False):
    """Linear layers of sizes that no block divides, one of fewer rows than ranks; all of it trained, in float32."""
    model = plain_model(torch.float32)
    model.requires_grad_(True)
    for block in model:
        block.recompute = recompute
    if not high_precision:
        tritonfp8.convert(model, recipe, filter=is_base, weight_storage="quantized")
    return model


def optimizer_of(model, moments="bf16", **options):
    return AdamW(model.parameters(), lr=1e-2, moments=moments, seed=5, **options)


def laid_out(mesh, layout, model):
    """The model on this mesh. All ranks see the same data: the mean of their gradients is the gradient of one rank."""
    size = mesh.size()
    if layout == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if layout in ("tp", "tp_fsdp2"):
        grid = made_mesh(mesh.device_type, (2, size // 2), ("dp", "tp")) if layout == "tp_fsdp2" else None
        parallelize_module(model, mesh if grid is None else grid["tp"], tp_plan(model))
        return model if grid is None else shard(model, grid["dp"])
    if layout != "single":
        # One rank needs no mesh of copies.
        copies = {"hsdp": 2, "hsdp of one": 1, "copies": size if size > 1 else None}.get(layout.removesuffix("_kept"))
        shard(model, mesh, copies=copies, reshard=not layout.endswith("_kept"))
    return model


def train(model, optimizer, steps, first=0, accumulate=1):
    losses = []
    for step in range(first, first + steps):
        for part in range(accumulate):
            loss = model(data(torch.float32, seed=10 * step + part)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bare(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def contents(model):
    """Codes and scales of each whole stored weight, and the other parameters."""
    found = {}
    for name, p in bare(model).named_parameters():
        p = p.detach()
        if stored_part(p) is None:
            found[name] = whole(p).clone()
            continue
        part = whole_weight(p)
        # Parts of rows are joined as values.
        found[f"{name} values"] = part.dequantize() if isinstance(part, StoredWeight) else part
        if isinstance(part, StoredWeight):
            found[name], found[f"{name} scale"] = part._qdata.view(torch.uint8), part._scale.float()
    return found


def assert_same(found, expected):
    assert {name for name in expected if "values" in name} <= found.keys()
    for name, x in found.items():
        assert torch.equal(x, expected[name]), f"{name}: {(x != expected[name]).sum()} of {x.numel()}"


def compares(mesh, recipe, layout, moments="bf16", recompute=None, accumulate=1, steps=2, masters=False):
    """A sharded model takes the steps of the whole one, to the bit; and each weight changes."""
    reference = trained_model(recipe, recompute)
    before = contents(reference)

    def made(model):
        if masters:
            return with_masters(torch.optim.AdamW)(model.parameters(), lr=1e-2, foreach=True)
        return optimizer_of(model, moments)

    losses = train(reference, made(reference), steps, accumulate=accumulate)
    model = laid_out(mesh, layout, trained_model(recipe, recompute))
    found = train(model, made(model), steps, accumulate=accumulate)
    assert torch.equal(torch.stack(found), torch.stack(losses)), (found, losses)
    after = contents(model)
    assert_same(after, contents(reference))
    for name, x in before.items():
        if "values" in name:
            assert (after[name] != x).float().mean() > 0.5, name
    return True


def give_gradients(reference, model, seed):
    """The same gradients for a whole model and for a sharded one."""
    generator = torch.Generator().manual_seed(seed)
    for p, q in zip(reference.parameters(), model.parameters(), strict=True):
        p.grad = q.grad = torch.randn(p.shape, generator=generator)
        if isinstance(q, DTensor):
            q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements, src_data_rank=None)


def compares_steps(mesh, recipe, layout, moments="bf16", steps=2):
    """As :func:`compares`, with the same gradients given: tensor parallelism rounds its own otherwise."""
    reference = trained_model(recipe)
    model = laid_out(mesh, layout, trained_model(recipe))
    before = contents(reference)
    optimizers = [optimizer_of(each, moments) for each in (reference, model)]
    for seed in range(steps):
        give_gradients(reference, model, seed)
        for optimizer in optimizers:
            optimizer.step()
    after, expected = contents(model), contents(reference)
    assert_same(after, expected)
    assert all((after[name] != x).float().mean() > 0.5 for name, x in before.items() if "values" in name)
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for index, q in enumerate(model.parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            x = theirs[index][key]
            assert isinstance(x, DTensor) == isinstance(q, DTensor)
            assert torch.equal(whole(x), ours[index][key])
    return True


def refused(mesh, moments):
    """The message of the error: of 8-bit moments in cut blocks."""
    model = laid_out(mesh, "tp", trained_model("rowwise"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return raised(lambda: optimizer_of(model, moments).step())


def reductions(mesh, recipe):
    """The collectives of an optimizer step: kinds and numbers."""
    model = laid_out(mesh, "fsdp2", trained_model(recipe))
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    model(data(torch.float32)).square().mean().backward()
    with count_collective_bytes() as counted:
        optimizer.step()
    return dict(counted.calls) if hasattr(counted, "calls") else dict(counted.bytes)


def gathers(mesh, recompute):
    """Bytes gathered in a step of FSDP2."""
    model = laid_out(mesh, "fsdp2", trained_model("rowwise", recompute))
    train(model, optimizer_of(model), 1)
    with count_collective_bytes() as counted:
        model(data(torch.float32)).square().mean().backward()
    return counted.bytes["all_gather"]


def save(mesh, folder, recipe, layout, moments, steps, total):
    """Train ``total`` steps, saving after ``steps``; returns the contents at the end."""
    model = laid_out(mesh, layout, trained_model(recipe))
    optimizer = optimizer_of(model, moments)
    train(model, optimizer, steps)
    _save(mesh, model, optimizer, folder)
    saved = contents(model)
    losses = train(model, optimizer, total - steps, first=steps)
    return saved, contents(model), losses


def load(mesh, folder, recipe, layout, moments, steps, total):
    """Load what :func:`save` saved, on any mesh, and go on."""
    model = laid_out(mesh, layout, trained_model(recipe))
    optimizer = optimizer_of(model, moments)
    _restore(mesh, model, optimizer, folder)
    saved = contents(model)
    losses = train(model, optimizer, total - steps, first=steps)
    return saved, contents(model), losses


def _states(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def _save(mesh, model, optimizer, folder):
    dcp.save(_states(model, optimizer), checkpoint_id=folder, process_group=mesh.get_group())


def _restore(mesh, model, optimizer, folder):
    states = _states(model, optimizer)
    dcp.load(states, checkpoint_id=folder, process_group=mesh.get_group())
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def through_high_precision(mesh, folder, recipe, layout, moments):
    """Load into a model and optimizer of torch, save these, and load them back; the contents at the end."""
    plain = laid_out(mesh, layout, trained_model(recipe, high_precision=True))
    optimizer = torch.optim.AdamW(plain.parameters())
    _restore(mesh, plain, optimizer, folder)
    _save(mesh, plain, optimizer, f"{folder}-plain")
    model = laid_out(mesh, layout, trained_model(recipe))
    ours = optimizer_of(model, moments)
    _restore(mesh, model, ours, f"{folder}-plain")
    state = ours.state_dict()["state"]
    theirs = optimizer.state_dict()["state"]
    assert state.keys() == theirs.keys()
    for index, values in theirs.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(whole(values[key]), whole(state[index][key]))
    return contents(model)


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"foreach": False, "lr": 0.02}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True, "lr": 0.02}),
    "adamw fused": (torch.optim.AdamW, {"fused": True, "lr": 0.02}),
    "sgd": (torch.optim.SGD, {"foreach": False, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd foreach": (torch.optim.SGD, {"foreach": True, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd small": (torch.optim.SGD, {"foreach": False, "lr": 1e-12}),
}


def steps_directly(mesh, recipe, layout, optimizer, steps=3):
    """Whether torch's optimizer gives shards the codes of unsharded weights; the warnings and counts of the ranks."""
    kind, options = OPTIMIZERS[optimizer]
    reference = trained_model(recipe)
    model = laid_out(mesh, layout, trained_model(recipe))
    before = contents(model)
    steppers = [kind(each.parameters(), **options) for each in (reference, model)]
    direct._counts = direct._Counts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(steps):
            give_gradients(reference, model, seed)
            steppers[1].step()
            found = direct.direct_steps()
            direct._counts, kept = direct._Counts(), direct._counts
            steppers[0].step()
            direct._counts = kept
    after, expected = contents(model), contents(reference)
    if options.get("fused"):
        # torch's fused kernel rounds the last elements of a vector otherwise, and shards end elsewhere.
        plain = {name for name, p in model.named_parameters() if stored_part(p) is None}
        after = {name: x for name, x in after.items() if name not in plain}
    assert_same(after, expected)
    changed = [(after[name] != x).float().mean().item() for name, x in before.items() if "values" in name]
    messages = [str(each.message) for each in caught if "of their codes changed" in str(each.message)]
    return min(changed), found, messages
