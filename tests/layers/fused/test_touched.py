"""Fused modules and what is not the formula, what came before and what comes after: nothing is dropped silently."""

import copy
import itertools
import pickle
import threading

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from cases import normal
from mlp import MLP
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize, prune

from tritonfp8 import convert, revert
from tritonfp8.layers.fused.modules import Float8RMSNorm, Float8SwiGLU
from tritonfp8.layers.linear import QuantizedInput
from tritonfp8.testing import assert_bitwise_equal


def block(reader=MLP):
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(64), MLP(activation=nn.SiLU()) if reader is MLP else nn.Linear(64, 32))


def run(model, x):
    out = model(x)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return out, *torch.autograd.grad(out, [x, *parameters], torch.ones_like(out))


def forward_hook(model, name):
    return model.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out).remove


def forward_pre_hook(model, name):
    def double(module, args):
        assert isinstance(args[0], torch.Tensor)
        return (2 * args[0],)

    return model.get_submodule(name).register_forward_pre_hook(double).remove


def backward_hook(model, name):
    def double(module, grads, _):
        return tuple(2 * grad for grad in grads)

    return model.get_submodule(name).register_full_backward_hook(double).remove


def backward_pre_hook(model, name):
    def double(module, grads):
        return tuple(2 * grad for grad in grads)

    return model.get_submodule(name).register_full_backward_pre_hook(double).remove


def accelerate_hook(model, name):
    class Double(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    add_hook_to_module(model.get_submodule(name), Double())
    return lambda: remove_hook_from_module(model.get_submodule(name))


def own_forward(model, name):
    module = model.get_submodule(name)
    old = type(module).forward
    module.forward = lambda x: 2 * old(module, x)
    return lambda: module.__dict__.pop("forward")


def pruned(model, name):
    mask = torch.ones_like(model.get_submodule(name).weight)
    mask.view(-1)[::3] = 0
    prune.custom_from_mask(model.get_submodule(name), "weight", mask)
    return None


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized(model, name):
    parametrize.register_parametrization(model.get_submodule(name), "weight", Doubled())
    return lambda: parametrize.remove_parametrizations(model.get_submodule(name), "weight", leave_parametrized=False)


def adapted(model, name):
    config = peft.LoraConfig(target_modules=[name], r=2, init_lora_weights=False)
    torch.manual_seed(1)
    peft.inject_adapter_in_model(config, model)
    return None


def everything(model, name):
    return nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if module is model.get_submodule(name) else None
    ).remove


LINEAR = (
    forward_hook, forward_pre_hook, backward_hook, backward_pre_hook, accelerate_hook, own_forward, pruned,
    parametrized, adapted, everything,
)  # fmt: skip
CASES = [
    *itertools.product([MLP], LINEAR, ["1.gate_proj"]),
    *itertools.product([MLP], [forward_hook, adapted], ["1.down_proj"]),
    *itertools.product([MLP], [backward_hook, own_forward], ["0", "1.activation"]),
    *itertools.product([nn.Linear], [forward_pre_hook, pruned, adapted], ["1"]),
    *itertools.product([nn.Linear], [forward_hook, accelerate_hook, everything], ["0"]),
]


@pytest.mark.parametrize(("reader", "change", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_what_comes_after_fusing_takes_effect(reader, change, name):
    """What sees a part of what is fused runs as in the model that is not fused, to the bit."""
    model, plain, x = block(reader), block(reader), normal(3, 64).requires_grad_()
    assert "0" in convert(model, "tensorwise", fuse=True).fused
    convert(plain, "tensorwise")
    assert isinstance(model[0](x), QuantizedInput)
    before = run(plain, x)
    if reader is MLP and name == "0":
        # Which leaves the MLP fused.
        plain[1].__class__, plain[1].fused_from, plain[1].fused_reads = Float8SwiGLU, MLP, {}
    undo, undo_plain = change(model, name), change(plain, name)
    got, expected = run(model, x), run(plain, x)
    assert isinstance(model[0](x), torch.Tensor)
    if undo:
        undo()
        undo_plain()
        assert isinstance(model[0](x), QuantizedInput)
    assert_bitwise_equal(got, expected)
    assert len(got) != len(before) or not all(map(torch.equal, got, before))
    assert revert(model)


@pytest.mark.parametrize("change", [forward_hook, pruned, parametrized, everything, own_forward, accelerate_hook])
def test_what_came_before_keeps_modules_from_being_fused(change):
    model, plain = block(), block()
    undo, undo_plain = change(model, "1.gate_proj"), change(plain, "1.gate_proj")
    report = convert(model, "tensorwise", fuse=True)
    convert(plain, "tensorwise")
    assert not report.fused
    assert report.not_fused.keys() == {"0", "1"}
    x = normal(3, 64).requires_grad_()
    got, expected = run(model, x), run(plain, x)
    if change is everything:
        undo()
        undo_plain()
    assert_bitwise_equal(got, expected)


def test_other_changes_after_fusing():
    """Another activation or module in its place, a bias, another eps."""
    model, x = block(), normal(3, 64)
    convert(model, "tensorwise", fuse=True)
    for change in (
        lambda m: setattr(m[1], "activation", nn.GELU()),
        lambda m: setattr(m[1], "up_proj", nn.Linear(64, 96)),
        lambda m: setattr(m[1].down_proj, "bias", nn.Parameter(torch.ones(64))),
        lambda m: m.__setitem__(1, nn.Linear(64, 64)),
        lambda m: setattr(m[0], "eps", 10.0),
    ):
        twin = copy.deepcopy(model)
        change(twin)
        got = twin(x)
        revert(twin) if any(isinstance(m, nn.Linear) and hasattr(m, "recipe") for m in twin.modules()) else None
        plain = twin(x)
        assert (got - plain).abs().max() < 0.2 * plain.abs().max()
        assert (got - model(x)).abs().max() > 0.01 * plain.abs().max()


def test_a_norm_by_itself_has_no_readers():
    model, x = block(), normal(3, 64)
    convert(model, "rowwise", fuse=True)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert all(isinstance(twin[0](x), QuantizedInput) for twin in twins)
    twins[0][1].gate_proj.register_forward_hook(lambda *args: None)
    assert [isinstance(twin[0](x), QuantizedInput) for twin in (*twins, model)] == [False, True, True]
    assert_bitwise_equal(copy.deepcopy(model[0])(x), block()[0](x))
    norm = model[0]
    del model
    assert_bitwise_equal(norm(x), block()[0](x))


@pytest.mark.xdist_group("ranks")
def test_sharding_a_fused_mlp_and_a_linear_of_one(tmp_path):
    """fully_shard derives classes, and its hooks gather what a fused MLP would read past them."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = normal(3, 64)
        for shards in (["1"], ["1.down_proj"], ["0", "1.gate_proj", "1"]):
            model, plain = block(), block()
            convert(model, "tensorwise", fuse=True)
            convert(plain, "tensorwise")
            for name in shards:
                fully_shard(model.get_submodule(name))
            fully_shard(model)
            assert (model(x) - plain(x)).abs().max() < 0.1
            assert {"0", "1"} <= set(revert(model))
            assert isinstance(model[1], MLP)
            assert isinstance(model[1], FSDPModule) == ("1" in shards)
            assert not any(isinstance(m, Float8RMSNorm | Float8SwiGLU) for m in model.modules())
            assert (model(x) - block()(x)).abs().max() < 1e-5
    finally:
        dist.destroy_process_group()


def test_threads_fuse_while_others_run():
    """Nothing of the process is patched meanwhile."""
    models = [nn.Sequential(*[block() for _ in range(8)]) for _ in range(2)]
    stop, errors, call = threading.Event(), [], nn.Module.__call__

    def forwards():
        layer, x = nn.Linear(4, 4), normal(2, 4)
        while not stop.is_set():
            try:
                layer(x)
                assert nn.Module.__call__ is call
            except BaseException as error:
                errors.append(error)
                return

    def fuse(model):
        for _ in range(3):
            assert len(convert(model, "rowwise", fuse=True).fused) == 16
            revert(model)

    def guarded(model):
        try:
            fuse(model)
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=forwards)
    converters = [threading.Thread(target=guarded, args=(model,)) for model in models]
    for thread in (other, *converters):
        thread.start()
    for thread in converters:
        thread.join()
    stop.set()
    other.join()
    assert not errors
    assert nn.Module.__call__ is call
