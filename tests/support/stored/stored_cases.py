"""Functions of each rank in the tests of sharded weights that are stored in 8 bits."""

import copy

import torch
import torch.distributed.checkpoint as dcp
from cast_counts import HighPrecisionMemory
from raised import raised
from stored_expert_cases import IDS, mixture
from stored_layers import EXPERTS_KIND, LINEARS, call, reloaded, weights_of
from stored_layers import stored as stored_as
from stored_models import (
    HIDDEN,
    WIDE,
    Block,
    assert_equal,
    data,
    distributed_state,
    is_base,
    other_values,
    parallel,
    plain_model,
    results,
    shard,
    stored_model,
    whole,
)
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from trained_models import codes
from transformers.pytorch_utils import Conv1D

import tritonfp8
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather
from tritonfp8.layers.stored import is_stored, store, stored_part


def assert_stored(model, count=8):
    """All base layers are stored, so many."""
    assert [is_stored(layer) for name, layer in model.named_modules() if is_base(layer, name)] == [True] * count


def compares(mesh, recipe, dtype=torch.bfloat16, recompute=None, order="stored_first", param_dtype=None, compiled=False,
             **options):  # fmt: skip
    """A sharded model computes the bits of the whole one, twice, before and after it is saved."""
    model = stored_model(recipe, dtype)
    if param_dtype is not None:
        # The copy that computes in that dtype has the biases and adapters rounded to it.
        model = model.to(param_dtype)
    expected = results(model, data(param_dtype or dtype))
    if order == "stored_first":
        sharded = shard(stored_model(recipe, dtype, recompute), mesh, param_dtype=param_dtype, **options)
    else:
        sharded = shard(plain_model(dtype), mesh, param_dtype=param_dtype, **options)
        tritonfp8.convert(sharded, recipe, filter=is_base, weight_storage="quantized")
        for block in sharded:
            block.recompute = recompute
    assert_stored(sharded)
    if compiled:
        for block in sharded:
            block.compile(backend="aot_eager")
    for step in range(2):
        found = results(sharded, data(param_dtype or dtype))
        if param_dtype is not None:
            found = {name: x.to(param_dtype) for name, x in found.items()}
        assert_equal(found, expected)
        if step == 0:
            sharded.state_dict()
    return True


def packed(mesh, recipe, experts=False):
    """Weights in MXFP4, of linear layers or of experts, are sharded between rows and computed with as on one rank."""
    kind = EXPERTS_KIND if experts else LINEARS
    model, sharded = stored_as(kind, recipe), stored_as(kind, recipe)
    expected, values = call(model, kind).detach(), [weight.dequantize() for weight in weights_of(model)]
    sizes = [weight.nbytes for weight in weights_of(model)]
    for module in [] if experts else (sharded[0], sharded[2]):
        fully_shard(module, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for _ in range(2):
        found = call(sharded, kind)
        assert_equal({"out": found.detach()}, {"out": expected})
        found.sum().backward()
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(sharded, options=options)
    names = [name for name, _ in model.named_parameters() if "bias" not in name]
    assert_equal({name: full[name] for name in names}, dict(zip(names, values, strict=True)))
    shares = [stored_part(weight).nbytes / size for weight, size in zip(weights_of(sharded), sizes, strict=True)]
    return max(shares)


def replicated(mesh, recipe, stored, apply=replicate):
    """torch's replicate over stored weights, one of them of one row, or over weights of the 8-bit gather."""
    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, 1)).requires_grad_(not stored)
        options = {"weight_storage": "quantized"} if stored else {}
        tritonfp8.convert(model, recipe, filter=lambda module, name: True, **options)
        if shards:
            if not stored:
                enable_float8_all_gather(model)
            for module in (*model, model):
                apply(module, mesh=mesh)
        found.append([results(model, data(torch.float32)) for _ in range(2)])
    for ours, theirs in zip(*found, strict=True):
        assert_equal(ours, theirs)
    return True


def tensor_parallel(mesh, recipe, first=True, rows=1, **options):
    """A stored model computes the bits of a model of its values."""
    model, plain = (parallel(mesh, recipe, first, rows, stored=stored, **options) for stored in (True, False))
    assert_stored(model)
    for _ in range(2):
        assert_equal(results(model, data()), results(plain, data()))
    for name, value in model.state_dict().items():
        assert torch.equal(whole(value), whole(plain.state_dict()[name])), name
    return True


def checkpoints(mesh, recipe, folder, how="fsdp"):
    """What a sharded model saves has plain values; what it loads it computes with, also after it has computed."""
    model = shard(stored_model(recipe), mesh) if how == "fsdp" else parallel(mesh, recipe, True, 1)
    expected = stored_model(recipe).state_dict()
    sharded = model.state_dict()
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    assert list(full) == list(sharded) == list(expected)
    for name, x in expected.items():
        local = sharded[name].to_local() if isinstance(sharded[name], DTensor) else sharded[name]
        assert type(local) is torch.Tensor
        assert local.dtype == x.dtype
        assert torch.equal(full[name], x), name
    dcp.save(sharded, checkpoint_id=folder)
    x = data()
    before = results(model, x)
    for load in (
        lambda state: set_model_state_dict(model, state, options=options),
        lambda state: model.load_state_dict(distributed_state(model, state), assign=how == "fsdp"),
    ):
        reference, state = other_values(recipe)
        load(dict(state))
        assert_stored(model)
        found = results(model, x)
        if how == "fsdp":
            assert_equal(found, results(reference, x))
        assert not torch.equal(found["output"], before["output"])
        loaded = model.state_dict()
        for name, value in reference.state_dict().items():
            assert torch.equal(whole(loaded[name]), value), name
        dcp.load(loaded, checkpoint_id=folder)
        model.load_state_dict(loaded)
        assert_equal(results(model, x), before)
    return True


def moved_and_copied(mesh, recipe):
    """Casts, copies and pickles of sharded stored weights keep the codes."""
    model = parallel(mesh, recipe, True, 1)
    expected = results(model, data())
    copied = copy.deepcopy(model)
    assert_equal(results(copied, data()), expected)
    part = model[0].up.weight.to_local()
    again = reloaded(part, weights_only=False)
    assert torch.equal(again.dequantize(), part.dequantize())
    assert again._qdata.data_ptr() != part._qdata.data_ptr()
    sharded = shard(stored_model(recipe), mesh)
    before = codes(sharded)
    sharded.to("cpu")
    sharded.float()
    assert sharded[0].up.weight.dtype == torch.float32
    assert_equal(results(sharded, data(torch.float32)), results(stored_model(recipe).float(), data(torch.float32)))
    assert all(torch.equal(a, b) for a, b in zip(codes(sharded), before, strict=True))
    return True


def beside_trained_weights(mesh, recipe):
    """Some layers stored and some trained, the latter gathered in 8 bits by enable_float8_all_gather."""
    found = []
    for enabled in (True, False):
        model = stored_model(recipe)
        lora = lambda module, name: "lora" in name  # noqa: E731
        tritonfp8.convert(model, recipe, filter=lora)
        if enabled:
            report = enable_float8_all_gather(model)
            assert len(report.converted) == 4
            assert set(report.skipped.values()) == {"stored in 8 bits: FSDP2 gathers its codes without this"}
        shard(model, mesh)
        with torch.no_grad():
            first = model(data())
        again = results(model, data())
        assert torch.equal(first, again["output"])
        found.append(again)
    assert_equal(*found)
    return True


def other_tools(mesh, recipe):
    """verify, monitor, quantize_weights_once and export take a sharded stored model."""
    model, one_rank = shard(stored_model(recipe), mesh), stored_model(recipe)
    assert "e4m3 x e4m3" in str(tritonfp8.verify(model, data()))
    with tritonfp8.monitor(model, every=1, thresholds=()) as stats:
        model(data())
        stats.step()
    assert stats.to_dict()[0]["0.up"]["weight"]["sqnr"] == float("inf")
    expected = results(model, data())
    with tritonfp8.quantize_weights_once(model):
        assert_equal(results(model, data()), expected)
    exported, wanted = (dict(tritonfp8.export.tensors(each, "compressed_channel")) for each in (model, one_rank))
    assert exported.keys() == wanted.keys()
    assert torch.equal(exported["0.up.weight_scale"], wanted["0.up.weight_scale"])
    assert torch.equal(exported["0.up.weight"].view(torch.uint8), wanted["0.up.weight"].view(torch.uint8))
    return True


def reverted(mesh, recipe):
    """revert gives sharded plain weights of the values, which FSDP2 gathers from then on; convert stores them again."""
    model = shard(stored_model(recipe), mesh)
    expected = results(model, data())
    tritonfp8.revert(model)
    plain = plain_model()
    plain.load_state_dict(stored_model(recipe).state_dict())
    assert_equal(results(model, data()), results(plain, data()))
    tritonfp8.convert(model, recipe, filter=is_base, weight_storage="quantized")
    assert_equal(results(model, data()), expected)
    return True


def traffic(mesh, recipe):
    """Bytes that a step gathers, with weights in 8 bits over those in bf16."""
    found = []
    for make in (stored_model, lambda recipe: plain_model()):
        # Only the large weights: nothing else is halved.
        model = nn.Sequential(*(layer for block in make(recipe) for layer in (block.up, block.down)))
        for layer in model:
            layer.bias = None
            fully_shard(layer, mesh=mesh)
        results(model, data())
        with count_collective_bytes() as counted:
            results(model, data())
        found.append(counted.bytes["all_gather"])
    return found[0] / found[1]


def refused(mesh, how):
    """The message of the error."""
    model = stored_model("rowwise")
    layer, conv = (nn.Sequential(each).bfloat16() for each in (nn.Linear(64, 32, bias=False), Conv1D(64, 32)))
    for each in (layer, conv):
        tritonfp8.convert(each, "rowwise", filter=lambda module, name: True, mode="inference")

    def by_columns():
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(1))
        layer(torch.ones(2, 64, dtype=torch.bfloat16))

    return raised({
        "number": lambda: shard(model, mesh, reshard=2)(data()),
        "columns": by_columns,
        "conv1d": lambda: fully_shard(conv, mesh=mesh),
        "gather twice": lambda: enable_float8_all_gather(model),
        "float16": lambda: shard(model, mesh, param_dtype=torch.float16)(data(torch.float16)),
        "copy": lambda: shard(model, mesh)[0].up.weight.to_local().zero_(),
    }[how])  # fmt: skip


def wrapped_by_fsdp1(mesh, trains, experts, **options):
    """The message of FSDP version 1; the model computes what it did before."""
    torch.manual_seed(0)
    if experts:
        model, args = mixture(recipe="rowwise"), (IDS,)
    else:
        model, args = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)).requires_grad_(trains), (torch.ones(2, 64),)
        tritonfp8.convert(model, "rowwise", filter=lambda module, name: True, weight_storage="quantized")

    def output():
        found = model(*args)
        return found.logits if experts else found

    expected = output()
    options |= {"process_group": mesh.get_group(), "device_id": torch.device(mesh.device_type)}
    found = raised(lambda: FullyShardedDataParallel(model, **options))
    assert not found.startswith("NotImplementedError") or torch.equal(output(), expected)
    return found


def changed_while_gathered(mesh, recipe):
    """What changes a weight changes the shard, also after a forward that left the weights gathered."""

    def evaluated(model):
        with torch.no_grad():
            return model(data())

    model = shard(plain_model(), mesh, reshard=False)
    evaluated(model)
    tritonfp8.convert(model, recipe, filter=is_base, weight_storage="quantized")
    expected = results(stored_model(recipe), data())
    for _ in range(2):
        assert_equal(results(model, data()), expected)
    before = evaluated(model)
    model[0].up.reset_parameters()
    after = evaluated(model)
    assert not torch.equal(before, after)
    reference, state = other_values(recipe)
    model.load_state_dict(distributed_state(model, state))
    assert torch.equal(evaluated(model), evaluated(reference))
    tritonfp8.revert(model)
    assert type(model[0].up.weight.to_local()) is torch.Tensor
    tritonfp8.revert(reference)
    assert torch.equal(evaluated(model), evaluated(reference))
    return True


def made_on_meta(mesh, recipe):
    """A model that is never whole in high precision: stored as it is made, sharded, filled file by file."""
    expected = stored_model(recipe, blocks=6)
    files = [{f"{i}.{name}": x for name, x in block.state_dict().items()} for i, block in enumerate(expected)]
    whole_size = sum(x.nbytes for file in files for x in file.values())
    with HighPrecisionMemory() as memory:
        with tritonfp8.quantized_init(recipe, filter=is_base), torch.device("meta"):
            model = nn.Sequential(*(Block() for _ in range(6))).bfloat16()
        shard(model, mesh)
        model.to_empty(device=mesh.device_type)
        options = StateDictOptions(full_state_dict=True, strict=False)
        for file in files:
            set_model_state_dict(model, file, options=options)
    assert_stored(model, 24)
    assert_equal(results(model, data()), results(expected, data()))
    for layer in (model[3].up, model[3].back):
        layer.reset_parameters()
    weight = whole(model.state_dict()["3.up.weight"])
    assert 0.5 < weight.float().std() * (3 * HIDDEN) ** 0.5 < 2
    spec = stored_part(model[3].up.weight).spec
    assert torch.equal(store(weight, spec).dequantize(), weight)
    assert not torch.equal(results(model, data())["output"], results(expected, data())["output"])
    return memory.peak / whole_size
