"""Functions of each rank in the tests of the limits of the FP8 all-gather."""

from collections import Counter
from dataclasses import replace
from unittest import mock

import torch
from cases import give_up
from fsdp_cases import Setup, build, digest, gathered_weights, tokens_of, train
from fsdp_models import Linears, Llama, initialize, recomputed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather


def train_with_empty_batch(mesh, enabled, recipe):
    """Two steps in which one rank has an empty batch, and some ranks have no rows of some weights."""
    model = initialize(Linears([(131, 42), (40, 130), (5, 40), (1, 64)]))
    tritonfp8.convert(model, recipe, filter=lambda module, name: True)
    if enabled:
        enable_float8_all_gather(model)
    fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        x = torch.ones(0 if mesh.get_local_rank() == 1 else 3, 130, requires_grad=True)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def train_tied(mesh, enabled, recipe):
    """Train two layers that share one weight and both give it gradients."""
    model = initialize(Linears([(131, 64), (131, 64), (40, 64)]))
    tritonfp8.convert(model, recipe, filter=lambda module, name: True)
    model.layers[1].weight = model.layers[0].weight
    gathered = len(enable_float8_all_gather(model).converted) if enabled else None
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        loss = model(torch.arange(192.0).reshape(3, 64).sin() + step).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (losses, digest(model)), gathered


def fail_on_rank_1(mesh, how):
    """A step in which rank 1 fails or skips a layer."""
    model, _ = build(mesh, Setup())
    model(tokens_of(0)).backward()
    if mesh.get_local_rank() == 1:
        give_up(how)
        if how == "skip":
            del model.layers[1]
    return model(tokens_of(0)).item()


def raise_inside_forward(mesh):
    """Whether scales are computed again after a forward that raised; None if none raised."""
    model, _ = build(mesh, Setup())
    source = model.layers[0].up.on_revert.__self__
    model.layers[1].o.register_forward_pre_hook(lambda module, args: 1 / 0)
    try:
        model(tokens_of(0))
    except ZeroDivisionError:
        return not source._in_forward
    return None


class Interrupted(BaseException):
    """Like KeyboardInterrupt, not an Exception: torch runs no hooks when it ends a forward."""


def interrupt_inside_forward(mesh, enabled, recipe):
    """Outputs after a forward of the model was interrupted and all weights were multiplied by 15."""
    model, _ = build(mesh, Setup(recipe, enabled))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(tokens_of(0)).backward()
    optimizer.zero_grad()

    def stop(module, args):
        raise Interrupted

    handle = model.layers[1].register_forward_pre_hook(stop)
    try:
        model(tokens_of(0))
    except Interrupted:
        handle.remove()
    # The optimizer has the sharded parameters, even if the interrupted forward left some gathered.
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_(15)
    x = torch.ones(1, 3, 42).cumsum(1)
    outs = [model.layers[0](x), model.layers[1](x)]
    with torch.no_grad():
        outs += [model(tokens_of(1))]
    return [out.detach().float().flatten().tolist() for out in outs]


def inference_first(mesh, enabled, recipe, reshard):
    """Train after a forward in inference mode, which allocates FSDP's gather buffers.

    Without the FP8 gather FSDP cannot write to inference tensors later, so that run evaluates under no_grad.
    """
    evaluation = torch.inference_mode if enabled else torch.no_grad
    model, _ = build(mesh, Setup(recipe, enabled, reshard=reshard))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    with evaluation():
        losses.append(model(tokens_of(0)).item())
    for _ in range(2):
        loss = model(tokens_of(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with evaluation():
            losses.append(model(tokens_of(1)).item())
    return losses, digest(model)


def in_autocast(mesh, enabled, recipe, reshard):
    """Train inside autocast without a MixedPrecisionPolicy, evaluate outside of it."""
    model, _ = build(mesh, Setup(recipe, enabled, reshard=reshard, param_dtype=None))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for micro in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens_of(micro))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(tokens_of(micro)).item())
    return losses, digest(model)


def disagree(mesh, how):
    """The error of ranks that gather by different recipes of one size."""
    spec = tritonfp8.recipes.get("tensorwise").output.rhs
    other = {
        "rounding": replace(spec, scale_rounding="pow2"),
        "format": replace(spec, format="e5m2"),
    }.get(how, spec)
    base = tritonfp8.recipes.get("tensorwise")
    mine = replace(base, output=replace(base.output, rhs=other), grad_input=replace(base.grad_input, rhs=other))
    rank = mesh.get_local_rank()
    recipe = {"layers.1.up": mine if rank == 1 else base, "*": base}
    model = initialize(Llama())
    tritonfp8.convert(model, recipe)
    enable_float8_all_gather(model)
    fully_shard(model, mesh=mesh)
    if how == "swapped later":
        model(tokens_of(0))
        name = "rowwise" if rank == 1 else "blockwise"
        tritonfp8.swap_recipe(model, {"layers.0.q": name, "*": "tensorwise"})
    try:
        return model(tokens_of(0)).item()
    except RuntimeError as error:
        return str(error)


def changes_alone(mesh, how, copies=None, first="rowwise"):
    """The errors of a forward after rank 1 alone changed a recipe, and after it changed it back; then the loss."""
    model, _ = build(mesh, Setup(first, copies=copies, param_dtype=None))
    rank = torch.distributed.get_rank()
    expected = model(tokens_of(0)).item()
    model(tokens_of(0)).sum().backward()
    if rank == 1:
        if how == "reverted":
            tritonfp8.revert(model)
        else:
            tritonfp8.swap_recipe(model, {"layers.0.q": how, "*": first} if how == "blockwise" else how)
    told = []
    for _ in range(2):
        try:
            model(tokens_of(0))
        except RuntimeError as error:
            told.append(str(error))
    if how != "reverted":
        tritonfp8.swap_recipe(model, first)
        assert model(tokens_of(0)).item() == expected
    return told


def toggle_reshard(mesh, enabled, recipe):
    """Accumulate gradients without resharding between micro-batches (ZeRO-2), then with it (ZeRO-3)."""
    model, _ = build(mesh, Setup(recipe, enabled))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        for micro, last in enumerate((False, False, True)):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_forward(last)
            model.set_reshard_after_backward(last)
            loss = model(tokens_of(micro))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, digest(model)


def unshard_first(mesh, enabled):
    """Train with explicit prefetching: gathers start before a forward needs them."""
    model, _ = build(mesh, Setup(enabled=enabled))
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])
    losses = []
    for _ in range(2):
        handle = model.unshard(async_op=True)
        model.layers[1].unshard()
        handle.wait()
        loss = model(tokens_of(0))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.grad)
        model.zero_grad()
    return losses, digest(model)


def _teller():
    told = {}

    def tell(what, function):
        try:
            function()
        except Exception as error:
            told[what] = f"{type(error).__name__}: {error}"

    return told, tell


def order_errors(mesh):
    """Error messages for calls in a wrong order, by call."""
    told, tell = _teller()

    def twice():
        model = nn.Sequential(
            tritonfp8.Float8Linear(64, 32, recipe="rowwise"), tritonfp8.Float8Linear(32, 32, recipe="rowwise")
        )
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
        enable_float8_all_gather(model[0])
        enable_float8_all_gather(model)

    tell("tensor parallel twice", twice)
    return told


def errors(mesh):
    """Error messages of unsupported calls, by call."""
    told, tell = _teller()

    model, _ = build(mesh, Setup())
    model(tokens_of(0))

    def nested():
        with tritonfp8.quantize_weights_once(model), tritonfp8.quantize_weights_once(model):
            pass

    tell("once", nested)
    model.layers[0].unshard()
    weight = model.layers[0].up.weight
    tell("float", lambda: weight.float())
    tell("decay", lambda: weight.detach().mul_(0.9))
    told["repr"] = repr(weight)
    model.layers[0].reshard()

    def autocast():
        model, _ = build(mesh, Setup(param_dtype=None))
        layer = model.layers[0]
        forward = layer.forward
        layer.forward = lambda x: torch.autocast("cpu", torch.bfloat16)(forward)(x)
        model(tokens_of(0))

    tell("autocast", autocast)

    def columns():
        model = tritonfp8.Float8Linear(64, 32, recipe="rowwise")
        enable_float8_all_gather(model)
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        model(torch.ones(1, 64))

    tell("columns", columns)

    def above():
        model = nn.Sequential(nn.Sequential(tritonfp8.Float8Linear(64, 32, recipe="rowwise")))
        enable_float8_all_gather(model[0])
        fully_shard(model, mesh=mesh)
        model(torch.ones(1, 64))

    tell("above", above)
    return told


def copies_after_evaluation(mesh, enabled, path, **options):
    """Copy, save and load parameters after a forward without backward, which leaves some of them gathered."""
    model, _ = build(mesh, Setup(enabled=enabled, **options))
    with torch.no_grad():
        model(tokens_of(0))
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    wide = {name: p.detach().to(torch.float64) for name, p in model.named_parameters()}
    file = f"{path}/{mesh.get_local_rank()}.pt"
    torch.save(copies, file)
    loaded = torch.load(file, weights_only=True)
    found = {}
    for name, copy in copies.items():
        local = getattr(copy, "_local_tensor", copy)
        assert torch.equal(getattr(loaded[name], "_local_tensor", loaded[name]), local)
        assert torch.equal(getattr(wide[name], "_local_tensor", wide[name]).to(local.dtype), local)
        found[name] = type(copy).__name__, type(local).__name__, str(local.dtype), local.float().tolist()
    return found


def revert_that_fails(mesh):
    """A revert whose last layer raises: number of layers still gathered in 8 bits, and whether the loss is the same."""
    model, _ = build(mesh, Setup("tensorwise"))
    loss = model(tokens_of(0)).item()
    model.reshard()

    def fail(layer):
        raise KeyboardInterrupt

    release, model.last.on_revert = model.last.on_revert, fail
    try:
        tritonfp8.revert(model)
    except KeyboardInterrupt:
        model.last.on_revert = release
    gathered = gathered_weights(model)
    return len(gathered), loss == model(tokens_of(0)).item()


def revert_sharded(mesh):
    """``revert`` after ``fully_shard``: whether loss and parameters equal those of bf16."""
    model, _ = build(mesh, Setup())
    plain, _ = build(mesh, Setup(enabled=False))
    model(tokens_of(0)).backward()
    model.zero_grad()
    for each in (model, plain):
        tritonfp8.revert(each)
    return model(tokens_of(0)).item() == plain(tokens_of(0)).item(), digest(model) == digest(plain)


def train_grouped(mesh, setup, steps):
    """As :func:`fsdp_cases.train`, with shards that the ops cast together; and how often each op was called."""
    from tritonfp8 import ops
    from tritonfp8.distributed.fsdp import grouped

    called = Counter()

    def counted(name):
        op = getattr(ops, name)

        def call(*args):
            called[name] += 1
            return op(*args)

        return mock.patch.object(ops, name, call)

    # As on GPUs; here the dispatcher runs the reference.
    on_gpu = mock.patch.object(grouped, "runs_kernels", lambda shard: shard.is_contiguous())
    with on_gpu, counted("amax_of_shards"), counted("quantize_shards"):
        return train(mesh, setup, steps), called


def gathered_bytes(mesh, recipe, shape, enabled, recompute=None):
    """Bytes and number of one layer's collectives in a step, after a first forward, which registers the hooks."""
    from tritonfp8.distributed import count_collective_bytes

    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, device=mesh.device_type))
    tritonfp8.convert(model, recipe)
    if enabled:
        enable_float8_all_gather(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # In param_dtype: FSDP of torch 2.11 does not cast the input when it recomputes forward.
    x = torch.ones(2, shape[1], dtype=policy.param_dtype, requires_grad=True)
    with torch.no_grad():
        model(x)
    model.reshard()
    with count_collective_bytes() as counted:
        recomputed(model, x, recompute).sum().backward()
    return dict(counted.bytes), dict(counted.calls)
