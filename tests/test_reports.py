"""Reports of a model of 80 layers fit one screen: repeated layers are a line, the finding is first, what to do last."""

import itertools
import math

import pytest
import torch
from torch import nn

import tritonfp8
from tritonfp8 import export, recipes
from tritonfp8.export import ExportedLayer, ExportReport, LoadedLayer, LoadReport
from tritonfp8.specs.naming import repeated
from tritonfp8.workflow import (
    Failure,
    GemmReport,
    LayerReport,
    OtherGemms,
    TrainingCheck,
    VerificationReport,
)  # fmt: skip
from tritonfp8.workflow.health import FIELDS, Monitor, Sensitivity

LAYERS = 80
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
NAMES = [
    f"model.layers.{i}.{block}.{name}"
    for i in range(LAYERS)
    for block, names in (("self_attn", ATTENTION), ("mlp", MLP))
    for name in names
]


def screen(report, lines=40, width=100):
    """The lines of a report, which fit a screen."""
    found = str(report).splitlines()
    assert sum(math.ceil(len(line) / width) for line in found) <= lines
    return found


def model(device="meta"):
    def block():
        attention = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in ATTENTION})
        mlp = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in MLP})
        return nn.ModuleDict({"self_attn": attention, "mlp": mlp, "norm": nn.LayerNorm(64)})

    with torch.device(device):
        layers = nn.ModuleList([block() for _ in range(LAYERS)])
        inside = nn.ModuleDict({"embed_tokens": nn.Embedding(96, 64), "layers": layers})
        return nn.ModuleDict({"model": inside, "lm_head": nn.Linear(64, 96, bias=False)})


class TestRepeated:
    def test_names_that_differ_in_numbers_are_one(self):
        rows = [*((name, "a") for name in ("x.0.up", "x.1.up", "x.1.down", "x1", "x2", "y.0.3.w", "y.1.4.w", ""))]
        assert [(each.label, len(each.names)) for each in repeated(rows)] == [
            ("x.0-1.up (2x)", 2), ("x.1.down", 1), ("x1", 1), ("x2", 1), ("y.*.*.w (2x)", 2), ("", 1),
        ]  # fmt: skip

    def test_verdicts_are_told_apart_by_numbers(self):
        rows = [(f"x.{i}.up", "first" if i in (0, 1, 11) else "odd" if i % 2 and i < 10 else "even") for i in range(12)]
        assert [each.label for each in repeated(rows)] == ["x.0-1,11.up (3x)", "x.*.up (5x)", "x.*.up (4x)"]
        assert {name for each in repeated(rows) for name in each.names} == {name for name, _ in rows}


def test_a_conversion():
    found = model()
    ends = {f"model.layers.{i}.*": "bf16" for i in (0, LAYERS - 1)}
    report = tritonfp8.convert(found, {**ends, "*": "rowwise"})
    lines = screen(report)
    assert lines[0].startswith(f"{7 * LAYERS} converted, 1 skipped; ")
    assert lines[1].split() == ["model.layers.0,79.self_attn.q_proj", "(2x)", "bf16"]
    assert "model.layers.1-78.mlp.up_proj (78x)" in str(report)
    assert lines[-1] == "tritonfp8.verify(model, batch) shows what runs"
    assert repr(report) == f"<ConversionReport: {lines[0]}>"
    assert set(report.converted) == set(NAMES)


def test_skipped_layers_have_their_share_together():
    report = tritonfp8.convert(model(), "rowwise", filter=["*.mlp.*", "*lm_head"])
    (line,) = (line for line in screen(report) if "q_proj" in line)
    assert line.startswith("model.layers.*.self_attn.q_proj (80x)  skipped (14 % of the FLOPs): no pattern")


def quantize_weights_and(found, action):
    tritonfp8.convert(found, "rowwise")
    with tritonfp8.quantize_weights_once(found):
        action()


def halve(found):
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(0.5)


ERRORS = {
    "a pattern that decides nothing": lambda found: tritonfp8.convert(found, {"*": "rowwise", "nope": "mxfp8"}),
    "a pattern that matches nothing": lambda found: tritonfp8.convert(found, "rowwise", filter=["nope"]),
    "a pattern of what is left out": lambda found: tritonfp8.convert(found.half(), "rowwise", mode="inference"),
    "changed weights": lambda found: quantize_weights_and(found, lambda: halve(found)),
    "nested": lambda found: quantize_weights_and(found, lambda: quantize_weights_and(found, lambda: None)),
    "reverted in a block": lambda found: quantize_weights_and(found, lambda: tritonfp8.revert(found)),
    "nothing to export": lambda found: export.plan(found, "compressed_channel", filter=lambda module, name: False),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    with pytest.raises((ValueError, RuntimeError)) as error:
        ERRORS[case](model("cpu"))
    screen(error.value, lines=12)


def verified(failures=(), kinds=("fp8",)):
    gemms = [GemmReport("tritonfp8.scaled_matmul", "e4m3 x e4m3", kind, "cuda", 1, 100, 1 / 1700) for kind in kinds]
    names = zip(NAMES, itertools.cycle(gemms), strict=False)
    layers = {name: LayerReport("rowwise", 1, dict.fromkeys(recipes.GEMMS, gemm)) for name, gemm in names}
    others = {"lm_head.weight": OtherGemms(("aten.mm in bfloat16",), 100, 1 / 1700)}
    return VerificationReport(layers, others, tuple(failures), True)


def test_a_verification():
    lines = screen(verified())
    assert lines[0] == verified().summary
    assert lines[7].split()[:5] == ["model.layers.*.mlp.up_proj", "(80x)", "rowwise", "14", "%"]
    assert lines[-1].endswith("not converted: aten.mm in bfloat16")
    assert max(map(len, lines)) <= 100
    assert "calls" not in lines[1]
    assert "(fp8)" not in str(verified())


def test_gemms_that_are_computed_in_several_ways_say_so():
    lines = str(verified(kinds=("fp8", "dequantized"))).splitlines()
    assert "e4m3 x e4m3 (fp8)" in lines[2]
    assert "e4m3 x e4m3 (dequantized)" in lines[3]


def test_failures_are_the_end_and_say_what_to_do():
    report = verified(Failure(name, "it was never called", "call it") for name in NAMES if name.endswith("up_proj"))
    assert screen(report)[-1] == "  model.layers.*.mlp.up_proj (80x): it was never called. To mend it, call it."
    many = verified(Failure(name, f"cause {i}", "call it") for i, name in enumerate(NAMES))
    assert screen(many, lines=48)[-1] == f"  and {len(NAMES) - 12} more: see the failures of the report"
    check = TrainingCheck(nn.Linear(2, 2), (), "warn")
    check.failures = report.failures
    assert screen(check)[-1].startswith("  model.layers.*.mlp.up_proj (80x): ")


def test_an_export():
    layers = {name: ExportedLayer("e4m3 rowwise (fp32 pow2)", None, 2000, 1000, True) for name in NAMES}
    layers["lm_head"] = ExportedLayer(None, "an output head", 2000, 2000)
    report = ExportReport(
        "compressed_channel", layers, {}, {}, {}, 1_122_000, 562_000, notes=("what an engine may refuse",)
    )
    lines = screen(report)
    assert lines[0].startswith("560 layers in 8 bits as 'compressed_channel', 1 in high precision")
    same = "160.0 kB -> 80.0 kB, the codes of its recipe"
    assert lines[1] == f"model.layers.*.self_attn.q_proj (80x)  e4m3 rowwise (fp32 pow2), {same}"
    assert lines[-1].startswith("note: ")


def test_a_load():
    layers = {name: LoadedLayer("compressed_channel", "codes kept") for name in NAMES}
    copied = {f"model.layers.{i}.norm.weight": "copied" for i in range(LAYERS)}
    lines = screen(LoadReport(layers, copied))
    assert lines[0].startswith("560 layers from 8 bits, 80 other tensors")
    assert lines[-1].split() == ["model.layers.*.norm.weight", "(80x)", "copied"]


def test_a_sensitivity():
    found = tuple(recipes.get(name) for name in ("tensorwise", "rowwise", "mxfp8"))

    def errors(i, name):
        worst = {
            "tensorwise": -12.0 if name.endswith(".3.mlp.up_proj") else -25 - i % 7,
            "rowwise": -27.0,
            "mxfp8": -28.0,
        }
        return {recipe: {"output": error} for recipe, error in worst.items()}

    report = Sensitivity(found, {name: errors(i, name) for i, name in enumerate(NAMES)})
    lines = screen(report)
    assert lines[0] == "559 of 560 layers are within -20 dB by 'tensorwise' in each GEMM"
    assert lines[2].split() == ["model.layers.3.mlp.up_proj", "-12.0", "-27.0", "-28.0", "rowwise"]
    assert lines[-1].startswith("tritonfp8.convert(model, sensitivity.mapping())")
    assert repr(report) == f"<Sensitivity: {lines[0]}>"


@pytest.mark.parametrize("steps", [1, 3])
def test_findings(steps, caplog):
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    tritonfp8.convert(blocks, "tensorwise")
    with tritonfp8.monitor(blocks, every=1) as stats:
        for _ in range(steps):
            x = torch.ones(16, 64)
            x[:, 5] = math.nan
            blocks(x)
            stats.step()
    assert isinstance(stats, Monitor)
    assert "nonfinite_share" in FIELDS
    lines = screen(stats)
    assert lines[0] == f"sampled steps: {steps}; findings: {len(stats.findings)}"
    assert len(stats.findings) >= steps * LAYERS
    # One warning for all layers that have it in a step.
    assert len(caplog.records) <= 2
    assert "layer '* (80x)', input: " in lines[1]
    assert "To try: " in lines[1]
