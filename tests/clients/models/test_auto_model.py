"""AutoModelForCausalLM.from_pretrained of a folder whose config.json asks for stored weights, as from_pretrained."""

import json

import pytest
import torch
from checkpoints import EXPERTS, WHOLE
from pretrained_cases import FORMATS, IDS, differing, train, values, written
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM

import tritonfp8
from tritonfp8.integrations.transformers import StoredWeightsConfig, from_pretrained
from tritonfp8.layers.stored import is_stored


def check_same(found, expected):
    assert type(found) is type(expected)
    assert found.training == expected.training
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    mine, theirs = (dict(model.named_parameters()) for model in (found, expected))
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        assert (type(parameter), parameter.dtype) == (type(theirs[name]), theirs[name].dtype)
        assert parameter.requires_grad == theirs[name].requires_grad
    assert [x.recipe for x in found.modules() if is_stored(x)] == [x.recipe for x in expected.modules() if is_stored(x)]
    assert all(torch.equal(x, y) for x, y in zip(values(found).values(), values(expected).values(), strict=True))
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", [None, "adapters", "full"])
@pytest.mark.parametrize("base", [("llama", WHOLE), ("moe", EXPERTS)], ids=["llama", "moe"])
def test_the_model_is_the_one_of_from_pretrained(tmp_path, base, mode, format):
    folder = written(tmp_path / "it", format, *base)
    expected = from_pretrained(folder, train=mode)
    StoredWeightsConfig(train=mode).write(folder)
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert sum(map(is_stored, found.modules())) > 3
    check_same(found, expected)
    # The folder is a checkpoint as before to everything here.
    check_same(from_pretrained(folder, train=mode), expected)


def test_a_recipe_and_arguments_of_transformers(tmp_path):
    folder = written(tmp_path / "it", "fine_grained", "llama")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    expected = from_pretrained(folder, "rowwise", **options)
    StoredWeightsConfig("mxfp8").write(folder)
    StoredWeightsConfig("rowwise").write(folder)
    for found in (
        AutoModelForCausalLM.from_pretrained(folder, **options),
        LlamaForCausalLM.from_pretrained(folder, device_map="cpu", **options),
        AutoModelForCausalLM.from_pretrained(folder, device_map={"": torch.device("cpu")}, **options),
    ):
        check_same(found, expected)
        assert found.config._attn_implementation == "eager"


def test_it_trains_and_goes_back_to_its_folders_format(tmp_path):
    folder = written(tmp_path / "it", "compressed_channel", "llama")
    StoredWeightsConfig(train="full").write(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tritonfp8.export.save(model, tmp_path / "before")
    assert differing(tmp_path / "before", folder) == []
    losses = train(model, tmp_path / "trainer")
    assert losses[-1] < losses[0]
    tritonfp8.export.save(model, tmp_path / "after")
    entry = json.loads((tmp_path / "after/config.json").read_text())["quantization_config"]
    assert (entry["quant_method"], entry["train"]) == ("tritonfp8", "full")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    stored = {name for name, p in model.named_parameters() if type(p) is type(model.model.layers[0].mlp.up_proj.weight)}
    mine, theirs = values(model), values(again)
    assert len(stored) >= 7
    assert all(torch.equal(mine[name], theirs[name]) for name in stored if "proj" in name)


def test_mistakes(tmp_path):
    folder = written(tmp_path / "it", "compressed_channel", "llama")
    with pytest.raises(ValueError, match="train must be one of"):
        StoredWeightsConfig(train="lora")
    with pytest.raises(ValueError, match="row-wise"):
        StoredWeightsConfig("row-wise")
    StoredWeightsConfig().write(folder)
    with pytest.raises(ValueError, match="are loaded to one device.*got 'auto'"):
        AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    with pytest.raises(ValueError, match=r"no place for these tensors of the checkpoint: lm_head\.weight"):
        AutoModel.from_pretrained(folder)
    shard = next(folder.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is no complete safetensors file"):
        AutoModelForCausalLM.from_pretrained(folder)
