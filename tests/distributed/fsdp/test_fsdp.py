"""FSDP2 with FP8 all-gather: the same losses, bit for bit, as without."""

import functools
from dataclasses import replace

import fsdp_cases
import fsdp_limit_cases
import pytest
import torch
from cases import QUANTIZED
from fsdp_cases import Setup

from tritonfp8 import recipes
from tritonfp8.distributed.fsdp.orientations import weight_orientations

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]


# Plain FSDP2 gives the same bits with and without these on a CPU, so one run of it stands for all of them.
LEAVE_FSDP2_ALONE = {
    "reshard": True,
    "root_reshard": None,
    "offload": False,
    "meta": False,
    "recompute": None,
    "recompute_with_hooks": None,
    "enable_last": False,
}


@pytest.fixture(scope="module")
def off(ranks):
    """Runs of plain FSDP2, each made once."""

    @functools.cache
    def run(world, setup, steps):
        return ranks.run(world, fsdp_cases.train, setup=setup, steps=steps)

    def find(world, setup, steps):
        plain = LEAVE_FSDP2_ALONE | {"enabled": False}
        if setup.optimizer == "loop":
            plain["optimizer"] = "foreach"
        if setup.compile == "whole":
            plain["compile"] = ""
        return run(world, replace(setup, **plain), steps)

    return find


def check_equal_to_off(ranks, off, world, setup, steps=3):
    on = ranks.run(world, fsdp_cases.train, setup=setup, steps=steps)
    assert on == off(world, setup, steps)
    return on


# One recipe takes ten steps. After the second, steps run the same code on other values. Shards are uneven over three
# ranks; test_operands_are_those_of_the_whole_weight has each number of ranks with each recipe.
UNEVEN = pytest.param(3, "rowwise", marks=pytest.mark.in_turn(1))
WORLDS = [UNEVEN, *((3, name) for name in QUANTIZED if name != "rowwise"), (2, "rowwise"), (4, "tensorwise")]


@pytest.mark.parametrize(("world", "recipe"), WORLDS)
def test_losses_with_fp8_all_gather_equal_those_without(ranks, off, world, recipe):
    steps = 10 if recipe == "blockwise" else 2
    on = check_equal_to_off(ranks, off, world, Setup(recipe), steps)
    losses, digests = zip(*on, strict=True)
    assert len(set(digests)) == 1
    assert all(len(rank) == steps and rank[-1] < rank[0] for rank in losses)


# tests/distributed/test_parallelism.py has HSDP, with each recipe. Options that do not meet in the code share a run.
OPTIONS = {
    "no_reshard_fused": Setup(reshard=False, optimizer="fused"),
    "root_reshards_loop": Setup(root_reshard=True, optimizer="loop"),
    "float32_compute_frozen_mlp": Setup(param_dtype=None, frozen="up"),
    "float16_compute_clip": Setup(param_dtype=torch.float16, clip=True),
    "bf16_parameters_frozen_weights": Setup(dtype=torch.bfloat16, frozen="weight"),
    "offload": Setup(offload=True),
    "meta": Setup(meta=True),
    "recompute": Setup(recompute="yes"),
    "recompute_reentrant": Setup(recompute="reentrant"),
    "recompute_mxfp8": Setup("mxfp8", recompute="yes"),
    "recompute_selective": Setup(recompute="selective"),
    "recompute_selective_mxfp8": Setup("mxfp8", recompute="selective"),
    # Around the hooks of FSDP, as transformers does: they run again, too.
    "recompute_with_hooks": Setup(recompute_with_hooks="yes"),
    "recompute_with_hooks_reentrant": Setup(recompute_with_hooks="reentrant"),
    "accumulate": Setup(accumulate=2),
    **{
        f"offload_accumulate_{name}": Setup(name, offload=True, accumulate=2) for name in QUANTIZED if name != "rowwise"
    },
    "tied": Setup(tied=True),
    "enable_last": Setup(enable_last=True),
    "enable_last_meta": Setup("tensorwise", enable_last=True, meta=True, root_reshard=True),
    "compile_block": Setup(compile="block"),
    **{f"compile_block_{name}": Setup(name, compile="block") for name in QUANTIZED if name != "rowwise"},
    "compile_block_recompute": Setup(compile="block", recompute="yes"),
    "compile_whole": Setup(compile="whole"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option(ranks, off, option):
    # The second step is the first that gathers what the optimizer changed. Shards are uneven over two ranks as well.
    check_equal_to_off(ranks, off, 2, OPTIONS[option], steps=2)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_reshard_after_forward_to_fewer_ranks(ranks, off, recipe):
    check_equal_to_off(ranks, off, 4, Setup(recipe, reshard=2), steps=2)


@pytest.mark.parametrize("copies", [None, 2], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("recipe", ["bf16"])
def test_weights_that_no_gemm_reads_in_8_bits(ranks, recipe, copies):
    """They are gathered and computed with as they are: the loss is that of one process."""
    options = {"setup": Setup(recipe, False, copies=copies)}
    sharded, alone = (ranks.run(4, f, **options) for f in (fsdp_cases.train, fsdp_cases.first_loss_alone))
    assert [losses[0] for losses, _ in sharded] == alone


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_conversion_after_fully_shard(ranks, recipe):
    """Weights are then gathered in bf16, and the losses are those of the usual order."""
    last, first = (ranks.run(3, fsdp_cases.train, setup=Setup(recipe, False, last=x), steps=3) for x in (True, False))
    assert last == first


# Shards of 5 rows over 4 ranks are 2, 2, 1 and 0; the others straddle blocks of 128 and of 32.
SHAPES = [(5, 40), (131, 42), (300, 200), (40, 130), (512, 64)]


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("world", "poisoned"), [(1, False), (2, True), (3, False), (4, True)])
def test_operands_are_those_of_the_whole_weight(ranks, world, poisoned, reshard, recipe):
    options = {"recipe": recipe, "shapes": SHAPES, "reshard": reshard, "poisoned": poisoned}
    for different, compared in ranks.run(world, fsdp_cases.compare_operands, **options):
        assert different == []
        assert compared == len(SHAPES)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_cast_master_quantizes_the_float32_shard(ranks, recipe):
    options = {"recipe": recipe, "shapes": SHAPES, "reshard": True, "poisoned": False}
    master = ranks.run(3, fsdp_cases.compare_operands, cast="master", **options)
    assert [different for different, _ in master] == [[]] * 3


# One after the other, on one model.
CHANGES = ("step", "load", "data", "assign", "swap_mxfp8", "swap_bf16", "swap_rowwise")


@pytest.mark.parametrize("changes", [CHANGES, ("load_before_forward",), ("assign_before_forward",)], ids=",".join)
def test_scales_are_never_stale(ranks, changes):
    on, off = (ranks.run(3, fsdp_cases.after_changes, changes=changes, enabled=e) for e in (True, False))
    assert on == off
    for losses, _ in on:
        for change, (before, after, _) in zip(changes, losses, strict=True):
            assert (before == after) == change.endswith("_before_forward"), change


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_forward_that_does_not_go_through_the_model(ranks, recipe):
    on, off = (ranks.run(2, fsdp_cases.through_submodules, enabled=e, recipe=recipe) for e in (True, False))
    assert on == off


def test_checkpoint_loads_at_another_world_size_and_into_a_plain_model(ranks, tmp_path):
    setup = Setup("rowwise")
    saved = ranks.run(3, fsdp_cases.save, folder=str(tmp_path), setup=setup)
    before, _, _, types, keys = saved[0]
    assert types == ["Tensor"]
    assert keys == list(fsdp_cases.Llama().state_dict())
    for options in (setup, replace(setup, enabled=False), replace(setup, recipe="mxfp8")):
        loaded = ranks.run(2, fsdp_cases.load, folder=str(tmp_path), setup=options)
        assert [digest for digest, _ in loaded] == [before] * 2
    same = ranks.run(3, fsdp_cases.load, folder=str(tmp_path), setup=setup)
    assert [losses for _, losses in same] == [losses for _, losses, _, _, _ in saved]
    plain, different, loss = ranks.run(1, fsdp_cases.load_plain, folder=str(tmp_path))[0]
    assert (plain, different) == (before, [])
    assert loss == pytest.approx(saved[0][1][0], rel=0.1)


def test_full_tensor(ranks):
    assert ranks.run(3, fsdp_cases.gathers_like_a_plain_parameter) == [True] * 3


def test_weights_only_loads(ranks, tmp_path):
    assert ranks.run(2, fsdp_cases.saved_with_torch, path=str(tmp_path), setup=Setup("rowwise")) == [True, True]


@pytest.fixture(scope="module")
def bytes_off(ranks):
    """Bytes of plain FSDP2's collectives, in one run: it gathers weights in bf16, whatever the recipe."""

    @functools.cache
    def run(**options):
        return ranks.run(4, fsdp_limit_cases.gathered_bytes, recipe="rowwise", enabled=False, **options)

    return run


# Rows of 1024 are enough that scales are 3 % of the bytes at most.
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("shape", [(256, 1024)])
def test_gathered_bytes_are_half_of_those_of_bf16(ranks, bytes_off, shape, recipe):
    on = ranks.run(4, fsdp_limit_cases.gathered_bytes, recipe=recipe, shape=shape, enabled=True)[0]
    off = bytes_off(shape=shape)[0]
    assert off[0]["all_gather"] == 2 * 2 * shape[0] * shape[1]
    assert on[0]["all_gather"] <= 0.52 * off[0]["all_gather"]
    assert on[0]["all_gather"] + 2 * on[0].get("all_reduce", 0) <= 0.52 * off[0]["all_gather"]


def test_a_compiled_step_gathers_what_an_eager_one_does(ranks):
    """The compiler moves no read of the orientation for backward into forward, where it would be gathered once more."""

    def gathered(**options):
        return ranks.run(2, fsdp_cases.traffic, setup=Setup("rowwise", **options))[0][0]["all_gather"]

    once, again = gathered(), gathered(recompute="yes")
    assert gathered(compile="block") == gathered(compile="block_min_cut") == once
    compiled = gathered(compile="block_min_cut", recompute="yes")
    if torch.torch_version.TorchVersion(torch.__version__) < (2, 12):
        # It keeps what the GEMMs return, and recomputes the rest.
        assert compiled == once < again
    else:
        # A compiler recomputes no more than backward needs.
        assert once < compiled <= again


@pytest.mark.parametrize("recompute", ["yes", "reentrant"])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_gathered_bytes_where_forward_is_recomputed(ranks, bytes_off, recipe, recompute):
    """A weight of two orientations is gathered three times in 8 bits, where bf16 is gathered twice."""
    shape, gathers = (256, 1024), 1 + len(weight_orientations(recipes.get(recipe)))
    options = {"shape": shape, "recompute": recompute}
    on = ranks.run(4, fsdp_limit_cases.gathered_bytes, recipe=recipe, enabled=True, **options)[0]
    off = bytes_off(**options)[0]
    assert off[0]["all_gather"] == 2 * 2 * shape[0] * shape[1]
    assert (on[1]["all_gather"], off[1]["all_gather"]) == (gathers, 2)
    assert gathers / 4 <= on[0]["all_gather"] / off[0]["all_gather"] <= 1.04 * gathers / 4


def test_scales_of_all_weights_take_one_collective_a_step(ranks):
    for _, calls in ranks.run(2, fsdp_cases.traffic, setup=Setup("rowwise")):
        # The other one, of 16 bytes, checks that ranks gather alike.
        assert calls["all_reduce"] == 2


# On GPUs.


def check_equal_to_off_on_gpus(gpus, setup, steps=3):
    """Each setup with its own run of plain FSDP2: an optimizer on the CPU, for one, rounds in another way."""
    on, off = (
        gpus.run(gpus.size, fsdp_cases.train, setup=replace(setup, enabled=enabled), steps=steps)
        for enabled in (True, False)
    )
    assert on == off


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("compiled", ["", "block"])
def test_losses_on_gpus(gpus, recipe, compiled):
    check_equal_to_off_on_gpus(gpus, Setup(recipe, compile=compiled, sizes=(192, 3, 1000)), steps=10)


@pytest.mark.multigpu
@pytest.mark.parametrize("option", OPTIONS)
def test_option_on_gpus(gpus, option):
    check_equal_to_off_on_gpus(gpus, OPTIONS[option])


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("reshard", [True, False])
def test_operands_on_gpus(gpus, recipe, reshard):
    shapes = [*SHAPES, (1000, 3000)]
    options = {"recipe": recipe, "shapes": shapes, "reshard": reshard, "poisoned": True}
    for different, compared in gpus.run(gpus.size, fsdp_cases.compare_operands, **options):
        assert different == []
        assert compared == len(shapes)


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_gathered_bytes_on_gpus(gpus, recipe):
    options = {"recipe": recipe, "shape": (1024, 4096)}
    on, off = (gpus.run(gpus.size, fsdp_limit_cases.gathered_bytes, enabled=e, **options)[0] for e in (True, False))
    assert on[0]["all_gather"] <= 0.52 * off[0]["all_gather"]
