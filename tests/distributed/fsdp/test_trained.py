"""Weights that are trained in 8 bits, under DDP, FSDP2, HSDP and tensor parallelism: the bits of one rank."""

import re

import covering
import pytest
import torch
import trained_cases
from cases import CODES, IN_BYTES, named
from torch import nn
from torch.distributed.fsdp import fully_shard

import tritonfp8
from tritonfp8.layers.stored import whole_weight

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(6)]


WORLDS = {"fsdp2": 4, "fsdp2_kept": 2, "hsdp": 4, "ddp": 2, "tp_fsdp2": 4, "tp": 2}
# Shards of FSDP2 cut the blocks of each recipe. The other layouts have its shards, or whole weights.
LAYOUTS = [
    *(("fsdp2", recipe) for recipe in (*IN_BYTES, *CODES.values())),
    *covering.each(["fsdp2_kept", "hsdp", "ddp"], IN_BYTES),
]


@pytest.mark.parametrize(("layout", "recipe"), LAYOUTS, ids=named)
def test_the_bits_of_one_rank(ranks, layout, recipe):
    world = WORLDS[layout]
    assert all(ranks.run(world, trained_cases.compares, recipe=recipe, layout=layout))


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("recipe", "layout", "world"),
    [
        *covering.pairs(IN_BYTES, ["copies", "copies_kept"], [1, 2, 4]),
        ("rowwise", "hsdp of one", 2),
        ("blockwise", "hsdp of one_kept", 2),
    ],
)
def test_a_shard_that_is_the_whole(request, recipe, layout, world):
    ranks = request.getfixturevalue("two_ranks" if world == 2 else "ranks")
    assert all(ranks.run(world, trained_cases.compares, recipe=recipe, layout=layout))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("blockwise", {"accumulate": 2}),
        ("rowwise", {"recompute": "yes"}),
        ("tensorwise", {"recompute": "selective"}),
        ("mxfp8", {"moments": "fp8"}),
        ("blockwise", {"moments": "fp8"}),
        ("tensorwise", {"moments": "fp32"}),
        ("blockwise", {"masters": True}),
        ("rowwise", {"masters": True}),
    ],
)
def test_option(ranks, recipe, options):
    assert all(ranks.run(2, trained_cases.compares, recipe=recipe, layout="fsdp2", **options))


@pytest.mark.parametrize(
    ("layout", "recipe"), [*(("tp_fsdp2", name) for name in IN_BYTES), ("tp", "rowwise"), ("tp", "blockwise")]
)
def test_tensor_parallel(ranks, layout, recipe):
    assert all(ranks.run(WORLDS[layout], trained_cases.compares_steps, recipe=recipe, layout=layout))


def test_8_bit_moments_in_cut_blocks_are_refused(ranks):
    for found in ranks.run(2, trained_cases.refused, moments="fp8"):
        assert re.search(r"columns are sharded at 69, inside of a block: use mom", found)


@pytest.mark.parametrize(
    ("recipe", "layout", "world", "optimizer"),
    [
        ("rowwise", "fsdp2", 4, "adamw foreach"),
        ("blockwise", "fsdp2", 4, "adamw foreach"),
        ("tensorwise", "fsdp2", 2, "adamw"),
        ("mxfp8", "fsdp2_kept", 2, "sgd"),
        ("blockwise", "fsdp2", 2, "adamw fused"),
        ("tensorwise", "hsdp", 4, "sgd foreach"),
        ("blockwise", "tp", 2, "sgd"),
        ("tensorwise", "tp_fsdp2", 4, "adamw foreach"),
    ],
)
def test_optimizers_of_torch_step_shards_to_the_codes_of_one_rank(ranks, recipe, layout, world, optimizer):
    for changed, steps, messages in ranks.run(
        world, trained_cases.steps_directly, recipe=recipe, layout=layout, optimizer=optimizer
    ):
        assert changed > 0.2
        assert (steps.steps, steps.unchanged) == (3, 0)
        # One call has the shards, and the other the whole weights to compare with.
        assert len(messages) == 2 + 2


def test_a_step_that_changes_no_shard_is_counted(ranks):
    options = {"recipe": "rowwise", "layout": "fsdp2", "optimizer": "sgd small"}
    for changed, steps, messages in ranks.run(2, trained_cases.steps_directly, **options):
        assert changed == 0
        assert (steps.steps, steps.unchanged) == (3, 3)
        assert "SGD writes to weights that are stored in 8 bits" in messages[0]
        assert "at most 0.00 % of their codes changed" in messages[0]


def test_recompute_gathers_as_often(ranks):
    without, with_recompute = (ranks.run(2, trained_cases.gathers, recompute=how)[0] for how in (None, "yes"))
    assert without == with_recompute


@pytest.mark.parametrize(
    ("recipe", "expected"), [("rowwise", False), ("mxfp8", False), ("blockwise", True), ("tensorwise", True)]
)
def test_one_reduction_where_ranks_share_blocks(ranks, recipe, expected):
    for found in ranks.run(2, trained_cases.reductions, recipe=recipe):
        assert bool(found) == expected, found


def equal(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.parametrize(
    ("recipe", "moments", "source", "target"),
    [
        ("rowwise", "fp8", ("fsdp2", 4), ("single", 1)),
        ("blockwise", "bf16", ("single", 1), ("fsdp2", 2)),
        ("tensorwise", "fp32", ("hsdp", 4), ("fsdp2_kept", 2)),
        ("mxfp8", "fp8", ("ddp", 2), ("fsdp2", 4)),
        ("blockwise", "bf16", ("fsdp2", 4), ("copies", 2)),
    ],
)
def test_three_and_three_steps_on_another_mesh_are_six(request, ranks, tmp_path, recipe, moments, source, target):
    options = {"folder": str(tmp_path / "state"), "recipe": recipe, "moments": moments, "steps": 3, "total": 6}
    saved, wanted, losses = ranks.run(source[1], trained_cases.save, layout=source[0], **options)[0]
    if target[0] == "copies":
        ranks = request.getfixturevalue("two_ranks")
    for loaded, found, after in ranks.run(target[1], trained_cases.load, layout=target[0], **options):
        values = [{name: x for name, x in each.items() if "values" in name} for each in (loaded, saved)]
        assert equal(*values)
        assert equal(found, wanted)
        assert torch.equal(torch.stack(after), torch.stack(losses))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp8"])
def test_through_high_precision_and_back(ranks, tmp_path, moments):
    options = {"folder": str(tmp_path / "state"), "recipe": "blockwise", "moments": moments}
    saved, _, _ = ranks.run(2, trained_cases.save, layout="fsdp2", steps=3, total=3, **options)[0]
    for found in ranks.run(2, trained_cases.through_high_precision, layout="fsdp2", **options):
        assert all(torch.equal(x, saved[name]) for name, x in found.items() if "values" in name)


def packed(mesh, optimizer):
    """Steps of codes of two a byte, whose rows ranks share unevenly: the codes of one rank, to the bit."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 64), nn.Linear(64, 21))
        tritonfp8.convert(model, "mxfp4_weights", filter=["0", "2"], weight_storage="quantized")
        models.append(model)
    whole, sharded = models
    fully_shard(sharded, mesh=mesh)
    steppers = [PACKED[optimizer](model.parameters()) for model in models]
    before = whole[0].weight.dequantize().clone()
    for seed in range(3):
        for model, stepper in zip(models, steppers, strict=True):
            # Each rank has the same rows, whose mean is exact.
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
            stepper.zero_grad()
            model(x).square().mean().backward()
            stepper.step()
    assert not torch.equal(whole[0].weight.dequantize(), before)
    for at in (0, 2):
        found = whole_weight(sharded[at].weight)
        assert torch.equal(found._qdata, whole[at].weight._qdata)
        assert torch.equal(found._scale.view(torch.uint8), whole[at].weight._scale.view(torch.uint8))


PACKED = {
    "ours": lambda params: tritonfp8.optim.AdamW(params, 1e-2, moments="fp8"),
    "masters": lambda params: tritonfp8.optim.with_masters(torch.optim.SGD)(params, 1.0),
    "torch's": lambda params: torch.optim.SGD(params, 0.1, foreach=False),
}


@pytest.mark.parametrize("optimizer", PACKED)
def test_codes_of_two_a_byte(ranks, optimizer):
    ranks.run(2, packed, optimizer)
