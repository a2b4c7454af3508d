"""Adapters of every kind that peft has, on a frozen base that is stored in 8 bits."""

import importlib.util

import pytest
import torch
from adapter_kinds import COLUMNS, INITS, KINDS, REFUSED, UNMERGED, adapted, initialized, kind_names
from checkpoints import EXPERTS, WHOLE, are_equal, model_of
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from pretrained_cases import FORMATS, IDS, train, values, written

import tritonfp8
from tritonfp8.integrations.transformers import from_pretrained
from tritonfp8.layers.stored import is_stored

LLAMA, MOE = ("llama", WHOLE), ("moe", EXPERTS)
# Without scikit-learn peft makes no adapters of this kind.
NEEDS = {"ADAMSS": pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn")}
EACH_KIND = [pytest.param(kind, marks=NEEDS.get(kind, ())) for kind in KINDS]
# These do not write to a weight that is stored.
MERGED_ANYWHERE = {"LN_TUNING", "TRAINABLE_TOKENS"}
CODES = ["fine_grained", "compressed_channel", "compressed_mxfp8"]


def stored_base(folder):
    return from_pretrained(folder, train="adapters", dtype=torch.float32)


def plain_base(folder, format, kind):
    """A frozen model of the same values, which quantizes them in each forward."""
    base = model_of(*kind, 1, torch.float32).requires_grad_(False)
    tritonfp8.export.load(base, folder)
    tritonfp8.convert(base, FORMATS[format][1])
    return base


def exported_values(model, **options):
    """The tensors of an export; codes times scales, as equal values have codes that differ by a power of two."""
    found = dict(tritonfp8.export.tensors(model, "compressed_channel", **options))
    scales = {name: found.pop(name) for name in list(found) if name.endswith("_scale")}
    return {name: x.float() * scales.get(f"{name}_scale", 1) for name, x in found.items()}


def check_trains_to_the_bits(tmp_path, format, base, kind):
    """In float32, through every layer, and into an embedding before the base, which trains with the adapters."""
    folder = written(tmp_path / "it", format, *base)
    stored = adapted(stored_base(folder), kind, tmp_path)
    plain = adapted(plain_base(folder, format, base), kind, tmp_path)
    assert sum(map(is_stored, stored.modules())) > 0 == sum(map(is_stored, plain.modules()))
    # Such as PiSSA and KaSA write to their base, which a plain one takes unrounded.
    plain.load_state_dict(stored.state_dict())
    found = []
    for model in (stored, plain):
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.requires_grad_()
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        before = values(model)
        torch.manual_seed(0)
        losses = train(model, tmp_path / str(len(found)), steps=4, **COLUMNS.get(kind, {}))
        after = values(model)
        assert {name for name, x in after.items() if not torch.equal(x, before[name])} <= set(trained)
        found.append((losses, {name: after[name] for name in trained}, before))
    (losses, adapters, before), (expected, theirs, _) = found
    assert losses == expected
    assert len(set(losses)) > 3
    assert [name for name in theirs if not torch.equal(adapters[name], theirs[name])] == []
    moved = [name for name, x in adapters.items() if not torch.equal(x, before[name])]
    assert any("embed_tokens" in name for name in moved)
    assert any("embed_tokens" not in name or kind == "TRAINABLE_TOKENS" for name in moved)


def test_every_kind_has_a_case():
    """A kind that peft gets is named here first."""
    assert kind_names(KINDS) | kind_names(REFUSED) == {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}


@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("base", [LLAMA, MOE], ids=["llama", "moe"])
def test_adapters_train_to_the_bits_of_a_plain_base(tmp_path, base, format):
    check_trains_to_the_bits(tmp_path, format, base, "LORA")


@pytest.mark.parametrize("kind", EACH_KIND[1:])
def test_each_kind_trains_to_the_bits_of_a_plain_base(tmp_path, kind):
    check_trains_to_the_bits(tmp_path, "compressed_channel", LLAMA, kind)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("format", CODES)
def test_an_init_that_reads_data_has_the_adapters_of_a_plain_base(tmp_path, format, init):
    """Activations, gradients and values of the base are the same; what is left of the base is rounded to codes."""
    folder = written(tmp_path / "it", format, *LLAMA)
    bases = [stored_base(folder), plain_base(folder, format, LLAMA)]
    before = [values(base) for base in bases]
    assert are_equal(*before)
    stored, plain = (initialized(base, init, IDS) for base in bases)
    found, expected = ({name: x for name, x in values(each).items() if "lora_" in name} for each in (stored, plain))
    assert are_equal(found, expected)
    assert sum(bool(x.any()) for x in found.values()) >= len(found) / 2 > 0
    rest = {name.removeprefix("base_model.model.").replace("base_layer.", ""): x for name, x in values(stored).items()}
    changed = {name for name, x in before[0].items() if not torch.equal(rest[name], x)}
    assert changed == (set() if init == "eva" else {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qo"})
    plain.load_state_dict(stored.state_dict())
    assert len({tuple(train(model, tmp_path / "trained", steps=4)) for model in (stored, plain)}) == 1
    after = values(stored)
    assert are_equal(
        {name: x for name, x in after.items() if "lora_" in name},
        {n: x for n, x in values(plain).items() if "lora_" in n},
    )
    kept = {name.removeprefix("base_model.model.").replace("base_layer.", ""): x for name, x in after.items()}
    assert are_equal({n: kept[n] for n in before[0]}, {n: rest[n] for n in before[0]})
    assert any(not torch.equal(after[name], x) for name, x in found.items())


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_that_a_base_in_8_bits_refuses_says_what_to_do(tmp_path, kind):
    base = stored_base(written(tmp_path / "it", "compressed_channel", *LLAMA))
    before = values(base)
    _, error, message = REFUSED[kind]
    with pytest.raises(error, match=message):
        adapted(base, kind, tmp_path)(input_ids=IDS)
    after = {name.replace("base_layer.", ""): x for name, x in values(base).items() if "shira" not in name}
    assert are_equal({name: x for name, x in after.items() if "lora" not in name}, before)


@pytest.mark.parametrize("kind", [kind for kind in EACH_KIND if kind.values[0] not in UNMERGED])
def test_each_kind_merges_to_the_values_of_a_plain_base_or_not_at_all(tmp_path, kind):
    """Merged into codes, and taken out again, adapters would leave another base."""
    folder = written(tmp_path / "it", "compressed_channel", *LLAMA)
    stored = adapted(stored_base(folder), kind, tmp_path)
    if not hasattr(stored, "merge_and_unload"):
        pytest.skip("a prompt, which no weight takes up")
    plain = adapted(plain_base(folder, "compressed_channel", LLAMA), kind, tmp_path)
    plain.load_state_dict(stored.state_dict())
    merged = values(plain.merge_and_unload())
    if kind not in MERGED_ANYWHERE:
        exported = exported_values(stored, adapters="merged")
        before = values(stored)
        with pytest.raises(NotImplementedError, match=r"tritonfp8\.revert\(model\) before model\.merge_and_unload"):
            stored.merge_and_unload()
        assert are_equal(values(stored), before)
        assert are_equal(exported, exported_values(plain.base_model.model))
        tritonfp8.revert(stored)
    assert are_equal(values(stored.merge_and_unload()), merged)
