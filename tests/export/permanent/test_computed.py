"""Weights that a model computes are exported as if that had been made permanent, and the model stays as it is."""

import copy

import pytest
import torch
from checkpoints import files_of, model_of, same
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers import LlamaForCausalLM

import tritonfp8
from tritonfp8 import export
from tritonfp8.specs.testing import assert_bitwise_equal


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "bias", 0.5)


def pruned_twice(layer):
    prune.l1_unstructured(layer, "weight", 0.25)
    prune.ln_structured(layer, "weight", 0.25, n=2, dim=0)


# How torch makes each of them permanent.
COMPUTED = {
    "weight_norm": (parametrizations.weight_norm, lambda x: parametrize.remove_parametrizations(x, "weight")),
    "spectral_norm": (parametrizations.spectral_norm, lambda x: parametrize.remove_parametrizations(x, "weight")),
    "orthogonal": (parametrizations.orthogonal, lambda x: parametrize.remove_parametrizations(x, "weight")),
    "two": (
        lambda x: [parametrize.register_parametrization(x, "weight", Doubled()) for _ in range(2)],
        lambda x: parametrize.remove_parametrizations(x, "weight"),
    ),
    "old weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "old spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "pruned": (pruned, lambda x: [prune.remove(x, name) for name in ("weight", "bias")]),
    "pruned twice": (pruned_twice, lambda x: prune.remove(x, "weight")),
}
each_kind = pytest.mark.parametrize("kind", COMPUTED)
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.(weight_norm|spectral_norm)` is deprecated")


def model(kind, recipe=None):
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Conv1d(128, 128, 1), nn.Linear(128, 128)).eval()
    if recipe is not None:
        tritonfp8.convert(found, recipe)
    for layer in (found[0], found[2]):
        COMPUTED[kind][0](layer)
    # What the hooks of the old functions computed is now of other values than the next forward computes.
    with torch.no_grad():
        for p in found.parameters():
            p.mul_(1.5)
    return found


def made_permanent(found, kind):
    found = copy.deepcopy(found) if kind in ("weight_norm", "spectral_norm", "orthogonal", "two") else found
    found[0](torch.ones(1, 128)), found[2](torch.ones(1, 128, 1))
    for layer in (found[0], found[2]):
        COMPUTED[kind][1](layer)
    return found


def exported(found, **options):
    return dict(export.tensors(found, "compressed_channel", **options))


@pytest.mark.parametrize("recipe", [None, "rowwise"])
@each_kind
def test_a_computed_weight_is_exported_under_its_plain_name(kind, recipe):
    found = model(kind, recipe)
    before = {name: x.clone() for name, x in found.state_dict().items()}
    ours = exported(found)
    assert "0.weight_scale" in ours
    assert list(found.state_dict()) == list(before)
    same(found.state_dict(), before)
    same(ours, exported(made_permanent(found, kind)))


def test_a_power_iteration_does_not_go_on():
    layer = nn.Linear(128, 128)
    parametrizations.spectral_norm(layer)
    found = nn.Sequential(layer, nn.Linear(128, 128)).train()
    before = [x.clone() for x in found.buffers()]
    exported(found)
    assert_bitwise_equal([*found.buffers()], before)
    assert all(module.training for module in found.modules())


def test_the_report_and_the_choice_are_as_of_a_plain_layer():
    found = model("weight_norm")
    report = export.plan(found, "compressed_channel", filter=["0"])
    plain = export.plan(made_permanent(found, "weight_norm"), "compressed_channel", filter=["0"])
    assert report.exported == plain.exported == ["0"]
    assert report.layers == plain.layers
    assert report.others == plain.others
    assert report.quantization_config == plain.quantization_config


def test_a_computed_weight_is_read_when_its_turn_comes():
    found = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    parametrize.register_parametrization(found[1], "weight", Doubled())
    stream = export.tensors(found, "compressed_channel")
    next(stream), next(stream)
    with torch.no_grad():
        found[1].parametrizations.weight.original.fill_(3.0)
    found_scale = dict(stream)["1.weight_scale"]
    codes = dict(export.tensors(found, "compressed_channel"))["1.weight"]
    assert torch.equal(codes.float() * found_scale, torch.full((128, 128), 6.0))


def test_a_weight_that_other_code_computes_is_named():
    found = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    weight = found[1].weight
    del found[1]._parameters["weight"]
    found[1].weight = weight * 2
    for filter in (None, ["*"], ["0"]):
        with pytest.raises(ValueError, match="the weight of 1 is no parameter"):
            export.plan(found, "compressed_channel", filter=filter)


def test_transformers_reads_it(tmp_path):
    found = model_of()
    for layer in found.model.layers:
        prune.l1_unstructured(layer.mlp.up_proj, "weight", 0.5)
        parametrizations.weight_norm(layer.mlp.down_proj)
    export.save(found, tmp_path, "fine_grained")
    for layer in found.model.layers:
        prune.remove(layer.mlp.up_proj, "weight")
        parametrize.remove_parametrizations(layer.mlp.down_proj, "weight")
    export.save(found, tmp_path / "plain", "fine_grained")
    same(files_of(tmp_path), files_of(tmp_path / "plain"))
    ours, theirs = (LlamaForCausalLM.from_pretrained(each).state_dict() for each in (tmp_path, tmp_path / "plain"))
    same(ours, theirs)
