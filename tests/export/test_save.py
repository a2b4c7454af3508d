"""The files of an export: shards, index and configs, and no part of a file under a final name."""

import json
import os

import pytest
import safetensors.torch
import torch
from checkpoints import MODELS, config_of, files_of, loaded, model_of, same
from safetensors import safe_open
from torch import nn

import tritonfp8
from tritonfp8.export.writing import together


@pytest.mark.parametrize("limit", [1, 20_000, 60_000])
def test_shards_have_at_most_so_many_bytes(tmp_path, limit):
    model = model_of("qwen3")
    tritonfp8.export.save(model, tmp_path / "one", "fine_grained")
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    report = tritonfp8.export.save(model, tmp_path / "many", "fine_grained", max_shard_bytes=limit)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    shards = sorted(name for name in report.files if name.endswith(".safetensors"))
    assert shards == [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 3
    assert sorted(set(index["weight_map"].values())) == shards
    same(files_of(tmp_path / "one"), files_of(tmp_path / "many"))
    assert index["metadata"]["total_size"] == report.bytes_after
    for shard in shards:
        with safe_open(tmp_path / "many" / shard, "pt") as file:
            names = list(file.keys())
            assert file.metadata() == {"format": "pt"}
            assert all(index["weight_map"][name] == shard for name in names)
            layers = {name.removesuffix("_scale_inv") for name in names}
            assert len(layers) == 1 or sum(file.get_tensor(name).nbytes for name in names) <= limit
    one, many = (loaded(tmp_path / folder, "qwen3")[0].state_dict() for folder in ("one", "many"))
    same(one, many)


def test_transformers_reads_shards(tmp_path):
    tritonfp8.export.save(model_of(), tmp_path, "fine_grained", max_shard_bytes=30_000)
    theirs = MODELS["llama"][1].from_pretrained(tmp_path, dtype=torch.bfloat16)
    same(theirs.state_dict(), loaded(tmp_path)[0].state_dict())


def test_the_config_is_that_of_the_model(tmp_path):
    model = model_of("qwen3", dtype=torch.float32)
    report = tritonfp8.export.save(model, tmp_path / "a", "compressed_block")
    config = json.loads((tmp_path / "a/config.json").read_text())
    assert config_of(tmp_path / "a") == report.quantization_config
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["hidden_size"] == 128
    assert not hasattr(model.config, "quantization_config"), "the model stays as it was"
    tritonfp8.export.save(model, tmp_path / "b", "compressed_block", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "b/config.json").read_text())["dtype"] == "bfloat16"
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    tritonfp8.export.save(model, tmp_path / "c", "compressed_block")
    assert json.loads((tmp_path / "c/generation_config.json").read_text())["temperature"] == 0.5


def test_a_model_without_a_config_of_transformers(tmp_path):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    report = tritonfp8.export.save(model, tmp_path, "fine_grained")
    assert {path.name for path in tmp_path.iterdir()} == {"quantization_config.json", "model.safetensors"}
    assert json.loads((tmp_path / "quantization_config.json").read_text()) == report.quantization_config
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1, "other users may read the weights as they may read the config"
    other = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    assert len(tritonfp8.export.load(other, tmp_path).layers) == 2


def test_a_converted_compiled_model_is_saved_as_the_plain_one(tmp_path):
    model = model_of()
    tritonfp8.export.save(model, tmp_path / "plain", "fine_grained")
    tritonfp8.convert(model, "blockwise")
    tritonfp8.export.save(torch.compile(model), tmp_path / "converted", "fine_grained")
    same(files_of(tmp_path / "plain"), files_of(tmp_path / "converted"))
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "plain" / name).read_text() == (tmp_path / "converted" / name).read_text()


def test_tensors_that_overlap_or_are_strided_are_written_by_value(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(128, 128, bias=False), "b": nn.LayerNorm(128)})
    whole = torch.randn(128, 256)
    model["a"].weight = nn.Parameter(whole.t()[:128].t())
    model["b"].weight = nn.Parameter(whole[0, :128])
    model["b"].bias = nn.Parameter(whole[0, 64:192])
    tritonfp8.export.save(model, tmp_path, "compressed_tensor")
    stored = files_of(tmp_path)
    assert torch.equal(stored["b.weight"], whole[0, :128])
    assert torch.equal(stored["b.bias"], whole[0, 64:192])


@pytest.mark.parametrize("existing", ["model.safetensors", "other.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_weights_is_left_alone(tmp_path, existing):
    (tmp_path / existing).write_text("old")
    with pytest.raises(ValueError, match=f"must not have weights yet; it has {existing}. Give another folder"):
        tritonfp8.export.save(model_of(), tmp_path, "fine_grained")
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "old"


def test_a_tokenizer_and_an_old_config_may_be_there(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    tritonfp8.export.save(model_of(), tmp_path, "fine_grained")
    assert config_of(tmp_path)["quant_method"] == "fp8"
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch, fails):
    calls = []

    def failing(tensors, path, metadata):
        calls.append(path)
        safetensors_save(tensors, path, metadata)
        if len(calls) > fails:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError("no space left on the device")

    safetensors_save = safetensors.torch.save_file
    monkeypatch.setattr("safetensors.torch.save_file", failing)
    with pytest.raises(OSError, match="no space left"):
        tritonfp8.export.save(model_of(), tmp_path, "fine_grained", max_shard_bytes=30_000)
    assert len(calls) == fails + 1
    assert list(tmp_path.iterdir()) == []


def test_a_kill_between_renames_leaves_whole_files_and_no_config(tmp_path, monkeypatch):
    class KilledError(BaseException):
        pass

    renamed, replace = [], os.replace

    def killed(source, target):
        if len(renamed) == 2:
            raise KilledError
        renamed.append(target)
        replace(source, target)

    monkeypatch.setattr(together.os, "replace", killed)
    # A process that is killed runs no cleanup.
    monkeypatch.setattr(together.shutil, "rmtree", lambda *args, **options: None)
    with pytest.raises(KilledError):
        tritonfp8.export.save(model_of(), tmp_path, "fine_grained", max_shard_bytes=30_000)
    final = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert final == sorted(path.name for path in renamed)
    assert all(name.startswith("model-0000") for name in final)
    for path in renamed:
        with safe_open(path, "pt") as file:
            assert list(file.keys())
    with pytest.raises(ValueError, match="has no quantization config"):
        tritonfp8.export.load(model_of(), tmp_path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes must be at least 1; got 0"),
        ({"max_shard_bytes": "5GB"}, TypeError, "max_shard_bytes must be an int; got str"),
        ({"folder": 3}, TypeError, "folder must be a str or a Path; got int"),
    ],
)
def test_wrong_arguments(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        tritonfp8.export.save(model_of(), **{"folder": tmp_path, "format": "fine_grained"} | options)
