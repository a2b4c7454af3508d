"""FSDP2 with FP8 all-gather where things go wrong or unusual ways: nothing hangs, and errors say what to do."""

import functools
from collections import Counter
from unittest import mock

import pytest
import torch
from cases import QUANTIZED
from fsdp_cases import BFLOAT16, Setup, build, digest, same_as_without, step, tokens_of, train
from fsdp_models import Linears, initialize
from raised import raised
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import tritonfp8
from tritonfp8 import ops
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.distributed.fsdp import grouped
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]


def train_with_empty_batch(mesh, enabled, recipe):
    """Two steps in which one rank has an empty batch, and some ranks have no rows of some weights."""
    model = initialize(Linears([(131, 42), (40, 130), (5, 40), (1, 64)]))
    tritonfp8.convert(model, recipe, filter=lambda module, name: True)
    if enabled:
        enable_float8_all_gather(model)
    fully_shard(model, mesh=mesh, mp_policy=BFLOAT16, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(0 if mesh.get_local_rank() == 1 else 3, 130, requires_grad=True)
    losses = [step(lambda: model(x).square().sum(), optimizer) for _ in range(2)]
    return losses, digest(model)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_empty_batch_and_empty_shards_on_some_ranks(ranks, recipe):
    same_as_without(ranks, 4, train_with_empty_batch, recipe=recipe)


def train_tied(mesh, enabled, recipe):
    """Train two layers that share one weight and both give it gradients."""
    model = initialize(Linears([(131, 64), (131, 64), (40, 64)]))
    tritonfp8.convert(model, recipe, filter=lambda module, name: True)
    model.layers[1].weight = model.layers[0].weight
    if enabled:
        # Weights, not layers.
        assert len(enable_float8_all_gather(model).converted) == 2
    fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(192.0).reshape(3, 64).sin()
    losses = [step(lambda x: model(x).square().sum(), optimizer, x + number) for number in range(3)]
    return losses, digest(model)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_layers_that_share_a_weight(ranks, recipe):
    [(losses, _), *_], _ = same_as_without(ranks, 3, train_tied, recipe=recipe)
    assert len(set(losses)) == 3


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


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_reshard_that_changes_between_micro_batches(ranks, recipe):
    same_as_without(ranks, 2, toggle_reshard, recipe=recipe)


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


def test_explicit_unshard_and_prefetch(ranks):
    same_as_without(ranks, 2, unshard_first)


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


def test_error_inside_forward(ranks):
    assert ranks.run(2, raise_inside_forward) == [True] * 2


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


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_scales_of_an_interrupted_forward_are_not_used_for_weights_that_changed(ranks, recipe):
    same_as_without(ranks, 2, interrupt_inside_forward, recipe=recipe)


def check_resharded_and_not(ranks, function, recipe, both=True):
    """Plain FSDP2 gives the same bits whether it reshards or not, so it runs once."""
    _, off = same_as_without(ranks, 2, function, recipe, True)
    if both:
        assert ranks.run(2, function, recipe, False, enabled=True) == off


def inference_first(mesh, recipe, reshard, enabled):
    """Train after a forward in inference mode, which allocates FSDP's gather buffers.

    Without the FP8 gather FSDP cannot write to inference tensors later, so that run evaluates under no_grad.
    """
    evaluation = torch.inference_mode if enabled else torch.no_grad
    model, _ = build(mesh, Setup(recipe, enabled, reshard=reshard))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    with evaluation():
        losses.append(model(tokens_of(0)).item())
    for _ in range(2):
        losses.append(step(model, optimizer, tokens_of(0)))
        with evaluation():
            losses.append(model(tokens_of(1)).item())
    return losses, digest(model)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_training_after_a_first_forward_in_inference_mode(ranks, recipe):
    check_resharded_and_not(ranks, inference_first, recipe)


def in_autocast(mesh, recipe, reshard, enabled):
    """Train inside autocast without a MixedPrecisionPolicy, evaluate outside of it."""
    model, _ = build(mesh, Setup(recipe, enabled, reshard=reshard, param_dtype=None))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    forward = torch.autocast("cpu", torch.bfloat16)(model)
    for micro in range(3):
        losses.append(step(forward, optimizer, tokens_of(micro)))
        with torch.no_grad():
            losses.append(model(tokens_of(micro)).item())
    return losses, digest(model)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_autocast_without_a_mixed_precision_policy(ranks, recipe):
    # Without resharding both orientations are gathered at once: of recipes that read one, and that read two.
    check_resharded_and_not(ranks, in_autocast, recipe, both=recipe in ("rowwise", "blockwise"))


def copies_after_evaluation(mesh, enabled, path, reshard):
    """Copy, save and load parameters after a forward without backward, which leaves some of them gathered."""
    model, _ = build(mesh, Setup(enabled=enabled, reshard=reshard))
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


@pytest.mark.parametrize("reshard", [True, False])
def test_copies_of_parameters_after_an_evaluation_are_those_of_plain_fsdp2(ranks, reshard, tmp_path):
    same_as_without(ranks, 3, copies_after_evaluation, path=str(tmp_path), reshard=reshard)


def gathered_weights(model):
    """The names of the converted layers that read gathered weights in forward."""
    found = set()

    def note(name, module):
        if isinstance(module.weight, GatheredWeight):
            found.add(name)

    for name, module in model.named_modules():
        if isinstance(module, tritonfp8.Float8Linear):
            module.register_forward_pre_hook(lambda module, args, name=name: note(name, module))
    with torch.no_grad():
        model(tokens_of(0))
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


def test_a_revert_that_fails_leaves_the_gather_as_it_was(ranks):
    assert ranks.run(2, revert_that_fails) == [(15, True)] * 2


def revert_sharded(mesh):
    """``revert`` after ``fully_shard``: whether loss and parameters equal the loss and parameters of bf16."""
    model, _ = build(mesh, Setup())
    plain, _ = build(mesh, Setup(enabled=False))
    model(tokens_of(0)).backward()
    model.zero_grad()
    for each in (model, plain):
        tritonfp8.revert(each)
    return model(tokens_of(0)).item() == plain(tokens_of(0)).item(), digest(model) == digest(plain)


def test_revert_of_a_sharded_model(ranks):
    assert ranks.run(2, revert_sharded) == [(True, True)] * 2


def errors(mesh):
    """Error messages of unsupported calls, by call."""
    model, _ = build(mesh, Setup())
    model(tokens_of(0))

    def nested():
        with tritonfp8.quantize_weights_once(model), tritonfp8.quantize_weights_once(model):
            pass

    def autocast():
        model, _ = build(mesh, Setup(param_dtype=None))
        layer = model.layers[0]
        forward = layer.forward
        layer.forward = lambda x: torch.autocast("cpu", torch.bfloat16)(forward)(x)
        model(tokens_of(0))

    def above():
        model = nn.Sequential(nn.Sequential(tritonfp8.Float8Linear(64, 32, recipe="rowwise")))
        enable_float8_all_gather(model[0])
        fully_shard(model, mesh=mesh)
        model(torch.ones(1, 64))

    def twice():
        model = nn.Sequential(*(tritonfp8.Float8Linear(size, 32, recipe="rowwise") for size in (64, 32)))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
        enable_float8_all_gather(model[0])
        enable_float8_all_gather(model)

    told = {"once": raised(nested)}
    model.layers[0].unshard()
    weight = model.layers[0].up.weight
    told |= {"float": raised(weight.float), "decay": raised(lambda: weight.detach().mul_(0.9)), "repr": repr(weight)}
    model.layers[0].reshard()
    return told | {
        "autocast": raised(autocast),
        "above": raised(above),
        "tensor parallel twice": raised(twice),
    }


def test_errors_say_what_to_do(ranks):
    told, other = ranks.run(2, errors)
    assert told.keys() == other.keys()
    for what, words in {
        "once": ("ValueError", "blocks do not nest"),
        "float": ("NotImplementedError", "values of a weight that FSDP gathered in 8 bits"),
        "decay": ("NotImplementedError", "model.reshard()"),
        "autocast": ("NotImplementedError", "around the call of the model"),
        "above": ("RuntimeError", "outermost"),
        "tensor parallel twice": ("ValueError", "enable_float8_all_gather once"),
        "repr": ("GatheredWeight", "bfloat16"),
    }.items():
        assert all(word in told[what] for word in words), told[what]


def train_grouped(mesh, setup, steps):
    """As :func:`fsdp_cases.train`, with shards that the ops cast together; and how often each op was called."""
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


@pytest.fixture(scope="module")
def cast_alone(ranks):
    """Runs with shards cast one by one. Options change none of their bits on a CPU, so each recipe has one."""
    return functools.cache(lambda recipe: ranks.run(2, train, Setup(recipe), 2))


GROUPED = {"eager": {}, "together": {"reshard": False}, "compiled": {"compile": "whole"}}


# The hooks that cast are not compiled: one recipe shows it.
@pytest.mark.parametrize(
    ("recipe", "how"), [("rowwise", how) for how in GROUPED] + [("tensorwise", "eager"), ("tensorwise", "together")]
)
def test_shards_that_ops_cast_together(ranks, cast_alone, recipe, how):
    found = ranks.run(2, train_grouped, Setup(recipe, **GROUPED[how]), 2)
    for expected, (trained, called) in zip(cast_alone(recipe), found, strict=True):
        assert trained == expected
        # One call a forward for all amaxes.
        assert called["amax_of_shards"] == 2
        assert called["quantize_shards"] > 0
