"""Functions of each rank in the tests of fused layers on many devices."""

import torch
import torch.nn.functional as F
from cases import llama, tokens
from fsdp_cases import digest
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import tritonfp8
from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel, enable_float8_all_gather

COLWISE = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"
ROWWISE = "self_attn.o_proj", "mlp.down_proj"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLAIN, FLOAT8 = (ColwiseParallel, RowwiseParallel), (Float8ColwiseParallel, Float8RowwiseParallel)


def train(mesh, recipe, fuse=True, gathers=False, compile=False, recompute=False, swap=None, steps=3):
    """Losses of a Llama under FSDP2, a digest of its final parameters, and how many modules are fused.

    ``swap`` is the recipe from the second step on.
    """
    model = llama()
    fused = tritonfp8.convert(model, recipe, fuse=fuse).fused
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if gathers:
        enable_float8_all_gather(model)
    for layer in model.model.layers:
        if compile:
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, ids = [], tokens(length=17, seed=mesh.get_local_rank())
    for step in range(steps):
        if swap is not None and step == 1:
            tritonfp8.swap_recipe(model, swap)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, digest(model), len(fused)


def assigned(mesh, recipe, gathers):
    """A loss after ``load_state_dict(assign=True)`` of twice the weights; and a digest of the parameters."""
    model = llama()
    tritonfp8.convert(model, recipe, fuse=True)
    if gathers:
        enable_float8_all_gather(model)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    ids = tokens(length=17, seed=mesh.get_local_rank())
    model(input_ids=ids, use_cache=False).logits.sum().backward()
    state = {name: 2 * value.detach() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model(input_ids=ids, use_cache=False).logits.square().mean().item(), digest(model)


def parallelize(model, mesh, styles):
    colwise, rowwise = styles
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {name: colwise() for name in COLWISE} | {name: rowwise() for name in ROWWISE})
    return model


def errors_of_shards(mesh, recipe):
    """The error of a parallel style on each layer of a fused model, or None."""
    model = llama()
    tritonfp8.convert(model, recipe, fuse=True)
    tried = {f"model.layers.1.{name}": ColwiseParallel() for name in COLWISE}
    tried |= {f"model.layers.1.{name}": RowwiseParallel() for name in ROWWISE}
    tried |= {"model.layers.1.input_layernorm": SequenceParallel(), "model.norm": SequenceParallel()}
    found = {}
    for name, style in tried.items():
        try:
            parallelize_module(model, mesh, {name: style})
            found[name] = None
        except TypeError as error:
            found[name] = str(error)
    return found


def shards_first(mesh, recipe, float8):
    """Names of the layers that are fused after sharding. Asserts the logits and gradients of the unfused model."""
    results = []
    for fuse in (False, True):
        model = parallelize(llama(), mesh, FLOAT8 if float8 else PLAIN)
        fused = tritonfp8.convert(model, recipe, fuse=fuse).fused
        out = model(input_ids=tokens(), use_cache=False).logits
        out.square().mean().backward()
        grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        results.append([out.detach(), *grads])
    assert all(map(torch.equal, *results))
    assert isinstance(model.model.layers[0].mlp.gate_proj.weight, DTensor)
    assert model.model.layers[0].mlp.gate_proj.weight.placements == (Shard(0),)
    return list(fused)
