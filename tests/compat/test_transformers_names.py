"""Names of checkpoints by a table of transformers: a name is taken only if it leads back to the tensor."""

import pytest
from checkpoints import model_of
from torch import nn
from transformers import core_model_loading as loading

from tritonfp8.compat import CheckpointNames, transformers_names

GATE_UP, DOWN = "layers.3.mlp.experts.gate_up_proj", "layers.3.mlp.experts.down_proj"
SOURCES = [".experts.*.w1.weight", ".experts.*.w3.weight"]
FUSED, MERGED = ".experts.gate_up_proj", loading.MergeModulelist(dim=0)
RENAMING = loading.WeightRenaming(".moe.", ".mlp.")


def converter(sources, target, *operations):
    return loading.WeightConverter(sources, target, list(operations))


def names(monkeypatch, *table):
    monkeypatch.setattr(transformers_names, "_table", lambda model: list(table))
    return CheckpointNames(nn.Module())


def stacked(sources=SOURCES, more=()):
    return converter(list(sources), FUSED, MERGED, loading.Concatenate(dim=1), *more)


def test_matrices_are_in_the_order_of_the_concatenation(monkeypatch):
    down = converter(".experts.*.w2.weight", ".experts.down_proj", MERGED)
    found = names(monkeypatch, RENAMING, stacked(), down)
    assert found.matrices(GATE_UP) == tuple(f"layers.3.moe.experts.*.{name}.weight" for name in ("w1", "w3"))
    assert found.matrices(DOWN) == ("layers.3.moe.experts.*.w2.weight",)
    assert found.of("layers.3.mlp.gate.weight") == "layers.3.moe.gate.weight"
    assert found.of("norm.weight") == "norm.weight"
    # A weight that stays whole is in no checkpoint, and keeps its name.
    assert found.of(GATE_UP) == GATE_UP
    swapped = names(monkeypatch, stacked(SOURCES[::-1]))
    assert swapped.matrices(GATE_UP) == tuple(f"layers.3.mlp.experts.*.{name}.weight" for name in ("w3", "w1"))


@pytest.mark.parametrize(
    "entry",
    [
        converter(SOURCES, FUSED, MERGED, loading.Concatenate(dim=0)),
        converter(SOURCES, FUSED, loading.Concatenate(dim=1)),
        converter(".experts.gate_up", FUSED, loading.Transpose(1, 2)),
        stacked(more=[loading.Transpose(1, 2)]),
        converter(SOURCES, FUSED, MERGED, loading.Concatenate(dim=1, num_shards_attribute="shards")),
        stacked([".experts.*.w1", ".experts.*.w3"]),
        stacked([".experts.*.*.w1.weight", ".experts.*.w3.weight"]),
    ],
)
def test_other_operations_are_not_understood(monkeypatch, entry):
    found = names(monkeypatch, entry)
    assert found.matrices(GATE_UP) == ()
    assert found.of(GATE_UP) == GATE_UP


@pytest.mark.parametrize(
    ("table", "name"),
    [
        # The next entry takes what the first one makes.
        ([loading.WeightRenaming("attn", "conv"), loading.WeightRenaming("conv", "mixer")], "layers.0.conv.weight"),
        # The scale beside the weight would keep its name.
        ([loading.WeightRenaming("^head.weight$", "lm_head.weight")], "lm_head.weight"),
        # A converter takes the name on its way back.
        ([RENAMING, converter("moe.up.weight", "fused", loading.Concatenate())], "layers.0.mlp.fused"),
    ],
)
def test_a_name_that_does_not_lead_back_is_that_in_the_model(monkeypatch, table, name):
    assert names(monkeypatch, *table).of(name) == name


def test_operations_without_a_reverse_leave_all_names(monkeypatch):
    class Lost(loading.ConversionOps):
        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            return input_dict

    found = names(monkeypatch, RENAMING, converter("a.weight", "b.weight", Lost()), stacked())
    assert found.of("layers.3.mlp.gate.weight") == "layers.3.mlp.gate.weight"
    assert found.matrices(GATE_UP) == ()


@pytest.mark.parametrize(
    ("kind", "name", "written"),
    [
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("mixtral", "model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"),
    ],
)
def test_classes_that_fully_shard_derives_change_no_name(kind, name, written):
    model = model_of(kind)
    for module in (model, model.base_model):
        bases = (type("FSDPModule", (), {}), type(module))
        module.__class__ = type(f"FSDP{type(module).__name__}", bases, {})
        assert module.is_custom_code()
    before = dict(model.named_modules())
    assert CheckpointNames(model).of(name) == written
    assert dict(model.named_modules()) == before


def test_models_of_others_have_the_names_of_the_model():
    found = CheckpointNames(nn.Linear(2, 2))
    assert found.of("layers.3.mlp.gate.weight") == "layers.3.mlp.gate.weight"
    assert found.matrices(GATE_UP) == ()
