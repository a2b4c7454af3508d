"""transformers and compressed-tensors read what is written here, and what they write is read here, on a CPU."""

import itertools
import json

import pytest
import torch
from checkpoints import EXPERTS, RAGGED, WHOLE, blocks_of, dequantized, files_of, loaded, model_of, theirs_of, write
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

import tritonfp8
from tritonfp8 import QuantSpec

pytest.importorskip("compressed_tensors")
# gate_proj, up_proj and down_proj have a dim of 192, which is no multiple of 128.
PARTLY = WHOLE | {"intermediate_size": 192}
IDS = torch.arange(12).reshape(1, 12)


def check_equal(theirs, ours):
    """Their model has our weights, none of them in 8 bits."""
    expected = ours.state_dict()
    found = {name: x for name, x in theirs.state_dict().items() if not name.endswith("weight_scale")}
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == torch.bfloat16, name
        assert torch.equal(x, expected[name]), name


def check_read(folder, format, kind="llama", sizes=WHOLE, **options):
    """Their model of the saved folder has the weights that a load gives; returns the report."""
    report = tritonfp8.export.save(model_of(kind, sizes), folder, format, **options)
    check_equal(theirs_of(folder, format), loaded(folder, kind, sizes)[0])
    return report


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("sizes", [WHOLE, PARTLY], ids=["whole", "partly"])
@pytest.mark.parametrize("options", [{}, {"scale_fmt": "ue8m0"}], ids=["float", "ue8m0"])
def test_their_fine_grained_loader_reads_it(tmp_path, kind, sizes, options):
    report = check_read(tmp_path, "fine_grained", kind, sizes, **options)
    assert len(report.exported) == (7 if sizes is WHOLE else 4)


@pytest.mark.parametrize("format", ["fine_grained", "compressed_channel"])
def test_they_read_a_mixture_of_experts(tmp_path, format):
    assert len(check_read(tmp_path, format, "moe", EXPERTS).exported) == 4


@pytest.mark.parametrize("format", ["fine_grained", "compressed_channel"])
def test_they_read_layers_that_have_other_names_in_a_checkpoint(tmp_path, format):
    """Here a head, which the config lists by both names: transformers matches that in the model."""
    report = check_read(tmp_path, format, "gpt_neox")
    assert len(report.exported) == 4
    key = "modules_to_not_convert" if format == "fine_grained" else "ignore"
    assert report.quantization_config[key] == ["lm_head", "embed_out"]
    assert "lm_head.weight" not in files_of(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they keep the codes")
def test_without_a_gpu_they_dequantize_by_themselves(tmp_path):
    tritonfp8.export.save(model_of(), tmp_path, "fine_grained")
    check_equal(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), loaded(tmp_path)[0])


def test_they_misread_ragged_layers_which_is_why_these_stay_in_high_precision(tmp_path):
    weight = torch.randn(192, 128) * torch.logspace(-4, 4, 192)[:, None]
    q = tritonfp8.quantize(weight, tritonfp8.QuantSpec(block=(128, 128), scale_rounding="pow2"))
    theirs = Fp8Dequantize(None)._dequantize_one(q.qdata, q.scale, torch.float32)
    right = dequantized(q.qdata, q.scale, (128, 128))
    assert torch.equal(theirs[:96].double(), right[:96])
    assert not torch.equal(theirs.double(), right), "transformers reads ragged blocks now: export these layers"
    report = tritonfp8.export.plan(model_of(sizes=PARTLY), "fine_grained")
    assert "out_features=192 is no multiple of 128" in report.layers["model.layers.0.mlp.up_proj"].reason
    assert "in_features=192 is no multiple of 128" in report.layers["model.layers.0.mlp.down_proj"].reason
    assert "model.layers.0.mlp.up_proj" in report.quantization_config["modules_to_not_convert"]


PRESETS = {"FP8_DYNAMIC": "compressed_channel", "FP8_BLOCK": "compressed_block", "MXFP8": "compressed_mxfp8"}
ANY_SIZE = "compressed_channel", "compressed_tensor", "compressed_mxfp8"


@pytest.mark.parametrize(
    ("format", "sizes"),
    [*itertools.product(ANY_SIZE, (WHOLE, RAGGED)), *itertools.product(["compressed_block"], (WHOLE, PARTLY))],
)
def test_their_compressed_loader_reads_it(tmp_path, format, sizes):
    check_read(tmp_path, format, "qwen3", sizes)


@pytest.mark.parametrize("format", ["compressed_channel", "compressed_mxfp8"])
def test_their_first_forward_decompresses_it(tmp_path, format):
    tritonfp8.export.save(model_of(), tmp_path, format)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert theirs.model.layers[0].mlp.up_proj.weight.dtype == torch.float8_e4m3fn
    theirs(IDS)
    check_equal(theirs, loaded(tmp_path)[0])


@pytest.mark.parametrize("rounding", ["pow2", "none"])
def test_their_cast_of_scales_to_bfloat16_rounds_all_but_powers_of_two(tmp_path, rounding):
    tritonfp8.export.save(model_of(), tmp_path, "compressed_channel", scale_rounding=rounding)
    ours, theirs = (x.model.layers[0].mlp.up_proj.weight for x in (loaded(tmp_path)[0], theirs_of(tmp_path, "channel")))
    assert torch.equal(theirs, ours) == (rounding == "pow2")


@pytest.mark.parametrize("format", [*ANY_SIZE, "compressed_block"])
def test_the_config_is_one_that_they_would_write(format):
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig

    inferred = "mxfp8-quantized" if format == "compressed_mxfp8" else "float-quantized"
    config = tritonfp8.export.plan(model_of(), format).quantization_config
    parsed = QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    assert infer_module_format(torch.nn.Linear, scheme).value == parsed.format == inferred
    assert parsed.ignore == ["lm_head"]
    for name in (name for name, of in PRESETS.items() if of == format):
        (preset,) = QuantizationConfig(config_groups={name: ["Linear"]}).config_groups.values()
        for ours, theirs in ((scheme.weights, preset.weights), (scheme.input_activations, preset.input_activations)):
            for key in "num_bits type symmetric strategy group_size block_structure dynamic scale_dtype".split():  # noqa: SIM905
                assert getattr(ours, key) == getattr(theirs, key), key


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_what_their_fine_grained_quantizer_writes_is_read(tmp_path, scale_fmt):
    model = model_of("qwen3")
    config = FineGrainedFP8Config(scale_fmt=scale_fmt, modules_to_not_convert=["lm_head", "model.embed_tokens"])

    class Quantizer:
        quantization_config = config

    tensors = {}
    for name, x in model.state_dict().items():
        is_layer = name.endswith("_proj.weight")
        tensors |= Fp8Quantize(Quantizer).convert({name: x}) if is_layer else {name: x}
    assert len(tensors) == len(model.state_dict()) + 7
    write(tmp_path, tensors, {**config.to_dict(), "quant_method": "fp8"})
    other, report = loaded(tmp_path, "qwen3")
    assert len(report.layers) == 7
    for name, parameter in other.named_parameters():
        scale = tensors.get(f"{name}_scale_inv")
        expected = tensors[name] if scale is None else dequantized(tensors[name], scale.float(), (128, 128)).float()
        assert torch.equal(parameter, expected.bfloat16()), name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_their_compressor_writes_is_read(tmp_path, preset, dtype):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    format = PRESETS[preset]
    model = model_of("qwen3", dtype=dtype)
    config = QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"], quantization_status="frozen")
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            spec = tritonfp8.export.CHECKPOINT_FORMATS[format].spec
            q = tritonfp8.quantize(module.weight.detach(), spec)
            module.weight_scale.data.copy_(q.scale.float().reshape(module.weight_scale.shape))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    stored = files_of(tmp_path)
    other, report = loaded(tmp_path, "qwen3", dtype=dtype)
    assert len(report.layers) == 7
    compressor.decompress_model(model)
    theirs = model.state_dict()
    for name, parameter in other.named_parameters():
        scale = stored.get(f"{name}_scale")
        if scale is not None:
            expected = dequantized(stored[name], scale, blocks_of(format, parameter.shape)).to(dtype)
            assert torch.equal(parameter, expected), name
        assert torch.equal(parameter, theirs[name].to(dtype)), name


def quantized_by(spec, model, scale_key, extra=()):
    """The tensors of a checkpoint with codes in each layer but the head."""
    found = {}
    for name, x in model.state_dict().items():
        if x.ndim < 2 or "embed" in name or "lm_head" in name:
            found[name] = x
            continue
        q = tritonfp8.quantize(x, spec)
        scale = q.scale.reshape(()) if spec.block == (-1, -1) else q.scale
        found |= {name: q.qdata, name.removesuffix("weight") + scale_key: scale}
        found |= {name.removesuffix("weight") + key: torch.ones(()) for key in extra}
    return found


def written(folder, model, tensors, config):
    model.config.save_pretrained(folder)
    whole = json.loads((folder / "config.json").read_text())
    write(folder, tensors, config)
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": config}))


# As AutoFP8, Mistral and DeepSeek-V4 write them.
LAYOUTS = {
    "static": (QuantSpec(), "weight_scale_inv", ("activation_scale",), {"activation_scheme": "static"}, None),
    "e8m0": (QuantSpec(block=(128, 128), scale_rounding="pow2"), "scale", (), {"scale_fmt": "ue8m0"}, [128, 128]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_read_other_layouts_to_the_same_weights(tmp_path, layout):
    spec, key, extra, options, block = LAYOUTS[layout]
    model = model_of()
    tensors = quantized_by(spec, model, key, extra)
    if layout == "e8m0":
        tensors = {name: x.to(torch.float8_e8m0fnu) if name.endswith(".scale") else x for name, x in tensors.items()}
    config = {"quant_method": "fp8", "weight_block_size": block, "modules_to_not_convert": ["lm_head"], **options}
    written(tmp_path, model, tensors, config)
    ours, report = loaded(tmp_path)
    assert len(report.layers) == 7
    assert len(report.of_activations) == 7 * len(extra)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(**config, dequantize=True)
    )
    check_equal(theirs, ours)


@pytest.mark.parametrize("layout", ["float", "ue8m0", "tensor"])
def test_what_they_write_is_read(tmp_path, layout):
    """transformers quantizes the values of a checkpoint as it saves them."""
    block = None if layout == "tensor" else (128, 128)
    options = {"scale_fmt": "ue8m0"} if layout == "ue8m0" else {}
    config = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=["lm_head"], **options)
    model = model_of()
    spec = QuantSpec() if block is None else QuantSpec(block=(128, 128), scale_rounding="pow2")
    written(tmp_path, model, quantized_by(spec, model, "weight_scale_inv"), config.to_dict())
    theirs_of(tmp_path).save_pretrained(tmp_path / "again")
    stored = files_of(tmp_path / "again")
    name = "model.layers.0.mlp.up_proj.weight"
    assert stored[name].dtype == torch.float8_e4m3fn
    # They wrote codes, and no word of them into the config.
    with pytest.raises(ValueError, match=r"no quantization config .* has codes, whose blocks the config would say"):
        loaded(tmp_path / "again")
    (tmp_path / "again/quantization_config.json").write_text(json.dumps(config.to_dict()))
    ours, report = loaded(tmp_path / "again")
    # By one scale a tensor they quantize the embedding and the head, too.
    assert len(report.layers) == (9 if layout == "tensor" else 7)
    rows = tuple(ours.state_dict()[name].shape) if block is None else block
    expected = dequantized(stored[name], stored[f"{name}_scale_inv"].float(), rows).bfloat16()
    assert torch.equal(ours.state_dict()[name], expected)
