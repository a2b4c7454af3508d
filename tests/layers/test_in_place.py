"""A change of class in place keeps derived classes and own forwards, and happens to all modules or to none."""

import copy
import functools
import sys

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from cases import each_recipe, normal
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize

from tritonfp8 import Float8Linear, convert, quantize_weights_once, recipes, revert, swap_recipe
from tritonfp8.compat.counting import count_gemms
from tritonfp8.layers.in_place import all_or_nothing, rebase
from tritonfp8.specs.testing import assert_bitwise_equal


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


def state(model):
    """What convert and revert may change of each module."""
    return {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}


def gemms(model, x):
    with count_gemms() as counts:
        model(x)
    return counts.calls.total()


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestDerivedClasses:
    @pytest.mark.xdist_group("ranks")
    def test_revert_of_sharded_modules(self, one_rank):
        """torchtitan shards the last norm and the head as one."""
        model, plain, x = Model(), Model(), normal(5, 32)
        expected = plain(x)
        convert(model, "rowwise")
        fully_shard([model.norm, model.last])
        fully_shard(model)
        assert revert(model) == ["first", "last"]
        assert type(model.last).__name__ == "FSDPLinear"
        assert isinstance(model.last, FSDPModule)
        assert isinstance(model.last, nn.Linear)
        assert not isinstance(model.last, Float8Linear)
        assert gemms(model, x) == 0
        assert_bitwise_equal(model(x).detach(), expected.detach())
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        # A class made of it makes a layer of the class below.
        assert type(type(model.last)(32, 16)) is nn.Linear

    def test_parametrized_after_convert(self):
        model, x = Model(), normal(5, 32)
        convert(model, "rowwise")
        expected = model(x)
        parametrize.register_parametrization(model.last, "weight", Doubled())
        assert_bitwise_equal(model(x), expected)
        assert list(swap_recipe(model, "blockwise").converted) == ["first", "last"]
        assert model.last.recipe is recipes.get("blockwise")
        expected = model(x)
        with quantize_weights_once(model):
            assert_bitwise_equal(model(x), expected)
        assert revert(model) == ["first", "last"]
        assert gemms(model, x) == 0
        assert_bitwise_equal(model(x), Model()(x))
        parametrize.remove_parametrizations(model.last, "weight")
        assert type(model.last) is nn.Linear
        assert list(convert(model, "rowwise").converted) == ["first", "last"]

    @pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), nn.Sequential])
    def test_wrapped(self, wrap):
        inner = Model()
        inner.last = wrap(inner.last)
        model = wrap(inner)
        assert len(convert(model, "rowwise").converted) == 2
        assert set(swap_recipe(model, "mxfp8").converted.values()) == {recipes.get("mxfp8")}
        with quantize_weights_once(model):
            assert inner.first.cached_weight is not None
        assert len(revert(model)) == 2
        assert not any(isinstance(m, Float8Linear) for m in model.modules())

    def test_layers_alike_get_one_class(self):
        derived = type("FSDPFloat8Linear", (FSDPModule, Float8Linear), {})
        assert rebase(derived, Float8Linear, nn.Linear) is rebase(derived, Float8Linear, nn.Linear)
        assert rebase(nn.ReLU, Float8Linear, nn.Linear) is nn.ReLU

    def test_a_subclass_with_code_of_its_own_is_not_reverted(self):
        class Scaled(Float8Linear):
            def forward(self, input):
                return 2 * super().forward(input)

        model = Model()
        convert(model, "rowwise")
        model.last = Scaled(32, 32, recipe="rowwise")
        before = state(model)
        with pytest.raises(TypeError, match="Scaled derives from Float8Linear and calls super"):
            revert(model)
        assert state(model) == before


def hooked(model, **options):
    add_hook_to_module(model.last, ModelHook(), **options)


HOOKS = {
    "hooked": hooked,
    "hooked_once": lambda model: (hooked(model), remove_hook_from_submodules(model)),
    "hooked_twice": lambda model: (hooked(model), hooked(model, append=True)),
    "offloaded": lambda model: accelerate.cpu_offload(model, execution_device="cpu"),
    "dispatched": lambda model: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True),
}


class TestForwardsOnTheInstance:
    @each_recipe
    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize("change", HOOKS)
    def test_hooks_of_accelerate(self, change, first, recipe):
        """They keep the forward that the layer had."""
        plain, model, x = Model(), Model(), normal(5, 32)
        expected = plain(x)
        convert(plain, recipe)
        steps = [HOOKS[change], lambda model: convert(model, recipe)]
        for step in steps if first else reversed(steps):
            step(model)
        assert gemms(model, x) == 2
        assert_bitwise_equal(model(x), plain(x))
        assert_bitwise_equal(copy.deepcopy(model)(x), plain(x))
        assert revert(model) == ["first", "last"]
        assert gemms(model, x) == 0
        assert_bitwise_equal(model(x), expected)
        remove_hook_from_submodules(model)
        assert gemms(model, x) == 0
        convert(model, recipe)
        assert gemms(model, x) == 2

    def test_another_forward_is_reported_and_runs(self):
        model, x = Model(), normal(5, 32)
        model.last.forward = lambda x: -x
        model.first.forward = functools.partial(nn.Linear.forward, model.first)
        report = convert(nn.ModuleList([model, nn.Linear(32, 32)]), "rowwise")
        assert report.skipped == {
            f"0.{name}": "its forward was replaced on the instance: it may compute otherwise"
            for name in ("first", "last")
        }
        assert type(model.last) is nn.Linear
        assert_bitwise_equal(model(x), -model.norm(model.first(x)))


class Stop(BaseException):
    """Not an Exception: as KeyboardInterrupt."""


def stop(*args):
    raise Stop


def stopped(function, model, *args):
    """The function ends by Stop, and leaves the model as it was."""
    before = state(model)
    with pytest.raises(Stop):
        function(model, *args)
    assert state(model) == before


class TestAllOrNothing:
    def test_an_interrupt_in_the_middle(self, monkeypatch):
        model, module = Model(), sys.modules["tritonfp8.conversion.model"]
        hooked(model)
        before = state(model)
        convert(model, "rowwise")
        with monkeypatch.context() as patch:
            patch.setattr(module, "unshare_inputs", stop)
            stopped(revert, model)
        revert(model)
        assert state(model).keys() == before.keys()
        monkeypatch.setattr(module, "share_inputs", stop)
        stopped(convert, model, "rowwise")

    def test_a_setter_that_raises(self, monkeypatch):
        model = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 32))

        def swap(self, name, value):
            if name == "recipe" and value is recipes.get("mxfp8") and self is model[2]:
                raise Stop(name)
            nn.Module.__setattr__(self, name, value)

        monkeypatch.setattr(Float8Linear, "__setattr__", swap, raising=False)
        stopped(convert, model, "mxfp8")
        convert(model, "rowwise")
        stopped(swap_recipe, model, "mxfp8")

    def test_what_others_prepared(self):
        """All of it is released before anything changes, and taken back if one cannot be."""
        model, log = Model(), []

        def release(layer):
            log.append("release")
            return lambda: log.append("undo")

        convert(model, "rowwise")
        model.first.on_revert, model.last.on_revert = release, stop
        stopped(revert, model)
        assert log == ["release", "undo"]
        model.last.on_revert = release
        revert(model)
        assert log == ["release", "undo", "release", "release"]
        assert "on_revert" not in model.last.__dict__

    def test_modules_get_all_back(self):
        def change(model):
            with all_or_nothing(model):
                model.last.__class__ = Float8Linear
                model.norm.extra = 1
                del model.first.in_features
                raise Stop

        stopped(change, Model())
