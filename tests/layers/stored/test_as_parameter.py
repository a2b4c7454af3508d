"""What other programs do with a Parameter: it works, or raises an error of ours, and the process never dies."""

import copy
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.multiprocessing
from cases import normal
from stored_layers import spec_of
from torch import nn
from trained_models import stored_model
from transformers.pytorch_utils import Conv1D

import tritonfp8
from tritonfp8 import Float8Experts, recipes
from tritonfp8.distributed.fsdp.byte_layout import ByteLayout, GatheredBytes, MatricesLayout
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight
from tritonfp8.distributed.fsdp.orientations import weight_orientations
from tritonfp8.layers.stored import CodesTensor, StoredMatrices, StoredWeight, store
from tritonfp8.specs.testing import assert_bitwise_equal

N, K = 16, 24
RECIPE, SPEC = recipes.get("rowwise"), spec_of("rowwise")
# Graphs of torch compare the storages of tensors without memory, so these stay. torch's error says that none is there.
STORAGES = "storage", "_typed_storage", "untyped_storage"
NOT_OURS = {*STORAGES, "__class__", "__init__", "__new__"}
# FSDP2 asks a shard for a flat view, which keeps its shape; torch detaches no view in place.
KNOWN = {("MatricesShard", "diagflat"), ("StoredRows", "diagflat"), ("ValuesView", "detach_")}
ARGUMENTS = {
    "none": (),
    "an int": (0,),
    "two ints": (0, 1),
    "a tensor": (torch.ones(N, K),),
    "a dtype": (torch.float32,),
    "a device": ("cpu",),
    "a function": (abs,),
}


def weight():
    return store(normal(N, K), SPEC)


def experts():
    return StoredMatrices.of(normal(2, N, K), SPEC)


def gathered():
    layout = ByteLayout(N, K, 1, weight_orientations(RECIPE), together=True)
    return GatheredWeight(GatheredBytes(torch.zeros(4096, dtype=torch.uint8)), None, layout, torch.float32)


def gathered_experts():
    layout = MatricesLayout(2, N, K, 1, weight_orientations(RECIPE), together=True)
    sent = layout.pack(torch.randn(2, N, K), (0, 1))
    return GatheredWeight(layout.joined(sent, ()), None, layout, torch.float32)


KINDS = {
    "GatheredWeight": gathered,
    "GatheredWeight of experts": gathered_experts,
    "StoredWeight": weight,
    "StoredRows": lambda: weight().as_shard(),
    "StoredMatrices": experts,
    "MatricesShard": lambda: experts().as_shard(),
    "ValuesView": lambda: weight()[:],
}


def outcome(make, name, arguments):
    """What a method of a tensor raises; None if it works."""
    try:
        found = getattr(make(), name)
        repr(found(*arguments) if callable(found) else found)
    except Exception as error:
        return error
    return None


def sweep(kind):
    """Call each method of ``torch.Tensor`` with each form of arguments; fail where only a plain tensor works."""
    warnings.simplefilter("ignore")
    for name in dir(torch.Tensor):
        forms = ARGUMENTS if callable(getattr(torch.Tensor, name, None)) else {"none": ()}
        for form, arguments in forms.items():
            print(f"{name} ({form})", flush=True)
            found = outcome(KINDS[kind], name, arguments)
            if found is None or "red in 8 bits" in str(found) or name in NOT_OURS or (kind, name) in KNOWN:
                continue
            expected = outcome(lambda: normal(*KINDS[kind]().shape), name, arguments)
            assert expected is not None, f"{name} ({form}) works for a plain tensor, and raises {found!r} here"


@pytest.mark.one_in(len(KINDS))
@pytest.mark.parametrize("kind", KINDS)
def test_no_method_ends_the_process(kind):
    code = f"import conftest, test_as_parameter as t; t.sweep({kind!r})"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, env=env)
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr[-2000:])


class TestMadeOfTheTypeOfAnother:
    """``type(p)(x, requires_grad=...)``, by which accelerate, peft and others make a Parameter like one they have."""

    @pytest.mark.parametrize("make", [weight, experts, lambda: weight().as_shard()])
    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_of_a_stored_tensor(self, make, requires_grad):
        p = nn.Parameter(make(), requires_grad=not requires_grad)
        found = type(p)(p.to("cpu"), requires_grad=requires_grad)
        assert (type(found), found.requires_grad, isinstance(found, nn.Parameter)) == (type(p), requires_grad, True)
        assert_bitwise_equal(list(found._inner().values()), list(p._inner().values()))
        assert type(p)(p).requires_grad

    def test_with_the_attributes_of_the_other(self):
        """init_empty_weights passes them all."""
        p = nn.Parameter(weight(), requires_grad=False)
        p.marked = True
        found = type(p)(p.to("meta"), **{**p.__dict__, "requires_grad": p.requires_grad})
        assert (found.is_meta, found._qdata.is_meta, found.marked, found.requires_grad) == (True, True, True, False)

    def test_of_values_it_is_stored_as_the_variable_that_it_replaces(self):
        param, values = nn.Parameter(weight(), requires_grad=False), torch.randn(N, K)
        found = type(param)(values, requires_grad=True)
        assert (type(found), found.spec, found.requires_grad) == (StoredWeight, SPEC, True)
        assert_bitwise_equal([found._qdata], [store(values, SPEC)._qdata])

    def test_of_values_without_such_a_variable_or_of_a_shard_it_is_an_error(self):
        kind, param, values = StoredWeight, nn.Parameter(weight().as_shard()), torch.randn(N, K)
        with pytest.raises(TypeError, match=r"a StoredWeight is made of codes, and Tensor has none.*load_state_dict"):
            kind(values, requires_grad=False)
        with pytest.raises(NotImplementedError, match=r"of another tensor does not work .* in 8 bits \(StoredRows\)"):
            type(param)(values, requires_grad=False)


class TestModels:
    def test_share_memory_and_processes(self):
        model = stored_model("rowwise")
        before = [x.clone() for x in _inner(model)]
        assert model.share_memory() is model
        assert all(p.is_shared() for p in model.parameters())
        assert_bitwise_equal(_inner(model), before)
        with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(_write_ones, (model,))
        # The process wrote to the same memory.
        assert (model[0].weight.dequantize() == 1).all()

    def test_copies(self):
        model = stored_model("blockwise")
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(p) for p in other.parameters()] == [type(p) for p in model.parameters()]
            assert_bitwise_equal(_inner(other), _inner(model))

    @pytest.mark.parametrize("move", ["to meta", "to bfloat16", "to_empty", "double and back"])
    def test_a_move_while_a_graph_is_alive_moves_all_or_nothing(self, move):
        model = stored_model("rowwise")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(normal(3, 200)).sum()
        weight = model[0].weight
        {
            "to meta": lambda: model.to("meta"),
            "to bfloat16": lambda: model.to(torch.bfloat16),
            "to_empty": lambda: model.to_empty(device="cpu"),
            "double and back": lambda: model.double().float(),
        }[move]()
        assert {(p.device, p.dtype) for p in model.parameters()} == {(model[2].bias.device, model[2].bias.dtype)}
        assert [type(p) for p in model.parameters()] == [StoredWeight, nn.Parameter] * 2
        if move in ("to bfloat16", "double and back"):
            # The optimizer has the same Parameters.
            assert model[0].weight is weight is optimizer.param_groups[0]["params"][0]
            assert_bitwise_equal([model[0].weight._qdata], [stored_model("rowwise")[0].weight._qdata])
        if move == "double and back":
            out.backward()
            assert weight.grad is not None

    @pytest.mark.gpu
    def test_to_a_gpu_and_back_while_a_graph_is_alive(self):
        model = stored_model("blockwise")
        before, weight = [x.clone() for x in _inner(model)], model[0].weight
        out = model(normal(3, 200)).sum()
        out.backward(retain_graph=True)
        model.cuda()
        assert {p.device.type for p in model.parameters()} == {weight.grad.device.type} == {"cuda"}
        assert model[0].weight is weight
        model(normal(3, 200).cuda()).sum().backward()
        model.cpu()
        assert_bitwise_equal(_inner(model), before)
        out.backward()

    def test_gradients_move_along_and_a_move_that_fails_changes_no_weight(self):
        model = stored_model("rowwise")
        model(normal(3, 200)).sum().backward()
        before, gradient = list(model.parameters()), model[0].weight.grad.clone()

        def move(x):
            raise MemoryError

        with pytest.raises(MemoryError):
            model._apply(move)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        model.to(torch.bfloat16)
        assert_bitwise_equal([model[0].weight.grad], [gradient.bfloat16()])

    def test_of_a_conv1d_and_of_experts(self):
        conv = nn.Sequential(Conv1D(32, 48))
        moe = nn.Sequential(Float8Experts(2, 64, 32, recipe="rowwise"))
        for model, is_experts in ((conv, False), (moe, True)):
            tritonfp8.convert(model, "rowwise", mode="inference")
            model.bfloat16()
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
            model.share_memory()
            stored = [p for p in model.parameters() if isinstance(p, CodesTensor)]
            assert len(stored) == 1 + is_experts
            assert all(p.is_shared() for p in stored)
            assert all(isinstance(p, CodesTensor) for p in model.to("meta").parameters() if p.ndim > 1)


def _inner(model):
    return [x for p in model.parameters() if isinstance(p, CodesTensor) for x in p._inner().values()]


def _write_ones(model):
    with torch.no_grad():
        model[0].weight.fill_(1.0)
