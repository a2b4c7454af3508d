"""verify and verify_training on models that FSDP2 and tensor parallelism shard."""

import pytest
import torch
import torch.nn.functional as F
from fsdp_cases import Setup, build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonfp8
from tritonfp8.recipes import GEMMS

PROCESSES = 2

pytestmark = pytest.mark.xdist_group("ranks")


def digest(model):
    return [p.to_local().sum().item() for p in model.parameters()]


def tokens(mesh):
    return torch.randint(0, 8, (2, 9), generator=torch.Generator().manual_seed(mesh.get_rank()))


def verify(mesh, setup):
    """The GEMMs of each layer, the failures, and whether the model is as before."""
    model, _ = build(mesh, setup)
    x = tokens(mesh).to(mesh.device_type)
    before = digest(model)
    report = tritonfp8.verify(model, x)
    forward = tritonfp8.verify(model, x, backward=False)
    assert {gemm for layer in forward.layers.values() for gemm in layer.gemms} == {"output"}
    assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    assert digest(model) == before
    return {name: tuple(layer.gemms) for name, layer in report.layers.items()}, sorted(report.others)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(enabled=False),
        Setup(recompute="yes"),
        Setup(param_dtype=None, reshard=False),
        Setup(compile="block"),
    ],
    ids=["gather_in_8_bits", "gather_values", "recompute", "float32_no_reshard", "compiled"],
)
def test_every_layer_of_an_fsdp2_model_is_seen(ranks, setup):
    for layers, others in ranks.run(2, verify, setup=setup):
        assert len(layers) == 2 * 7 + 1
        assert set(layers.values()) == {GEMMS}
        assert others == []


class Reads(nn.Module):
    """The second weight is read past its layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return F.linear(self.a(x), self.b.weight, self.b.bias)


def failures(run):
    try:
        run()
    except tritonfp8.VerificationError as error:
        return {each.layer: each.cause for each in error.report.failures}
    return {}


def raw_read(mesh):
    model = Reads().to(mesh.device_type)
    tritonfp8.convert(model, "rowwise")
    fully_shard(model, mesh=mesh)
    return failures(lambda: tritonfp8.verify(model, torch.randn(16, 32, device=mesh.device_type)))


def test_a_gathered_weight_that_a_function_reads(ranks):
    for found in ranks.run(2, raw_read):
        assert found.keys() == {"b"}
        assert "its weight was multiplied by aten." in found["b"]


def tensor_parallel(mesh, recipe):
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32)).to(mesh.device_type)
    tritonfp8.convert(model, recipe)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    report = tritonfp8.verify(model, torch.randn(16, 32, device=mesh.device_type, requires_grad=True))
    return {
        name: {gemm: (each.calls, each.flops) for gemm, each in layer.gemms.items()}
        for name, layer in report.layers.items()
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_tensor_parallel_layers_count_their_local_gemms(ranks, recipe):
    for layers in ranks.run(2, tensor_parallel, recipe=recipe):
        assert layers == {name: dict.fromkeys(GEMMS, (1, 2 * 16 * 32 * 256 // 2)) for name in "02"}


def step(mesh, setup, spoil=""):
    """The weights that moved in a step, and the failures."""
    model, _ = build(mesh, setup)
    parameters = list(model.parameters())
    if spoil == "other":
        parameters[0] = nn.Parameter(parameters[0].to_local().clone())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    check = tritonfp8.verify_training(model, optimizer)

    def run():
        with check:
            model(tokens(mesh).to(mesh.device_type)).backward()
            if spoil == "zeros":
                model.last.weight.grad.zero_()
            optimizer.step()
            optimizer.zero_grad()

    found = failures(run)
    return sorted(check.moved), found


@pytest.mark.parametrize("enabled", [False, True])
def test_a_step_on_shards_moves_every_weight(ranks, enabled):
    """Only rank 0 has rows of the embedding that change."""
    for moved, failures in ranks.run(2, step, setup=Setup(enabled=enabled)):
        assert failures == {}
        assert {"embed.weight", "last.weight", "layers.0.q.weight"} <= set(moved)


def test_a_shard_that_is_stuck_on_all_ranks(ranks):
    for moved, failures in ranks.run(2, step, setup=Setup(), spoil="zeros"):
        assert failures == {"last.weight": "it did not change: its gradient is all zeros"}
        assert "last.weight" not in moved


def test_an_optimizer_that_was_made_before_the_model_was_sharded(ranks):
    for _, failures in ranks.run(2, step, setup=Setup(), spoil="other"):
        assert failures.keys() == {"parameter 0 of group 0 of the optimizer", "embed.weight"}
