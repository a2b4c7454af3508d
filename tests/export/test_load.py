"""A load uses every tensor of a checkpoint or says which one it cannot use, and changes nothing then."""

import json
import pickle
import shutil

import pytest
import torch
from checkpoints import (
    FINE_GRAINED,
    check_error,
    codes,
    compressed,
    config_of,
    dequantized,
    files_of,
    model_of,
    small,
    tensors,
    write,
)
from safetensors.torch import save_file
from torch import nn

import tritonfp8


def test_a_checkpoint_of_another_program(tmp_path):
    stored = tensors()
    model = small()
    report = tritonfp8.export.load(model, write(tmp_path, stored, FINE_GRAINED))
    expected = dequantized(stored["0.weight"], stored["0.weight_scale_inv"], (128, 128)).float()
    assert torch.equal(model[0].weight, expected)
    assert torch.equal(model[1].weight, stored["1.weight"])
    assert report.layers.keys() == {"0"}
    assert report.copied == {"1.weight": "copied"}
    assert str(report).startswith("1 layers from 8 bits, 1 other tensors\n")


@pytest.mark.parametrize(
    "change",
    [
        {"modules_to_not_convert": None, "ignored_layers": ["1"]},
        {"scale_fmt": "ue8m0"},
        {"scale_fmt": "float"},
        {"fmt": None},
        {"modules_to_not_convert": None},
    ],
)
def test_configs_of_deepseek_and_others(tmp_path, change):
    config = {key: value for key, value in (FINE_GRAINED | change).items() if value is not None}
    assert tritonfp8.export.load(small(), write(tmp_path, tensors(), config)).layers.keys() == {"0"}


OF_BLOCKS, OF_POWERS = torch.tensor([[2.0], [0.25]]), torch.tensor([[2.0**-9], [2.0**-12]])
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu
NO_SCALE = {"0__weight_scale_inv": None}
# Config, name, scale and block: dtypes of scales, a scale a row or a tensor with any dims, and DeepSeek's other name.
SCALES = [
    *((FINE_GRAINED, "weight_scale_inv", OF_BLOCKS.to(dtype), (128, 128)) for dtype in DTYPES),
    *((compressed(), "weight_scale", (torch.arange(256) / 99).reshape(dims), (1, 128)) for dims in ((256, 1), (256,))),
    *((compressed("tensor"), "weight_scale", torch.full(dims, 0.5), (256, 128)) for dims in ((), (1,), (1, 1))),
    *((FINE_GRAINED | {"scale_fmt": "ue8m0"}, "scale", OF_POWERS.to(x), (128, 128)) for x in (DTYPES[0], DTYPES[3])),
]


@pytest.mark.parametrize(("config", "name", "scale", "block"), SCALES)
def test_scales_of_every_form(tmp_path, config, name, scale, block):
    stored, model = tensors(**{"0__weight_scale_inv": None, f"0__{name}": scale}), small()
    report = tritonfp8.export.load(model, write(tmp_path, stored, config))
    assert torch.equal(model[0].weight, dequantized(stored["0.weight"], scale.float(), block).float())
    assert report.layers.keys() == {"0"}


def test_groups_of_several_formats(tmp_path):
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    config = compressed()
    config["config_groups"] |= {
        "group_1": {"targets": ["re:.*b$"], "weights": block},
        "group_2": {"targets": ["c"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
        "group_3": {"targets": ["Attention"], "weights": None},
    }
    model = nn.ModuleDict({name: nn.Linear(256, 128, bias=False) for name in "abc"})
    scales = {"a": torch.rand(128, 1), "b": torch.rand(1, 2), "c": torch.rand(1)}
    blocks = {"a": (1, 256), "b": (128, 128), "c": (128, 256)}
    stored = {f"{name}.weight": codes(128, 256) for name in "abc"}
    write(tmp_path, stored | {f"{name}.weight_scale": x for name, x in scales.items()}, config)
    report = tritonfp8.export.load(model, tmp_path)
    for name in "abc":
        expected = dequantized(stored[f"{name}.weight"], scales[name], blocks[name]).float()
        assert torch.equal(model[name].weight, expected), name
    assert report.layers["b"].loaded_as == "compressed_block 128x128"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (NO_SCALE, r"0.weight has codes and needs one scale, 0.weight_scale_inv or .* no scale"),
        ({"0__weight": None}, r"no place for these tensors .*: 0.weight_scale_inv; .* does not have .*: 0.weight\."),
        ({"0__weight": torch.zeros(256, 128)}, "no place for these tensors of the checkpoint: 0.weight_scale_inv"),
        ({"1__weight": None}, "the checkpoint does not have these tensors of the model: 1.weight"),
        ({"2__weight": torch.zeros(3)}, "the model has no place for these tensors of the checkpoint: 2.weight"),
        ({"0__activation_scale": torch.zeros(1)}, "has no place for .*: 0.activation_scale"),
        ({"1__weight_scale_inv": torch.ones(1, 2)}, "has no place for .*: 1.weight_scale_inv"),
        ({"0__weight": codes(256, 64)}, r"0.weight must have shape \(256, 128\), as in the model; got \(256, 64\)"),
        ({"1__weight": torch.zeros(8, 128)}, r"1.weight must have shape \(8, 256\), as in the model; got \(8, 128\)"),
        ({"1__weight": torch.zeros(8, 256).int()}, "1.weight must be of torch.float32 or .* its kind; got torch.int32"),
        ({"1__weight": torch.zeros(8, 256).to(torch.float8_e5m2)}, "1.weight must be .*; got torch.float8_e5m2"),
        ({"0__weight_scale_inv": torch.ones(1, 2)}, r"0.weight_scale_inv must have shape \(2, 1\), .* got \(1, 2\)"),
        ({"0__weight_scale_inv": torch.ones(256, 1)}, r"must have shape \(2, 1\), for blocks of 128x128"),
        ({"0__weight_scale_inv": torch.ones(())}, r"must have shape \(2, 1\), .* got \(\)"),
        ({"0__weight_scale_inv": torch.ones(2, 1, dtype=torch.uint8)}, "0.weight_scale_inv must be torch.float32 or"),
        *(
            ({"0__weight_scale_inv": torch.tensor([[1.0], [x]])}, "0.weight_scale_inv must be finite and not negative")
            for x in (torch.nan, torch.inf, -1.0)
        ),
        (
            NO_SCALE | {"0__weight_scales": OF_BLOCKS},
            "got 0.weight_scales. The checkpoint is of another layout than its",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, changes, message):
    check_error(write(tmp_path, tensors(**changes), FINE_GRAINED), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quant_method": "gptq"},
            "quant_method .* must be one of 'fp8', 'compressed-tensors', 'mxfp4', 'modelopt'; got 'gptq'",
        ),
        ({"quant_method": None}, "quant_method of the quantization config must be one of"),
        ({"quant_method": ["fp8"]}, "quant_method of the quantization config must be one of"),
        ({"fmt": "e5m2"}, "fmt of the quantization config must be one of 'e4m3'; got 'e5m2'"),
        ({"weight_block_size": None}, r"0.weight_scale_inv must have shape \(1,\), for blocks of tensorwise"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size must be one of .*; got \[64, 64\]"),
        ({"weight_block_size": "128x128"}, "weight_block_size must be one of"),
        ({"scale_fmt": "e8m0"}, "scale_fmt of the quantization config must be one of None, 'float', 'ue8m0'"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert .* must be a list of names; got 'lm_head'"),
        ({"ignored_layers": [3]}, r"ignored_layers of the quantization config must be a list of names; got \[3\]"),
    ],
)
def test_fine_grained_configs_that_are_not_known(tmp_path, change, message):
    check_error(write(tmp_path, tensors(), FINE_GRAINED | change), message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_bits", 3, "num_bits of the weights of group_0 must be one of 8, 4; got 3"),
        ("type", "int", "type of the weights of group_0 must be one of 'float'; got 'int'"),
        ("type", None, "type of the weights of group_0 must be one of 'float'"),
        ("symmetric", False, "symmetric of the weights of group_0 must be one of True; got False"),
        ("strategy", "tensor_group", "strategy of the weights of group_0 must be one of 'channel', 'tensor', 'block'"),
        ("strategy", "group", "group_size of the weights of group_0 must be one of 32; got None"),
        ("strategy", "block", r"block_structure of group_0 must be one of \[1, 128\], \[128, 128\]; got None"),
    ],
)
def test_compressed_weights_that_are_not_known(tmp_path, key, value, message):
    config = compressed()
    config["config_groups"]["group_0"]["weights"][key] = value
    stored = tensors(**{"0__weight_scale_inv": None, "0__weight_scale": torch.rand(256, 1)})
    check_error(write(tmp_path, stored, config), message)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "config_groups of the quantization config must be a JSON object; got None"),
        ({}, r"config_groups of the quantization config must be a JSON object; got {}"),
        ({"FP8": ["Linear"]}, "FP8 of config_groups must be a JSON object"),
        ({"a": {"targets": "Linear", "weights": {}}}, "targets of a of the .* config must be a list of names"),
        ({"a": {"targets": ["Linear"], "weights": 3}}, "weights of a must be a JSON object; got 3"),
        (
            {"a": compressed()["config_groups"]["group_0"] | {"targets": ["Conv2d"]}},
            "has .* codes, and no group of the config names its layer",
        ),
    ],
)
def test_groups_that_cannot_be_read(tmp_path, groups, message):
    stored = tensors(**{"0__weight_scale_inv": None, "0__weight_scale": torch.rand(256, 1)})
    check_error(write(tmp_path, stored, compressed() | {"config_groups": groups}), message)


def test_other_configs_are_errors(tmp_path):
    folder = write(tmp_path / "a", tensors(), FINE_GRAINED)
    for text, message in (
        ("{", "config.json cannot be read as JSON"),
        ("[]", "config.json must be a JSON object; got list"),
        ("[" * 100_000, "config.json cannot be read as JSON"),
        ('{"quantization_config": 3}', "quantization_config of .* must be a JSON object; got int"),
        ("{}", "has no quantization config .neither config.json with an entry"),
    ):
        (folder / "config.json").write_text(text)
        check_error(folder, message)
    (folder / "config.json").unlink()
    check_error(folder, "has no quantization config .* 0.weight has codes, whose blocks the config would say: copy it")
    plain = write(tmp_path / "plain", {"0.weight": torch.zeros(256, 128)}, None)
    check_error(plain, "has no quantization config: .* in high precision is read by the loader of its library")
    check_error(tmp_path / "nothing", "must be the folder of a checkpoint; it does not exist")


def test_files_that_are_missing_or_broken(tmp_path):
    folder = write(tmp_path / "a", tensors(), FINE_GRAINED)
    whole = (folder / "model.safetensors").read_bytes()
    broken = (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:4],
        b"",
        b"\xff" * 100,
        pickle.dumps({"a": 1}),
        whole + b"more",
    )
    for content in broken:
        (folder / "model.safetensors").write_bytes(content)
        check_error(folder, "is no complete safetensors file")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    message = "must have model.safetensors or .*index.json; it has config.json, pytorch_model.bin. Files of pi"
    check_error(folder, message)


@pytest.fixture
def sharded(tmp_path):
    tritonfp8.export.save(model_of(), tmp_path / "whole", "fine_grained", max_shard_bytes=30_000)
    return tmp_path / "whole"


def test_shards_that_are_missing_or_exchanged(sharded, tmp_path):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))

    def changed(name):
        return shutil.copytree(sharded, tmp_path / name)

    folder = changed("missing")
    (folder / shards[1]).unlink()
    check_error(folder, f"{shards[1]} is missing: copy the whole checkpoint", model_of())
    folder = changed("exchanged")
    shutil.copy(folder / shards[0], folder / shards[1])
    check_error(folder, f"{shards[1]} has tensors that .* does not place there", model_of())
    folder = changed("absent")
    weight_map = index["weight_map"] | {"model.other": shards[0]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_error(folder, "places tensors in files that do not have them: model.other", model_of())


FILES = "../secret.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin", 3, None
ELSEWHERE = "must place model.norm.weight in a safetensors file of its folder"
INDICES = {
    **{json.dumps({"weight_map": {"model.norm.weight": file}}): ELSEWHERE for file in FILES},
    **dict.fromkeys(["{}", '{"weight_map": []}', '{"weight_map": {}}'], "must have a 'weight_map' from names to files"),
    "nothing": "cannot be read as JSON",
}


@pytest.mark.parametrize(("text", "message"), INDICES.items())
def test_an_index_leads_to_files_of_its_folder(sharded, text, message):
    (sharded / "model.safetensors.index.json").write_text(text)
    check_error(sharded, message, model_of())


def test_a_scale_in_another_shard_than_its_codes(tmp_path):
    stored, model = tensors(), small()
    for name, x in stored.items():
        save_file({name: x}, tmp_path / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in stored}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "quantization_config.json").write_text(json.dumps(FINE_GRAINED))
    tritonfp8.export.load(model, tmp_path)
    expected = dequantized(stored["0.weight"], stored["0.weight_scale_inv"], (128, 128)).float()
    assert torch.equal(model[0].weight, expected)


def test_patterns_leave_out_tensors_of_either_side(tmp_path):
    stored = tensors(**{"0__input_scale": torch.ones(1), "9__weight": torch.ones(3)})
    folder = write(tmp_path, stored, FINE_GRAINED)
    model = nn.Sequential(*small(), nn.Linear(8, 1))
    check_error(folder, "no place for .*: 0.input_scale, 9.weight; .* does not have .*: 2.bias, 2.weight", model)
    check_error(folder, "no place for .*: 9.weight; .* does not have", model, ignore=["*.input_scale"])
    new_head = model[2].weight.clone()
    report = tritonfp8.export.load(model, folder, ignore=["*.input_scale", "9.*", "2.*"])
    assert report.ignored == ("0.input_scale", "9.weight")
    assert report.left == ("2.weight", "2.bias")
    assert torch.equal(model[2].weight, new_head)
    assert "0.input_scale  ignored: not read" in str(report)
    assert "2.weight       not in the checkpoint: left as it was" in str(report)
    check_error(folder, r"the patterns '\*.k_scale' of ignore match no tensor", model, ignore=["*", "*.k_scale"])


def test_ignored_tensors_of_a_meta_model_are_an_error(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(*small(), nn.Linear(8, 1))
    with pytest.raises(ValueError, match=r"2.weight, 2.bias must have values.*: they are on the meta device"):
        tritonfp8.export.load(model, write(tmp_path, tensors(), FINE_GRAINED), ignore=["2.*"])


def test_tied_weights_that_differ_in_the_checkpoint(tmp_path):
    tritonfp8.export.save(model_of("qwen3"), tmp_path, "fine_grained")
    tied = model_of("qwen3", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight and lm_head.weight are one tensor in the model"):
        tritonfp8.export.load(tied, tmp_path)
    stored = files_of(tmp_path)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    write(tmp_path, stored, config_of(tmp_path))
    report = tritonfp8.export.load(tied, tmp_path)
    notes = sorted(note for name, note in report.copied.items() if "embed" in name or "head" in name)
    assert notes == ["copied", "tied"]
    assert torch.equal(tied.lm_head.weight, stored["lm_head.weight"])


def test_values_beyond_the_dtype_of_the_model(tmp_path):
    nan = codes(256, 128).view(torch.uint8)
    nan[5, 5] = 0x7F
    large = tensors(**{"0__weight_scale_inv": torch.full((2, 1), 1e6)})
    for stored, dtype, message in (
        (large, torch.float16, "0.weight must be finite in torch.float16; it has a NaN or values beyond"),
        (tensors(**{"1__weight": torch.full((8, 256), 1e6)}), torch.float16, "1.weight must be .* in torch.float16"),
        (tensors(**{"0__weight": nan.view(torch.float8_e4m3fn)}), torch.float32, "in torch.float32; it has a NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            tritonfp8.export.load(small(dtype=dtype), write(tmp_path, stored, FINE_GRAINED))
    report = tritonfp8.export.load(small(dtype=torch.bfloat16), write(tmp_path, large, FINE_GRAINED))
    # A cast of another tensor is in the report.
    assert report.copied == {"1.weight": "copied, float32 to bfloat16"}


def test_codes_go_into_known_layers_in_high_precision_only(tmp_path):
    matrix = nn.Module()
    matrix.weight = nn.Parameter(torch.zeros(256, 128))
    other = nn.Sequential(matrix, nn.Linear(256, 8, bias=False))
    folder = write(tmp_path, tensors(), FINE_GRAINED)
    check_error(folder, "0.weight is dequantized into bfloat16", small().double())
    check_error(folder, "nn.Embedding; the model has a Module", other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": "*.input_scale"}, "ignore must be a list of patterns; got str"),
        ({"ignore": [3]}, "a pattern of ignore must be a str; got int"),
        ({"folder": 3}, "folder must be a str or a Path; got int"),
        ({"model": {}}, "model must be an nn.Module; got dict"),
    ],
)
def test_arguments_of_other_types(tmp_path, options, message):
    with pytest.raises(TypeError, match=message):
        tritonfp8.export.load(**{"model": small(), "folder": tmp_path} | options)
