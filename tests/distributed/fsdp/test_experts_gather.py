"""FSDP2 gathers the weights of experts in 8 bits: losses and weights have the bits of a gather in high precision."""

import functools
from dataclasses import replace

import experts_gather_cases
import pytest
import torch
from experts_gather_cases import Setup
from mixtures import model_of

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.distributed.fsdp.byte_layout import MatricesLayout
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight
from tritonfp8.distributed.fsdp.orientations import weight_orientations

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]
QUANTIZED = ["tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8"]


# Plain FSDP2 gives the same bits with and without these, so one run of it stands for all of them.
LEAVE_FSDP2_ALONE = {"reshard": True, "recompute": False, "compiled": False}


@pytest.fixture(scope="module")
def off(ranks):
    """Runs without the 8-bit gather, each made once."""

    @functools.cache
    def run(world, setup):
        return ranks.run(world, experts_gather_cases.train, setup=setup, enabled=False)

    return lambda world, setup: run(world, replace(setup, **LEAVE_FSDP2_ALONE))


def assert_same(ranks, off, world, setup):
    """Train with the 8-bit gather and without it; returns how many bytes each gathers in a step."""
    on, plain = ranks.run(world, experts_gather_cases.train, setup=setup, enabled=True), off(world, setup)
    for (losses, digest, stuck, _, names), (expected, expected_digest, *_) in zip(on, plain, strict=True):
        assert losses == expected
        assert digest == expected_digest
        assert stuck == []
        assert names
    return on[0][3], plain[0][3]


# The second step is the first that gathers what the optimizer changed. Whether weights stay gathered is decided before
# any recipe is read: compiled mxfp8 below, and experts on GPUs, have the other choice too.
@pytest.mark.parametrize(("recipe", "reshard"), [*((name, True) for name in QUANTIZED), ("rowwise", False)])
def test_losses_and_weights_have_the_same_bits(ranks, off, recipe, reshard):
    gathered, plain = assert_same(ranks, off, 2, Setup(recipe, reshard=reshard))
    if reshard:
        # Routers and the head are gathered as they are.
        assert gathered < 0.6 * plain


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"recompute": True, "recipe": "blockwise"},
        {"micro_batches": 2},
        {"micro_batches": 2, "reshard": False, "recipe": "mxfp8"},
        {"param_dtype": None},
        {"param_dtype": None, "autocast": True},
        {"family": "gpt_oss"},
        {"family": "gpt_oss", "recipe": "tensorwise", "compiled": True},
        {"family": "qwen3_moe", "recipe": "mxfp8", "recompute": True},
    ],
    ids=str,
)
def test_of_other_models_and_setups(ranks, off, options):
    assert_same(ranks, off, 2, Setup(**options))


@pytest.mark.parametrize(("world", "experts", "recipe"), [(2, 5, "rowwise"), (4, 5, "tensorwise"), (4, 3, "mxfp8")])
def test_experts_that_do_not_divide_and_ranks_without_one(ranks, off, world, experts, recipe):
    assert_same(ranks, off, world, Setup(recipe, experts))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("rowwise", {}),
        ("rowwise_hp_grad_weight", {"recompute": True}),
        ("blockwise", {"recompute": True}),
        ("mxfp8", {"reshard": False}),
    ],
    ids=str,
)
def test_compiled_blocks(ranks, off, recipe, options):
    gathered, plain = assert_same(ranks, off, 2, Setup(recipe, compiled=True, **options))
    if not options:
        # Backward's operands are gathered in backward, not in forward as well.
        assert gathered < 0.6 * plain


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "actions",
    [
        ("swap", "swap back", "high precision", "swap"),
        ("revert",),
        ("no_grad", "inference", "block alone"),
        ("block alone", "copy", "once"),
    ],
    ids=str,
)
def test_between_steps(ranks, actions, reshard):
    setup = Setup(recipe="rowwise", reshard=reshard)
    on, off = (
        ranks.run(2, experts_gather_cases.after_actions, setup=setup, enabled=enabled, actions=actions)
        for enabled in (True, False)
    )
    assert on == off
    assert [stuck for _, stuck in on] == [[], []]


def test_an_evaluation_where_a_rank_has_no_expert(ranks):
    setup, actions = Setup(experts=3), ("no_grad", "inference")
    on, off = (
        ranks.run(4, experts_gather_cases.after_actions, setup=setup, enabled=enabled, actions=actions)
        for enabled in (True, False)
    )
    assert on == off


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shard_dim": 1}, "sharded along another dim than that of the experts"),
        ({"reshard": 2}, "resharded to fewer ranks"),
    ],
    ids=str,
)
def test_a_way_of_sharding_that_is_not_served_is_told_once(ranks, off, options, reason):
    assert_same(ranks, off, 4, Setup(**options))
    for texts in ranks.run(4, experts_gather_cases.warned, setup=Setup(**options)):
        assert len(texts) == 4
        assert all(reason in text for text in texts)
        assert texts[0].startswith("blocks.0.experts.gate_up_proj is gathered in high precision, not in 8 bits")


def test_float32_shards_can_be_quantized_as_they_are(ranks):
    for quantized, rounded in ranks.run(2, experts_gather_cases.master):
        assert quantized != rounded
        assert quantized == pytest.approx(rounded, rel=1e-2)


def test_errors(ranks):
    for texts in ranks.run(2, experts_gather_cases.errors):
        for text, message in zip(
            texts,
            (
                "ValueError: the weight of blocks.0.first is gathered in 8 bits already",
                "ValueError: the experts of the model are gathered in 8 bits already",
                "RuntimeError: the weight of blocks.0.experts.down_proj was assigned by param.data",
                "NotImplementedError: aten.sum.default needs the values of experts that FSDP gathered in 8 bits",
            ),
            strict=True,
        ):
            assert text.startswith(message), text


def test_operands_of_another_recipe_are_an_error():
    hp, rowwise = (recipes.get(name) for name in ("rowwise_hp_grad_weight", "rowwise"))
    layout = MatricesLayout(2, 32, 64, 1, weight_orientations(hp), together=True)
    sent = layout.pack(torch.randn(2, 32, 64), (0, 1))
    weight = GatheredWeight(layout.joined(sent, ()), None, layout, torch.float32)
    weight.operand(rowwise.output.rhs, False)
    with pytest.raises(ValueError, match="and their recipe reads .* transposed: swap recipes between steps"):
        weight.operand(rowwise.grad_input.rhs, True)


@pytest.mark.parametrize("recipe", ["bf16"])
def test_the_report_names_experts_in_high_precision(recipe):
    model = model_of("mixtral")
    tritonfp8.convert(model, {"*.0.mlp.experts": recipe, "*": "rowwise"})
    report = enable_float8_all_gather(model)
    assert report.skipped["model.layers.0.mlp.experts"] == "experts whose recipe reads their weights in high precision"
    assert report.converted["model.layers.1.mlp.experts"] == recipes.get("rowwise")


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_bytes_of_each_pass(recipe):
    """Half of those of bfloat16, and the scales; a rank sends as many whatever it has."""
    orientations = weight_orientations(recipes.get(recipe))
    layout = MatricesLayout(6, 512, 384, 4, orientations, together=False)
    for rank_experts in (2, 1, 0):
        shard = torch.randn(rank_experts, 512, 384)
        for i in range(len(orientations)):
            sent = layout.pack(shard, (i,))
            assert sum(x.numel() for x in sent) <= 0.52 * 2 * layout.shard_experts * 512 * 384
            assert [x.numel() for x in sent] == [2 * 512 * 384, layout.scales_size]


# On GPUs.


@pytest.mark.multigpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_on_gpus(gpus, recipe, compiled):
    for reshard in (True,) if compiled else (True, False):
        setup = Setup(recipe, reshard=reshard, compiled=compiled)
        on, off = (
            gpus.run(2, experts_gather_cases.train, timeout=300, setup=setup, enabled=enabled)
            for enabled in (True, False)
        )
        assert [row[:3] for row in on] == [row[:3] for row in off]
        assert [row[2] for row in on] == [[], []]
        if reshard:
            assert on[0][3] < 0.6 * off[0][3]


@pytest.mark.multigpu
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_mixtures_of_transformers_on_gpus(gpus, family):
    setup = Setup(family=family, recompute=family == "qwen3_moe")
    on, off = (gpus.run(2, experts_gather_cases.train, setup=setup, enabled=enabled) for enabled in (True, False))
    assert [row[:3] for row in on] == [row[:3] for row in off]
    assert [row[2] for row in on] == [[], []]
