"""``batch_invariant=True``: the output of a row is the same in every batch."""

from types import SimpleNamespace

import pytest
import torch
from cases import CUDA, cpu_and_cuda, normal
from torch import nn
from torch.distributed.tensor import Partial, Shard

import tritonfp8
from tritonfp8 import Float8Linear, convert, ops, recipes
from tritonfp8.distributed.dtensor_rules import placements_where_sharded
from tritonfp8.distributed.tensor_parallel.linear import _check_invariant
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.warmup.gemms import GemmCall
from tritonfp8.warmup.record import record_linear

INVARIANT = [name for name in recipes.names() if (spec := recipes.get(name).output.lhs) and spec.block[0] == 1]
# With this K and N, GEMMs of few rows may split K.
SIZES = {"cpu": (1200, 96), "cuda": (8192, 1024)}


def made(device="cpu"):
    torch.manual_seed(0)
    k, n = SIZES[device]
    return nn.Sequential(nn.Linear(k, n), nn.ReLU(), nn.Linear(n, 32)).to(device, torch.bfloat16)


def inferring(name, device="cpu", batch_invariant=True):
    model = made(device)
    convert(model, name, lambda layer, fqn: True, mode="inference", batch_invariant=batch_invariant)
    return model


def rows(device="cpu", m=300):
    return normal(m, SIZES[device][0], seed=1, dtype=torch.bfloat16, device=device)


@cpu_and_cuda
@pytest.mark.parametrize("name", INVARIANT)
def test_rows_are_those_of_a_larger_batch_and_of_training(device, name):
    model, x = inferring(name, device), rows(device, 300 if device == "cpu" else 4096)
    counts = (1, 7, 64, 65, 256, 300, *(() if device == "cpu" else (1000, 4095)))
    with torch.no_grad():
        whole = model(x)
        for m in counts:
            # From the middle of others, too.
            assert_bitwise_equal([model(x[:m]), model(x[-m:])], [whole[:m], whole[-m:]])
    training = made(device)
    convert(training, name, lambda layer, fqn: True, batch_invariant=True)
    assert_bitwise_equal(training(x), whole)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_compiled_and_an_exported_model_are_the_eager_one(device):
    model, x = inferring("rowwise", device), rows(device, 5)
    with torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,))
        gemms = [node for node in program.graph.nodes if node.target is ops.scaled_matmul]
        assert [node.args[-1] for node in gemms] == [True, True]
        assert_bitwise_equal([torch.compile(model, fullgraph=True)(x), program.module()(x)], [expected, expected])


def test_a_product_by_itself():
    a, b = (tritonfp8.quantize(normal(m, 1200, seed=m), recipes.get("rowwise").output.lhs) for m in (300, 40))
    whole = tritonfp8.scaled_matmul(a, b, batch_invariant=True)
    one = tritonfp8.Quantized(a.qdata[:1], a.scale[:1], a.spec)
    assert_bitwise_equal(tritonfp8.scaled_matmul(one, b, batch_invariant=True), whole[:1])
    with pytest.raises(TypeError, match="batch_invariant must be True or False; got int"):
        tritonfp8.scaled_matmul(a, b, batch_invariant=1)


def test_a_recipe_says_so():
    recipe = recipes.get("rowwise", batch_invariant=True)
    assert recipe.name == "rowwise_batch_invariant"
    assert "precise, batch-invariant" in str(recipe)
    assert recipes.Recipe.from_toml(recipe.to_toml()) == recipe
    assert recipes.get(recipe, batch_invariant=True) is recipe
    assert "batch_invariant" not in recipes.get("rowwise").to_json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "tensorwise"}, "recipe 'tensorwise': a batch-invariant GEMM needs a left operand with scales for"),
        ({"recipe": {"0": "rowwise", "*": "bf16"}}, "recipe 'bf16': a GEMM in high precision cannot be batch-invar"),
    ],
)
def test_what_cannot_be_invariant_is_an_error(arguments, message):
    model = made()
    with pytest.raises(ValueError, match=message):
        convert(model, **arguments, batch_invariant=True)
    assert not any(isinstance(layer, Float8Linear) for layer in model)


def test_a_layer_that_is_converted_already_is_an_error():
    model = made()
    convert(model, {"0": "rowwise"})
    with pytest.raises(ValueError, match="0 is converted already and keeps its recipe 'rowwise', which is not"):
        convert(model, "rowwise", mode="inference", batch_invariant=True)


def test_ranks_do_not_sum_what_must_be_invariant():
    sizes = {"a": 2, "a_scale": 2, "b": 2, "b_scale": 2}
    given = {name: SimpleNamespace(ndim=ndim) for name, ndim in sizes.items()}
    gemm = recipes.get("rowwise").output
    given |= {"a_spec": gemm.lhs.args[0], "b_spec": gemm.rhs.args[0]}
    assert placements_where_sharded("scaled_matmul", "K", given) is not None
    assert placements_where_sharded("scaled_matmul", "K", {**given, "batch_invariant": True}) is None
    assert placements_where_sharded("scaled_matmul", "M", {**given, "batch_invariant": True}) is not None
    _check_invariant((2, 4), (Partial(), Shard(0)))
    with pytest.raises(ValueError, match=r"cannot be summed over more than two ranks; got a mesh of \(2, 4\)"):
        _check_invariant((2, 4), (Shard(0), Partial()))


def test_warm_up_measures_no_configuration_that_another_number_of_rows_decides():
    calls = record_linear((8, 64, 128), recipes.get("rowwise", batch_invariant=True), "bfloat16")
    gemms = [GemmCall.of(call, torch.device("cpu")) for call in calls if call.op == "scaled_matmul"]
    found = [gemm.call.named()["batch_invariant"] for gemm in gemms]
    assert sorted(found) == [False, False, True]
    assert [gemm.has_configurations(torch.device("cpu")) for gemm in gemms] == [not each for each in found]
    assert ops.OPS["scaled_matmul"].schema.count("bool batch_invariant=False") == 1
