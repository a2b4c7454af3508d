"""FSDP2 with FP8 all-gather on top of tensor parallelism: the scales of the whole weight, the losses without it."""

import fsdp_tp_cases
import pytest
from process_group import Processes

from tritonfp8 import recipes

pytestmark = pytest.mark.xdist_group("ranks")

QUANTIZED = [name for name in recipes.names() if recipes.get(name).output.quantized]
TWO_BY_TWO, HYBRID = (2, 2), (2, 1, 2)


@pytest.fixture(scope="module")
def ranks():
    processes = Processes(4)
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def gpus():
    processes = Processes(4, "cuda")
    yield processes
    processes.stop()


def check_equal_to_off(ranks, sizes, recipe, steps=3, **options):
    on, off = (
        ranks.run(4, fsdp_tp_cases.train, sizes=sizes, recipe=recipe, enabled=enabled, steps=steps, **options)
        for enabled in (True, False)
    )
    layers = 7 * fsdp_tp_cases.LAYERS + 1
    for (losses, digest, gathered), (expected, expected_digest, _) in zip(on, off, strict=True):
        assert gathered == layers
        assert losses == expected
        assert digest == expected_digest
        assert losses[-1] != losses[0]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_tp_by_fsdp2(ranks, recipe):
    check_equal_to_off(ranks, TWO_BY_TWO, recipe, steps=10)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_tp_by_hsdp(ranks, recipe):
    check_equal_to_off(ranks, HYBRID, recipe)


OPTIONS = {
    "DTensor outputs": {"local": False},
    "no reshard": {"reshard": False},
    "converted last": {"first": False},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(ranks, option):
    for recipe in ("rowwise", "blockwise"):
        check_equal_to_off(ranks, TWO_BY_TWO, recipe, **OPTIONS[option])


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_scales_are_those_of_one_process(ranks, recipe, sizes):
    """Blocks that lie on several ranks of tensor parallelism, of FSDP2, and of both."""
    shapes = [(300, 96), (64, 300), (131, 67), (40, 131), (7, 40), (256, 48), (33, 512)]
    for different, seen in ranks.run(4, fsdp_tp_cases.compare_operands, sizes=sizes, recipe=recipe, shapes=shapes):
        assert different == []
        assert seen == 2 * len(shapes)
