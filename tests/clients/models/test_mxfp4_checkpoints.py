"""Checkpoints in MXFP4, as gpt-oss has them and as compressed-tensors writes them: the values of their own readers."""

import copy
import json
import logging

import pytest
import torch
import transformers
from checkpoints import EXPERTS, RAGGED, adapter_losses, config_of, falling_losses, files_of, model_of, theirs_of
from mixtures import experts_of
from mixtures import model_of as mixture_of
from safetensors.torch import save_file

import tritonfp8
from tritonfp8 import QuantSpec, reference
from tritonfp8.integrations.transformers import from_pretrained
from tritonfp8.layers.stored import StoredMatrices, StoredWeight, plain_weight
from tritonfp8.specs.testing import assert_bitwise_equal

SPEC = QuantSpec("e2m1", (1, 32), "e8m0", "floor")
IDS = torch.arange(3, 19).view(2, 8)
CODES = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {**CODES, "symmetric": True, "dynamic": False},
            "input_activations": None, "output_activations": None, "format": "mxfp4-pack-quantized",
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def codes_of(x):
    qdata, scale = reference.quantize(x, *SPEC.args)
    return qdata, scale.view(torch.uint8)


def saved(model, folder, tensors, config):
    """A checkpoint of these tensors, with the config of the model."""
    folder.mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    data = {**json.loads(model.config.to_json_string()), "quantization_config": config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def gpt_oss(folder, far=False):
    """A checkpoint as gpt-oss ships it; ``far``: one row has blocks 20 binades apart."""
    model = mixture_of("gpt_oss", torch.bfloat16)
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    for name in experts_of(model):
        for key in ("gate_up_proj", "down_proj"):
            values = tensors.pop(f"{name}.{key}").mT.contiguous()
            if far and key == "down_proj":
                values[1, 5, :32] *= 2.0**-20
            qdata, scale = codes_of(values)
            tensors[f"{name}.{key}_blocks"] = qdata.view(*scale.shape, 16)
            tensors[f"{name}.{key}_scales"] = scale
    return saved(model, folder, tensors, GPT_OSS)


def compressed(folder, kind="qwen3", sizes=RAGGED):
    """A checkpoint of compressed-tensors; matrices of experts one by one."""
    sizes = sizes | {"intermediate_size": 192}
    model = model_of(kind, sizes)
    model.save_pretrained(folder / "plain")
    tensors = files_of(folder / "plain")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        packed = name.removesuffix("weight")
        tensors[f"{packed}weight_packed"], tensors[f"{packed}weight_scale"] = codes_of(tensors.pop(name))
    return saved(model, folder / "it", tensors, COMPRESSED), model_of(kind, sizes, seed=1)


def values_of(model):
    return {name: plain_weight(p.detach()).clone() for name, p in model.named_parameters()}


def test_gpt_oss_has_the_values_that_transformers_reads(tmp_path):
    folder = gpt_oss(tmp_path / "it")
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    model = mixture_of("gpt_oss", torch.bfloat16)
    report = tritonfp8.export.load(model, folder)
    assert_bitwise_equal(values_of(model), values_of(theirs))
    assert {name: layer.loaded_as for name, layer in report.layers.items()} == {
        f"{name}.{key}": "mxfp4 1x32" for name in experts_of(model) for key in ("gate_up_proj", "down_proj")
    }


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", RAGGED), ("moe", EXPERTS)])
def test_compressed_tensors_has_the_values_that_transformers_reads(tmp_path, kind, sizes):
    folder, model = compressed(tmp_path, kind, sizes)
    report = tritonfp8.export.load(model, folder)
    stored = files_of(folder)
    for name, x in files_of(folder).items():
        if name.endswith("weight_packed") and kind == "qwen3":
            scale = stored[name.replace("_packed", "_scale")].view(torch.float8_e8m0fnu)
            expected = reference.dequantize(x, scale, *SPEC.args, torch.bfloat16)
            assert_bitwise_equal([model.get_parameter(name.removesuffix("_packed")).detach()], [expected])
    assert "compressed_mxfp4 1x32" in str(report)
    if kind == "qwen3":
        # Its layers keep their scales.
        theirs, ours = values_of(theirs_of(folder, "compressed_mxfp4")), values_of(model)
        assert_bitwise_equal({name: theirs[name] for name in ours}, ours)


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
@pytest.mark.parametrize("train", [None, "adapters"])
def test_experts_keep_the_codes_of_the_file(tmp_path, caplog, recipe, train):
    folder = gpt_oss(tmp_path / "it")
    with caplog.at_level(logging.INFO, "tritonfp8"):
        model = from_pretrained(folder, recipe, train)
    assert "codes kept" in caplog.text
    stored = files_of(folder)
    for name, experts in experts_of(model).items():
        for key in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, key)
            assert type(weight) is StoredMatrices
            assert weight.spec == SPEC
            assert_bitwise_equal([weight._qdata], [stored[f"{name}.{key}_blocks"].flatten(-2)])
            assert_bitwise_equal([weight._scale.view(torch.uint8)], [stored[f"{name}.{key}_scales"]])
    plain = mixture_of("gpt_oss", torch.bfloat16)
    tritonfp8.export.load(plain, folder)
    tritonfp8.convert(plain, recipe)
    # Other layers are stored, too: they have the values of the codes.
    plain.load_state_dict(model.state_dict())
    embeds = plain.get_input_embeddings()(IDS).detach()
    found = []
    for each in (model.eval(), plain.eval()):
        leaf = embeds.clone().requires_grad_()
        out = each(inputs_embeds=leaf).logits
        found.append([out.detach(), *torch.autograd.grad(out.float().square().mean(), leaf)])
    assert_bitwise_equal(*found)


@pytest.mark.parametrize(
    ("recipe", "mode", "again"),
    [
        ("rowwise", "training", "values kept"), ("rowwise", "inference", "values kept"),
        ("mxfp8", "training", "values kept"), ("mxfp8", "inference", "values kept"),
        # Stored, its scales are powers of two.
        ("tensorwise", "training", "rounded again"), ("tensorwise", "inference", "values kept"),
        ("bf16", "training", None),
    ],
)  # fmt: skip
def test_a_model_in_memory_takes_the_values(tmp_path, recipe, mode, again):
    folder, model = gpt_oss(tmp_path / "it"), mixture_of("gpt_oss", torch.bfloat16)
    tritonfp8.convert(model, recipe, mode=mode)
    report = tritonfp8.export.load(model, folder)
    assert {layer.again for layer in report.layers.values()} == {again}
    assert not any(getattr(p, "spec", None) == SPEC for p in model.parameters())
    plain = mixture_of("gpt_oss", torch.bfloat16)
    tritonfp8.export.load(plain, folder)
    wanted = {name: x for name, x in values_of(plain).items() if ".experts." in name}
    assert_bitwise_equal({name: values_of(model)[name] for name in wanted}, wanted)


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", RAGGED), ("moe", EXPERTS)])
def test_layers_keep_the_codes_of_the_file(tmp_path, kind, sizes):
    folder, _ = compressed(tmp_path, kind, sizes)
    model = from_pretrained(folder, "rowwise")
    kept = [p for p in model.parameters() if isinstance(p, StoredWeight)]
    assert {p.spec for p in kept} == {SPEC}
    packed = sum(x.nbytes for name, x in files_of(folder).items() if name.endswith(("_packed", "_scale")))
    assert sum(p.nbytes - p._row_scale.nbytes for p in kept) == packed <= 0.27 * sum(2 * p.numel() for p in kept)
    model(IDS)


def test_rows_that_e4m3_does_not_hold_are_reported(tmp_path, caplog):
    folder = gpt_oss(tmp_path / "it", far=True)
    with caplog.at_level(logging.INFO, "tritonfp8"):
        # The recipe that is chosen.
        from_pretrained(folder)
    assert " as rowwise: " in caplog.text
    assert "a scale a row rounds 1 rows of them, and the recipe 'mxfp8' none" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "tritonfp8"):
        from_pretrained(folder, "mxfp8")
    assert "codes kept" in caplog.text
    assert "a scale a row rounds" not in caplog.text


def _without(key):
    return lambda tensors: tensors.pop(key)


def _nan(key):
    return lambda tensors: tensors[key].view(-1)[:1].fill_(255)


def _cut(key):
    return lambda tensors: tensors.update({key: tensors[key][:, :-1].contiguous()})


FIRST = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without(f"{FIRST}_scales"), r"down_proj_blocks has codes and needs one scale, .*down_proj_scales; got no"),
        (_without(f"{FIRST}_blocks"), r"does not have these tensors of the model: .*down_proj"),
        (_nan(f"{FIRST}_scales"), r"down_proj_scales must be finite and not negative"),
        (_cut(f"{FIRST}_blocks"), r"down_proj_blocks must have shape \(4, 64, 2, 16\), .* got \(4, 63, 2, 16\)"),
        (_cut(f"{FIRST}_scales"), r"down_proj_scales must have shape \(4, 64, 2\), .*got \(4, 63, 2\)"),
    ],
)
def test_damage_is_an_error_that_changes_nothing(tmp_path, damage, message):
    folder = gpt_oss(tmp_path / "it")
    tensors, model = files_of(folder), mixture_of("gpt_oss", torch.bfloat16)
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    before = values_of(model)
    with pytest.raises(ValueError, match=message):
        tritonfp8.export.load(model, folder)
    assert_bitwise_equal(values_of(model), before)


def test_a_config_of_other_codes_is_an_error(tmp_path):
    folder, model = compressed(tmp_path)
    config = config_of(folder)
    config["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ValueError, match=r"weight_packed .*codes"):
        tritonfp8.export.load(model, folder)


@pytest.mark.parametrize("rounding", ["pow2", "floor"])
def test_what_is_written_is_read_by_others_and_here(tmp_path, rounding):
    model = model_of("qwen3", RAGGED | {"intermediate_size": 192})
    plan = tritonfp8.export.plan(model, "compressed_mxfp4", scale_rounding=rounding)
    report = tritonfp8.export.save(model, tmp_path, "compressed_mxfp4", scale_rounding=rounding)
    assert plan.bytes_after == report.bytes_after
    # Layers with a K that is no multiple of 32 stay in high precision.
    assert len(report.exported) == 7
    stored = files_of(tmp_path)
    spec = QuantSpec("e2m1", (1, 32), "e8m0", rounding)
    for name, layer in model.named_modules():
        if name in report.exported:
            qdata, scale = reference.quantize(layer.weight.detach(), *spec.args)
            assert_bitwise_equal(stored[f"{name}.weight_packed"], qdata)
            assert_bitwise_equal(stored[f"{name}.weight_scale"], scale.view(torch.uint8))
    ours = model_of("qwen3", RAGGED | {"intermediate_size": 192}, seed=1)
    tritonfp8.export.load(ours, tmp_path)
    theirs, ours = values_of(theirs_of(tmp_path, "compressed_mxfp4")), values_of(ours)
    assert_bitwise_equal({name: theirs[name] for name in ours}, ours)


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", RAGGED), ("moe", EXPERTS)])
def test_a_loaded_model_is_written_byte_for_byte(tmp_path, kind, sizes):
    folder, _ = compressed(tmp_path, kind, sizes)
    model = from_pretrained(folder, "rowwise")
    tritonfp8.export.save(model, tmp_path / "again", "compressed_mxfp4")
    before, after = files_of(folder), files_of(tmp_path / "again")
    assert sum(name.endswith("_packed") for name in after) == (7 if kind == "qwen3" else 16)
    assert_bitwise_equal(dict(sorted(after.items())), dict(sorted(before.items())))
    tensors = tritonfp8.export.tensors(model, "compressed_mxfp4")
    other = from_pretrained(folder, "mxfp8")
    report = tritonfp8.export.load_tensors(other, tensors, "compressed_mxfp4")
    assert {layer.again for layer in report.layers.values()} == {"codes kept"}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_lora_trains_on_codes_that_stay(tmp_path, compiled):
    """Ten steps of adapters of each layer: the losses of the plain model of the values, to the bit."""
    folder, plain = compressed(tmp_path)
    tritonfp8.export.load(plain, folder)
    tritonfp8.convert(plain.requires_grad_(False), "rowwise")
    loaded = from_pretrained(folder, "rowwise", "adapters")
    # Its frequencies are float32, where a cast of the whole model rounds them.
    plain.model.rotary_emb = copy.deepcopy(loaded.model.rotary_emb)
    before = {
        model: {name: x._qdata.clone() for name, x in model.named_parameters() if isinstance(x, StoredWeight)}
        for model in (loaded, plain.train())
    }
    assert adapter_losses(loaded, IDS, 10, compiled) == adapter_losses(plain, IDS, 10, compiled)
    stored, plain_ones = before.values()
    assert not plain_ones
    now = {name: x._qdata for name, x in loaded.named_parameters() if isinstance(x, StoredWeight)}
    assert_bitwise_equal(list(now.values()), list(stored.values()))
    assert len(now) == 7


def test_gpt_oss_trains_and_comes_out_as_it_was(tmp_path):
    """Trained experts are quantized once; what did not change is copied, and transformers reads the same values."""
    folder, out = gpt_oss(tmp_path / "it"), tmp_path / "out"
    model = from_pretrained(folder, train="full")
    changed = "model.layers.1.mlp.experts.down_proj"
    optimizer = tritonfp8.optim.AdamW([model.get_parameter(changed)], 1e-2)
    falling_losses(model, optimizer, IDS, 10)
    tritonfp8.export.save(model, out)
    before, after = files_of(folder), files_of(out)
    assert list(after) == list(before)
    ends = ("_blocks", "_scales")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {changed + end for end in ends}
    qdata, scale = codes_of(model.get_parameter(changed).detach().mT.contiguous())
    assert_bitwise_equal([after[changed + end].flatten(2) for end in ends], [qdata, scale])
    assert config_of(out) == config_of(folder)
    again = from_pretrained(out, train="adapters")
    kept = again.get_parameter(changed)
    assert_bitwise_equal([kept._qdata, kept._scale.view(torch.uint8)], [qdata, scale])


def test_compressed_tensors_trains_and_comes_out_as_it_was(tmp_path):
    folder, _ = compressed(tmp_path)
    model = from_pretrained(folder, train="full")
    name = "model.layers.0.mlp.up_proj.weight"
    before = model.get_parameter(name).dequantize().clone()
    model(IDS, labels=IDS).loss.backward()
    tritonfp8.optim.AdamW([model.get_parameter(name)], 0.1).step()
    now = model.get_parameter(name).dequantize()
    assert not torch.equal(now, before)
    tritonfp8.export.save(model, tmp_path / "out")
    found, after = files_of(folder), files_of(tmp_path / "out")
    changed = {key for key in found if not torch.equal(found[key], after[key])}
    assert {f"{name}_packed"} <= changed <= {f"{name}_packed", f"{name}_scale"}
    assert_bitwise_equal([after[f"{name}_packed"], after[f"{name}_scale"]], list(codes_of(now)))
