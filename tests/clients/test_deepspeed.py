"""DeepSpeed's ZeRO in Hugging Face's Trainer, with Float8Callback, on two processes of gloo."""

import deepspeed_cases
import mixtures
import pytest
from process_group import RankError

from tritonfp8 import recipes

PROCESSES = 2
pytestmark = [pytest.mark.xdist_group("trainers"), pytest.mark.one_in(2)]


UNCLIPPED = 1e6
# DeepSpeed and torch compute the factor of clipped gradients by other expressions, so it differs by an ulp, 2^-23, on
# some CPUs. That moves about one code in a million, by 1/16 of a value: one term among the many of an activation.
OF_A_CLIPPED_STEP = 1e-4


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("recipe", "max_grad_norm"), [("rowwise", 1.0), *((recipe, UNCLIPPED) for recipe in recipes.names())]
)
@pytest.mark.parametrize("stage", [1, 2])
def test_every_weight_moves_and_the_losses_are_those_of_ddp(ranks, stage, recipe, max_grad_norm, tmp_path):
    options = {"folder": tmp_path, "recipe": recipe, "max_grad_norm": max_grad_norm}
    expected, found = (ranks.run(2, deepspeed_cases.train, stage=each, **options) for each in (None, stage))
    for row, reference in zip(found, expected, strict=True):
        assert reference["wrapped"] == "DistributedDataParallel"
        assert row["wrapped"] == "DeepSpeedEngine"
        assert row["converted"] == 14
        assert row["stuck"] == []
        assert any("21 of 21 trainable weights moved; failures: 0" in each for each in row["messages"])
        if max_grad_norm == UNCLIPPED:
            assert row["losses"] == reference["losses"]
        else:
            # The first loss is older than the first step.
            assert row["losses"][0] == reference["losses"][0]
            assert row["losses"] == pytest.approx(reference["losses"], rel=OF_A_CLIPPED_STEP)


@pytest.mark.parametrize("family", mixtures.FAMILIES)
def test_experts_have_the_losses_of_ddp(ranks, family, tmp_path):
    options = {"folder": tmp_path, "family": family, "max_grad_norm": UNCLIPPED}
    expected, found = (ranks.run(2, deepspeed_cases.train, stage=stage, **options) for stage in (None, 2))
    for row, reference in zip(found, expected, strict=True):
        assert row["experts"] == reference["experts"] > 0
        assert row["stuck"] == []
        assert row["losses"] == reference["losses"]


def test_bfloat16_with_masters_of_the_engine(ranks, tmp_path):
    expected = ranks.run(2, deepspeed_cases.train, folder=tmp_path)
    found = ranks.run(2, deepspeed_cases.train, folder=tmp_path, stage=2, bfloat16=True)
    for row, reference in zip(found, expected, strict=True):
        assert row["stuck"] == []
        assert row["losses"] == pytest.approx(reference["losses"], rel=1e-2)


def test_a_weight_that_the_engine_does_not_move_is_named(ranks, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    for row in ranks.run(2, deepspeed_cases.train, folder=tmp_path, stage=1, frozen=name):
        assert any("20 of 21 trainable weights moved; failures: 1" in each for each in row["messages"])


def test_gradients_that_are_nan_are_reported(ranks, tmp_path):
    for row in ranks.run(2, deepspeed_cases.train, folder=tmp_path, stage=1, poison="model.norm.weight"):
        assert any("gradients that are NaN or infinite" in each for each in row["messages"])


def test_without_a_norm_it_is_said_that_nothing_is_reported(ranks, tmp_path):
    options = {"folder": tmp_path, "stage": 1, "norm": False, "poison": "model.norm.weight"}
    for row in ranks.run(2, deepspeed_cases.train, **options):
        assert sum("gives no norm of the gradients" in each for each in row["messages"]) == 1


def test_accumulated_gradients_give_the_losses_of_ddp(ranks, tmp_path):
    accumulate = {"folder": tmp_path, "gradient_accumulation_steps": 2, "max_grad_norm": UNCLIPPED}
    expected, found = (ranks.run(2, deepspeed_cases.train, stage=stage, **accumulate) for stage in (None, 2))
    for row, reference in zip(found, expected, strict=True):
        assert row["stuck"] == []
        assert row["losses"] == reference["losses"]


def test_a_resumed_run_goes_on_to_the_same_bits(ranks, tmp_path):
    saving = {"stage": 1, "save_strategy": "steps", "save_steps": 2}
    whole = ranks.run(2, deepspeed_cases.train, folder=tmp_path / "whole", **saving)
    resumed = ranks.run(
        2, deepspeed_cases.train, folder=tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"), **saving
    )
    for row, reference in zip(resumed, whole, strict=True):
        assert len(row["losses"]) == 4
        assert row["losses"] == reference["losses"]
        assert row["weights"] == reference["weights"]


def test_stage_three_is_an_error_before_the_training(ranks, tmp_path):
    with pytest.raises(RankError, match="ZeRO-3, which is not supported: use ZeRO-1 or ZeRO-2, or FSDP2"):
        ranks.run(2, deepspeed_cases.train, folder=tmp_path, stage=3)
