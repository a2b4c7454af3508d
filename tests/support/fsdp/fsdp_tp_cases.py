"""A training run of FSDP2 on top of tensor parallelism by its options, and the operands of a weight that both shard."""

import hashlib
from contextlib import nullcontext

import torch
from fsdp_cases import BFLOAT16, bytes_of
from fsdp_models import VOCABULARY, Llama, initialize
from process_group import made_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather, scales

HEADS, LAYERS = 4, 2
TWO_BY_TWO = (2, 2)


def mesh_of(world_mesh, sizes):
    names = ("replicate", "shard", "tp") if len(sizes) == 3 else ("shard", "tp")
    mesh = made_mesh(world_mesh.device_type, sizes, names)
    return mesh[names[:-1]], mesh["tp"]


def plan(local, layers, attention):
    found = {"last": ColwiseParallel(output_layouts=Replicate())}
    for i in range(layers):
        found |= {f"layers.{i}.{name}": ColwiseParallel(use_local_output=local) for name in ("gate", "up")}
        found[f"layers.{i}.down"] = RowwiseParallel()
        if attention:
            found |= {f"layers.{i}.{name}": ColwiseParallel() for name in ("q", "k", "v")}
            found[f"layers.{i}.o"] = RowwiseParallel()
    return found


def build(
    world_mesh, sizes, recipe, enabled, local=True, reshard=True, compiled=0, first=True, recompute=None,
    enable="after_parallel", layers=LAYERS, attention=True, frozen=None,
):  # fmt: skip
    """A Llama sharded by TP and FSDP2, with sizes that do not divide if torch allows it; its first layers compiled."""
    dp, tp = mesh_of(world_mesh, sizes)
    # With local outputs the number of all features is unknown, so it must divide.
    model = Llama(10 * HEADS, HEADS, 132 if local else 131, layers, attention=attention)
    initialize(model).to(world_mesh.device_type)
    reports = []

    def reach(point):
        if enabled and enable == point:
            reports.append(enable_float8_all_gather(model))

    if first:
        tritonfp8.convert(model, recipe)
    reach("before_parallel")
    parallelize_module(model, tp, plan(local, layers, attention))
    if not first:
        tritonfp8.convert(model, recipe)
    reach("after_parallel")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    for name, layer in model.layers.named_children():
        layer.recompute = recompute
        if int(name) < compiled:
            layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
            model.layers.register_module(name, layer)
        fully_shard(layer, mesh=dp, mp_policy=BFLOAT16, reshard_after_forward=reshard)
    fully_shard(model, mesh=dp, mp_policy=BFLOAT16)
    reach("last")
    if enabled:
        assert len(reports[0].converted) == (7 if attention else 3) * layers + 1
    return model, dp


def tokens_of(step, dp, batch=4, length=7):
    """Tokens of this rank; all TP ranks of a group have the same."""
    generator = torch.Generator().manual_seed(100 * step)
    every = torch.randint(VOCABULARY, (batch * dp.size(), length), generator=generator)
    index = sum(c * n for c, n in zip(dp.get_coordinate(), (*dp.shape[1:], 1), strict=True))
    return every.chunk(dp.size())[index]


def train(
    world_mesh, sizes, recipe, enabled, steps, micro=1, once=False, scaling="global", evaluates=False, **options
):  # fmt: skip
    """Losses of each micro-batch, summed over the ranks, and a hash of all bits of this rank's shards.

    ``evaluates``: in inference mode between steps, which adds a loss.
    """
    model, dp = build(world_mesh, sizes, recipe, enabled, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for number in range(steps):
        if evaluates and number:
            with torch.inference_mode():
                losses.append(model(tokens_of(0, dp)).item())
        kept = tritonfp8.quantize_weights_once(model) if once else nullcontext()
        with scales(scaling), kept:
            for i in range(micro):
                loss = model(tokens_of(number + 50 * i, dp))
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    losses = torch.tensor(losses, device=world_mesh.device_type)
    torch.distributed.all_reduce(losses)
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode() + bytes_of(parameter.to_local()))
    assert losses[-1] != losses[0]
    return losses.tolist(), found.hexdigest()


def part_of(found, expected, dim, start, gap):
    """Whether a shard, with ``gap`` elements of padding before it, equals the whole operand from ``start`` on."""
    size = found.qdata.shape[dim] - gap
    same = torch.equal(
        found.qdata.view(torch.uint8).narrow(dim, gap, size), expected.qdata.view(torch.uint8).narrow(dim, start, size)
    )
    block = found.spec.block[dim]
    if block == -1:
        mine, whole = found.scale, expected.scale
    else:
        first, skip = start // block, gap // block
        mine = found.scale.narrow(dim, skip, found.scale.shape[dim] - skip)
        whole = expected.scale.narrow(dim, first, mine.shape[dim])
    # A scale of one element may have any strides, which ``view(torch.uint8)`` does not accept.
    mine, whole = (torch.empty(s.shape, dtype=s.dtype).copy_(s).view(torch.uint8) for s in (mine, whole))
    return same and torch.equal(mine, whole)
