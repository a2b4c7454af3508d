"""monitor() and sensitivity() on sharded models."""

import pytest
import torch
from figures import measure
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import tritonfp8
from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel, enable_float8_all_gather, shard_experts
from tritonfp8.recipes import get
from tritonfp8.workflow.health.statistics import FIELDS

PROCESSES = 2

pytestmark = pytest.mark.xdist_group("ranks")


def _model(recipe="rowwise"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    tritonfp8.convert(model, recipe)
    return model


def _figures(x, spec):
    return dict(zip(FIELDS, measure(x, spec, 1024).tolist(), strict=True))


def inspect_fsdp(mesh, gather, compiled):
    """Two of four steps are sampled: the figures are of the local shard and batch, and every parameter changes."""
    model, spec = _model(), get("rowwise").output.lhs
    if gather:
        enable_float8_all_gather(model)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(mesh.get_rank()))
    weights = [layer.weight.to_local().clone() for layer in (model[0], model[2])]
    before = [p.full_tensor() for p in model.parameters()]
    # FSDP2 has hooks of its own.
    hooks = [len(module._forward_hooks) for module in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    with tritonfp8.monitor(model, every=2) as stats:
        for _ in range(4):
            call(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stats.step()
    found = stats.to_dict()
    assert list(found) == [0, 2]
    assert all(set(layers) == {"0", "2"} for layers in found.values())
    assert all(set(each) == {"input", "weight", "grad_output"} for layers in found.values() for each in layers.values())
    assert found[0]["0"]["input"] == _figures(x, spec)
    assert [found[0][name]["weight"] for name in ("0", "2")] == [_figures(weight, spec) for weight in weights]
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    return [torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters(), strict=True)]


# Compiled code reads weights after the gather, so one kind of gather is enough for it.
@pytest.mark.parametrize(("gather", "compiled"), [(False, False), (True, False), (True, True)])
def test_shards_of_fsdp2_are_monitored(ranks, gather, compiled):
    unchanged = ranks.run(2, inspect_fsdp, gather=gather, compiled=compiled)
    assert unchanged == [[False, False]] * 2


def inspect_tensor_parallel(mesh):
    """The figures of a sharded layer are measured on the shards of this rank."""
    model = _model("tensorwise")
    full = [layer.weight.detach().clone() for layer in (model[0], model[2])]
    parallelize_module(model, mesh, {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()})
    with tritonfp8.monitor(model) as stats:
        model(torch.ones(16, 64)).square().mean().backward()
    found, rank, world = stats.to_dict()[0], mesh.get_local_rank(), mesh.size()
    spec = get("tensorwise").output.rhs
    assert isinstance(model[0].weight, DTensor)
    assert found["0"]["weight"] == _figures(full[0].chunk(world, 0)[rank], spec)
    assert found["2"]["weight"] == _figures(full[1].chunk(world, 1)[rank], spec)
    assert found["0"]["input"]["amax"] == 1.0


def test_shards_of_tensor_parallelism_are_monitored(ranks):
    ranks.run(2, inspect_tensor_parallel)


class Routed(nn.Module):
    """Experts with a given routing, two for each token."""

    def __init__(self, experts, index):
        super().__init__()
        self.experts, self.index = experts, index

    def forward(self, hidden):
        return self.experts(hidden, self.index, torch.full(self.index.shape, 0.5))


def inspect_experts(mesh, way):
    """Experts that a rank holds, or that FSDP2 shards: the weights of this rank are measured, and every operand."""
    torch.manual_seed(0)
    experts = tritonfp8.Float8Experts(4, 64, 48, recipe="rowwise")
    whole = {name: weight.detach().clone() for name, weight in experts.weights().items()}
    if way == "experts":
        shard_experts(experts, mesh)
    else:
        fully_shard(experts, mesh=mesh)
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    hidden = torch.randn(16, 64, generator=generator)
    model = Routed(experts, torch.rand(16, 4, generator=generator).topk(2).indices)
    with tritonfp8.monitor(model, every=1) as stats:
        model(hidden).square().mean().backward()
        stats.step()
    found, spec = stats.to_dict()[0], get("rowwise").output.rhs
    assert set(found) == {"experts.gate_up_proj", "experts.down_proj"}
    for name, weight in whole.items():
        operands = found[f"experts.{name}"]
        assert set(operands) == {"input", "weight", "grad_output"}
        mine = weight.chunk(mesh.size())[mesh.get_local_rank()]
        assert operands["weight"]["sqnr"] == min(_figures(matrix, spec)["sqnr"] for matrix in mine)
        assert all(20 < figures["sqnr"] < 50 for figures in operands.values())
    assert experts.observer is None
    errors = tritonfp8.sensitivity(model, hidden, ["rowwise"]).errors["experts"]["rowwise"]
    assert set(errors) == {"output", "grad_input", "grad_weight"}
    assert all(-50 < error < -20 for error in errors.values())
    assert experts.recipe.name == "rowwise"


@pytest.mark.parametrize("way", ["experts", "fsdp"])
def test_sharded_experts_are_monitored(ranks, way):
    ranks.run(2, inspect_experts, way=way)


def sensitivity_fsdp(mesh, gather):
    """The errors equal the errors of one process: in high precision FSDP2 gathers weights in high precision."""
    whole, sharded = _model(), _model()
    if gather:
        enable_float8_all_gather(sharded)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    found = tritonfp8.sensitivity(sharded, x, ["rowwise", "tensorwise"])
    assert found.errors == tritonfp8.sensitivity(whole, x, ["rowwise", "tensorwise"]).errors
    assert all(p.grad is None for p in sharded.parameters())
    assert {layer.recipe.name for layer in (sharded[0], sharded[2])} == {"rowwise"}
    sharded(x).square().mean().backward()


@pytest.mark.parametrize("gather", [False, True])
def test_sensitivity_of_sharded_weights(ranks, gather):
    ranks.run(2, sensitivity_fsdp, gather=gather)
