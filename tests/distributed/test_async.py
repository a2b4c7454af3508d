"""Collectives that end later, and torch's pass that cuts them and products into pieces (asynchronous TP)."""

import async_cases
import pytest
from cases import QUANTIZED

from tritonfp8 import recipes

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]

NAMES = recipes.names()
ALL, MLP = async_cases.LINEARS, async_cases.MLP


def test_functions_of_what_a_collective_has_yet_to_bring(ranks):
    for name in NAMES:
        ranks.run(2, async_cases.check_functions, name=name)


def test_only_dtensors_import_the_subpackage(ranks):
    ranks.run(2, async_cases.check_without_handlers)


def test_layers_of_what_a_collective_has_yet_to_bring(ranks):
    for name in NAMES:
        ranks.run(2, async_cases.check_layers, name=name)


@pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
def test_layer_without_a_style_after_one_that_sums_over_the_ranks(ranks, float8):
    for name in NAMES:
        ranks.run(2, async_cases.check_output_of_a_style, name=name, float8=float8)


PIPELINED = [("rowwise_hp_grad_weight", False, ALL), ("tensorwise", True, MLP)]
# Collectives of attention that the pass fuses. The MLP has as many.
OF_ATTENTION = 4


@pytest.mark.parametrize(("name", "float8", "converted"), PIPELINED, ids=["plain", "float8, mlp alone"])
def test_micro_pipelining_leaves_converted_layers_alone(ranks, name, float8, converted):
    """It fuses a gather with products of what it gathers: those of torch's layers, as ours quantize in between."""
    options = {"name": name, "float8": float8, "converted": converted, "timeout": 150}
    for fused in ranks.run(2, async_cases.check_micro_pipelined_graphs, **options):
        assert len(fused) == 2
        assert any(fused) == (converted != ALL)
        assert sum(map(len, fused)) <= OF_ATTENTION


# On GPUs.


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("name", "float8", "converted"),
    [*((name, float8, ALL) for name in QUANTIZED for float8 in (False, True)), ("rowwise", True, MLP)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_micro_pipelining_on_gpus(gpus, name, float8, converted):
    """By torch's compiler; and op by op, where losses and gradients are to the bit those without the pass."""
    options = {"name": name, "float8": float8, "converted": converted, "timeout": 300}
    checks = [async_cases.check_micro_pipelined]
    if converted == ALL:
        checks.append(async_cases.check_micro_pipelined_graphs)
    for check in checks:
        for fused in gpus.run(2, check, **options):
            assert len(fused) >= 2
            assert any(fused) == (converted != ALL)


@pytest.mark.multigpu
def test_what_a_collective_has_yet_to_bring_on_gpus(gpus):
    for name in NAMES:
        gpus.run(2, async_cases.check_functions, name=name)
        gpus.run(2, async_cases.check_layers, name=name)
        gpus.run(2, async_cases.check_output_of_a_style, name=name, float8=True)
