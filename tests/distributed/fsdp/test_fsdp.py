"""FSDP2 with FP8 all-gather: the same losses, bit for bit, as without."""

import functools
from dataclasses import replace

import pytest
import torch
from cases import QUANTIZED
from fsdp_cases import (
    Setup,
    build,
    compare_operands,
    digest,
    full_parameters,
    load,
    load_full,
    same_as_without,
    save,
    tokens_of,
    train,
    zero,
)
from fsdp_models import Llama, initialize, recomputed
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather
from tritonfp8.distributed.fsdp.orientations import weight_orientations

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(6)]


# Plain FSDP2 gives the same bits with and without these on a CPU, so one run of it stands for all of them.
LEAVE_FSDP2_ALONE = {
    "enabled": False, "reshard": True, "root_reshard": None, "offload": False, "meta": False, "recompute": None,
    "recompute_with_hooks": None, "enable_last": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def off(ranks):
    """Runs of plain FSDP2, each made once."""
    run = functools.cache(functools.partial(ranks.run, function=train))

    def find(world, setup, steps):
        plain = dict(LEAVE_FSDP2_ALONE)
        if setup.optimizer == "loop":
            plain["optimizer"] = "foreach"
        if setup.compile == "whole":
            plain["compile"] = ""
        return run(world, setup=replace(setup, **plain), steps=steps)

    return find


def check_equal_to_off(ranks, off, world, setup, steps=3):
    on = ranks.run(world, train, setup, steps)
    assert on == off(world, setup, steps)
    return on


# One recipe takes ten steps. After the second, steps run the same code on other values. Shards are uneven over three
# ranks; test_operands_are_those_of_the_whole_weight has each number of ranks with each recipe.
UNEVEN = pytest.param(3, "rowwise", marks=pytest.mark.one_in(1))


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


def first_loss_alone(mesh, setup):
    """Loss of this rank's tokens with an unsharded model."""
    model = initialize(Llama()).to(setup.param_dtype)
    tritonfp8.convert(model, setup.recipe)
    return model(tokens_of(0)).item()


@pytest.mark.parametrize("copies", [None, 2], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("recipe", ["bf16"])
def test_weights_that_no_gemm_reads_in_8_bits(ranks, recipe, copies):
    """They are gathered and computed with as they are: the loss equals the loss of one process."""
    sharded, alone = (ranks.run(4, f, Setup(recipe, False, copies=copies)) for f in (train, first_loss_alone))
    assert [losses[0] for losses, _ in sharded] == alone


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_conversion_after_fully_shard(ranks, recipe):
    """Weights are then gathered in bf16, and the losses are the losses of the usual order."""
    last, first = (ranks.run(3, train, Setup(recipe, False, last=last), 3) for last in (True, False))
    assert last == first


# Shards of 5 rows over 4 ranks are 2, 2, 1 and 0; the others straddle blocks of 128 and of 32.
SHAPES = [(5, 40), (131, 42), (300, 200), (40, 130), (512, 64)]


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("world", "poisoned"), [(1, False), (2, True), (3, False), (4, True)])
def test_operands_are_those_of_the_whole_weight(ranks, world, poisoned, reshard, recipe):
    assert ranks.run(world, compare_operands, recipe, SHAPES, reshard, poisoned) == [([], len(SHAPES))] * world


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_cast_master_quantizes_the_float32_shard(ranks, recipe):
    assert ranks.run(3, compare_operands, recipe, SHAPES, True, False, cast="master") == [([], len(SHAPES))] * 3


def after_changes(mesh, changes, enabled):
    """Losses after the weights change in some ways, one after the other, and the sum of one layer's output."""
    model, _ = build(mesh, Setup("tensorwise", enabled))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, change in enumerate(changes):
        # Weights that only grew would make losses so large that recipes do not differ.
        factor = 1.7 if number % 2 == 0 else 1 / 1.7
        other = {name: factor * value for name, value in full_parameters(model).items()}
        if change.endswith("_before_forward"):
            load_full(model, other, assign=change.startswith("assign"))
        loss = model(tokens_of(number))
        loss.backward()
        with torch.no_grad():
            model(tokens_of(1))
            if change in ("load", "assign"):
                load_full(model, other, assign=change == "assign")
            elif change == "data":
                model.reshard()
                for parameter in model.parameters():
                    parameter.data.mul_(factor)
            elif change == "step":
                optimizer.step()
            elif change.startswith("swap_"):
                tritonfp8.swap_recipe(model, change.removeprefix("swap_"))
        # After a forward without backward FSDP keeps the root's gathered weights until a reshard.
        model.reshard()
        model.zero_grad()
        after = model(tokens_of(number)).item()
        losses.append((loss.item(), after, model.layers[0](torch.ones(1, 3, 42)).sum().item()))
    return losses, digest(model)


# One after the other, on one model.
CHANGES = ("step", "load", "data", "assign", "swap_mxfp8", "swap_bf16", "swap_rowwise")


@pytest.mark.parametrize("changes", [CHANGES, ("load_before_forward",), ("assign_before_forward",)], ids=",".join)
def test_scales_are_never_stale(ranks, changes):
    on, _ = same_as_without(ranks, 3, after_changes, changes)
    for losses, _ in on:
        for change, (before, after, _) in zip(changes, losses, strict=True):
            assert (before == after) == change.endswith("_before_forward"), change


def through_submodules(mesh, enabled, recipe):
    """Losses and digest of a training that calls layers of the model, never the model itself."""
    model, _ = build(mesh, Setup(recipe, enabled))
    model.set_is_last_backward(True)
    optimizer = torch.optim.AdamW(model.layers.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        for layer in model.layers:
            generator = torch.Generator().manual_seed(torch.distributed.get_rank())
            loss = layer(torch.randn(2, 5, 42, generator=generator)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, digest(model)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_forward_that_does_not_go_through_the_model(ranks, recipe):
    same_as_without(ranks, 2, through_submodules, recipe=recipe)


def load_plain(mesh, folder):
    """Load into a plain float32 model and into a bf16 one.

    Returns the digest of the first, the names of parameters of the second that are not roundings of the first's, and
    the loss of the second.
    """
    import torch.distributed.checkpoint as dcp

    models = Llama(), Llama().to(torch.bfloat16)
    for model in models:
        zero(model)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        model.load_state_dict(state["model"], strict=True)
    wide, narrow = models
    pairs = zip(wide.named_parameters(), narrow.parameters(), strict=True)
    different = [name for (name, p), q in pairs if not torch.equal(p.bfloat16(), q)]
    return digest(wide), different, narrow(tokens_of(0)).item()


def test_checkpoint_loads_at_another_world_size_and_into_a_plain_model(ranks, tmp_path):
    setup, folder = Setup("rowwise"), str(tmp_path)
    saved = ranks.run(3, save, folder, setup)
    before, _, types, keys = saved[0]
    assert types == ["Tensor"]
    assert keys == list(Llama().state_dict())
    for options in (setup, replace(setup, enabled=False), replace(setup, recipe="mxfp8")):
        assert [digest for digest, _ in ranks.run(2, load, folder, options)] == [before] * 2
    assert [losses for _, losses in ranks.run(3, load, folder, setup)] == [losses for _, losses, *_ in saved]
    [(plain, different, loss)] = ranks.run(1, load_plain, folder)
    assert (plain, different) == (before, [])
    assert loss == pytest.approx(saved[0][1][0], rel=0.1)


def gathers_like_a_plain_parameter(mesh):
    model, _ = build(mesh, Setup())
    expected = full_parameters(model)
    return all(torch.equal(p.full_tensor(), expected[name]) for name, p in model.named_parameters())


def test_full_tensor(ranks):
    assert ranks.run(3, gathers_like_a_plain_parameter) == [True] * 3


def saved_with_torch(mesh, path):
    model, _ = build(mesh, Setup())
    path = f"{path}/{torch.distributed.get_rank()}.pt"
    torch.save(model.state_dict(), path)
    before = digest(model)
    zero(model)
    model.load_state_dict(torch.load(path, weights_only=True), strict=True)
    return before == digest(model)


def test_weights_only_loads(ranks, tmp_path):
    assert ranks.run(2, saved_with_torch, str(tmp_path)) == [True, True]


def gathered_bytes(mesh, recipe, shape, enabled, recompute=None):
    """Bytes and number of one layer's collectives in a step, after a first forward, which registers the hooks."""
    model = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False, device=mesh.device_type))
    tritonfp8.convert(model, recipe)
    if enabled:
        enable_float8_all_gather(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # In param_dtype: FSDP of torch 2.11 does not cast the input when it recomputes forward.
    x = torch.ones(2, shape[1], dtype=policy.param_dtype, requires_grad=True)
    with torch.no_grad():
        model(x)
    model.reshard()
    with count_collective_bytes() as counted:
        recomputed(model, x, recompute).sum().backward()
    return dict(counted.bytes), dict(counted.calls)


@pytest.fixture(scope="module")
def bytes_off(ranks):
    """Bytes of plain FSDP2's collectives, in one run: it gathers weights in bf16, whatever the recipe."""
    return functools.cache(functools.partial(ranks.run, 4, gathered_bytes, "rowwise", enabled=False))


# Rows of 1024 are enough that scales are 3 % of the bytes at most.
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("shape", [(256, 1024)])
def test_gathered_bytes_are_half_of_those_of_bf16(ranks, bytes_off, shape, recipe):
    (on, _), *_ = ranks.run(4, gathered_bytes, recipe, shape, True)
    (off, _), *_ = bytes_off(shape=shape)
    assert off["all_gather"] == 2 * 2 * shape[0] * shape[1]
    assert on["all_gather"] + 2 * on.get("all_reduce", 0) <= 0.52 * off["all_gather"]


def traffic(mesh, setup):
    """Bytes and number of a step's collectives, by kind."""
    model, _ = build(mesh, setup)
    model(tokens_of(0)).backward()
    with count_collective_bytes() as counted:
        model(tokens_of(0)).backward()
    return dict(counted.bytes), dict(counted.calls)


def test_a_compiled_step_gathers_what_an_eager_one_does(ranks):
    """The compiler moves no read of the orientation for backward into forward, where it would be gathered once more."""

    def gathered(**options):
        return ranks.run(2, traffic, Setup("rowwise", **options))[0][0]["all_gather"]

    once, again = gathered(), gathered(recompute="yes")
    assert gathered(compile="block") == gathered(compile="block_min_cut") == once
    compiled = gathered(compile="block_min_cut", recompute="yes")
    # A compiler recomputes no more than backward needs.
    assert once < compiled <= again


@pytest.mark.parametrize("recompute", ["yes", "reentrant"])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_gathered_bytes_where_forward_is_recomputed(ranks, bytes_off, recipe, recompute):
    """A weight of two orientations is gathered three times in 8 bits, where bf16 is gathered twice."""
    shape, gathers = (256, 1024), 1 + len(weight_orientations(recipes.get(recipe)))
    on = ranks.run(4, gathered_bytes, recipe, shape, True, recompute)[0]
    off = bytes_off(shape=shape, recompute=recompute)[0]
    assert off[0]["all_gather"] == 2 * 2 * shape[0] * shape[1]
    assert (on[1]["all_gather"], off[1]["all_gather"]) == (gathers, 2)
    assert gathers / 4 <= on[0]["all_gather"] / off[0]["all_gather"] <= 1.04 * gathers / 4


def test_scales_of_all_weights_take_one_collective_a_step(ranks):
    for _, calls in ranks.run(2, traffic, Setup("rowwise")):
        # The other one, of 16 bytes, checks that ranks gather alike.
        assert calls["all_reduce"] == 2


# On GPUs.


def check_equal_to_off_on_gpus(gpus, setup, steps=3):
    """Each setup with its own run of plain FSDP2: an optimizer on the CPU, for one, rounds in another way."""
    on, off = (gpus.run(gpus.size, train, replace(setup, enabled=enabled), steps) for enabled in (True, False))
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
    assert gpus.run(gpus.size, compare_operands, recipe, shapes, reshard, True) == [([], len(shapes))] * gpus.size


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_gathered_bytes_on_gpus(gpus, recipe):
    on, off = (gpus.run(gpus.size, gathered_bytes, recipe, (1024, 4096), enabled)[0][0] for enabled in (True, False))
    assert on["all_gather"] <= 0.52 * off["all_gather"]
