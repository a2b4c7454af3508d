"""What a load says of the codes of a converted layer is true to the bit."""

import pytest
import torch
from cases import IN_BYTES, rounded
from checkpoints import FINE_GRAINED, FORMATS, WHOLE, blocks_of, files_of, model_of, write
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.export import CHECKPOINT_FORMATS

SPECS = {name: recipes.get(name).output.rhs for name in IN_BYTES}


def codes_by_recipe(layer):
    return tritonfp8.quantize(layer.weight, layer.recipe.output.rhs)


@pytest.mark.parametrize("recipe", IN_BYTES)
@pytest.mark.parametrize("format", FORMATS)
def test_equal_specs_keep_the_values_and_most_codes(tmp_path, format, recipe):
    """A block whose largest code is at most 224 gets twice the codes and half the scale; every other keeps its bits."""
    tritonfp8.export.save(model_of("qwen3"), tmp_path, format)
    other = model_of("qwen3", seed=1)
    tritonfp8.convert(other, recipe)
    stored, report = files_of(tmp_path), tritonfp8.export.load(other, tmp_path)
    assert len(report.layers) == 7
    row = CHECKPOINT_FORMATS[format]
    for name, layer in report.layers.items():
        if row.spec != SPECS[recipe]:
            assert layer.again != "codes kept"
            continue
        codes, scale = stored[f"{name}.weight"], stored[f"{name}.{row.scale_name}"]
        before = tritonfp8.Quantized(codes, scale.view(other_dtype(row)), row.spec)
        again = codes_by_recipe(other.get_submodule(name))
        assert torch.equal(tritonfp8.dequantize(again), tritonfp8.dequantize(before))
        ratio = before.scale.float() / again.scale.float()
        assert set(ratio.unique().tolist()) <= {1.0, 2.0}
        rows, cols = blocks_of(format, codes.shape)
        doubled = ratio.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: codes.shape[0], : codes.shape[1]]
        assert torch.equal(again.qdata.float(), codes.float() * doubled)
        assert layer.again == ("codes kept" if (ratio == 1).all() else "values kept")


def other_dtype(row):
    return torch.float8_e8m0fnu if row.scale_dtype == torch.uint8 else row.scale_dtype


@settings(max_examples=40)
@given(
    recipe=st.sampled_from(IN_BYTES),
    format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    scale_rounding=st.sampled_from(["pow2", "none"]),
    largest=st.sampled_from([None, 224.0, 225.0, 231.0, 232.5, 240.0, 448.0, 463.0]),
    seed=st.integers(0, 9),
)
def test_each_answer_is_true(tmp_path_factory, recipe, format, dtype, scale_rounding, largest, seed):
    if format == "compressed_mxfp8":
        scale_rounding = "pow2"
    folder = tmp_path_factory.mktemp("codes")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 256, bias=False, dtype=dtype))
    with torch.no_grad():
        if largest is not None:
            model[0].weight.clamp_(-0.01, 0.01)[:, ::32] = largest / 2**12
    tritonfp8.export.save(model, folder, format, scale_rounding=scale_rounding)
    other = nn.Sequential(nn.Linear(128, 256, bias=False, dtype=dtype))
    tritonfp8.convert(other, recipe)
    answer = tritonfp8.export.load(other, folder).layers["0"].again
    stored = files_of(folder)
    codes, scale = (stored[name] for name in sorted(stored))
    again = codes_by_recipe(other[0])
    row = CHECKPOINT_FORMATS[format]
    same = again.spec.block == row.spec.block and torch.equal(again.qdata.view(torch.uint8), codes.view(torch.uint8))
    if same:
        ours = again.scale.contiguous().view(scale.dtype) if scale.dtype == torch.uint8 else again.scale
        same = torch.equal(ours.float().flatten(), scale.float().flatten())
    assert (answer == "codes kept") == same
    if answer == "values kept":
        values = tritonfp8.dequantize(again)
        assert torch.equal(values.to(dtype), other[0].weight)


def test_equal_specs_do_not_keep_the_codes_of_a_block_whose_largest_is_224(tmp_path):
    """225 rounds to the code 224 with scale 1. Read again, 224 fits twice: 448 with scale 1/2."""
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    model[0].weight.data.fill_(3.0)[0, 0] = 225.0
    tritonfp8.export.save(model, tmp_path, "fine_grained")
    stored = files_of(tmp_path)
    assert stored["0.weight"].float().max() == 224
    assert stored["0.weight_scale_inv"].item() == 1
    tritonfp8.convert(model, "blockwise")
    report = tritonfp8.export.load(model, tmp_path)
    assert report.layers["0"].again == "values kept"
    again = codes_by_recipe(model[0])
    assert again.qdata.float().max() == 448
    assert again.scale.item() == 0.5
    assert torch.equal(tritonfp8.dequantize(again), model[0].weight)


def test_layers_that_quantize_no_weight_have_no_answer(tmp_path):
    tritonfp8.export.save(model_of(), tmp_path, "fine_grained")
    model = model_of()
    tritonfp8.convert(model, {"*.mlp.*": "bf16", "*.q_proj": "blockwise"})
    layers = tritonfp8.export.load(model, tmp_path).layers
    assert layers["model.layers.0.mlp.up_proj"].again is None
    assert layers["model.layers.0.self_attn.k_proj"].again is None
    assert layers["model.layers.0.self_attn.q_proj"].again == "codes kept"
    assert str(layers["model.layers.0.self_attn.q_proj"]) == "fine_grained 128x128; by its recipe: codes kept"


def test_a_zero_block_keeps_its_codes(tmp_path):
    model = nn.Sequential(nn.Linear(128, 256))
    model[0].weight.data[:128] = 0
    tritonfp8.export.save(model, tmp_path, "fine_grained")
    tritonfp8.convert(model, "blockwise")
    assert tritonfp8.export.load(model, tmp_path).layers["0"].again == "codes kept"


def test_zeros_with_another_scale_keep_their_values(tmp_path):
    """Other programs store other scales for a block of zeros."""
    tensors = {"0.weight": torch.zeros(128, 128).to(torch.float8_e4m3fn), "0.weight_scale_inv": torch.zeros(1, 1)}
    write(tmp_path, tensors, FINE_GRAINED)
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    tritonfp8.convert(model, "blockwise")
    assert tritonfp8.export.load(model, tmp_path).layers["0"].again == "values kept"
    assert not model[0].weight.any()


def test_the_output_of_a_layer_is_that_of_its_codes(tmp_path):
    """The checkpoint that is served and the model that trains on compute one function."""
    model = model_of("qwen3", WHOLE)
    tritonfp8.convert(model, "blockwise")
    tritonfp8.export.save(model, tmp_path, "fine_grained")
    other = model_of("qwen3", WHOLE, seed=1)
    tritonfp8.convert(other, "blockwise")
    tritonfp8.export.load(other, tmp_path)
    ids = torch.arange(8).reshape(1, 8)
    assert torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
@pytest.mark.parametrize("format", ["compressed_channel", "compressed_mxfp4"])
def test_a_recipe_that_rounds_weights_writes_what_its_forward_multiplies(tmp_path, format, kind):
    model = model_of(kind)
    tritonfp8.convert(model, "mxfp4_weights")
    plan = tritonfp8.export.save(model, tmp_path, format)
    assert all(layer.same_codes for layer in plan.layers.values() if layer.exported_as)
    other = model_of(kind, seed=1)
    tritonfp8.export.load(other, tmp_path)
    written = {name for name, layer in plan.layers.items() if layer.exported_as}
    assert written
    for (name, x), (_, y) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        owner = name.rpartition(".")[0]
        expected = rounded(x.detach(), recipes.get("mxfp4_weights")) if owner in written else x
        assert torch.equal(y, expected), name
