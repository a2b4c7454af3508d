"""What monitor() shows: the worst layers, a few figures for loggers, and heat maps."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.recipes import Gemm, Recipe
from tritonfp8.specs import QuantSpec
from tritonfp8.workflow.health import Threshold


def model_of(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    tritonfp8.convert(model, recipe)
    return model


def run(model, stats, steps, scale=1.0):
    for _ in range(steps):
        (model(torch.randn(32, 64)) * scale).square().mean().backward()
        stats.step()


def monitored(recipe, steps=1, **options):
    model = model_of(recipe)
    with tritonfp8.monitor(model, every=1, **options) as stats:
        run(model, stats, steps)
    return stats


def test_the_worst_layers_are_shown_without_a_finding():
    stats = monitored({"3": "tensorwise", "*": "rowwise"}, steps=2)
    assert stats.findings == []
    headline, title, *lines = str(stats).splitlines()
    assert (headline, title) == ("sampled steps: 2; findings: 0", "lowest SQNR:")
    assert len(lines) == 3
    lowest = {}
    for sample in stats.samples:
        lowest.setdefault(sample.layer, []).append((sample.figures["sqnr"], sample.operand, sample.step))
    expected = sorted((min(found), layer) for layer, found in lowest.items())[:3]
    assert expected[0][1] == "3"
    for line, ((sqnr, operand, step), layer) in zip(lines, expected, strict=True):
        assert line == f"  {sqnr:.1f} dB, 0.00% flushed to zero, 0.00% saturated: {layer}, {operand}, step {step}"


def test_findings_come_before_the_worst_layers_which_no_limit_cuts():
    threshold = Threshold("small", "sqnr", "below", 90.0, "{value:.3g}", "this")
    # Of other names than numbers each layer has lines of its own.
    model = nn.Sequential(OrderedDict((f"layer{i}", nn.Linear(16, 16)) for i in range(12)))
    tritonfp8.convert(model, "rowwise")
    with tritonfp8.monitor(model, thresholds=[threshold]) as stats:
        model(torch.randn(8, 16)).sum().backward()
    lines = str(stats).splitlines()
    assert lines[1].startswith("step 0, layer ")
    assert lines[30].startswith("and ")
    assert lines[31] == "lowest SQNR:"
    assert len(lines) == 35


def test_nothing_is_worst_where_nothing_was_quantized():
    stats = monitored("bf16")
    assert str(stats) == "sampled steps: 1; findings: 0"
    assert stats.summary() == {"fp8/flushed_share": 0.0, "fp8/saturated_share": 0.0, "fp8/flops_share": 0.0}


def test_zeros_are_exact_and_a_nan_is_worst():
    model = model_of("rowwise")
    with tritonfp8.monitor(model, thresholds=()) as stats, torch.no_grad():
        model(torch.randn(4, 64).index_fill(1, torch.tensor([3]), math.nan))
    assert stats.summary()["fp8/worst_sqnr_db"] == -math.inf
    # All figures of the quantization are NaN there, but the operand is quantized.
    assert all(sample.is_quantized for sample in stats.samples)
    for layer in model:
        layer.weight.data.zero_()
    with tritonfp8.monitor(model, thresholds=()) as stats, torch.no_grad():
        model(torch.zeros(4, 64))
    assert all(line.startswith("  exact, 0.00% flushed") for line in str(stats).splitlines()[2:])
    assert set(stats.summary()) == {"fp8/flushed_share", "fp8/saturated_share", "fp8/flops_share"}


def test_the_summary_is_of_the_last_sampled_step():
    floor = QuantSpec("e4m3", (1, 32), "e8m0", "floor")
    clips = Recipe("floor", output=Gemm(floor, recipes.get("mxfp8").output.lhs))
    model = model_of({"2": clips, "0": "bf16", "*": "mxfp8"})
    with tritonfp8.monitor(model, every=2, thresholds=()) as stats:
        assert stats.summary() == {}
        run(model, stats, 3)
        found, samples = stats.summary(), [each for each in stats.samples if each.step == 2]
    assert max(each.step for each in samples) == 2
    quantized = [each.figures for each in samples if each.is_quantized]
    # Layer 0 has none, and the gradient of layer 2 stays in high precision.
    assert len(quantized) == 15 - 3 - 1
    worst = min(samples, key=lambda each: each.figures["sqnr"])
    assert found["fp8/worst_sqnr_db"] == worst.figures["sqnr"]
    assert (found["fp8/worst_layer"], found["fp8/worst_operand"]) == (worst.layer, worst.operand)
    for name in ("flushed_share", "saturated_share"):
        assert found[f"fp8/{name}"] == pytest.approx(sum(each[name] for each in quantized) / len(quantized))
    assert found["fp8/saturated_share"] > 0
    assert found["fp8/flops_share"] == pytest.approx((3 + 1 / 3) / 5)
    # A schedule changes it.
    tritonfp8.swap_recipe(model, "bf16")
    assert stats.summary()["fp8/flops_share"] == 0.0


def test_cleared_figures_are_gone_and_a_layer_is_not_warned_of_again(caplog):
    model = model_of("rowwise")
    model[1].weight.data.zero_()
    with tritonfp8.monitor(model, every=1) as stats:
        for _ in range(2):
            run(model, stats, 1)
            assert {each.layer for each in stats.findings} >= {"1", "2"}
            stats.clear()
            assert (stats.samples, stats.findings, stats.summary()) == ([], [], {})
    assert sum("layer '1'" in record.getMessage() for record in caplog.records) == 1


@pytest.fixture
def drawn(monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    kept = []
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **options: kept.append(self))
    return kept


def maps_of(figure):
    return [axes for axes in figure.axes if axes.images]


def test_colors_of_sqnr_mean_the_same_in_each_map(drawn):
    fine, coarse = monitored("rowwise"), monitored("tensorwise", thresholds=())
    fine.plot("fine.png")
    coarse.plot("coarse.png", operand="grad_output")
    for figure, count in zip(drawn, (3, 1), strict=True):
        images = [axes.images[0] for axes in maps_of(figure)]
        assert len(images) == count
        assert {(image.norm.vmin, image.norm.vmax) for image in images} == {(20.0, 35.0)}
    marks = [[line.get_ydata()[0] for axes in figure.axes for line in axes.lines] for figure in drawn]
    # The bar's own lines have no length; the second run has no threshold.
    assert marks == [[20.0], []]


def test_figures_below_the_scale_and_infinities_have_the_colors_of_its_ends(drawn):
    model = model_of("rowwise")
    with tritonfp8.monitor(model, every=1, thresholds=()) as stats:
        for value in (0.0, math.nan):
            model(torch.ones(4, 64).index_fill(1, torch.tensor([3]), value)).sum().backward()
            stats.step()
    stats.plot("map.png", operand="input")
    image = maps_of(drawn[0])[0].images[0]
    exact, spoiled = (tuple(color) for color in image.cmap(image.norm(image.get_array()))[0])
    assert (exact, spoiled) == (tuple(image.cmap(1.0)), tuple(image.cmap.get_under()))


def test_what_was_not_quantized_is_grey(drawn):
    stats = monitored({"1": "bf16", "*": "rowwise"})
    for value in ("sqnr", "flushed_share", "amax"):
        stats.plot("map.png", value=value)
    for figure, blank in zip(drawn, ([1], [1], []), strict=True):
        for axes in maps_of(figure):
            array = axes.images[0].get_array()
            assert [row for row in range(5) if math.isnan(array.filled(math.nan)[row][0])] == blank
            assert len({*axes.get_facecolor()[:3]}) == 1
            assert axes.get_facecolor()[0] < 1
        assert len(figure.legends) == bool(blank)
