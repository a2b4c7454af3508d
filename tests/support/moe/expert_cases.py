"""Functions of each rank in the tests of expert parallelism. Each returns plain data."""

import contextlib
import copy
import functools

import mixtures
import torch
from cases import normal
from raised import raised
from stored_models import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tritonfp8
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather, shard_experts
from tritonfp8.distributed.fsdp.torch_fsdp import managed_parameters
from tritonfp8.specs.testing import assert_bitwise_equal

HIDDEN, INSIDE, TOP_K = 64, 48, 2


def experts_of(count, recipe, dtype, bias=True, family=None):
    torch.manual_seed(0)
    if family is not None:
        model = mixtures.model_of(family, dtype)
        tritonfp8.convert(model, {"*.0.mlp.experts": recipe})
        return model.model.layers[0].mlp.experts
    return tritonfp8.Float8Experts(count, HIDDEN, INSIDE, recipe=recipe, bias=bias, dtype=dtype)


def batch_of(tokens, experts, dtype, routing):
    """Tokens of all ranks, with their experts and weights.

    ``routing`` is ``"any"``; ``"one"``, all tokens at the first expert; or ``"none"``, with tokens at no expert.
    """
    generator = torch.Generator().manual_seed(7)
    index = torch.rand(tokens, experts, generator=generator).topk(TOP_K).indices
    if routing == "one":
        index = torch.zeros_like(index)
    if routing == "none":
        index[::3, 0] = experts
    return normal(tokens, HIDDEN, dtype=dtype), index, normal(tokens, TOP_K, seed=1).softmax(1).to(dtype)


def run(module, hidden, index, weights, grad):
    hidden, weights = (x.clone().requires_grad_() for x in (hidden, weights))
    out = module(hidden, index, weights)
    out.backward(grad)
    return {"out": out.detach(), "grad_hidden": hidden.grad, "grad_weights": weights.grad}


def differing(found, expected):
    """The names of the tensors whose bits differ, and by how much at most, over the largest element."""
    rows = {}
    for name, x in found.items():
        try:
            assert_bitwise_equal(x, expected[name])
        except AssertionError:
            y = expected[name].float()
            rows[name] = ((x.float() - y).abs().max() / y.abs().max()).item()
    return rows


def against_one_process(mesh, tokens, experts=8, recipe="rowwise", payload="high_precision", dtype="bfloat16",
                        routing="any", average=False, once=False, family=None, autocast=False):  # fmt: skip
    """What differs from one process with the tokens of all ranks; the bytes of this rank's all-to-alls."""
    dtype, device = getattr(torch, dtype), mesh.device_type
    in_bf16 = functools.partial(torch.autocast, device, torch.bfloat16, enabled=autocast)
    whole = experts_of(experts, recipe, dtype, family=family).to(device)
    module = copy.deepcopy(whole)
    batch = [x.to(device) for x in batch_of(sum(tokens), experts, dtype, routing)]
    grad = normal(sum(tokens), HIDDEN, seed=5, dtype=dtype, device=device)
    with in_bf16():
        expected = run(whole, *batch, grad)
    names = shard_experts(module, mesh, payload, average_gradients=average)
    assert names == [""]
    mine = slice(sum(tokens[: mesh.get_rank()]), sum(tokens[: mesh.get_rank() + 1]))
    scope = tritonfp8.quantize_weights_once(module) if once else contextlib.nullcontext()
    with scope, in_bf16(), count_collective_bytes() as traffic:
        found = run(module, *(x[mine] for x in batch), grad[mine])
    expected = {name: x[mine] for name, x in expected.items()}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        full = whole.get_parameter(name).grad
        each = -(-experts // mesh.size())
        found[name] = parameter.grad.to_local() * (mesh.size() if average else 1)
        expected[name] = full[mesh.get_rank() * each :][:each]
    return differing(found, expected), traffic.bytes["all_to_all"]


class Mixture(nn.Module):
    """A linear layer, experts with a router, and a head."""

    def __init__(self, recipe):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 16)
        self.experts = tritonfp8.Float8Experts(8, HIDDEN, INSIDE, recipe=recipe)

    def forward(self, x):
        x = torch.relu(self.first(x))
        weights, index = self.router(x).softmax(1).topk(TOP_K)
        return self.last(x + self.experts(x, index, weights))


def _trained(model, batches, steps):
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for step in range(steps):
        x, y = batches[step]
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    now = dict(model.named_parameters())
    stuck = [name for (name, p), old in zip(now.items(), before, strict=True) if torch.equal(whole(p), whole(old))]
    return torch.stack(losses), stuck


def train_with_fsdp(mesh, recipe, payload, steps=3, tokens=32, gather=False, reshard=True):
    """Experts over one dim of a square mesh, FSDP2 over the other, and over both for the other layers.

    Args:
        gather: whether FSDP gathers weights in 8 bits.
        reshard: ``reshard_after_forward``.

    Returns:
        Losses of one process with all tokens, the mean of the losses of all ranks, and the parameters that are stuck.
    """
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    model = Mixture(recipe)
    tritonfp8.convert(model, recipe, ["first", "last"]) if recipe != "bf16" else None
    single = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(4 * tokens, HIDDEN, generator=generator), torch.randint(16, (4 * tokens,), generator=generator))
        for _ in range(steps)
    ]
    expected, _ = _trained(single, batches, steps)
    shard_experts(model, square["ep"], payload)
    if gather:
        assert "experts" in enable_float8_all_gather(model).converted
    fully_shard(model.experts, mesh=square["dp"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    for module in (model.experts, model):
        module.set_gradient_divide_factor(float(2 if module is model.experts else 4))
        module.set_force_sum_reduction_for_comms(True)
    mine = slice(mesh.get_rank() * tokens, (mesh.get_rank() + 1) * tokens)
    losses, stuck = _trained(model, [(x[mine], y[mine]) for x, y in batches], steps)
    if gather:
        found = managed_parameters(model.modules())
        assert all(found[model.experts, name].gathers_by_hooks for name in model.experts.weights())
    torch.distributed.all_reduce(losses)
    return expected.tolist(), (losses / 4).tolist(), stuck


def errors(mesh):
    """The texts of errors."""
    experts = experts_of(8, "rowwise", torch.float32)
    two_dims = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("a", "b"))
    found = [
        raised(lambda: shard_experts(nn.Linear(4, 4), mesh)),
        raised(lambda: shard_experts(experts, two_dims)),
        raised(lambda: shard_experts(experts, mesh, "float4")),
        raised(lambda: shard_experts(experts, mesh, average_gradients="yes")),
        raised(lambda: shard_experts(experts, mesh, average_gradients=0)),
    ]
    shard_experts(experts, mesh)
    found += [raised(lambda: shard_experts(experts, mesh)), raised(lambda: tritonfp8.revert(experts))]
    experts.down_proj = nn.Parameter(torch.zeros(8, HIDDEN, INSIDE))
    batch = batch_of(4, 8, torch.float32, "any")
    return [*found, raised(lambda: experts(*batch))]


def checkpoint(mesh, path):
    """Whether experts that are saved sharded, by DCP, are the same when they are loaded whole."""
    import torch.distributed.checkpoint as dcp

    module = experts_of(8, "rowwise", torch.float32)
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    shard_experts(module, mesh)
    dcp.save(module.state_dict(), checkpoint_id=path)
    other = experts_of(8, "rowwise", torch.float32)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=path)
    return all(torch.equal(state[name], x) for name, x in expected.items())
