"""Functions of each rank in the tests of FSDP2 on top of tensor parallelism."""

import hashlib

import torch
from fsdp_cases import both_operands, operand_of
from fsdp_models import VOCABULARY, Linears, Llama, initialize
from process_group import made_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather

HEADS, LAYERS = 4, 2


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
    world_mesh,
    sizes,
    recipe,
    enabled,
    local=True,
    reshard=True,
    compiled=0,
    first=True,
    recompute=None,
    enable="after_parallel",
    layers=LAYERS,
    attention=True,
):
    """A Llama sharded by TP and FSDP2, with sizes that do not divide if torch allows it; its first layers compiled."""
    dp, tp = mesh_of(world_mesh, sizes)
    # With local outputs the number of all features is unknown, so it must divide.
    model = Llama(10 * HEADS, HEADS, 132 if local else 131, layers, attention=attention)
    initialize(model).to(world_mesh.device_type)
    if first:
        tritonfp8.convert(model, recipe)
    report = enable_float8_all_gather(model) if enabled and enable == "before_parallel" else None
    parallelize_module(model, tp, plan(local, layers, attention))
    if not first:
        tritonfp8.convert(model, recipe)
    if enabled and enable == "after_parallel":
        report = enable_float8_all_gather(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, layer in model.layers.named_children():
        layer.recompute = recompute
        if int(name) < compiled:
            layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
            model.layers.register_module(name, layer)
        fully_shard(layer, mesh=dp, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=dp, mp_policy=policy)
    if enabled and enable == "last":
        report = enable_float8_all_gather(model)
    return model, report, dp


def digest(model):
    """Hash of all bits of this rank's shards."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = parameter.to_local()
        found.update(name.encode() + value.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tokens_of(step, dp, batch=4, length=7):
    """Tokens of this rank; all TP ranks of a group have the same."""
    generator = torch.Generator().manual_seed(100 * step)
    every = torch.randint(VOCABULARY, (batch * dp.size(), length), generator=generator)
    index = sum(c * n for c, n in zip(dp.get_coordinate(), (*dp.shape[1:], 1), strict=True))
    return every.chunk(dp.size())[index]


def train(world_mesh, sizes, recipe, enabled, steps, **options):
    """Losses of each step and a digest of this rank's shards."""
    model, report, dp = build(world_mesh, sizes, recipe, enabled, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = model(tokens_of(step, dp))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / torch.distributed.get_world_size())
    return losses, digest(model), None if report is None else len(report.converted)


CHANGES = {
    "load": lambda model, other: model.load_state_dict(other),
    "assign": lambda model, other: model.load_state_dict(other, assign=True),
    "data": lambda model, other: [p.data.mul_(1.7) for p in model.parameters()],
    "swap": lambda model, other: tritonfp8.swap_recipe(model, "blockwise"),
    "revert": lambda model, other: tritonfp8.revert(model),
}


def after_changes(world_mesh, enabled):
    """Of each change of the weights: the losses before and after it, and the bytes of a step's collectives."""
    from tritonfp8.distributed import count_collective_bytes

    model, _, dp = build(world_mesh, (2, 2), "rowwise", enabled, layers=1)
    found = {}
    for name, change in CHANGES.items():
        # Weights that only grew would make losses so large that recipes do not differ.
        factor = 1 / 1.7 if name == "assign" else 1.7
        other = {key: value * factor for key, value in model.state_dict().items()}
        before = model(tokens_of(0, dp)).item()
        with torch.no_grad():
            # After a forward without backward FSDP keeps the root's gathered weights until a reshard.
            model.reshard()
            change(model, other)
        with count_collective_bytes() as counted:
            after = model(tokens_of(0, dp))
            after.backward()
        found[name] = (before, after.item()), dict(counted.bytes)
    return found


def save(world_mesh, folder, sizes, recipe):
    """Save with DCP; returns the names and the local types of the state."""
    import torch.distributed.checkpoint as dcp

    model, _, _ = build(world_mesh, sizes, recipe, True)
    state = model.state_dict()
    dcp.save({"model": state}, checkpoint_id=folder)
    return sorted(state), {type(value.to_local()).__name__ for value in state.values()}


def load(world_mesh, folder, sizes, recipe, enabled):
    """Load the checkpoint of :func:`save`; returns the names of parameters that differ from the saved ones."""
    import torch.distributed.checkpoint as dcp

    model, _, _ = build(world_mesh, sizes, recipe, enabled)
    with torch.no_grad():
        expected = [p.to_local().detach().clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"], strict=True)
    pairs = zip(model.named_parameters(), expected, strict=True)
    return [name for (name, p), value in pairs if not torch.equal(p.to_local(), value)]


def compare_operands(world_mesh, sizes, recipe, shapes):
    """:func:`fsdp_cases.compare_operands` with every second weight sharded by in features."""
    from tritonfp8.distributed.shard_layout import largest_blocks

    dp, tp = mesh_of(world_mesh, sizes)
    model = initialize(Linears(shapes)).to(world_mesh.device_type)
    full = [layer.weight.detach().to(torch.bfloat16) for layer in model.layers]
    tritonfp8.convert(model, recipe, filter=lambda module, name: True)
    styles = (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model, tp, {f"layers.{i}": styles[i % 2] for i in range(len(shapes))})
    enable_float8_all_gather(model)
    fully_shard(model, mesh=dp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True)
    different, seen = [], []

    def compare(index, layer):
        spec = layer.recipe
        _, *blocks = largest_blocks(spec)
        dim, rank = index % 2, tp.get_local_rank()
        step = -(-shapes[index][dim] // tp.size())
        start = step * rank
        gaps = [0, 0]
        local = layer.weight.to_local()
        gaps[dim] = start % blocks[dim]
        padded = torch.nn.functional.pad(local, (gaps[1], 0, gaps[0], 0)) if any(gaps) else local
        for transposed, expected in enumerate(both_operands(full[index], spec)):
            found = operand_of(padded, spec, bool(transposed))
            if not part_of(found, expected, dim ^ transposed, start, gaps[dim]):
                different.append((shapes[index], "transposed" if transposed else "untransposed"))
            seen.append(index)

    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda module, args, index=index: compare(index, module))
    model(torch.randn(3, max(k for _, k in shapes), requires_grad=True)).sum().backward()
    return different, len(seen)


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
