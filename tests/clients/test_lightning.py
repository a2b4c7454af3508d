"""The precision plugins in Lightning's Trainer and in Fabric."""

import csv

import lightning
import lightning_cases
import pytest
import torch
from callback_cases import assert_trained, weights
from cases import QUANTIZED, each_recipe
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from mixtures import experts_of, model_of
from torch.utils.data import DataLoader

import tritonfp8
from tritonfp8.integrations.lightning import fabric_plugin, trainer_plugin
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.specs.testing import assert_bitwise_equal

PROCESSES = 2

pytestmark = [pytest.mark.xdist_group("trainers"), pytest.mark.one_in(2)]


class Module(lightning.LightningModule):
    """``prepare(model)`` runs before the Trainer is there."""

    make = staticmethod(lightning_cases.model)

    def __init__(self, prepare=lambda model: None):
        super().__init__()
        self.model = self.make()
        prepare(self.model)

    def training_step(self, batch, index):
        return self.model(batch).float().square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LanguageModel(Module):
    """A mixture of experts, on random tokens."""

    make = staticmethod(lambda: model_of("mixtral"))

    def training_step(self, batch, index):
        tokens = batch.abs().mul(20).long().clamp(max=95)
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def fit(module, folder, rows=24, **options):
    rows = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **{"max_epochs": 1, "logger": False, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=8))
    return trainer


@pytest.mark.one_in(6)
@each_recipe
def test_the_trainer_trains_as_after_convert(tmp_path, recipe):
    plugin, module = trainer_plugin(recipe, precision="32-true"), Module()
    before, expected = weights(module), Module(lambda model: tritonfp8.convert(model, recipe))
    fit(module, tmp_path, plugins=[plugin])
    assert list(plugin.report.converted) == ["model.0", "model.2", "model.4"]
    fit(expected, tmp_path)
    assert_trained(module, before, expected)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)])
def test_the_trainer_converts_in_other_precisions(tmp_path, precision, dtype):
    plugin, module = trainer_plugin("blockwise", precision=precision), Module()
    before = weights(module)
    fit(module, tmp_path, plugins=[plugin])
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert len(plugin.report.converted) == 3
    assert_trained(module.float(), before)


def test_patterns_choose_layers(tmp_path):
    plugin = trainer_plugin({"*.2": "rowwise"}, precision="32-true")
    fit(Module(), tmp_path, plugins=[plugin])
    assert list(plugin.report.converted) == ["model.2"]


def test_experts_are_converted_when_asked_for(tmp_path):
    plugin, module = trainer_plugin("rowwise", precision="32-true"), LanguageModel()
    before = weights(module)
    expected = LanguageModel(lambda model: tritonfp8.convert(model, "rowwise"))
    fit(module, tmp_path, plugins=[plugin])
    assert all(is_converted_experts(each) for each in experts_of(module).values())
    fit(expected, tmp_path)
    assert_trained(module, before, expected)


def check_the_gather(ranks, case, count, **options):
    """The gather in 8 bits changes no loss; all parameters train."""
    on, off = (ranks.run(2, case, gather=gather, **options) for gather in (True, False))
    for (losses, stuck, gathered), (expected, others, none) in zip(on, off, strict=True):
        assert stuck == others == []
        assert (gathered, none) == (3, 0)
        assert losses == expected
        assert len(set(losses)) == count


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_fabric_with_fsdp2_has_the_same_losses_with_and_without_the_gather(ranks, recipe):
    check_the_gather(ranks, lightning_cases.fabric_losses, 3, recipe=recipe)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_with_fsdp2_has_the_same_losses_with_and_without_the_gather(ranks, tmp_path, accumulate, recipe):
    options = {"recipe": recipe, "folder": tmp_path, "accumulate": accumulate}
    check_the_gather(ranks, lightning_cases.trainer_losses, 4 * accumulate, **options)


@pytest.mark.parametrize("gather", [True, False], ids=["gather", "without"])
def test_a_trainer_with_fsdp2_resumes_to_the_same_losses(ranks, tmp_path, gather):
    options = {"recipe": "blockwise", "gather": gather, "folder": tmp_path}
    whole = ranks.run(2, lightning_cases.trainer_losses, **options)
    first = ranks.run(2, lightning_cases.trainer_losses, steps=2, save=tmp_path / "saved", **options)
    rest = ranks.run(2, lightning_cases.trainer_losses, resume=tmp_path / "saved", **options)
    for (losses, _, _), (before, _, _), (after, _, _) in zip(whole, first, rest, strict=True):
        assert len(after) == 2
        assert before + after == losses


def test_another_precision_is_an_error():
    with pytest.raises(ValueError, match="bf16-mixed"):
        fabric_plugin("rowwise", precision="16-mixed")


def hooks_of(module):
    return sum(len(each._forward_hooks) for each in module.modules())


class Watched(Module):
    """Notes the optimizer steps in which layers have hooks."""

    def __init__(self):
        super().__init__()
        self.hooked = []

    def training_step(self, batch, index):
        if hooks_of(self):
            self.hooked.append(self.global_step)
        return super().training_step(batch, index)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_nth_optimizer_step_is_logged_and_no_bit_changes(tmp_path, accumulate):
    boards = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loggers = [CSVLogger(tmp_path, flush_logs_every_n_steps=1), TensorBoardLogger(tmp_path, name="board")]
    module, options = Watched(), {"rows": 40 * accumulate, "accumulate_grad_batches": accumulate}
    plugin = trainer_plugin("tensorwise", precision="32-true", health_every=2)
    fit(module, tmp_path, plugins=[plugin], logger=loggers, **options)
    assert module.hooked == [step for step in (0, 2, 4) for _ in range(accumulate)]
    assert hooks_of(module) == 0
    with open(f"{loggers[0].log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["fp8/flops_share"]]
    assert [int(row["step"]) for row in rows] == [0, 2, 4]
    board = boards.EventAccumulator(loggers[1].log_dir)
    board.Reload()
    for row, event in zip(rows, board.Scalars("fp8/worst_sqnr_db"), strict=True):
        assert (event.step, event.value) == (int(row["step"]), pytest.approx(float(row["fp8/worst_sqnr_db"])))
        assert 20 < event.value < 40
        assert row["fp8/worst_layer"] in ("model.0", "model.2", "model.4")
        assert float(row["fp8/flops_share"]) == 1.0
    text = board.Tensors("fp8/worst_layer/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == rows[0]["fp8/worst_layer"]
    plain = Watched()
    fit(plain, tmp_path, plugins=[trainer_plugin("tensorwise", precision="32-true")], **options)
    assert plain.hooked == []
    assert_bitwise_equal(weights(module), weights(plain))


def test_a_second_fit_and_one_that_fails_leave_no_hooks(tmp_path):
    plugin, module = trainer_plugin("rowwise", precision="32-true", health_every=1), Module()
    fit(module, tmp_path, plugins=[plugin])
    trainer = fit(module, tmp_path, plugins=[plugin])
    assert trainer.callbacks.count(plugin.health) == 1
    module.training_step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, tmp_path, plugins=[plugin])
    assert hooks_of(module) == 0


def test_sampled_steps_with_fsdp2_have_the_same_losses(ranks, tmp_path):
    options = {"recipe": "rowwise", "gather": True, "folder": tmp_path, "accumulate": 2}
    sampled = ranks.run(2, lightning_cases.trainer_losses, health=2, **options)
    assert sampled == ranks.run(2, lightning_cases.trainer_losses, **options)


def test_unusable_numbers_of_steps_are_errors():
    with pytest.raises(ValueError, match="health_every must be at least 1; got 0"):
        trainer_plugin(health_every=0)
    with pytest.raises(TypeError, match="health_every must be an int; got str"):
        trainer_plugin(health_every="50")
