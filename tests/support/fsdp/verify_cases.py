"""Functions of each rank in the tests of verify and verify_training on sharded models."""

import torch
import torch.nn.functional as F
from fsdp_cases import build
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonfp8


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


class Reads(nn.Module):
    """The second weight is read past its layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return F.linear(self.a(x), self.b.weight, self.b.bias)


def raw_read(mesh):
    model = Reads().to(mesh.device_type)
    tritonfp8.convert(model, "rowwise")
    fully_shard(model, mesh=mesh)
    return failures(lambda: tritonfp8.verify(model, torch.randn(16, 32, device=mesh.device_type)))


def failures(run):
    try:
        run()
    except tritonfp8.VerificationError as error:
        return {each.layer: each.cause for each in error.report.failures}
    return {}


def tensor_parallel(mesh, recipe):
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32)).to(mesh.device_type)
    tritonfp8.convert(model, recipe)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    report = tritonfp8.verify(model, torch.randn(16, 32, device=mesh.device_type, requires_grad=True))
    return {
        name: {gemm: (each.calls, each.flops) for gemm, each in layer.gemms.items()}
        for name, layer in report.layers.items()
    }


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
