"""Checkpoints in NVFP4, as compressed-tensors and ModelOpt write them: the values of other readers, and errors."""

import copy
import json
import logging

import peft
import pytest
import torch
import transformers
from checkpoints import EXPERTS, RAGGED, adapter_losses, config_of, falling_losses, files_of, model_of
from safetensors.torch import save_file
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

import tritonfp8
from tritonfp8.export.checkpoint_formats import READ_FORMATS
from tritonfp8.integrations.transformers import from_pretrained
from tritonfp8.layers.stored import StoredWeight, plain_weight
from tritonfp8.recipes import Gemm
from tritonfp8.specs import NVFP4, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

IDS = torch.arange(3, 19).view(2, 8)
INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": INPUTS | {"symmetric": True, "dynamic": False},
            "input_activations": INPUTS | {"symmetric": True}, "output_activations": None,
            "format": "nvfp4-pack-quantized",
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
}  # fmt: skip
LAYOUTS = {"compressed": COMPRESSED, "modelopt": MODELOPT}
# Wider than a block in each dim, and no multiple of 32.
SIZES = RAGGED | {"intermediate_size": 176}


def theirs(x):
    """A weight in NVFP4 as torchao quantizes it."""
    whole = x.float().abs().max() / (448 * 6)
    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole)


def nvfp4(folder, layout="compressed", kind="qwen3", sizes=SIZES):
    """A checkpoint, the values of its weights in float32 as torchao reads them, and a model of other weights."""
    model = model_of(kind, sizes)
    model.save_pretrained(folder / "plain")
    tensors, values = files_of(folder / "plain"), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        q, begin = theirs(tensors.pop(name)), name.removesuffix("weight")
        scale = q.scale.view(-1, q.qdata.shape[1] // 8)
        whole = q.per_tensor_scale
        if layout == "compressed":
            # Here the scales of blocks are divided by it.
            whole = (1 / whole).view(1)
            elements = f4_unpacked_to_f32(unpack_uint4(q.qdata)).unflatten(1, (-1, 16))
            values[name] = (elements * (scale.float() / whole).unsqueeze(2)).flatten(1)
            extra = {"weight_packed": q.qdata, "weight_global_scale": whole, "input_global_scale": torch.ones(1)}
        else:
            values[name] = q.dequantize(torch.float32)
            extra = {"weight": q.qdata, "weight_scale_2": whole, "input_scale": torch.ones(())}
        tensors |= {begin + key: x for key, x in {**extra, "weight_scale": scale}.items()}
    (folder / "it").mkdir()
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "it/model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    data = {**json.loads(model.config.to_json_string()), "quantization_config": LAYOUTS[layout], "dtype": "bfloat16"}
    (folder / "it/config.json").write_text(json.dumps(data))
    return folder / "it", values, model_of(kind, sizes, seed=1)


def values_of(model):
    return {name: plain_weight(p.detach()).clone() for name, p in model.named_parameters()}


each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@each_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_torchao(tmp_path, layout, dtype):
    folder, values, model = nvfp4(tmp_path, layout)
    model = model.to(dtype)
    report = tritonfp8.export.load(model, folder)
    assert len(values) == len(report.layers) == 7
    assert_bitwise_equal(
        {n: model.get_parameter(n).detach() for n in values}, {n: x.to(dtype) for n, x in values.items()}
    )
    assert "nvfp4 1x16" in str(report)
    assert "7 static scales of activations" in str(report)


def test_values_are_those_of_compressed_tensors(tmp_path):
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    folder, values, model = nvfp4(tmp_path)
    tritonfp8.export.load(model, folder)
    stored = files_of(folder)
    scheme = QuantizationScheme.model_validate(COMPRESSED["config_groups"]["group_0"])
    for name in values:
        begin = name.removesuffix("weight")
        state = {key: stored[begin + key] for key in ("weight_packed", "weight_scale", "weight_global_scale")}
        expected = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        assert expected.dtype == torch.bfloat16
        assert_bitwise_equal([model.get_parameter(name).detach()], [expected.data])


def test_every_code_and_scale_in_float32():
    """The exact product of 16 codes and all scales of a block that are numbers, rounded once."""
    even = torch.arange(0, 16, 2, dtype=torch.uint8)
    codes = (even | ((even + 1) << 4)).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).view(127, 1)
    expected = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
    # Without a scale of the tensor bfloat16 holds every value.
    q = tritonfp8.Quantized(codes, scale.float(), NVFP4)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(tritonfp8.dequantize(q, dtype).double(), expected * scale.double())
    for row in READ_FORMATS.values():
        if row.global_scale is not None:
            whole = torch.tensor(0.3)
            of = scale.float() / whole if row.name == "compressed_nvfp4" else scale.float() * whole
            q = tritonfp8.Quantized(codes, row.scale_read((127, 16), scale, whole), NVFP4)
            assert torch.equal(tritonfp8.dequantize(q), (expected * of.double()).float())


@each_layout
def test_weights_are_quantized_again_by_the_recipe(tmp_path, caplog, layout):
    folder, values, _ = nvfp4(tmp_path, layout)
    with caplog.at_level(logging.INFO, "tritonfp8"):
        model = from_pretrained(folder, train="adapters")
    assert " as rowwise: 7 layers from 8 bits" in caplog.text
    costs = []
    for name, x in values.items():
        weight = model.get_parameter(name)
        assert type(weight) is StoredWeight
        assert weight.spec == QuantSpec("e4m3", (1, -1), "fp32", "pow2")
        expected = tritonfp8.quantize(x.bfloat16(), weight.spec)
        assert_bitwise_equal([weight._qdata, weight._scale], [expected.qdata, expected.scale])
        costs.append(sqnr(weight.dequantize().float(), x))
    assert f"7 rounded again (from {min(costs):.1f} dB)" in caplog.text
    assert 25 < min(costs) < 50


def test_no_more_than_a_weight_is_in_high_precision(tmp_path, monkeypatch):
    folder, values, _ = nvfp4(tmp_path)
    of, seen = StoredWeight.of.__func__, []

    def counted(cls, weight, *args):
        # On the meta device there is nothing in memory.
        if not weight.is_meta:
            seen.append(weight.shape)
        return of(cls, weight, *args)

    monkeypatch.setattr(StoredWeight, "of", classmethod(counted))
    model = from_pretrained(folder)
    assert sorted(seen) == sorted(x.shape for x in values.values())
    assert sum(p.nbytes for n, p in model.named_parameters() if n in values) < 0.6 * sum(
        2 * x.numel() for x in values.values()
    )


@each_layout
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_each_recipe_reads_it(tmp_path, layout, recipe):
    folder, _, _ = nvfp4(tmp_path, layout)
    model = from_pretrained(folder, recipe)
    plain = model_of("qwen3", SIZES, seed=1)
    tritonfp8.export.load(plain, folder)
    tritonfp8.convert(plain, recipe, mode="inference")
    assert_bitwise_equal(values_of(model), values_of(plain))
    assert model(IDS).logits.isfinite().all()


@each_layout
def test_experts_one_by_one(tmp_path, layout):
    folder, values, model = nvfp4(tmp_path, layout, "moe", EXPERTS)
    report = tritonfp8.export.load(model, folder)
    experts = model.model.layers[0].mlp.experts
    for i in range(4):
        begin = f"model.layers.0.mlp.experts.{i}."
        gate, up, down = (values[f"{begin}{name}_proj.weight"].bfloat16() for name in ("gate", "up", "down"))
        assert_bitwise_equal([experts.gate_up_proj[i].detach()], [torch.cat([gate, up])])
        assert_bitwise_equal([experts.down_proj[i].detach()], [down])
    assert "nvfp4 1x16, of each expert" in str(report)
    stored = from_pretrained(folder, train="adapters")
    assert stored.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    assert stored(IDS).logits.isfinite().all()


@each_layout
def test_lora_trains_and_the_file_comes_out_as_it_was(tmp_path, layout):
    folder, _, plain = nvfp4(tmp_path, layout)
    loaded = from_pretrained(folder, "rowwise", "adapters")
    tritonfp8.export.load(plain, folder)
    tritonfp8.convert(plain.requires_grad_(False), "rowwise", weight_storage="quantized")
    # Its frequencies are float32, where a cast of the whole model rounds them.
    plain.model.rotary_emb = copy.deepcopy(loaded.model.rotary_emb)
    assert adapter_losses(loaded, IDS, 6) == adapter_losses(plain.train(), IDS, 6)
    with pytest.raises(ValueError, match=r"changed since the load, and their format, '.*nvfp4', is read and not"):
        tritonfp8.export.save(adapted_of(loaded), tmp_path / "merged", adapters="merged")
    assert not (tmp_path / "merged").exists()


def adapted_of(model):
    """The model of peft around a model that has adapters."""
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False))


@each_layout
def test_training_moves_weights_that_are_written_in_another_format(tmp_path, layout):
    folder, values, _ = nvfp4(tmp_path, layout)
    model = from_pretrained(folder, train="full")
    tritonfp8.export.save(model, tmp_path / "same")
    assert_bitwise_equal(files_of(tmp_path / "same"), files_of(folder))
    assert config_of(tmp_path / "same") == config_of(folder)
    optimizer = tritonfp8.optim.AdamW(model.parameters(), 1e-2)
    falling_losses(model, optimizer, IDS, 5)
    with pytest.raises(ValueError, match=r"give format=, such as 'compressed_channel'"):
        tritonfp8.export.save(model, tmp_path / "out")
    report = tritonfp8.export.save(model, tmp_path / "out", "compressed_channel")
    assert len(report.exported) == 7
    again = model_of("qwen3", SIZES, seed=2).float()
    tritonfp8.export.load(again, tmp_path / "out")
    assert_bitwise_equal({n: values_of(again)[n] for n in values}, {n: values_of(model)[n] for n in values})


def test_a_config_beside_the_model(tmp_path):
    """Older ModelOpt writes hf_quant_config.json, and config.json says nothing."""
    folder, _, model = nvfp4(tmp_path, "modelopt")
    model.config.architectures = ["Qwen3ForCausalLM"]
    data = json.loads((folder / "config.json").read_text())
    del data["quantization_config"]
    (folder / "config.json").write_text(json.dumps(data))
    kind = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": kind}))
    report = tritonfp8.export.load(model, folder)
    assert len(report.layers) == 7
    tritonfp8.export.save(model, tmp_path / "out")
    for name in ("hf_quant_config.json", "config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((folder / name).read_text())
    for change, message in (
        ({"quant_algo": "FP8"}, "quant_algo 'FP8' .* layout of NVIDIA ModelOpt .* TensorRT-LLM, vLLM and SGLang read"),
        ({"group_size": 32}, "group_size of the quantization config must be one of 16; got 32"),
    ):
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": kind | change}))
        with pytest.raises(ValueError, match=message):
            tritonfp8.export.load(model, folder)


FIRST = "model.layers.0.mlp.down_proj"
WHOLE = {"compressed": "weight_global_scale", "modelopt": "weight_scale_2"}
PACKED = {"compressed": "weight_packed", "modelopt": "weight"}


def _damage(layout):
    codes, scale, whole = (f"{FIRST}.{key}" for key in (PACKED[layout], "weight_scale", WHOLE[layout]))
    nan = torch.full((), torch.nan)
    other = f"{FIRST}.{WHOLE['modelopt' if layout == 'compressed' else 'compressed']}"
    return {
        "no scale": (lambda t: t.pop(scale), "needs one scale, .*down_proj.weight_scale"),
        "no scale of the tensor": (lambda t: t.pop(whole), f"needs {whole}; got none. The checkpoint is incomplete"),
        "no codes": (lambda t: t.pop(codes), "does not have these tensors of the model: .*down_proj"),
        "another scale": (lambda t: t.update({other: torch.ones(1)}), f"no place for .*{other}"),
        "NaN in a scale": (
            lambda t: t[scale].view(torch.uint8).view(-1)[:1].fill_(0x7F),
            "weight_scale must be finite",
        ),
        "NaN": (lambda t: t.update({whole: nan}), f"{whole} must be finite and not negative"),
        "negative": (lambda t: t.update({whole: -torch.ones(())}), f"{whole} must be finite and not negative"),
        "codes cut": (lambda t: t.update({codes: t[codes][:-1].contiguous()}), rf"{codes} must have shape \(160, 88\)"),
        "scales cut": (lambda t: t.update({scale: t[scale][:, :-1].contiguous()}), r"must have shape \(160, 11\)"),
        "two values": (lambda t: t.update({whole: torch.ones(2)}), f"{whole} must be one value in torch.float32"),
        "dtype": (lambda t: t.update({scale: t[scale].float()}), f"{scale} must be torch.float8_e4m3fn; got torch.fl"),
    }


@each_layout
@pytest.mark.parametrize("what", _damage("modelopt"))
def test_damage_is_an_error_that_changes_nothing(tmp_path, layout, what):
    folder, _, model = nvfp4(tmp_path, layout)
    tensors, before = files_of(folder), values_of(model)
    change, message = _damage(layout)[what]
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        tritonfp8.export.load(model, folder)
    assert_bitwise_equal(values_of(model), before)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


@each_layout
def test_a_truncated_file_and_another_config(tmp_path, layout):
    folder, _, model = nvfp4(tmp_path, layout)
    before = values_of(model)
    config = json.loads((folder / "config.json").read_text())
    wrong = copy.deepcopy(config)
    wrong["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32
    (folder / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=r"group_size .* must be one of 16; got 32"):
        tritonfp8.export.load(model, folder)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="no complete safetensors file"):
        tritonfp8.export.load(model, folder)
    assert_bitwise_equal(values_of(model), before)


def test_nothing_is_made_in_it():
    model = transformers.LlamaForCausalLM(model_of().config)
    with pytest.raises(ValueError, match="format must be one of 'fine_grained'"):
        tritonfp8.export.plan(model, "compressed_nvfp4")
    with pytest.raises(ValueError, match=r"codes of e2m1 1x16 \(fp32\) are only read"):
        tritonfp8.quantize(torch.ones(16, 32), NVFP4)
    with pytest.raises(ValueError, match="lhs must have a format of 8 bits"):
        Gemm(NVFP4, NVFP4)
    for format, scale_format in (("e4m3", "fp32"), ("e2m1", "e8m0")):
        with pytest.raises(ValueError, match="takes"):
            QuantSpec(format, (1, 16), scale_format, "pow2")
