"""The models of the tests of sharded weights that are stored in 8 bits, and their results."""

import torch
from fsdp_models import recomputed
from process_group import made_mesh
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonfp8

HIDDEN, WIDE, FEW = 201, 137, 9


class Block(nn.Module):
    """Linear layers of sizes that no block divides, one of them of fewer rows than some ranks get; and an adapter."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.few, self.back = nn.Linear(HIDDEN, FEW), nn.Linear(FEW, HIDDEN, bias=False)
        self.lora_a, self.lora_b = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, WIDE, bias=False)
        self.recompute = None

    def forward(self, x):
        return recomputed(self.layer, x, self.recompute)

    def layer(self, x):
        h = self.norm(x)
        x = x + self.down(nn.functional.gelu(self.up(h) + self.lora_b(self.lora_a(h))))
        return x + self.back(self.few(h))


def is_base(module, name):
    return isinstance(module, nn.Linear) and "lora" not in name


def plain_model(dtype=torch.bfloat16, blocks=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks))).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(torch.exp(1.5 * torch.randn(parameter.shape)))
    for name, layer in model.named_modules():
        if is_base(layer, name):
            layer.weight.requires_grad_(False)
    return model


def stored_model(recipe, dtype=torch.bfloat16, recompute=None, blocks=2):
    model = plain_model(dtype, blocks)
    tritonfp8.convert(model, recipe, filter=is_base, weight_storage="quantized")
    for block in model:
        block.recompute = recompute
    return model


def hybrid_mesh(mesh, copies):
    """The ranks of a mesh as so many copies of the shards, for HSDP."""
    return made_mesh(mesh.device_type, (copies, mesh.size() // copies), ("replicate", "shard"))


def shard(model, mesh, *, copies=None, offload=False, param_dtype=None, reshard=True, root=True):
    if copies is not None:
        mesh = hybrid_mesh(mesh, copies)
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
        "reshard_after_forward": reshard,
    }
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options) if root else model


def data(dtype=torch.bfloat16, seed=1):
    return torch.randn(3, 11, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def results(model, x):
    """Output and gradients of the input and of each trained parameter, by name."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.float().square().mean().backward()
    found = {"output": out.detach(), "input": x.grad}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name] = whole(parameter.grad)
            parameter.grad = None
        else:
            assert parameter.grad is None, name
    return found


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        assert torch.equal(found[name], x), f"{name} differs by {(found[name] - x).abs().max()}"


def tp_plan(model, local=False):
    plan = {}
    for i in range(len(model)):
        plan |= {f"{i}.{name}": ColwiseParallel(use_local_output=local) for name in ("up", "few", "lora_b")}
        plan |= {f"{i}.{name}": RowwiseParallel() for name in ("down", "back")}
    return plan


def parallel(mesh, recipe, first, rows, dtype=torch.bfloat16, stored=True, source=0, styles=tp_plan, **options):
    """A model under tensor parallelism and, with two or more ``rows`` of the mesh, FSDP2. Stored, or of the values."""
    model = plain_model(dtype)
    values = stored_model(recipe, dtype)
    options_of = {"filter": is_base, "weight_storage": "quantized"} if stored else {"filter": is_base}
    recipe = values[0].up.recipe
    if not stored:
        model.load_state_dict(values.state_dict())
    if first:
        tritonfp8.convert(model, recipe, **options_of)
    dp, tp = None, mesh
    if rows > 1:
        grid = made_mesh(mesh.device_type, (rows, mesh.size() // rows), ("dp", "tp"))
        dp, tp = grid["dp"], grid["tp"]
    parallelize_module(model, tp, styles(model), src_data_rank=source)
    if rows > 1:
        shard(model, dp, **options)
    if not first:
        tritonfp8.convert(model, recipe, **options_of)
    return model


def other_values(recipe):
    """A stored model of other values, and its plain state_dict before it was stored."""
    model = plain_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0) * 1.3 + 0.01)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    tritonfp8.convert(model, recipe, filter=is_base, weight_storage="quantized")
    return model, state


def distributed_state(model, state):
    return {
        name: distribute_tensor(state[name], now.device_mesh, now.placements, src_data_rank=None)
        if isinstance(now, DTensor)
        else state[name]
        for name, now in model.state_dict().items()
    }
