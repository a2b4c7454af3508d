"""FSDP2 with FP8 all-gather on top of tensor parallelism: the scales of the whole weight, the losses without it."""

import functools
import math

import fsdp_cases
import fsdp_tp_cases
import pytest
from cases import QUANTIZED
from process_group import Processes

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]

TWO_BY_TWO = (2, 2)
# Replicas, ranks of FSDP2, of tensor parallelism.
HYBRID, HYBRID_OF_FOUR = (2, 2, 2), (2, 1, 2)


@pytest.fixture(scope="module")
def eight():
    processes = Processes(8)
    yield processes
    processes.stop()


@pytest.fixture
def four_gpus(gpus):
    if gpus.size < 4:
        pytest.skip("needs four CUDA GPUs")
    return gpus


# Plain FSDP2 gives the same bits with and without these on a CPU, so one run of it stands for all of them.
LEAVE_FSDP2_ALONE = {"enable", "reshard", "first", "recompute"}


def off_on_gpus(processes, sizes, **options):
    """A run without the FP8 all-gather."""
    return processes.run(math.prod(sizes), fsdp_tp_cases.train, sizes=sizes, enabled=False, **options)


@pytest.fixture(scope="module")
def off():
    """Runs without the FP8 all-gather, each made once."""
    run = functools.cache(off_on_gpus)

    def find(processes, **options):
        return run(processes, **{name: value for name, value in options.items() if name not in LEAVE_FSDP2_ALONE})

    return find


def check_equal_to_off(ranks, off, sizes, recipe, steps=3, **options):
    options |= {"sizes": sizes, "recipe": recipe, "steps": steps}
    on = ranks.run(math.prod(sizes), fsdp_tp_cases.train, enabled=True, **options)
    layers = (7 if options.get("attention", True) else 3) * options.get("layers", fsdp_tp_cases.LAYERS) + 1
    for (losses, digest, gathered), (expected, expected_digest, _) in zip(on, off(ranks, **options), strict=True):
        assert gathered == layers
        assert losses == expected
        assert digest == expected_digest
        assert losses[-1] != losses[0]


@pytest.mark.parametrize("enable", ["before_parallel", "last"])
def test_it_is_enabled_before_tensor_parallelism_or_after_everything(ranks, off, enable):
    check_equal_to_off(ranks, off, TWO_BY_TWO, "blockwise", steps=2, layers=1, enable=enable)


# The second step is the first that gathers what the optimizer changed. test_fsdp.py takes ten.
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_tp_by_fsdp2(ranks, off, recipe):
    check_equal_to_off(ranks, off, TWO_BY_TWO, recipe, 2)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_tp_by_hsdp(request, off, recipe):
    """Each replica has shards as in the test above, and so their scales: eight ranks show it with one recipe."""
    ranks, sizes = ("eight", HYBRID) if recipe == "blockwise" else ("ranks", HYBRID_OF_FOUR)
    check_equal_to_off(request.getfixturevalue(ranks), off, sizes, recipe, 2, layers=1)


OPTIONS = {
    "DTensor outputs": {"local": False},
    "no reshard": {"reshard": False},
    "converted last": {"first": False},
    "recompute": {"recompute": "yes"},
    "one rank of FSDP2": {"sizes": (1, 4)},
}


# Whether weights are resharded decides which orientations are gathered, and that differs by recipe. The other options
# meet shards and blocks: a weight of one orientation in blocks, or of two in rows.
CASES = [
    ("no reshard", "rowwise"),
    ("no reshard", "blockwise"),
    ("DTensor outputs", "blockwise"),
    ("converted last", "rowwise"),
    ("recompute", "rowwise"),
    ("one rank of FSDP2", "blockwise"),
]


@pytest.mark.parametrize(("option", "recipe"), CASES)
def test_option(ranks, off, option, recipe):
    # The gathers of several layers overlap in the tests above.
    options = {"sizes": TWO_BY_TWO, "layers": 1, **OPTIONS[option]}
    check_equal_to_off(ranks, off, recipe=recipe, steps=2, **options)


def test_compiled_layer(ranks, off):
    """Ranks whose shards start inside blocks and ranks whose shards do not have the same collectives in each graph.

    The layer is the MLP: test_tensor_parallel.py and test_fsdp.py compile attention.
    """
    options = {"compiled": 1, "layers": 1, "attention": False, "timeout": 240}
    check_equal_to_off(ranks, off, TWO_BY_TWO, "blockwise", steps=2, **options)


def test_scales_are_never_stale(ranks):
    """By changes of the weights or of the recipe, one after the other on one model."""
    on, off = (ranks.run(4, fsdp_tp_cases.after_changes, enabled=enabled) for enabled in (True, False))
    for mine, theirs in zip(on, off, strict=True):
        assert mine.keys() == theirs.keys() == fsdp_tp_cases.CHANGES.keys()
        for change, (losses, counted) in mine.items():
            expected, gathered = theirs[change]
            assert losses == expected
            assert losses[0] != losses[1]
            assert counted["all_gather"] < 0.7 * gathered["all_gather"] or change == "revert"


def test_checkpoint_loads_on_another_mesh(ranks, tmp_path):
    keys, types = ranks.run(4, fsdp_tp_cases.save, folder=str(tmp_path), sizes=TWO_BY_TWO, recipe="rowwise")[0]
    assert keys == sorted(fsdp_cases.Llama().state_dict())
    assert types == {"Tensor"}
    for sizes, recipe, enabled in (((4, 1), "mxfp8", True), ((1, 4), "rowwise", True), (TWO_BY_TWO, "rowwise", False)):
        options = {"folder": str(tmp_path), "sizes": sizes, "recipe": recipe, "enabled": enabled}
        assert ranks.run(4, fsdp_tp_cases.load, **options) == [[]] * 4


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_scales_are_those_of_one_process(ranks, recipe, sizes):
    """Blocks that lie on several ranks of tensor parallelism, of FSDP2, and of both."""
    shapes = [(300, 96), (64, 300), (131, 67), (40, 131), (7, 40), (256, 48), (33, 512)]
    for different, seen in ranks.run(4, fsdp_tp_cases.compare_operands, sizes=sizes, recipe=recipe, shapes=shapes):
        assert different == []
        assert seen == 2 * len(shapes)


# On GPUs.


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("sizes", [TWO_BY_TWO, HYBRID_OF_FOUR], ids=str)
def test_tp_by_fsdp2_on_gpus(four_gpus, recipe, sizes):
    check_equal_to_off(four_gpus, off_on_gpus, sizes, recipe, steps=10, timeout=240)


@pytest.mark.multigpu
@pytest.mark.parametrize("option", OPTIONS)
def test_option_on_gpus(four_gpus, option):
    options = {"sizes": TWO_BY_TWO, **OPTIONS[option]}
    check_equal_to_off(four_gpus, off_on_gpus, recipe="blockwise", timeout=240, **options)


@pytest.mark.multigpu
def test_compiled_on_gpus(four_gpus):
    check_equal_to_off(four_gpus, off_on_gpus, TWO_BY_TWO, "blockwise", compiled=fsdp_tp_cases.LAYERS, timeout=240)
