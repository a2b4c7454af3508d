"""Layouts of checkpoints of other programs: read to the right values, or an error that says what they are."""

import pytest
import torch
from checkpoints import FINE_GRAINED, check_error, codes, compressed, dequantized, small, tensors, write
from torch import nn

import tritonfp8

STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["1"]}


def one_scale(name="weight_scale", activations="input_scale", shape=()):
    changes = {"0__weight_scale_inv": None, f"0__{name}": torch.full(shape, 2.0**-12)}
    return tensors(**changes, **({f"0__{activations}": torch.ones(())} if activations else {}))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("block", [{}, {"weight_block_size": None}])
def test_one_scale_a_tensor_of_autofp8_and_mistral(tmp_path, name, shape, block):
    stored = one_scale(name, "activation_scale" if name.endswith("inv") else "input_scale", shape)
    model = small()
    report = tritonfp8.export.load(model, write(tmp_path, stored, STATIC | block))
    assert torch.equal(model[0].weight, stored["0.weight"].float() * 2.0**-12)
    assert report.layers["0"].loaded_as == "fine_grained tensorwise"


def test_static_scales_of_activations_are_said_once(tmp_path):
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)))
    stored = {f"{i}.weight": codes(128, 128) for i in range(3)}
    stored |= {f"{i}.{name}_scale": torch.ones(()) for name in ("weight", "input") for i in range(3)}
    folder = write(tmp_path, stored, STATIC)
    report = tritonfp8.export.load(model, folder)
    assert report.of_activations == ("0.input_scale", "1.input_scale", "2.input_scale")
    assert str(report).count("input_scale") == 1
    assert "note: 3 static scales of activations, such as 0.input_scale, are not used" in str(report)
    # A pattern of before still leaves them out.
    report = tritonfp8.export.load(model, folder, ignore=["*.input_scale"])
    assert (len(report.ignored), report.of_activations) == (3, ())
    for scheme, message in (("dynamic", "no place for .*input_scale"), ("both", "activation_scheme .*; got 'both'")):
        check_error(write(tmp_path, stored, STATIC | {"activation_scheme": scheme}), message, model)


def test_static_scales_of_compressed_tensors(tmp_path):
    config = compressed("tensor")
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    stored = one_scale(shape=(1,))
    model = small()
    report = tritonfp8.export.load(model, write(tmp_path, stored, config))
    assert report.of_activations == ("0.input_scale",)
    assert torch.equal(model[0].weight, stored["0.weight"].float() * 2.0**-12)
    config["config_groups"]["group_0"]["input_activations"]["dynamic"] = True
    check_error(write(tmp_path, stored, config), "no place for .*: 0.input_scale")


def test_a_tensor_of_the_model_that_is_called_scale_is_no_scale_of_codes(tmp_path):
    model = small()
    model[0].scale = nn.Parameter(torch.ones(3))
    stored = tensors(**{"0__scale": torch.full((3,), 7.0)})
    tritonfp8.export.load(model, write(tmp_path, stored, FINE_GRAINED))
    assert torch.equal(model[0].scale, torch.full((3,), 7.0))
    expected = dequantized(stored["0.weight"], stored["0.weight_scale_inv"], (128, 128)).float()
    assert torch.equal(model[0].weight, expected)


def test_other_layouts_are_named_with_what_reads_them(tmp_path):
    modelopt = r"layout of NVIDIA ModelOpt .* TensorRT-LLM, vLLM and SGLang read"
    for method, message in (
        ("modelopt", modelopt), ("fbgemm_fp8", r"layout of FBGEMM .* transformers with fbgemm-gpu, and vLLM read"),
    ):  # fmt: skip
        check_error(write(tmp_path, one_scale(activations=None), {"quant_method": method}), message)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    check_error(tmp_path, modelopt)


def test_a_checkpoint_is_called_incomplete_only_if_it_is(tmp_path):
    for changes, message in (
        ({"0__weight_scale_inv": None}, "got no scale. The checkpoint is incomplete"),
        ({"0__weight_scale_inv": None, "0__qscale_weight": torch.ones(())}, "got 0.qscale_weight. .* another layout"),
        ({"0__scale": torch.ones(2, 1)}, "got 0.weight_scale_inv, 0.scale. The checkpoint mixes layouts"),
        ({"0__weight_scale": torch.ones(())}, "got 0.weight_scale_inv, 0.weight_scale. The checkpoint mixes layouts"),
    ):
        folder = write(tmp_path, tensors(**changes), FINE_GRAINED)
        check_error(folder, message)
        check_error(folder, message, ignore=["*scale*"])


def test_a_second_scale_of_codes_is_not_ignored(tmp_path):
    folder = write(tmp_path, tensors(**{"0__weight_scale_2": torch.full((), 1e-4)}), FINE_GRAINED)
    check_error(folder, "no place for .*: 0.weight_scale_2")
    check_error(folder, "0.weight_scale_2 may scale the codes of 0.weight, beside 0.weight_scale_inv", ignore=["*_2"])
    folder = write(tmp_path, tensors(**{"0__k_scale": torch.ones(())}), FINE_GRAINED)
    assert tritonfp8.export.load(small(), folder, ignore=["*.k_scale"]).ignored == ("0.k_scale",)


@pytest.mark.parametrize(
    ("config", "scale", "shape"),
    [
        *((STATIC, torch.ones(shape), r"\(1,\), for blocks of tensorwise") for shape in ((2, 1), (256, 1))),
        *((FINE_GRAINED, torch.ones(shape), r"\(2, 1\), for blocks of 128x128") for shape in ((), (256, 1))),
        *((compressed(), torch.ones(shape), r"\(256, 1\), for blocks of rowwise") for shape in ((), (2, 1))),
    ],
)
def test_scales_of_another_kind_than_the_config_says(tmp_path, config, scale, shape):
    # Layers of several kinds in one checkpoint meet the same check, each by itself.
    check_error(write(tmp_path, tensors(**{"0__weight_scale_inv": None, "0__weight_scale": scale}), config), shape)


def test_codes_go_into_an_embedding(tmp_path):
    # transformers quantizes embeddings that a config names.
    model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(256, 8, bias=False))
    stored = tensors()
    tritonfp8.export.load(model, write(tmp_path, stored, FINE_GRAINED))
    expected = dequantized(stored["0.weight"], stored["0.weight_scale_inv"], (128, 128)).float()
    assert torch.equal(model[0].weight, expected)
