"""A checkpoint that was loaded is written in its own format: what did not change to the bit, the rest rounded once."""

import json
import shutil

import peft
import pytest
import torch
from checkpoints import EXPERTS, WHOLE, config_of, files_of, same, scale_name, theirs_of
from pretrained_cases import FORMATS, IDS, contents, differing, train, values, written
from safetensors.torch import load_file, save_file

import tritonfp8
from tritonfp8.integrations.transformers import from_pretrained
from tritonfp8.layers.stored import StoredWeight, plain_weight, stored_part
from tritonfp8.optim import AdamW

LLAMA, MOE = ("llama", WHOLE), ("moe", EXPERTS)


def rewrite(folder, change):
    """Change the tensors of each file: ``change(name, x)`` gives a name and a tensor."""
    index = folder / "model.safetensors.index.json"
    weight_map = {}
    for path in folder.glob("*.safetensors"):
        shutil.copy(path, folder / "old")
        found = dict(change(name, x) for name, x in load_file(folder / "old").items())
        (folder / "old").unlink()
        save_file(found, path, {"format": "pt"})
        weight_map.update(dict.fromkeys(found, path.name))
    if index.exists():
        index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def is_scale(name):
    return name.endswith(("weight_scale", "weight_scale_inv"))


def uneven(name, x):
    """A scale that is no power of two, so that no stored weight has these codes."""
    return name, x * 1.37 if is_scale(name) else x


CHANGES = {
    "as written": None,
    "scales that are no powers of two": uneven,
    "scales in bfloat16": lambda name, x: (name, x.bfloat16() if is_scale(name) else x),
    "scales called scale, in e8m0": lambda name, x: (
        (name.replace("weight_scale_inv", "scale"), x.to(torch.float8_e8m0fnu)) if is_scale(name) else (name, x)
    ),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("base", [LLAMA, MOE], ids=["llama", "moe"])
@pytest.mark.parametrize("mode", [None, "adapters", "full"])
def test_a_model_that_did_not_change_is_written_to_the_bit(tmp_path, mode, base, format):
    folder = written(tmp_path / "it", format, *base)
    model = from_pretrained(folder, train=mode)
    report = tritonfp8.export.save(model, tmp_path / "out")
    assert differing(tmp_path / "out", folder) == []
    assert report.files == {name: len(data) for name, data in contents(folder).items()}
    assert "0 of " in str(report)


@pytest.mark.parametrize("change", list(CHANGES)[1:])
@pytest.mark.parametrize("base", [LLAMA, MOE], ids=["llama", "moe"])
def test_codes_that_the_model_rounded_again_are_written_to_the_bit(tmp_path, base, change):
    folder = written(tmp_path / "it", "fine_grained", *base)
    rewrite(folder, CHANGES[change])
    tritonfp8.export.save(from_pretrained(folder, "rowwise"), tmp_path / "out")
    assert differing(tmp_path / "out", folder) == []


@pytest.mark.parametrize(
    ("change", "format"),
    [*(("as written", format) for format in FORMATS), ("scales called scale, in e8m0", "fine_grained")],
)
@pytest.mark.parametrize("base", [LLAMA, MOE], ids=["llama", "moe"])
def test_what_was_trained_is_rounded_once(tmp_path, base, change, format):
    folder = written(tmp_path / "it", format, *base)
    if CHANGES[change]:
        rewrite(folder, CHANGES[change])
    model = from_pretrained(folder, train="full")
    for name, parameter in model.named_parameters():
        if any(each in name for each in ("q_proj", "o_proj", "input_layernorm", "down_proj", "embed")):
            parameter.requires_grad_(False)
    before = values(model)
    train(model, tmp_path / "trainer", AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2), steps=2)
    now = values(model)
    moved = {name for name, x in now.items() if not torch.equal(x, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    tritonfp8.export.save(model, tmp_path / "out")
    old, new = files_of(folder), files_of(tmp_path / "out")
    assert {name: (x.dtype, x.shape) for name, x in old.items()} == {
        name: (x.dtype, x.shape) for name, x in new.items()
    }
    stems = {name.removesuffix("weight").replace("experts.gate_up_proj", "experts.") for name in moved}
    for name, x in old.items():
        stem = name.removesuffix(scale_name(format)).removesuffix("scale").removesuffix("weight")
        is_moved = stem in stems or (".experts." in name and "down_proj" not in name)
        if not is_moved:
            assert torch.equal(x.view(torch.uint8), new[name].view(torch.uint8)), name
        elif name.endswith("weight"):
            assert not torch.equal(x.view(torch.uint8), new[name].view(torch.uint8)), name
    # The codes that the model stores, where its recipe has the blocks of the format.
    for name, parameter in model.named_parameters():
        part = stored_part(parameter)
        if name in moved and part is not None and format not in (None, "compressed_tensor"):
            assert torch.equal(new[name].view(torch.uint8), part.quantized.qdata.view(torch.uint8)), name
    again = from_pretrained(tmp_path / "out", train="full")
    if format not in (None, "compressed_tensor"):
        kept = {name for name, p in model.named_parameters() if isinstance(p, StoredWeight)}
        theirs = values(again)
        assert all(torch.equal(now[name], theirs[name]) for name in kept)
    before_config, config = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "out"))
    assert config == before_config


@pytest.mark.parametrize("format", [name for name in FORMATS if name])
def test_their_loaders_read_what_was_trained(tmp_path, format):
    """transformers and compressed-tensors dequantize to the values of the model, in bfloat16."""
    model = from_pretrained(written(tmp_path / "it", format, *LLAMA), train="full")
    train(model, tmp_path / "trainer", AdamW(model.parameters(), lr=1e-2), steps=2)
    tritonfp8.export.save(model, tmp_path / "out")
    theirs = {name: x.detach() for name, x in theirs_of(tmp_path / "out", format).named_parameters()}
    expected = {name: x.bfloat16() for name, x in values(model).items()}
    if format == "compressed_tensor":
        # The rows of a stored weight have scales of their own; the file has one.
        spec = tritonfp8.QuantSpec("e4m3", (-1, -1), scale_rounding="pow2")
        expected |= {
            name: tritonfp8.dequantize(tritonfp8.quantize(plain_weight(p.detach()), spec), torch.bfloat16)
            for name, p in model.named_parameters()
            if stored_part(p) is not None
        }
    same({name: x for name, x in theirs.items() if name in expected}, expected)


def test_one_expert_that_changed_leaves_the_others_as_they_are(tmp_path):
    folder = written(tmp_path / "it", "fine_grained", *MOE)
    rewrite(folder, uneven)
    model = from_pretrained(folder, train="full")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[2, :128] *= 2
    tritonfp8.export.save(model, tmp_path / "out")
    old, new = files_of(folder), files_of(tmp_path / "out")
    changed = {name for name, x in old.items() if not torch.equal(x.float(), new[name].float())}
    stem = "model.layers.0.mlp.experts.2.gate_proj.weight"
    assert changed == {stem, f"{stem}_scale_inv"}


def test_adapters_are_merged_into_the_layers_that_have_them(tmp_path):
    folder = written(tmp_path / "it", "fine_grained", *LLAMA)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(from_pretrained(folder, train="adapters"), config)
    with pytest.raises(ValueError, match='Give adapters="merged"'):
        tritonfp8.export.save(model, tmp_path / "out")
    tritonfp8.export.save(model, tmp_path / "out", adapters="merged")
    old, new = files_of(folder), files_of(tmp_path / "out")
    changed = {name for name, x in old.items() if not torch.equal(x.float(), new[name].float())}
    assert {name for name in changed if name.endswith("weight")} == {"model.layers.0.self_attn.q_proj.weight"}
    assert all("q_proj" in name for name in changed)
    tritonfp8.revert(model)
    merged = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight
    loaded = from_pretrained(tmp_path / "out").model.layers[0].self_attn.q_proj.weight
    expected = tritonfp8.quantize(merged.detach(), loaded.spec)
    assert torch.equal(loaded.dequantize(), tritonfp8.dequantize(expected, torch.bfloat16))


def test_the_config_has_what_changed_in_the_model(tmp_path):
    folder = written(tmp_path / "it", "compressed_channel", *LLAMA)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps({**json.loads(text), "of_their_own": [1, 2]}))
    model = from_pretrained(folder, attn_implementation="eager")
    model.config.pad_token_id = 7
    model.generation_config.temperature = 0.5
    tritonfp8.export.save(model, tmp_path / "out")
    before, after = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "out"))
    assert after == {**before, "pad_token_id": 7}
    assert config_of(tmp_path / "out") == config_of(folder)
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["temperature"] == 0.5
    same(files_of(tmp_path / "out"), files_of(folder))


@pytest.mark.parametrize("format", ["fine_grained", "compressed_tensor", None])
@pytest.mark.parametrize("mode", ["adapters", "full", "full, by the Trainer's AdamW"])
def test_a_resumed_training_ends_as_one_that_was_not_stopped(tmp_path, mode, format):
    folder, found = written(tmp_path / "it", format, *LLAMA), []
    for name, parts in (("whole", (4,)), ("halves", (2, 4))):
        for steps in parts:
            model = from_pretrained(folder, train=mode.partition(",")[0])
            if mode == "adapters":
                torch.manual_seed(0)
                model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
            optimizer = AdamW(model.parameters(), lr=1e-2) if mode == "full" else None
            losses = train(model, tmp_path / name, optimizer, steps, save_steps=2, resume=steps > parts[0])
        tritonfp8.export.save(model, tmp_path / f"out of {name}", adapters="merged" if mode == "adapters" else None)
        found.append((losses, values(model)))
    (losses, now), (again, resumed) = found
    assert losses == again
    assert all(torch.equal(x, resumed[name]) for name, x in now.items())
    assert differing(tmp_path / "out of whole", tmp_path / "out of halves") == []
    assert differing(tmp_path / "out of whole", folder) != []


def test_mistakes_change_nothing(tmp_path):
    folder = written(tmp_path / "it", "fine_grained", *LLAMA)
    model = from_pretrained(folder)
    save = tritonfp8.export.save
    with pytest.raises(ValueError, match=r"was not loaded by tritonfp8\.export\.load.*give format="):
        save(torch.nn.Linear(128, 128), tmp_path / "out")
    for options in ({"scale_fmt": "ue8m0"}, {"dtype": torch.bfloat16}, {"max_shard_bytes": 9}):
        with pytest.raises(ValueError, match="give adapters= only"):
            save(model, tmp_path / "out", **options)
    with pytest.raises(ValueError, match="must not have weights yet"):
        save(model, folder)
    path = next(folder.glob("model-00002*"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="is no complete safetensors file"):
        save(model, tmp_path / "out")
    path.write_bytes(whole)
    shutil.move(folder, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is gone, and weights that did not change are copied from it: put it back"):
        save(model, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))
    assert model.eval()(IDS).logits.isfinite().all()
