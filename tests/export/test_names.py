"""Tensors that have other names in a checkpoint than in the model: both are read, and messages name what is meant."""

import json

import pytest
import torch
from checkpoints import EXPERTS, MIXTRAL, files_of, model_of, write

import tritonfp8

ROUTER, WRITTEN = "model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"
HEAD, WRITTEN_HEAD = "lm_head", "embed_out"


@pytest.fixture
def saved(tmp_path):
    """A mixture as it is saved, and its tensors."""
    model = model_of("mixtral", MIXTRAL)
    report = tritonfp8.export.save(model, tmp_path, "fine_grained", filter=["*"])
    return model, report.quantization_config, files_of(tmp_path), tmp_path / "changed"


def test_names_of_the_model_are_read_too(saved):
    """transformers reads either, and so old exports stay readable."""
    model, config, tensors, folder = saved
    tensors[ROUTER] = tensors.pop(WRITTEN)
    found = model_of("mixtral", MIXTRAL, seed=1)
    report = tritonfp8.export.load(found, write(folder, tensors, config))
    assert report.copied[ROUTER] == "copied"
    assert torch.equal(found.get_parameter(ROUTER), model.get_parameter(ROUTER))
    # Both names are an error.
    tensors[WRITTEN] = tensors[ROUTER].clone()
    with pytest.raises(ValueError, match=f"no place for these tensors of the checkpoint: {ROUTER}"):
        tritonfp8.export.load(found, write(folder, tensors, config))


@pytest.mark.parametrize("pattern", [ROUTER, WRITTEN])
def test_a_missing_tensor_has_its_name_in_the_checkpoint(saved, pattern):
    """A pattern may be of that name, or of the name in the model."""
    _, config, tensors, folder = saved
    del tensors[WRITTEN]
    folder, found = write(folder, tensors, config), model_of("mixtral", MIXTRAL, seed=1)
    with pytest.raises(ValueError, match=f"does not have these tensors of the model: {WRITTEN}"):
        tritonfp8.export.load(found, folder)
    assert tritonfp8.export.load(found, folder, ignore=[pattern]).left == (ROUTER,)
    with pytest.raises(ValueError, match=f"{ROUTER} must have values"):
        tritonfp8.export.load(found.to("meta"), folder, ignore=[pattern])


@pytest.mark.parametrize("target", [HEAD, WRITTEN_HEAD, f"re:.*{HEAD}", f"re:{WRITTEN_HEAD}"])
def test_a_group_names_a_layer_by_either_name(tmp_path, target):
    model = model_of("gpt_neox")
    report = tritonfp8.export.save(model, tmp_path, "compressed_channel")
    tensors, config = files_of(tmp_path), json.loads(json.dumps(report.quantization_config))
    q = tritonfp8.quantize(model.lm_head.weight, tritonfp8.QuantSpec(block=(-1, -1)))
    tensors |= {f"{WRITTEN_HEAD}.weight": q.qdata, f"{WRITTEN_HEAD}.weight_scale": q.scale}
    group = json.loads(json.dumps(config["config_groups"]["group_0"]))
    group["weights"]["strategy"], group["targets"] = "tensor", [target]
    config["config_groups"]["group_1"] = group
    found = model_of("gpt_neox", seed=1)
    report = tritonfp8.export.load(found, write(tmp_path / "changed", tensors, config))
    assert report.layers[HEAD].loaded_as.startswith("compressed_tensor")
    assert torch.equal(found.lm_head.weight, tritonfp8.dequantize(q, torch.bfloat16))


def test_a_vector_of_a_router_does_not_hide_its_parent():
    """In checkpoints of EXAONE a bias of the router lies beside it: an entry of that module would hide all experts."""
    layers = {"layer_types": ["full_attention"], "is_moe_layer": [True], "mlp_layer_types": ["sparse"]}
    model = model_of("exaone", EXPERTS | layers)
    tritonfp8.convert(model, "blockwise")
    report = tritonfp8.export.plan(model, "fine_grained")
    assert "model.layers.0.mlp.e_score_correction_bias" in report.others
    assert "model.layers.0.mlp.experts" in report.exported
    assert report.quantization_config["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.gate"]


def test_a_compiled_model_has_the_same_names(tmp_path):
    model = model_of("mixtral", MIXTRAL)
    expected = tritonfp8.export.plan(model, "compressed_channel", filter=["*"])
    assert tritonfp8.export.plan(torch.compile(model), "compressed_channel", filter=["*"]) == expected
    assert WRITTEN in expected.others
