"""Operands that are measured together have the figures that each has by itself."""

import math

import pytest
import torch
from figures import measure
from strategies import VALID_SPECS
from torch import nn

import tritonfp8
from tritonfp8.specs import SPECS, QuantSpec
from tritonfp8.workflow.health import groups
from tritonfp8.workflow.health.statistics import FIELDS

ROWWISE = QuantSpec("e4m3", (1, -1))


def operand(seed, rows=140, columns=96, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * 10.0 ** torch.randint(-7, 3, x.shape, generator=generator).float()).to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """The number of operands in each call of measure_all."""
    sizes = []

    def counted(parts, *args):
        sizes.append(len(parts))
        return measure_all(parts, *args)

    measure_all = groups.measure_all
    monkeypatch.setattr(groups, "measure_all", counted)
    return sizes


def together_of(operands, specs, rows=1024):
    """The figures of operands that are measured together, which each has by itself, too."""
    together = groups.StepOperands(rows)
    for index, (x, spec) in enumerate(zip(operands, specs, strict=True)):
        together.add((str(index), "input"), x, spec)
    found = together.figures()
    for index, (x, spec) in enumerate(zip(operands, specs, strict=True)):
        assert_same(found[str(index), "input"], measure(x, spec, rows))
    return found


def assert_same(found, alone):
    for field, ours, theirs in zip(FIELDS, found.tolist(), alone.tolist(), strict=True):
        if field == "sqnr":
            # The order of a sum depends on the shape.
            assert ours == pytest.approx(theirs, rel=1e-12)
        else:
            assert ours == theirs or (math.isnan(ours) and math.isnan(theirs)), field


# Figures depend on the rounding of scales as for each by itself, which test_statistics.py measures.
WITHOUT_ROUNDING = {(spec.format, spec.block): spec.args[0] for spec in VALID_SPECS}


@pytest.mark.parametrize("text", [*WITHOUT_ROUNDING.values(), None])
def test_figures_are_those_of_each_alone(text, calls):
    spec = None if text is None else SPECS[text]
    operands = [operand(seed) for seed in range(3)]
    operands[1][3, 5] = math.inf
    together_of(operands, [spec] * 3)
    assert calls == [3]


def test_kinds_are_measured_apart_and_keep_their_order(calls):
    operands = [operand(0), operand(1, rows=128), operand(2, dtype=torch.float32), operand(3), operand(4)]
    specs = [ROWWISE, ROWWISE, ROWWISE, None, ROWWISE]
    found = together_of(operands, specs)
    assert sorted(calls) == [1, 1, 1, 2]
    assert [name for name, _ in found] == ["0", "1", "2", "3", "4"]


def test_a_full_group_is_measured_at_once(calls, monkeypatch):
    x = operand(0)
    monkeypatch.setattr(groups, "GROUP_BYTES", 2 * x.nbytes)
    together = groups.StepOperands(rows=1024)
    for index in range(5):
        together.add((str(index), "input"), x, ROWWISE)
    assert calls == [2, 2]
    assert len(together.figures()) == 5
    assert calls == [2, 2, 1]


@pytest.mark.parametrize("rows", [128, 1024])
def test_an_operand_may_be_overwritten_after_it_was_added(rows):
    x = operand(0, rows=300)
    alone = measure(x, ROWWISE, rows)
    together = groups.StepOperands(rows)
    together.add(("layer", "input"), x, ROWWISE)
    x.zero_()
    assert_same(together.figures()["layer", "input"], alone)


def test_an_operand_equal_to_another_is_not_measured_again(calls):
    together = groups.StepOperands(rows=1024)
    together.add(("q", "input"), operand(0), ROWWISE)
    together.add(("o", "input"), operand(1), ROWWISE)
    together.add_equal(("k", "input"), ("q", "input"))
    found = together.figures()
    assert calls == [2]
    assert [name for name, _ in found] == ["q", "o", "k"]
    assert_same(found["k", "input"], measure(operand(0), ROWWISE, 1024))
    assert not torch.equal(found["o", "input"], found["k", "input"])


class Siblings(nn.Module):
    """Layers that read one tensor; it is changed in place before the last one reads it."""

    def __init__(self, change):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.change = change

    def forward(self, x):
        x = x.clone()
        first = self.q(x) + self.k(x)
        return first + self.v(self.change(x))


def triple(x):
    x.mul_(3)
    return x


@pytest.mark.parametrize(
    ("change", "measured"), [(lambda x: x, 1), (triple, 2), (lambda x: x[:], 2)], ids=["same", "written", "view"]
)
def test_siblings_are_measured_once_unless_their_input_changed(calls, change, measured):
    model = Siblings(change).bfloat16()
    tritonfp8.convert(model, "rowwise")
    x = operand(0, rows=32, columns=64)
    with tritonfp8.monitor(model, every=1) as stats, torch.no_grad():
        model(x)
        stats.step()
    # Three weights, then the inputs: they have another shape. The next sample begins with the weights.
    assert calls[:2] == [3, measured]
    found = {sample.layer: sample.figures["amax"] for sample in stats.samples if sample.operand == "input"}
    assert found["q"] == found["k"] == x.abs().max().item()
    assert found["v"] == change(x.clone()).abs().max().item()


def test_an_input_of_an_earlier_call_serves_nobody():
    model = Siblings(lambda x: x).bfloat16()
    tritonfp8.convert(model, "rowwise")
    first, second = operand(0, rows=32, columns=64), operand(1, rows=32, columns=64)
    with tritonfp8.monitor(model, every=1, thresholds=()) as stats, torch.no_grad():
        model.q(first)
        # The second call of q is not measured; k reads the same tensor, which is.
        model.q(second)
        model.k(second)
        stats.step()
    found = {sample.layer: sample.figures["amax"] for sample in stats.samples if sample.operand == "input"}
    assert found == {"q": first.abs().max().item(), "k": second.abs().max().item()}


def test_layers_of_a_model_share_their_launches(calls):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))).bfloat16()
    tritonfp8.convert(model, "rowwise")
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with tritonfp8.monitor(model, every=1) as stats:
        model(x).square().mean().backward()
        stats.step()
        after_a_step = list(calls)
    # Weights; inputs and gradients, which have one shape and one spec; and the weights of the next step.
    assert after_a_step == [8, 16, 8]
    assert len(stats.samples) == 24
