"""monitor() finds what is unhealthy, names it, and leaves nothing behind."""

import csv
import logging
import math
import sys

import pytest
import torch
from cases import each_recipe
from figures import measure
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.compat.counting import is_active
from tritonfp8.recipes import Gemm, Recipe
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.workflow.health import FIELDS, THRESHOLDS


class Blocks(nn.Module):
    """Three layers in a residual stream, on an input that a test may change."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3)).to(dtype)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def model_of(recipe="rowwise", dtype=torch.float32, dead=()):
    model = Blocks(dtype)
    tritonfp8.convert(model, recipe)
    for index in dead:
        model.blocks[index].weight.data.zero_()
    return model


def batch(step=0, dtype=torch.float32):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def one_step(model, x, call=None):
    with tritonfp8.monitor(model) as stats:
        (call or model)(x).float().square().mean().backward()
    return stats


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in hooks
    ]


def problems(stats):
    return {(each.layer, each.operand, each.problem) for each in stats.findings}


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "tritonfp8")
    return caplog


@each_recipe
def test_a_healthy_model_has_no_findings(recipe, warnings):
    stats = one_step(model_of(recipe), batch())
    assert problems(stats) == set()
    assert warnings.records == []
    assert len(stats.samples) == 9


def test_a_planted_overflow_is_found_and_named(warnings):
    """float16 overflows between the second and the third layer."""
    model = model_of(dtype=torch.float16)
    model.blocks[1].weight.data.fill_(60000.0)
    stats = one_step(model, batch(dtype=torch.float16).abs())
    assert ("blocks.2", "input", "not finite") in problems(stats)
    assert not [each for each in problems(stats) if each[:2] == ("blocks.1", "input")]
    [record] = [r for r in warnings.records if "'blocks.2'" in r.getMessage()]
    assert "float16 overflows at 65504" in record.getMessage()


def test_planted_values_beyond_the_format_are_found_and_named(warnings):
    """Scales that are rounded down clip the largest values of a block: here, all of them."""
    floor = QuantSpec("e4m3", (1, 32), "e8m0", "floor")
    mx = recipes.get("mxfp8").output.lhs
    model = model_of({"blocks.1": Recipe("floor", output=Gemm(floor, mx)), "*": "mxfp8"}, dead=[0])
    # Each value of the second layer's input is 1.9, the largest fraction but for a little.
    stats = one_step(model, torch.full((4, 64), 1.9))
    assert problems(stats) == {("blocks.0", "weight", "dead"), ("blocks.1", "input", "overflow")}
    assert stats.to_dict()[0]["blocks.1"]["input"]["saturated_share"] == 1.0
    [record] = [r for r in warnings.records if "'blocks.1'" in r.getMessage()]
    assert "scale_rounding='pow2'" in record.getMessage()


def test_a_planted_dead_layer_is_found_and_named(warnings):
    stats = one_step(model_of(dead=[1]), batch())
    assert problems(stats) == {("blocks.1", "weight", "dead")}
    assert [r.getMessage().count("'blocks.1'") for r in warnings.records] == [1]


def test_a_layer_without_a_gradient_is_found_and_named():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    tritonfp8.convert(model, "rowwise")
    model[0].bias.data.fill_(-1e3)
    assert problems(one_step(model, batch())) == {("0", "grad_output", "dead"), ("2", "input", "dead")}


def test_a_planted_outlier_channel_is_found_and_named(warnings):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tritonfp8.convert(model, "tensorwise")
    model[0].bias.data[17] = 1e6
    stats = one_step(model, batch())
    found = {(each.layer, each.operand): each for each in stats.findings if each.problem == "outlier channel"}
    assert "channel 17 is" in found["1", "input"].text
    assert "blockwise" in found["1", "input"].text
    assert ("0", "input") not in found
    # One scale for the whole tensor cannot hold the others.
    assert ("1", "input", "underflow") in problems(stats)
    assert stats.to_dict()[0]["1"]["input"]["outlier_channel"] == 17
    assert any("'1'" in r.getMessage() and "channel 17" in r.getMessage() for r in warnings.records)


def test_figures_are_those_of_each_operand():
    model, x = model_of(), batch()
    stats = one_step(model, x)
    layer, spec = model.blocks[0], recipes.get("rowwise").output.lhs
    found = stats.to_dict()[0]["blocks.0"]
    assert list(found["input"].values()) == measure(x, spec, 1024).tolist()
    assert list(found["weight"].values()) == measure(layer.weight, spec, 1024).tolist()
    seen = []
    layer.register_full_backward_pre_hook(lambda module, grads: seen.append(grads[0]))
    model.zero_grad()
    model(x).square().mean().backward()
    assert list(found["grad_output"].values()) == measure(seen[0], spec, 1024).tolist()


def test_every_nth_step_is_sampled_and_no_hooks_are_left():
    model, hooked = model_of(), []
    with tritonfp8.monitor(model, every=3) as stats:
        for step in range(8):
            hooked.append(bool(hooks_of(model)))
            model(batch(step)).square().mean().backward()
            stats.step()
    assert list(stats.to_dict()) == [0, 3, 6]
    assert hooked == [step % 3 == 0 for step in range(8)]
    assert hooks_of(model) == []
    with pytest.raises(ZeroDivisionError), tritonfp8.monitor(model):
        raise ZeroDivisionError
    assert hooks_of(model) == []


def test_step_may_come_before_the_forward():
    model = model_of()
    with tritonfp8.monitor(model, every=2) as stats:
        for step in range(4):
            stats.step()
            model(batch(step))
    assert list(stats.to_dict()) == [0, 2]
    assert stats.to_dict()[2]["blocks.0"]["input"]["amax"] == batch(2).abs().max().item()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "bf16"])
def test_step_may_come_before_the_forward_of_a_step_without_a_sample(compiled, recipe):
    model = model_of(recipe)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    if compiled:
        call(batch()).sum().backward()
    with tritonfp8.monitor(call, every=2, first_step=3) as stats:
        for step in range(3, 7):
            stats.step()
            assert stats.next_step == step
            # Compiled code would keep a hook.
            assert bool(hooks_of(model)) == (step % 2 == 0)
            call(torch.full((4, 64), float(step))).sum().backward()
    assert [layers["blocks.0"]["input"]["amax"] for layers in stats.to_dict().values()] == [4.0, 6.0]
    assert list(stats.to_dict()) == [4, 6]
    assert not is_active()


def test_a_resumed_run_goes_on_counting():
    model = model_of()
    with tritonfp8.monitor(model, every=4, first_step=6) as stats:
        for step in range(6, 10):
            model(batch(step))
            stats.step()
    assert list(stats.to_dict()) == [8]


def test_a_monitored_run_has_the_same_bits():
    def trained(monitored):
        model = model_of("tensorwise")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tritonfp8.monitor(model if monitored else model_of(), every=2) as stats:
            for step in range(4):
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()
                optimizer.step()
                stats.step()
        return [p.detach() for p in model.parameters()]

    assert_bitwise_equal(trained(True), trained(False))


def test_compiled_code_is_neither_compiled_again_nor_changed():
    torch._dynamo.reset()
    model, counter = model_of(), CompileCounterWithBackend("aot_eager")
    compiled, frames = torch.compile(model, backend=counter, fullgraph=True), []
    with tritonfp8.monitor(compiled, every=3) as stats:
        for step in range(8):
            compiled(batch(step)).square().mean().backward()
            frames.append(counter.frame_count)
            stats.step()
    # The first step is sampled, so it runs eagerly; the second compiles.
    assert frames == [0, *[1] * 7]
    assert {len(layers["blocks.0"]) for layers in stats.to_dict().values()} == {3}
    compiled(batch()).square().mean().backward()
    assert counter.frame_count == 1
    assert torch.compiler.is_compiling() is False


def test_a_caller_s_stance_comes_back():
    model, counter = model_of(), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter)
    torch._dynamo.reset()
    compiled(batch())
    with torch.compiler.set_stance("fail_on_recompile"):
        with tritonfp8.monitor(model):
            pass
        with pytest.raises(RuntimeError):
            compiled(torch.randn(3, 5, 64))
    compiled(torch.randn(3, 5, 64))
    assert counter.frame_count == 2


def test_checkpointing_and_accumulation_measure_the_first_call():
    model, x = model_of(), batch().requires_grad_()
    once = one_step(model, x)
    with tritonfp8.monitor(model) as stats:
        for step in range(2):
            checkpoint(model, batch(step).requires_grad_(), use_reentrant=False).float().square().mean().backward()
    assert stats.to_dict() == once.to_dict()


def test_a_layer_without_elements_or_calls_is_left_out_and_none_at_all_is_a_warning(warnings):
    model = model_of()
    assert set(one_step(model, torch.zeros(0, 64)).to_dict()[0]["blocks.0"]) == {"weight"}
    with tritonfp8.monitor(model) as stats:
        model.blocks[0](batch())
    assert set(stats.to_dict()[0]["blocks.0"]) == {"input", "weight"}
    with tritonfp8.monitor(model) as stats:
        stats.step()
    assert stats.samples == []
    assert "saw no layer run" in warnings.records[0].getMessage()


def test_a_conv1d_of_transformers_is_measured_by_its_output_features():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model, plain = nn.Sequential(conv1d(96, 64)), nn.Sequential(nn.Linear(64, 96))
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight.t())
        plain[0].bias.zero_()
    for each in (model, plain):
        tritonfp8.convert(each, "rowwise")
    found, expected = (one_step(each, batch()).to_dict()[0]["0"] for each in (model, plain))
    for operand in ("input", "weight", "grad_output"):
        # Sums over other strides have another order.
        assert found[operand] == pytest.approx(expected[operand], rel=1e-9)


def test_a_layer_is_warned_of_once_and_findings_are_kept(warnings):
    model = model_of(dead=[1])
    with tritonfp8.monitor(model, every=1) as stats:
        for step in range(3):
            model(batch(step))
            stats.step()
    assert len(warnings.records) == 1
    assert [each.step for each in stats.findings] == [0, 1, 2]


def test_thresholds_are_data():
    model = model_of(dead=[1])
    with tritonfp8.monitor(model, thresholds=()) as stats:
        model(batch())
    assert stats.findings == []
    assert {each.field for each in THRESHOLDS} <= set(FIELDS)
    for each in THRESHOLDS:
        assert each.says.format(value=0.5, **dict.fromkeys(FIELDS, 0.5))


def test_csv_is_read_back(tmp_path):
    stats = one_step(model_of("bf16"), batch())
    stats.to_csv(tmp_path / "health.csv")
    with (tmp_path / "health.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 9
    for line in lines:
        figures = stats.to_dict()[int(line["step"])][line["layer"]][line["operand"]]
        for field in FIELDS:
            read = float(line[field])
            assert read == figures[field] or (math.isnan(read) and math.isnan(figures[field]))


def test_each_figure_is_written_for_tensorboard():
    class Writer:
        def __init__(self):
            self.scalars = {}

        def add_scalar(self, tag, value, step):
            self.scalars[tag, step] = value

    stats, writer = one_step(model_of(), batch()), Writer()
    stats.to_tensorboard(writer)
    assert len(writer.scalars) == 9 * len(FIELDS)
    expected = stats.to_dict()[0]["blocks.2"]["weight"]["sqnr"]
    assert writer.scalars["health/blocks.2/weight/sqnr", 0] == expected


@pytest.mark.parametrize("options", [{}, {"value": "amax", "operand": "weight"}, {"value": "scale_max"}])
def test_a_heat_map_is_drawn_or_matplotlib_is_named(tmp_path, monkeypatch, options):
    matplotlib = pytest.importorskip("matplotlib.image")
    model = model_of("tensorwise")
    with tritonfp8.monitor(model, every=1, thresholds=()) as stats:
        for step in range(3):
            # Infinite figures: no error, and a spoiled block.
            model(batch(step) * (0, 1, math.inf)[step])
            stats.step()
    stats.plot(tmp_path / "map.png", **options)
    assert matplotlib.imread(tmp_path / "map.png").std() > 0
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        stats.plot(tmp_path / "map.png")


def test_mistakes_are_errors(tmp_path):
    model = model_of()
    with pytest.raises(ValueError, match="convert first"):
        tritonfp8.monitor(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="every must be at least 1; got 0"):
        tritonfp8.monitor(model, every=0)
    with pytest.raises(TypeError, match="rows must be an int"):
        tritonfp8.monitor(model, rows=1.5)
    stats = tritonfp8.monitor(model)
    with pytest.raises(RuntimeError, match="belongs into the block"):
        stats.step()
    with stats, pytest.raises(RuntimeError, match="open already"), stats:
        pass
    with pytest.raises(ValueError, match="nothing to plot"):
        stats.plot(tmp_path / "map.png")
    with pytest.raises(ValueError, match="value must be one of"):
        stats.plot(tmp_path / "map.png", value="mean")
