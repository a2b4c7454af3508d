"""A model that is saved and loaded has the values of its codes, to the bit."""

import checkpoints
import pytest
import torch
from checkpoints import FORMATS, RAGGED, WHOLE, blocks_of, dequantized, files_of, loaded, model_of, scale_name
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tritonfp8
from tritonfp8 import QuantSpec, reference
from tritonfp8.export import CHECKPOINT_FORMATS

SCALES = {"compressed_mxfp8": ("e8m0", "pow2")}


def fill(model, value=7.0):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


@pytest.mark.parametrize("sizes", [WHOLE, RAGGED], ids=["whole", "ragged"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_the_reference_and_weights_their_values(tmp_path, format, kind, sizes):
    model = model_of(kind, sizes)
    if sizes is RAGGED and format in ("fine_grained", "compressed_block"):
        with pytest.raises(ValueError, match=r"(?s)no layer is exported in 8 bits.*is no multiple of 128"):
            tritonfp8.export.plan(model, format)
        return
    report = tritonfp8.export.save(model, tmp_path, format)
    stored, weights = files_of(tmp_path), dict(model.named_parameters())
    assert len(report.exported) == (7 if sizes is WHOLE or format != "compressed_mxfp8" else 6)
    expected = {name: x.detach() for name, x in weights.items()}
    for layer in report.exported:
        weight = weights[f"{layer}.weight"].detach()
        codes, scale = stored.pop(f"{layer}.weight"), stored.pop(f"{layer}.{scale_name(format)}")
        block, (scale_format, rounding) = blocks_of(format, weight.shape), SCALES.get(format, ("fp32", "pow2"))
        spec_block = {"compressed_channel": (1, -1), "compressed_tensor": (-1, -1)}.get(format, block)
        ours, our_scale = reference.quantize(weight, *QuantSpec("e4m3", spec_block, scale_format, rounding).args)
        assert torch.equal(codes.view(torch.uint8), ours.view(torch.uint8))
        assert torch.equal(scale.flatten(), our_scale.contiguous().view(scale.dtype).flatten())
        values = dequantized(codes, scale, block)
        assert torch.equal(values.bfloat16().double(), values), "powers of two lose nothing in bfloat16"
        assert (values - weight.double()).abs().max() <= weight.double().abs().max() / 16
        expected[f"{layer}.weight"] = values.bfloat16()
    assert stored.keys() == expected.keys() - {f"{layer}.weight" for layer in report.exported}

    other = fill(model_of(kind, sizes))
    loaded = tritonfp8.export.load(other, tmp_path)
    assert loaded.layers.keys() == set(report.exported)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_in_another_dtype_gets_the_product_rounded_once(tmp_path, dtype):
    model = model_of(dtype=torch.float32)
    tritonfp8.export.save(model, tmp_path, "compressed_channel", scale_rounding="none")
    stored = files_of(tmp_path)
    other = model_of(dtype=dtype)
    tritonfp8.export.load(fill(other), tmp_path)
    for name, parameter in other.named_parameters():
        scale = stored.get(f"{name}_scale")
        expected = stored[name] if scale is None else dequantized(stored[name], scale, (1, parameter.shape[1])).float()
        assert torch.equal(parameter, expected.to(dtype)), name


@settings(max_examples=40)
@given(
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    recipe=st.sampled_from(["rowwise", "blockwise", "mxfp8", "tensorwise", None]),
    seed=st.integers(0, 99),
)
def test_any_shape(tmp_path_factory, n, k, format, dtype, recipe, seed):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(k, n, dtype=dtype))
    if recipe:
        tritonfp8.convert(model, recipe, filter=lambda layer, name: True)
    rows, cols = CHECKPOINT_FORMATS[format].multiples
    options = {"filter": lambda layer, name: True}
    if n % rows or k % cols:
        with pytest.raises(ValueError, match="is no multiple of"):
            tritonfp8.export.plan(model, format, **options)
        return
    tritonfp8.export.save(model, folder, format, **options)
    stored = files_of(folder)
    values = dequantized(stored["0.weight"], stored[f"0.{scale_name(format)}"], blocks_of(format, (n, k)))
    other = nn.Sequential(nn.Linear(k, n, dtype=dtype))
    tritonfp8.export.load(other, folder)
    assert torch.equal(other[0].weight.double(), values)
    assert torch.equal(other[0].bias, model[0].bias)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_scales_survive_a_cast_to_bfloat16(tmp_path, scale_fmt):
    """Loaders cast scales to the dtype of the model: powers of two stay."""
    tritonfp8.export.save(model_of(), tmp_path, "fine_grained", scale_fmt=scale_fmt)
    scales = [x for name, x in files_of(tmp_path).items() if name.endswith("_scale_inv")]
    assert len(scales) == 7
    for scale in scales:
        assert scale.dtype == torch.float32
        assert torch.equal(scale.bfloat16().float(), scale)
        assert (torch.frexp(scale).mantissa == 0.5).all()
    assert checkpoints.config_of(tmp_path).get("scale_fmt") == scale_fmt


def test_scales_without_rounding_are_finer_and_do_not_survive(tmp_path):
    tritonfp8.export.save(model_of(), tmp_path, "compressed_channel", scale_rounding="none")
    codes, scale = (files_of(tmp_path)[f"model.layers.0.mlp.up_proj.weight{x}"] for x in ("", "_scale"))
    assert not torch.equal(scale.bfloat16().float(), scale)
    assert torch.equal(codes.float().abs().amax(1), torch.full((256,), 448.0))


def test_meta_parameters_get_memory_and_keep_their_ties(tmp_path):
    model = model_of("qwen3", tie_word_embeddings=True)
    tritonfp8.export.save(model, tmp_path, "fine_grained")
    with torch.device("meta"):
        config, cls = checkpoints.MODELS["qwen3"]
        other = cls(config(**checkpoints.SIZES | WHOLE | {"tie_word_embeddings": True}))
    other = other.to(torch.bfloat16)
    tritonfp8.convert(other, "blockwise")
    with pytest.warns(UserWarning, match=r"are on the meta device still: model.rotary_emb.inv_freq"):
        report = tritonfp8.export.load(other, tmp_path)
    assert "model.rotary_emb.inv_freq" in report.on_meta
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert isinstance(other.model.layers[0].mlp.up_proj, tritonfp8.Float8Linear)
    plain, _ = loaded(tmp_path, "qwen3", tie_word_embeddings=True)
    # What safetensors reads lies in the file: a file that changes later must not change the model.
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    for (name, a), (_, b) in zip(other.named_parameters(), plain.named_parameters(), strict=True):
        assert a.device.type == "cpu", name
        assert a.requires_grad, name
        assert torch.equal(a, b), name


def test_parameters_stay_the_same_objects_and_hooks_see_a_new_version(tmp_path):
    tritonfp8.export.save(model_of(), tmp_path, "compressed_mxfp8")
    other = fill(model_of())
    before = {name: (parameter, parameter._version) for name, parameter in other.named_parameters()}
    tritonfp8.export.load(other, tmp_path)
    for name, parameter in other.named_parameters():
        assert parameter is before[name][0]
        assert parameter._version > before[name][1]
