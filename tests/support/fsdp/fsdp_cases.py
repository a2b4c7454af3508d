"""A training run of FSDP2 by its options, and what the tests of several files compare of it."""

import hashlib
from dataclasses import dataclass

import torch
from fsdp_models import VOCABULARY, Linears, Llama, initialize
from process_group import made_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# The second divides forward from backward as the default one does, by what it costs to keep.
BACKENDS = {"block": "aot_eager", "block_min_cut": "aot_eager_decomp_partition"}


@dataclass(frozen=True)
class Setup:
    """Options of a training run."""

    recipe: str = "rowwise"
    enabled: bool = True
    cast: str = "param_dtype"
    reshard: object = True
    root_reshard: object = None
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = torch.bfloat16
    optimizer: str = "foreach"
    copies: int | None = None
    offload: bool = False
    meta: bool = False
    frozen: str = ""
    recompute: str | None = None
    recompute_with_hooks: str | None = None
    accumulate: int = 1
    clip: bool = False
    tied: bool = False
    compile: str = ""
    reverse: bool = False
    sizes: tuple = ()
    last: bool = False
    enable_last: bool = False


def same_as_without(ranks, world, function, *args, **options):
    """Assert that the ranks return the same with the 8-bit gather and without it; return both results."""
    on, off = (ranks.run(world, function, *args, enabled=enabled, **options) for enabled in (True, False))
    assert on == off
    return on, off


def build(mesh, setup):
    """The converted and sharded model, and the report of the gather or None."""
    if setup.copies is not None:
        shape = (setup.copies, mesh.size() // setup.copies)
        mesh = made_mesh(mesh.device_type, shape, ("replicate", "shard"))
    with torch.device("meta" if setup.meta else "cpu"):
        model = Llama(*setup.sizes, tied=setup.tied)
    if not setup.meta:
        initialize(model).to(setup.dtype)
        if not setup.offload:
            model.to(mesh.device_type)
    # A tied head is converted only by a pattern that names it.
    recipe = {"last": setup.recipe, "*": setup.recipe}
    if not setup.last:
        tritonfp8.convert(model, recipe)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not setup.frozen or setup.frozen not in name)
    for layer in model.layers:
        layer.recompute = setup.recompute
    model.recompute = setup.recompute_with_hooks
    report = enable_float8_all_gather(model, setup.cast) if setup.enabled and not setup.enable_last else None
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=setup.param_dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if setup.offload else OffloadPolicy(),
    }
    for name, layer in model.layers.named_children():
        if setup.compile in BACKENDS:
            layer = torch.compile(layer, backend=BACKENDS[setup.compile], fullgraph=True)
            model.layers.register_module(name, layer)
        fully_shard(layer, reshard_after_forward=setup.reshard, **options)
    fully_shard(model, reshard_after_forward=setup.root_reshard, **options)
    if setup.last:
        tritonfp8.convert(model, recipe)
    if setup.enable_last and setup.enabled:
        report = enable_float8_all_gather(model, setup.cast)
    if setup.meta:
        model.to_empty(device=mesh.device_type)
        full = initialize(Llama(*setup.sizes, tied=setup.tied).to(setup.dtype)).state_dict()
        load_full(model, full)
    if setup.compile == "whole":
        model.compile(backend="aot_eager")
    return model, report


def load_full(model, full, **options):
    """Load plain tensors, the same on all ranks, into the sharded model."""
    state = {}
    for name, now in model.state_dict().items():
        value = full[name].to(now.device, now.dtype)
        state[name] = (
            distribute_tensor(value, now.device_mesh, now.placements, src_data_rank=None)
            if isinstance(now, DTensor)
            else value
        )
    return model.load_state_dict(state, strict=True, **options)


def tokens_of(micro, batch=2, length=7):
    generator = torch.Generator().manual_seed(1000 * micro + torch.distributed.get_rank())
    return torch.randint(VOCABULARY, (batch, length), generator=generator)


def full_parameters(model):
    """The whole parameters, on the CPU, in one collective: one for each would take a tenth of the time of the tests."""
    state = model.state_dict()
    sharded = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    if not sharded:
        return state
    mesh = next(iter(sharded.values())).device_mesh
    parts = [None] * mesh.size(-1)
    mine = {name: value.to_local().cpu() for name, value in sharded.items()}
    torch.distributed.all_gather_object(parts, mine, group=mesh.get_group(-1))
    return {name: torch.cat([part[name] for part in parts]) if name in sharded else state[name] for name in state}


def bytes_of(x):
    return x.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()


def digest(model):
    """Hash of all bits of all parameters."""
    found = hashlib.sha256()
    for name, value in full_parameters(model).items():
        found.update(name.encode() + bytes_of(value))
    return found.hexdigest()


def zero(model):
    """Fill the parameters with zeros, which a checkpoint is loaded over."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def step(loss_of, optimizer, *inputs):
    """A step along the gradients of ``loss_of(*inputs)``, such as a model's; returns the loss."""
    loss = loss_of(*inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def step_of(model, optimizer, setup):
    """Losses of the micro-batches of a step, and the norm of the gradients if they are clipped."""
    losses = []
    for micro in range(setup.accumulate):
        model.set_requires_gradient_sync(micro == setup.accumulate - 1)
        loss = model(tokens_of(micro))
        loss.backward()
        losses.append(loss.item())
    if setup.clip:
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor().item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train(mesh, setup, steps=10):
    """Losses of each step, and a digest of the final parameters."""
    model, _ = build(mesh, setup)
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = {"foreach": False} if setup.optimizer == "loop" else {setup.optimizer: True}
    optimizer = torch.optim.AdamW(trained, lr=1e-2, **kind)
    losses = [loss for _ in range(steps) for loss in step_of(model, optimizer, setup)]
    return losses, digest(model)


def _poisoned(model):
    """Set weights with special values: a NaN, infinities, zeros, subnormals."""
    initialize(model)
    with torch.no_grad():
        for layer in model.layers:
            weight = layer.weight
            weight[:, 0] = 0
            weight[-1, -1] = 1e-42
            weight[weight.shape[0] // 2, 3] = -torch.nan
            weight[weight.shape[0] // 3, 7] = -torch.inf
            # Rounds to infinity in bf16.
            weight[0, 9] = torch.finfo(torch.float32).max
    return model


def _bits(q):
    return q.qdata.reshape(-1).view(torch.uint8), q.scale.reshape(-1).view(torch.uint8)


def both_operands(weight, recipe):
    """A whole weight quantized untransposed for ``output`` and transposed for ``grad_input``."""
    from tritonfp8.functional import quantize_weight

    q, q_t = quantize_weight(weight, recipe)
    return q, q_t or tritonfp8.Quantized(q.qdata.t().contiguous(), q.scale.t().contiguous(), q.spec)


def operand_of(weight, recipe, transposed):
    """What a GEMM reads of a gathered weight."""
    from tritonfp8.layers.linear import Later, Specs, source_of

    if transposed:
        spec = recipe.grad_input.rhs
        pair = source_of(weight).later(weight, Later(spec), None)
    else:
        spec = recipe.output.rhs
        pair, _ = source_of(weight).now(weight, Specs(spec, None))
    return tritonfp8.Quantized(*pair, spec)


def compare_operands(mesh, recipe, shapes, reshard, poisoned, cast="param_dtype", dtype=torch.bfloat16):
    """Gathered operands that differ from the bits of the whole weight in one process; and the number of layers."""
    model = (_poisoned if poisoned else initialize)(Linears(shapes))
    seen = dtype if cast == "param_dtype" else torch.float32
    full = [layer.weight.detach().clone().to(mesh.device_type, seen) for layer in model.layers]
    tritonfp8.convert(model, recipe, filter=lambda module, name: True)
    enable_float8_all_gather(model, cast)
    model.to(mesh.device_type)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype), reshard_after_forward=reshard)
    different, seen_layers = [], []

    def compare(index, layer):
        for transposed, expected in enumerate(both_operands(full[index], layer.recipe)):
            found = operand_of(layer.weight, layer.recipe, bool(transposed))
            same = all(torch.equal(a, b) for a, b in zip(_bits(found), _bits(expected), strict=True))
            if not same or found.spec != expected.spec or layer.weight.dtype != dtype:
                different.append((shapes[index], "transposed" if transposed else "untransposed"))
        seen_layers.append(index)

    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda module, args, index=index: compare(index, module))
    x = torch.randn(3, max(k for _, k in shapes), requires_grad=True)
    model(x).sum().backward()
    return different, len(seen_layers)


def save(mesh, folder, setup):
    """Train a little and save model and optimizer with DCP."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, _ = build(mesh, setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_of(model, optimizer, setup)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    types = {type(getattr(v, "_local_tensor", v)).__name__ for v in model_state.values()}
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, process_group=mesh.get_group())
    before = digest(model)
    return before, step_of(model, optimizer, setup), sorted(types), list(model.state_dict())


def load(mesh, folder, setup):
    """Load the checkpoint of :func:`save` at another world size, and train a step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, _ = build(mesh, setup)
    zero(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return digest(model), step_of(model, optimizer, setup)
