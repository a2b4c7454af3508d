"""Models of configs, shapes and Python files; and the command that reads them."""

import json

import pytest
import torch

from tritonfp8 import advice

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 128,
}  # fmt: skip
VIT = {
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
}  # fmt: skip
FILE = """
import torch
def build(tokens, dtype):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).to(dtype)
    return model, torch.randn(int(tokens), 32, dtype=dtype)
def wrong():
    return 3
"""


@pytest.fixture
def config(tmp_path):
    def written(fields):
        path = tmp_path / f"{fields.get('model_type')}.json"
        path.write_text(json.dumps(fields))
        return str(path)

    return written


def test_a_config_gives_weights_and_buffers(config):
    cpu = torch.device("cpu")
    source = advice.from_config(config(LLAMA), "2x16", torch.float32, cpu)
    assert {p.device.type for p in source.model.parameters()} == {"meta"}
    made = source.prepare(source.model)
    assert all(torch.isfinite(p).all() and p.abs().sum() > 0 for p in made.parameters())
    inverse = made.model.rotary_emb.inv_freq
    assert inverse[0] == 1
    assert (inverse.diff() < 0).all()
    out = made(**source.kwargs)
    assert torch.isfinite(out.loss)
    assert out.logits.shape == (2, 16, 300)


def test_a_model_of_images_takes_images(config):
    source = advice.from_config(config(VIT), "5", torch.bfloat16, None)
    assert source.kwargs["pixel_values"].shape == (5, 3, 32, 32)
    with pytest.raises(ValueError, match="the images of a batch, such as 64; got 5x4"):
        advice.from_config(config(VIT), "5x4", torch.bfloat16, None)


@pytest.mark.parametrize("name", ["Mistral3ForConditionalGeneration", "BartForConditionalGeneration"])
def test_no_model_keeps_keys_of_a_step_for_the_next(config, name):
    import transformers

    fields = getattr(transformers, name).config_class().to_dict() | {"architectures": [name]}
    source = advice.from_config(config(fields), "2x16", torch.bfloat16, None)
    used = [each.config for each in source.model.modules() if hasattr(each, "config")]
    assert not any(getattr(each, "use_cache", False) for each in (used[0], used[0].get_text_config()))
    assert source.kwargs.keys() == {"input_ids", "labels"}


def test_a_model_that_reads_values_is_not_predicted(config):
    fields = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 64, "ffn_dim": 64}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300, "word_embed_proj_dim": 64}
    source = advice.from_config(config(fields), "2x16", torch.bfloat16, None)
    with pytest.raises(ValueError, match="reads the values of tensors .* measure it on a GPU"):
        advice.advise(source.model, recipes=["rowwise"], **source.kwargs)


@pytest.mark.parametrize(
    ("fields", "tokens", "message"),
    [
        (LLAMA, "1x129", "at most 128 a sequence"),
        (LLAMA, "x", "tokens must be sequences x tokens"),
        ({"model_type": "clip"}, "2x16", "give a Python file"),
        (
            {"model_type": "segformer", "architectures": ["SegformerForImageClassification"]},
            "2",
            "how large images are",
        ),
        ({"model_type": "unheard"}, "2x16", "not a transformers config"),
    ],
)
def test_configs_that_do_not_fit(config, fields, tokens, message):
    with pytest.raises(ValueError, match=message):
        advice.from_config(config(fields), tokens, torch.bfloat16, None)


class TestCommand:
    @pytest.fixture
    def invoke(self):
        from typer.testing import CliRunner

        from tritonfp8.cli import app

        return lambda *args: CliRunner().invoke(app.app, ["advise", *map(str, args)])

    def test_a_config_is_predicted_and_written(self, invoke, config, tmp_path):
        done = invoke("--model", config({**LLAMA, "hidden_size": 8192, "intermediate_size": 28672}), "--tokens",
                      "16x128", "--recipes", "rowwise", "--out", tmp_path / "out")  # fmt: skip
        assert done.exit_code == 0, done.output
        assert "PREDICTED" in done.output
        assert "recommendation: rowwise" in done.output
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"advice.json", "blocks.png", "recipes.toml"}
        assert "written to" in done.output

    def test_shapes(self, invoke, tmp_path):
        (tmp_path / "shapes.json").write_text('[{"m": 8192, "n": 14336, "k": 4096}, {"m": 8, "n": 64, "k": 64}]')
        done = invoke("--shapes", tmp_path / "shapes.json", "--recipes", "rowwise")
        assert done.exit_code == 0, done.output
        assert "layers.8192x14336x4096" in done.output

    def test_a_file(self, invoke, tmp_path):
        (tmp_path / "model.py").write_text(FILE)
        done = invoke("--file", f"{tmp_path / 'model.py'}:build", "--tokens", 64)
        assert done.exit_code == 0, done.output
        assert "64 x 32 x 64" in done.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "give one of --model, --shapes and --file"),
            (["--model", "tiny", "--file", "a.py:b"], "give one of --model, --shapes and --file"),
            (["--file", "nowhere.py:build"], "there is no file nowhere.py"),
            (["--file", "nowhere.py"], "needs the name of a function"),
            (["--model", "tinny"], "did you mean 'tiny'"),
            (["--model", "tiny", "--dtype", "int8"], "dtype must be one of"),
            (["--model", "tiny", "--machine", "a100"], "machine must be one of"),
            (["--model", "tiny", "--recipes", "fast"], "no recipe is named 'fast'"),
            (["--model", "tiny", "--compile", "all"], "compile must be a list"),
        ],
    )
    def test_errors(self, invoke, arguments, message):
        done = invoke(*arguments)
        assert done.exit_code == 2
        assert message in " ".join(done.stderr.split())

    def test_functions_of_files_are_checked(self, invoke, tmp_path):
        (tmp_path / "model.py").write_text(FILE)
        for name, message in (("wrong", "must return a model and its inputs; got int"), ("no", "no function 'no'")):
            done = invoke("--file", f"{tmp_path / 'model.py'}:{name}", "--tokens", "16")
            assert done.exit_code == 2
            assert message in " ".join(done.stderr.split())
