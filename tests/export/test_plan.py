"""Which layers an export has in 8 bits, and what the report says of them."""

import functools

import cases
import pytest
import torch
from checkpoints import FORMATS, WHOLE, files_of, model_of
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.export import CHECKPOINT_FORMATS

PARTLY = WHOLE | {"intermediate_size": 192}
ATTENTION = [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]
MLP = [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")]


def test_a_plain_model_exports_what_convert_would_take():
    report = tritonfp8.export.plan(model_of(), "fine_grained")
    assert report.exported == ATTENTION + MLP
    told = "an output head (by get_output_embeddings of LlamaForCausalLM)"
    assert report.layers["lm_head"].reason == f"{told}: engines read heads in high precision"
    assert report.quantization_config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def test_a_converted_model_exports_its_converted_layers():
    model = model_of()
    tritonfp8.convert(model, {"*.mlp.*": "blockwise", "*.o_proj": "bf16", "*lm_head": "rowwise"})
    report = tritonfp8.export.plan(model, "fine_grained")
    assert report.exported == MLP
    assert report.layers["model.layers.0.self_attn.q_proj"].reason == "not converted"
    assert "its recipe, 'bf16', keeps output" in report.layers["model.layers.0.self_attn.o_proj"].reason
    assert "an output head" in report.layers["lm_head"].reason
    assert report.quantization_config["modules_to_not_convert"] == [*ATTENTION, "lm_head"]


def test_a_filter_decides_over_the_conversion():
    model = model_of()
    tritonfp8.convert(model, {"*.mlp.*": "blockwise", "*.o_proj": "bf16"})
    for filter in (["*.self_attn.*"], lambda layer, name: ".self_attn." in name):
        report = tritonfp8.export.plan(model, "compressed_channel", filter=filter)
        assert report.exported == ATTENTION
        assert set(report.quantization_config["ignore"]) == {*MLP, "lm_head"}


@pytest.mark.parametrize("filter", [["*lm_head", "*.mlp.*"], lambda layer, name: "self_attn" not in name])
def test_no_filter_exports_a_head(filter):
    report = tritonfp8.export.plan(model_of(), "compressed_tensor", filter=filter)
    assert report.exported == MLP
    assert "an output head" in report.layers["lm_head"].reason


@pytest.mark.parametrize(
    ("model", "filter", "error", "message"),
    [
        (model_of(), ["*.mlp.*", "*.nothing"], ValueError, r"'\*.nothing' of the filter match no linear layer"),
        (model_of(), "auto", ValueError, "filter must be patterns or a function for an export; got 'auto'"),
        (model_of(), 3, TypeError, "filter must be"),
        (model_of(), ["*lm_head"], ValueError, r"(?s)no layer .* in 8 bits as 'fine_grained'.*lm_head: an output head"),
        (nn.LayerNorm(4), None, ValueError, "the model has no nn.Linear"),
        ({}, None, TypeError, "model must be an nn.Module; got dict"),
    ],
)
def test_wrong_models_and_filters_are_errors(model, filter, error, message):
    with pytest.raises(error, match=message):
        tritonfp8.export.plan(model, "fine_grained", filter=filter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "gguf"}, "format must be one of 'fine_grained', "),
        ({"format": ["fine_grained"]}, "format must be one of"),
        ({"scale_fmt": "e8m0"}, "scale_fmt of 'fine_grained' must be one of None, 'ue8m0'"),
        ({"format": "compressed_channel", "scale_fmt": "ue8m0"}, "scale_fmt of .*channel' must be one of None"),
        ({"scale_fmt": "ue8m0", "scale_rounding": "none"}, "it needs scale_rounding 'pow2'; got 'none'"),
        ({"scale_rounding": "floor"}, "takes scale_rounding 'none' or 'pow2'; got 'floor'"),
        ({"format": "compressed_mxfp8", "scale_rounding": "none"}, "takes scale_rounding 'pow2' or 'floor'; got"),
        ({"dtype": torch.float64}, "dtype must be one of None, torch.bfloat16"),
    ],
)
def test_wrong_options_are_errors_before_the_first_tensor(tmp_path, options, message):
    model, options = model_of(), {"format": "fine_grained"} | options
    save = functools.partial(tritonfp8.export.save, folder=tmp_path / "new")
    for call in (tritonfp8.export.plan, tritonfp8.export.tensors, save):
        with pytest.raises(ValueError, match=message):
            call(model, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_of_the_report_are_those_of_the_file(tmp_path, format):
    model = model_of(dtype=torch.float32)
    report = tritonfp8.export.save(model, tmp_path, format, dtype=torch.bfloat16)
    stored = files_of(tmp_path)
    assert report.bytes_after == sum(x.nbytes for x in stored.values())
    assert report.bytes_before == sum(x.nbytes for x in model.parameters())
    up = report.layers["model.layers.0.mlp.up_proj"]
    assert up.bytes_before == 256 * 128 * 4
    scales = {
        "fine_grained": 2 * 4, "compressed_channel": 256 * 4, "compressed_tensor": 4, "compressed_block": 2 * 4,
        "compressed_mxfp8": 256 * 4,
    }  # fmt: skip
    assert up.bytes_after == 256 * 128 + scales[format]
    assert report.layers["lm_head"].bytes_after == 64 * 128 * 2
    assert report.others["model.norm.weight"] == 128 * 2
    assert stored["model.norm.weight"].dtype == torch.bfloat16
    assert report.files == {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    text = str(report)
    assert f"7 layers in 8 bits as {format!r}, 1 in high precision, 4 other tensors; 722.4 kB -> " in text
    assert "lm_head                          high precision: an output head" in text


@pytest.mark.parametrize("name", recipes.names())
@pytest.mark.parametrize("format", FORMATS)
def test_the_report_says_whether_training_reads_the_same_codes(format, name):
    model = model_of()
    tritonfp8.convert(model, name)
    if name == "bf16":
        with pytest.raises(ValueError, match="its recipe, 'bf16', keeps output in high precision"):
            tritonfp8.export.plan(model, format)
        return
    found = {layer.same_codes for layer in tritonfp8.export.plan(model, format).layers.values()} - {None}
    same = {
        "rowwise": ["compressed_channel"], "rowwise_hp_grad_weight": ["compressed_channel"],
        "blockwise": ["fine_grained", "compressed_block"], "mxfp8": ["compressed_mxfp8"], "tensorwise": [],
        "mxfp4_weights": ["compressed_channel", "compressed_mxfp4"],
    }  # fmt: skip
    assert found == {format in same[name]}
    layer = model.model.layers[0].mlp.up_proj
    ends = CHECKPOINT_FORMATS[format].codes_of("model.layers.0.mlp.up_proj.weight")
    codes, spec = dict(tritonfp8.export.tensors(model, format))[ends], CHECKPOINT_FORMATS[format].spec
    trained = tritonfp8.quantize(cases.rounded(layer.weight.detach(), layer.recipe), spec).qdata
    if found == {True}:
        assert torch.equal(codes.view(torch.uint8), trained.view(torch.uint8))
    rounded = tritonfp8.export.plan(model, "compressed_tensor", scale_rounding="none").layers
    assert rounded["model.layers.0.mlp.up_proj"].same_codes == (name == "tensorwise")


def test_a_weight_tied_to_an_embedding_is_written_once_in_high_precision(tmp_path):
    model = model_of("qwen3", tie_word_embeddings=True)
    report = tritonfp8.export.save(model, tmp_path, "compressed_channel", filter=lambda layer, name: True)
    assert "its weight is model.embed_tokens.weight" in report.layers["lm_head"].reason
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    stored = files_of(tmp_path)
    assert torch.equal(stored["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    assert not [name for name in stored if name.startswith("lm_head")]
    assert "lm_head" in report.quantization_config["ignore"]
    # The name of an embedding wins, though it comes later.
    model = nn.ModuleDict({"a": nn.Linear(32, 64, bias=False), "b": nn.Embedding(64, 32), "c": nn.Linear(32, 32)})
    model["a"].weight = model["b"].weight
    report = tritonfp8.export.plan(model, "compressed_channel")
    assert report.tied == {"a.weight": "b.weight"}
    assert report.exported == ["c"]


def test_layers_that_share_a_weight_stay_in_high_precision():
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    model[2].weight = model[0].weight
    report = tritonfp8.export.plan(model, "compressed_channel")
    assert report.exported == ["1"]
    assert "its weight is also 2.weight: loaders tie weights, and not their scales" in report.layers["0"].reason
    found = dict(tritonfp8.export.tensors(model, "compressed_channel"))
    assert set(found) == {"0.weight", "0.bias", "1.weight", "1.weight_scale", "1.bias", "2.bias"}
    view = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    view[1].weight = nn.Parameter(view[0].weight.data)
    with pytest.raises(ValueError, match="loaders tie weights, and not their scales"):
        tritonfp8.export.plan(view, "compressed_channel")


def test_layers_that_no_engine_would_find_stay_in_high_precision():
    """transformers takes the names of its list for beginnings and ends of names."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))
    report = tritonfp8.export.plan(model, "fine_grained", filter=lambda layer, name: name != "1")
    assert report.exported == ["0", "2", "3", "4", "5", "6", "7", "8", "9"]
    for name in ("10", "11"):
        assert "its name begins or ends with 1, which is in high precision" in report.layers[name].reason
    from transformers.quantizers.quantizers_utils import should_convert_module

    for name, layer in report.layers.items():
        listed = report.quantization_config["modules_to_not_convert"]
        assert should_convert_module(name, listed) == (layer.exported_as is not None)
    by_name = tritonfp8.export.plan(model, "compressed_channel", filter=lambda layer, name: name != "1")
    assert len(by_name.exported) == 11


def test_a_mix_inside_of_layers_that_engines_fuse_is_a_note():
    report = tritonfp8.export.plan(model_of(sizes=WHOLE | {"num_key_value_heads": 2}), "fine_grained")
    assert "out_features=64 is no multiple of 128" in report.layers[ATTENTION[1]].reason
    (note,) = report.notes
    assert note.startswith("vLLM and SGLang fuse q_proj, k_proj, v_proj and refuse a mix of formats: 1 modules")
    assert f"note: {note}" in str(report)
    assert tritonfp8.export.plan(model_of(sizes=PARTLY), "fine_grained").notes == ()


class Weight(nn.Module):
    """A module with this parameter, and no layer that an export knows."""

    def __init__(self, name, *shape):
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def test_routers_and_experts_are_listed_as_modules_in_high_precision():
    parts = {"a": nn.Linear(128, 128), "experts": Weight("gate_up", 2, 128, 128), "router": Weight("weight", 2, 128)}
    report = tritonfp8.export.plan(nn.ModuleDict({**parts, "n": nn.LayerNorm(8)}), "compressed_channel")
    assert report.quantization_config["ignore"] == ["experts", "router"]
    assert {"experts.gate_up", "router.weight"} <= set(report.others)
    (note,) = report.notes
    assert note.startswith(
        "1 parameters have 3 dims, like experts, such as experts.gate_up: they are in high precision"
    )


def test_conv1d_and_subclasses_stay_in_high_precision():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=128, n_layer=1, n_head=2))
    tritonfp8.convert(model, "rowwise")
    with pytest.raises(ValueError, match="c_attn, .*: a Conv1D, whose weight is transposed"):
        tritonfp8.export.plan(model, "compressed_channel")

    class Other(nn.Linear):
        pass

    mixed = nn.Sequential(nn.Linear(128, 128), Other(128, 128))
    report = tritonfp8.export.plan(mixed, "compressed_channel", filter=["0", "1"])
    assert report.exported == ["0"]
    assert "a subclass of nn.Linear (Other)" in report.layers["1"].reason


def test_names_are_those_without_compile_and_checkpointing():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = model_of()
    expected = [name for name, _ in tritonfp8.export.tensors(model, "fine_grained")]
    apply_activation_checkpointing(model, check_fn=lambda module: "DecoderLayer" in type(module).__name__)
    compiled = torch.compile(model)
    assert "_orig_mod" in next(iter(compiled.state_dict()))
    assert [name for name, _ in tritonfp8.export.tensors(compiled, "fine_grained")] == expected
    report = tritonfp8.export.plan(compiled, "fine_grained", filter=["*.mlp.*"])
    assert report.exported == MLP


def test_weights_that_cannot_be_exported_are_errors():
    codes = nn.Linear(128, 128)
    codes.weight = nn.Parameter(torch.zeros(128, 128).to(torch.float8_e4m3fn), requires_grad=False)
    for layer, message in (
        (nn.Linear(128, 128, device="meta"), "0.weight is on the meta device"),
        (nn.LazyLinear(128), "0.weight is lazy"),
        (codes, "0.weight is torch.float8_e4m3fn: an export needs weights in high precision"),
    ):
        with pytest.raises(ValueError, match=message):
            tritonfp8.export.plan(nn.Sequential(layer), "fine_grained")
