"""Functions of each rank in the tests of experts that are stored in 8 bits and sharded by FSDP2."""

import tempfile

import mixtures
import torch
import transformers
from process_group import made_mesh
from raised import raised
from stored_models import assert_equal, hybrid_mesh
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8.distributed import count_collective_bytes, shard_experts
from tritonfp8.layers.stored import MatricesShard

IDS = torch.arange(24).reshape(2, 12) * 7 % 96


def mixture(family="qwen3_moe", recipe=None, seed=0, **sizes):
    """A mixture, whose converted weights are frozen and stored if it has a recipe; the rest trains."""
    torch.manual_seed(seed)
    options = {**mixtures.COMMON, **mixtures.FAMILIES[family], **sizes}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **options))
    if recipe is not None:
        tritonfp8.convert(model, recipe, mode="inference")
    return model


def sharded(model, mesh, reshard=True, recompute=False, compiled=False, param_dtype=None):
    options = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": MixedPrecisionPolicy(param_dtype)}
    for layer in model.model.layers:
        if recompute:
            layer.mlp.forward = recomputed(layer.mlp.forward)
        if compiled:
            layer.mlp.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def recomputed(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def steps(model, ids=IDS):
    """Losses of two steps, in which all that is not stored trains; and the types of the experts' weights in forward."""
    seen = set()
    handles = [
        each.register_forward_pre_hook(lambda module, args: seen.update(type(p) for p in module.parameters()))
        for each in mixtures.experts_of(model).values()
    ]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    for handle in handles:
        handle.remove()
    return torch.stack(losses), seen


def full(state):
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}


def trains(mesh, recipe, experts=8, family="qwen3_moe", copies=None, **options):
    """Every rank has the same tokens, so losses and weights equal the losses and weights of one process."""
    sizes = {} if family != "qwen3_moe" else {"num_experts": experts}
    single, model = (mixture(family, recipe, **sizes) for _ in range(2))
    if copies is not None:
        mesh = hybrid_mesh(mesh, copies)
    model = sharded(model, mesh, **options)
    parts = [p._local_tensor for each in mixtures.experts_of(model).values() for p in each.parameters()]
    assert {type(x) for x in parts} - {torch.Tensor} == {MatricesShard}
    assert not any(x.requires_grad for x in parts if type(x) is MatricesShard)
    (expected, _), (found, seen) = steps(single), steps(model)
    assert_equal({"losses": found}, {"losses": expected})
    assert MatricesShard in seen
    assert_equal(full(model.state_dict()), single.state_dict())
    return [x.shape[0] for x in parts if type(x) is MatricesShard]


def computes_in_bfloat16(mesh, recipe):
    """Weights that count as float32 serve a policy of bfloat16."""
    single = mixture(recipe=recipe).bfloat16()
    # A policy leaves buffers in float32.
    single.model.rotary_emb = mixture().model.rotary_emb
    model = sharded(mixture(recipe=recipe), mesh, param_dtype=torch.bfloat16)
    with torch.no_grad():
        assert_equal({"logits": model(input_ids=IDS).logits}, {"logits": single(input_ids=IDS).logits})
    return model(input_ids=IDS).logits.dtype


def expert_parallel(mesh, recipe, experts=8, fsdp=False):
    """Each rank has tokens of its own: the bits of plain experts of the same values, sharded in the same way."""
    stored, plain = mixture(recipe=recipe, num_experts=experts), mixture(num_experts=experts)
    plain.load_state_dict(stored.state_dict())
    for (name, ours), (_, theirs) in zip(stored.named_parameters(), plain.named_parameters(), strict=True):
        theirs.requires_grad_(ours.requires_grad)
        assert ours.requires_grad != (".experts." in name or "_proj." in name), name
    tritonfp8.convert(plain, next(iter(mixtures.experts_of(stored).values())).recipe)
    shape, names = ((2, 2), ("fsdp", "ep")) if fsdp else ((mesh.size(),), ("ep",))
    grid = made_mesh(mesh.device_type, shape, names)
    found = []
    for model in (stored, plain):
        shard_experts(model, grid["ep"] if fsdp else grid)
        if fsdp:
            sharded(model, grid["fsdp"])
        found.append(steps(model, (IDS + torch.distributed.get_rank()) % 96))
    (losses, _), (expected, _) = found
    assert_equal({"losses": losses}, {"losses": expected})
    assert_equal(full(stored.state_dict()), full(plain.state_dict()))
    with tritonfp8.quantize_weights_once(stored), torch.no_grad():
        stored(input_ids=IDS)
    parts = [p._local_tensor for each in mixtures.experts_of(stored).values() for p in each.parameters()]
    assert {type(x) for x in parts} == {MatricesShard}
    return [x.shape[0] for x in parts]


def data_parallel(mesh, recipe):
    """DistributedDataParallel gives all ranks the weights of rank 0."""
    rank = torch.distributed.get_rank()
    single, model = mixture(recipe=recipe, seed=5), mixture(recipe=recipe, seed=5 + rank)
    model = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group(), find_unused_parameters=True)
    assert_equal(model.module.state_dict(), single.state_dict())
    (losses, seen), (expected, _) = steps(model.module), steps(single)
    assert MatricesShard not in seen
    assert_equal({"losses": losses}, {"losses": expected})
    return True


def bytes_of_a_forward(mesh, recipe):
    """Bytes that FSDP2 gathers with stored weights and with plain ones of bfloat16."""
    found = []
    for name in (recipe, None):
        model = sharded(mixture(recipe=name).bfloat16(), mesh)
        with torch.no_grad(), count_collective_bytes() as counts:
            model(input_ids=IDS)
        found.append(sum(counts.bytes.values()))
    return found


def saved_and_changed(mesh, recipe):
    """State dicts, copies, export, load and revert of a sharded model."""
    source, model = mixture(recipe=recipe, num_experts=3), mixture(recipe=recipe, seed=1, num_experts=3)
    plain = mixture(num_experts=3)
    model = sharded(model, mesh)
    with torch.no_grad():
        # Leaves the root gathered.
        model(input_ids=IDS)
    state = {
        name: torch.distributed.tensor.distribute_tensor(x, mesh, model.state_dict()[name].placements)
        for name, x in source.state_dict().items()
    }
    model.load_state_dict(state)
    assert_equal(full(model.state_dict()), source.state_dict())
    weight = next(iter(mixtures.experts_of(model).values())).down_proj
    assert type(weight._local_tensor) is MatricesShard
    with tempfile.TemporaryDirectory() as folder:
        tritonfp8.export.save(source, folder, "compressed_channel")
        other = sharded(mixture(recipe=recipe, seed=2, num_experts=3), mesh)
        report = tritonfp8.export.load(other, folder)
        kept = {name: layer.again for name, layer in report.layers.items() if ".experts" in name}
        assert set(kept.values()) == {"codes kept"}
        assert_equal(full(other.state_dict()), source.state_dict())
        expected = dict(tritonfp8.export.tensors(source, "compressed_channel"))
        assert_equal(dict(tritonfp8.export.tensors(other, "compressed_channel")), expected)
    tritonfp8.revert(model)
    assert {type(p._local_tensor) for p in model.parameters()} == {torch.Tensor}
    assert_equal(full(model.state_dict()), source.state_dict())
    plain.load_state_dict(source.state_dict())
    with torch.no_grad():
        assert_equal({"logits": model(input_ids=IDS).logits}, {"logits": plain(input_ids=IDS).logits})
    return True


def refused(mesh, how):
    model = mixture(recipe="rowwise")
    if how == "columns":
        by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 3 else None}
        return raised(lambda: fully_shard(model, mesh=mesh, **by_columns))
    if how == "number":
        return raised(lambda: sharded(model, mesh, reshard=2)(input_ids=IDS))
    tritonfp8.revert(model)
    report = tritonfp8.convert(sharded(model, mesh), "rowwise", mode="inference")
    return str(set(report.unstored_experts.values()))
