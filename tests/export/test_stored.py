"""Exports of weights that are stored in 8 bits, and loads into them: codes go both ways as they are."""

import pytest
import torch
from checkpoints import FORMATS, files_of, model_of

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.export import CHECKPOINT_FORMATS
from tritonfp8.layers.stored import StoredWeight, recipe_of_storage

SPECS = {
    name: recipe_of_storage(recipes.get(name)).output.rhs for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")
}


def stored_model(recipe, seed=0):
    model = model_of("qwen3", seed=seed)
    tritonfp8.convert(model, recipe, mode="inference")
    return model


def stored_weights(model):
    return {name: p for name, p in model.named_parameters() if type(p) is StoredWeight}


def bits(x):
    return x.view(torch.uint8)


@pytest.mark.parametrize("recipe", SPECS)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_written_as_they_are_where_the_format_has_them(tmp_path, format, recipe):
    model, row = stored_model(recipe), CHECKPOINT_FORMATS[format]
    report = tritonfp8.export.save(model, tmp_path, format)
    files = files_of(tmp_path)
    exported = [name for name, layer in report.layers.items() if layer.exported_as is not None]
    assert len(exported) == 7
    weights = stored_weights(model)
    # Plain weights of the same values.
    plain = stored_model(recipe)
    tritonfp8.revert(plain)
    expected = dict(tritonfp8.export.tensors(plain, format, filter=exported))
    for name in exported:
        weight, codes = weights[f"{name}.weight"], files[f"{name}.weight"]
        scale = files[f"{name}.{row.scale_name}"]
        if row.spec == SPECS[recipe]:
            assert torch.equal(bits(codes), bits(weight.quantized.qdata))
            assert torch.equal(scale.flatten().view(torch.uint8), bits(weight.quantized.scale.flatten()))
            assert report.layers[name].same_codes
        else:
            assert torch.equal(bits(codes), bits(expected[f"{name}.weight"]))
            assert torch.equal(scale, expected[f"{name}.{row.scale_name}"])
            assert not report.layers[name].same_codes


@pytest.mark.parametrize(("format", "recipe"), [("fine_grained", "blockwise"), ("compressed_channel", "rowwise")])
def test_a_stored_model_takes_the_codes_of_a_checkpoint(tmp_path, format, recipe):
    tritonfp8.export.save(model_of("qwen3"), tmp_path, format)
    model, files = stored_model(recipe, seed=1), files_of(tmp_path)
    report = tritonfp8.export.load(model, tmp_path)
    assert {layer.again for layer in report.layers.values()} == {"codes kept"}
    row = CHECKPOINT_FORMATS[format]
    for name, weight in stored_weights(model).items():
        assert torch.equal(bits(weight.quantized.qdata), bits(files[name]))
        assert torch.equal(weight.quantized.scale, files[name.removesuffix("weight") + row.scale_name])


def test_codes_of_another_layout_are_quantized_again(tmp_path):
    tritonfp8.export.save(model_of("qwen3"), tmp_path, "fine_grained")
    model, plain = stored_model("rowwise", seed=1), model_of("qwen3", seed=1)
    report = tritonfp8.export.load(model, tmp_path)
    tritonfp8.export.load(plain, tmp_path)
    assert "codes kept" not in {layer.again for layer in report.layers.values()}
    tritonfp8.convert(plain, "rowwise", mode="inference")
    expected = stored_weights(plain)
    for name, weight in stored_weights(model).items():
        assert torch.equal(bits(weight.quantized.qdata), bits(expected[name].quantized.qdata))


def test_scales_that_are_no_powers_of_two_are_not_stored(tmp_path):
    tritonfp8.export.save(model_of("qwen3"), tmp_path, "fine_grained", scale_rounding="none")
    model = stored_model("blockwise", seed=1)
    report = tritonfp8.export.load(model, tmp_path)
    assert "rounded again" in {layer.again for layer in report.layers.values()}
    for weight in stored_weights(model).values():
        assert (torch.frexp(weight.quantized.scale).mantissa == 0.5).all()
