"""A sharded model gives the tensors of the whole one, on every rank."""

import tempfile
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
from cases import QUANTIZED, rounded
from checkpoints import EXPERTS, MIXTRAL, WHOLE, files_of, model_of
from fsdp_cases import Setup, build, full_parameters, tokens_of
from pretrained_cases import FORMATS, IDS, differing, written
from process_group import made_mesh
from raised import raised
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel
from tritonfp8.integrations.transformers import from_pretrained
from tritonfp8.optim import AdamW
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.xdist_group("ranks")
PROCESSES = 4


def _taken(model, format, **options):
    return {name: x.clone() for name, x in tritonfp8.export.tensors(model, format, **options)}


def _expected(weights, exported, format):
    """Codes and scales of whole weights."""
    row = tritonfp8.export.CHECKPOINT_FORMATS[format]
    found = dict(weights)
    for layer in exported:
        q = tritonfp8.quantize(weights[f"{layer}.weight"], row.spec)
        found[f"{layer}.weight"] = q.qdata
        found[f"{layer}.{row.scale_name}"] = q.scale.view(row.scale_dtype).reshape(row.scale_shape(q.shape))
    return found


def _equal(found, expected):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == expected[name].dtype, name
        assert torch.equal(x.view(torch.uint8), expected[name].contiguous().view(torch.uint8)), name


def fsdp(mesh, recipe, reshard):
    """After a step, with weights that FSDP2 left gathered: the export has the sharded values."""
    model, _ = build(mesh, Setup(recipe, reshard=reshard))
    model(tokens_of(0)).float().square().mean().backward()
    weights = full_parameters(model)
    report = tritonfp8.export.plan(model, "compressed_channel")
    values = {f"{name}.weight": rounded(weights[f"{name}.weight"], recipes.get(recipe)) for name in report.exported}
    with torch.no_grad():
        # A backward would let FSDP2 drop what it gathered.
        model(tokens_of(1))
    _equal(_taken(model, "compressed_channel"), _expected({**weights, **values}, report.exported, "compressed_channel"))
    assert report.bytes_before == sum(x.nbytes for x in weights.values())
    assert len(report.exported) > 6


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_fsdp2_that_left_weights_gathered(ranks, recipe):
    ranks.run(2, fsdp, recipe, reshard=False)


def test_fsdp2(ranks):
    ranks.run(2, fsdp, "rowwise", reshard=True)


def tensor_parallel(mesh, format):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
    tritonfp8.convert(model, "rowwise")
    parallelize_module(model, mesh, {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()})
    _equal(_taken(model, format), _expected(weights, ("0", "2"), format))


@pytest.mark.parametrize("format", ["fine_grained", "compressed_mxfp8", "compressed_tensor"])
def test_tensor_parallel(ranks, format):
    ranks.run(2, tensor_parallel, format)


def data_parallel(mesh):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    tritonfp8.convert(model, "blockwise")
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group()))
    _equal(_taken(wrapped, "fine_grained"), _taken(model, "fine_grained"))


def test_data_parallel(ranks):
    ranks.run(2, data_parallel)


def merged(mesh, storage, dora):
    """Adapters on a sharded base: the tensors that the whole model merges to, on every rank."""
    model = model_of(dtype=torch.float32).requires_grad_(False)
    tritonfp8.convert(model, "rowwise", weight_storage=storage)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_dora=dora))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape) * 0.05)
    expected = _taken(model, "compressed_channel", adapters="merged")
    before = [p.clone() for p in model.parameters() if p.requires_grad]
    for layer in (*model.base_model.model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    _equal(_taken(model, "compressed_channel", adapters="merged"), expected)
    after = [p for p in model.parameters() if p.requires_grad]
    assert all(isinstance(p, DTensor) and torch.equal(p.full_tensor(), x) for p, x in zip(after, before, strict=True))


@pytest.mark.parametrize(("storage", "dora"), [("parameters", True), ("quantized", False)])
def test_adapters_on_a_sharded_base_are_merged(ranks, storage, dora):
    ranks.run(2, merged, storage, dora)


def _contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def saved(mesh, folder, format, limit):
    """All ranks save a sharded model of which rank 0 has the whole one, too."""
    whole, sharded = (model_of(dtype=torch.float32) for _ in range(2))
    for model in (whole, sharded):
        tritonfp8.convert(model, "rowwise")
    for layer in (*sharded.model.layers, sharded):
        fully_shard(layer, mesh=mesh)
    # FSDP2 leaves the weights of the root gathered.
    sharded(torch.arange(8)[None])
    found = tritonfp8.export.save(sharded, f"{folder}/sharded", format, max_shard_bytes=limit)
    if torch.distributed.get_rank() == 0:
        wanted = tritonfp8.export.save(whole, f"{folder}/whole", format, max_shard_bytes=limit)
        assert (found.files, found.bytes_before) == (wanted.files, wanted.bytes_before)
        assert _contents(f"{folder}/sharded") == _contents(f"{folder}/whole")
    return found


@pytest.mark.parametrize(("format", "limit"), [("compressed_channel", 10**9), ("fine_grained", 30_000)])
def test_a_sharded_model_is_saved_as_the_whole_one(ranks, tmp_path, format, limit):
    first, second = ranks.run(2, saved, str(tmp_path), format, limit)
    assert first == second
    assert (len(first.files) > 3) == (limit < 10**9)


def cannot(mesh, folder, what):
    """Rank 0 cannot write: all ranks raise, none hangs, and nothing is left."""
    model, _ = build(mesh, Setup())
    rank = torch.distributed.get_rank()
    if what == "weights":
        # Not of a disk that ranks share: only one of them sees it.
        folder = f"{folder}/{rank}"
        Path(folder).mkdir()
        if rank == 1:
            Path(folder, "old.safetensors").touch()
    if what == "disk" and rank == 0:
        Path(folder, "new").touch()
    if what == "file" and rank == 0:
        safetensors.torch.save_file = raising
    try:
        return raised(
            lambda: tritonfp8.export.save(model, f"{folder}/new" if what == "disk" else folder, "compressed_channel")
        )
    finally:
        safetensors.torch.save_file = SAVE_FILE


SAVE_FILE = safetensors.torch.save_file


def raising(*args, **options):
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("what", "culprit", "message"),
    [("disk", 0, "File exists"), ("file", 0, "no space left"), ("weights", 1, "must not have weights yet")],
)
def test_an_error_of_one_rank_is_an_error_of_all(ranks, tmp_path, what, culprit, message):
    found = ranks.run(2, cannot, str(tmp_path), what)
    assert message in found[culprit]
    assert f"the checkpoint was not written: rank {culprit}" in found[1 - culprit]
    assert message in found[1 - culprit]
    assert not [
        path for path in tmp_path.rglob("*") if path.suffix == ".safetensors" and path.name != "old.safetensors"
    ]


def _mlp(seed, width):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, 128), nn.LayerNorm(128)).bfloat16()


def loads(mesh, format, recipe, storage, way):
    """A sharded model reads a checkpoint as a whole model does, and a whole model takes its tensors."""
    # Blocks of these formats must divide the width.
    width = {"fine_grained": 256, "compressed_mxfp8": 224}.get(format, 200)
    source, *models = (_mlp(seed, width) for seed in (7, torch.distributed.get_rank(), 0))
    for model in models:
        tritonfp8.convert(model.requires_grad_(False), recipe, weight_storage=storage)
    sharded, alone = models
    meshes = dict.fromkeys(way, mesh)
    if len(way) == 2:
        grid = made_mesh(mesh.device_type, (2, 2), way)
        meshes = {name: grid[name] for name in way}
    if "tp" in way:
        parallelize_module(sharded, meshes["tp"], {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()})
    if "fsdp" in way:
        fully_shard(sharded, mesh=meshes["fsdp"])
    weight = next(sharded.parameters())
    if "fsdp" in way:
        with torch.no_grad():
            # FSDP2 leaves the weights of the root gathered.
            sharded(torch.ones(16, 128, dtype=torch.bfloat16))
    with tempfile.TemporaryDirectory() as folder:
        tritonfp8.export.save(source, folder, format, filter=["0", "2"])
        found, wanted = (tritonfp8.export.load(model, folder) for model in (sharded, alone))
    assert next(sharded.parameters()) is weight
    assert found == wanted
    for name, x in alone.state_dict().items():
        y = sharded.state_dict()[name]
        assert torch.equal(y.full_tensor() if isinstance(y, DTensor) else y, x), name
    copy = _mlp(3, width).requires_grad_(False)
    tritonfp8.convert(copy, recipe, weight_storage=storage)
    tritonfp8.export.load_tensors(copy, tritonfp8.export.tensors(sharded, format, filter=["0", "2"]), format)
    assert_bitwise_equal(dict(copy.state_dict()), dict(alone.state_dict()))
    return found


@pytest.mark.parametrize(
    ("way", "recipe", "storage", "format"),
    [
        ("fsdp", "rowwise", "parameters", "compressed_channel"),
        ("fsdp", "blockwise", "quantized", "fine_grained"),
        ("tp", "rowwise", "quantized", "compressed_channel"),
        ("tp", "mxfp8", "quantized", "compressed_mxfp8"),
        ("fsdp tp", "rowwise", "parameters", "compressed_channel"),
        ("fsdp tp", "blockwise", "quantized", "fine_grained"),
    ],
)
def test_loads(ranks, way, recipe, storage, format):
    way = tuple(way.split())
    first, *others = ranks.run(2 * len(way), loads, format, recipe, storage, way)
    assert len(first.layers) == 2
    assert all(each == first for each in others)


def experts(mesh, family):
    """A mixture whose experts FSDP2 shards unevenly."""
    sizes = EXPERTS | {"num_experts": 3} if family == "moe" else MIXTRAL | {"num_local_experts": 3}
    whole, sharded, alone = (model_of(family, sizes, seed) for seed in (0, 1, 1))
    for model in (whole, sharded, alone):
        tritonfp8.convert(model, "blockwise")
    with tempfile.TemporaryDirectory() as folder:
        tritonfp8.export.save(whole, folder, "fine_grained")
        files = files_of(folder)
        fully_shard(sharded, mesh=mesh)
        assert tritonfp8.export.load(sharded, folder) == tritonfp8.export.load(alone, folder)
    for name, x in alone.state_dict().items():
        assert torch.equal(sharded.state_dict()[name].full_tensor(), x), name
    found = _taken(sharded, "fine_grained")
    # Values that are read are quantized again, which may give other codes for them.
    assert found.keys() == files.keys()
    _equal(found, _taken(alone, "fine_grained"))


@pytest.mark.parametrize("family", ["moe", "mixtral"])
def test_experts_that_fsdp2_shards(ranks, family):
    """Every rank gets all tensors of the export, and reads its own part of a checkpoint."""
    ranks.run(2, experts, family)


def needs_memory(mesh):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16))
    fully_shard(model, mesh=mesh)
    with tempfile.TemporaryDirectory() as folder:
        tritonfp8.export.save(nn.Sequential(nn.Linear(16, 16)), folder, "compressed_channel")
        return raised(lambda: tritonfp8.export.load(model, folder))


def test_a_sharded_model_on_the_meta_device_loads_nothing(ranks):
    for message in ranks.run(2, needs_memory):
        assert "is sharded and on the meta device: give it memory first, by model.to_empty(device=...)" in message


def trained(folder, names):
    """A model of which two steps changed these weights."""
    model = from_pretrained(folder, train="full")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(each in name for each in names))
    if not names:
        return model
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def shard(model, mesh):
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)


def as_whole(mesh, folder, names, way):
    sharded, whole = (trained(f"{folder}/it", names) for _ in range(2))
    if "tp" in way:
        grid = made_mesh(mesh.device_type, (1, 2), ("fsdp", "tp"))
        plan = {"q_proj": Float8ColwiseParallel(), "o_proj": Float8RowwiseParallel()}
        for layer in sharded.model.layers:
            parallelize_module(layer.self_attn, grid["tp"], plan)
    else:
        shard(sharded, mesh)
    report = tritonfp8.export.save(sharded, f"{folder}/sharded")
    if torch.distributed.get_rank() == 0:
        wanted = tritonfp8.export.save(whole, f"{folder}/whole")
        assert (report.files, report.notes) == (wanted.files, wanted.notes)
        assert differing(Path(folder, "sharded"), Path(folder, "whole")) == []
        changed = differing(Path(folder, "sharded"), Path(folder, "it"))
        assert bool(changed) == bool(names)
    return report.files


@pytest.mark.parametrize(
    ("format", "kind", "names", "way"),
    [
        *((format, ("llama", WHOLE), ("q_proj", "down_proj", "norm"), "fsdp") for format in FORMATS),
        ("compressed_channel", ("llama", WHOLE), (), "fsdp"),
        ("fine_grained", ("moe", EXPERTS), ("down_proj",), "fsdp"),
        ("compressed_channel", ("llama", WHOLE), ("q_proj",), "tp"),
        ("fine_grained", ("llama", WHOLE), (), "tp"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) and value else str(value),
)
def test_the_bytes_of_the_whole_model(ranks, tmp_path, format, kind, names, way):
    written(tmp_path / "it", format, *kind)
    first, second = ranks.run(2, as_whole, str(tmp_path), names, way)
    assert first == second


def merged_into(mesh, folder):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = from_pretrained(f"{folder}/it", train="adapters")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        models.append(peft.get_peft_model(model, config))
    sharded, whole = models
    shard(sharded.base_model.model, mesh)
    tritonfp8.export.save(sharded, f"{folder}/sharded", adapters="merged")
    if torch.distributed.get_rank() == 0:
        tritonfp8.export.save(whole, f"{folder}/whole", adapters="merged")
        assert differing(Path(folder, "sharded"), Path(folder, "whole")) == []
        assert differing(Path(folder, "sharded"), Path(folder, "it"))


def test_merged_adapters(ranks, tmp_path):
    written(tmp_path / "it", "compressed_channel", "llama", WHOLE)
    ranks.run(2, merged_into, str(tmp_path))


def folders(mesh, folder):
    """Each rank gives a folder of its own: rank 0 writes, and no other."""
    model = from_pretrained(f"{folder}/it", train="adapters")
    shard(model, mesh)
    tritonfp8.export.save(model, f"{folder}/{torch.distributed.get_rank()}")


def test_one_rank_writes(ranks, tmp_path):
    written(tmp_path / "it", "compressed_channel", "llama", WHOLE)
    ranks.run(2, folders, str(tmp_path))
    assert differing(tmp_path / "0", tmp_path / "it") == []
    assert not (tmp_path / "1").exists()
