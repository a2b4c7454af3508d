"""health_every: the figures of sampled steps in the logs of Hugging Face's Trainer."""

import json

import pytest
import torch
from callback_cases import llama, trainer, weights
from transformers import TrainerCallback

import tritonfp8
from tritonfp8.integrations.transformers import Float8Callback, Float8Config
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.xdist_group("trainers")

NUMBERS = {"fp8/worst_sqnr_db", "fp8/flushed_share", "fp8/saturated_share", "fp8/flops_share"}
TEXTS = {"fp8/worst_layer", "fp8/worst_operand"}


class Hooked(TrainerCallback):
    """Notes in which steps layers have hooks, and what reporters get to log."""

    def __init__(self):
        self.during, self.between, self.logs = [], [], []

    def on_substep_end(self, args, state, control, model, **kwargs):
        self.during.append((state.global_step, hooks_of(model)))

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.during.append((state.global_step, hooks_of(model)))

    def on_evaluate(self, args, state, control, model, **kwargs):
        self.between.append((state.global_step, hooks_of(model)))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, logs))


def hooks_of(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def fp8_logs(run):
    return {entry["step"]: entry for entry in run.state.log_history if "fp8/flops_share" in entry}


def train(folder, *callbacks, model=None, resume=None, **options):
    run = trainer(llama() if model is None else model, folder, *callbacks, **options)
    run.train(resume_from_checkpoint=resume)
    return run


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_nth_optimizer_step_is_logged_and_no_bit_changes(tmp_path, accumulate):
    options = {"gradient_accumulation_steps": accumulate, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 5}
    hooked = Hooked()
    run = train(tmp_path, Float8Callback("rowwise", health_every=2), hooked, **options)
    found = fp8_logs(run)
    # The Trainer has counted the step when it logs its loss, too.
    assert list(found) == [1, 3, 5]
    assert [step for step, logs in hooked.logs if "fp8/flops_share" in logs] == [1, 3, 5]
    for entry in found.values():
        assert entry.keys() == {*NUMBERS, *TEXTS, "epoch", "step"}
        assert 20 < entry["fp8/worst_sqnr_db"] < 40
        assert entry["fp8/worst_layer"] in dict(run.model.named_modules())
        assert entry["fp8/flops_share"] == pytest.approx(tritonfp8.conversion.fp8_share(run.model))
    assert {step for step, hooks in hooked.during if hooks} == {0, 2, 4}
    assert len(hooked.during) == 5 * accumulate
    assert not any(hooks for _, hooks in hooked.between)
    assert len([entry for entry in run.state.log_history if "loss" in entry]) == 5
    plain = train(tmp_path, Float8Callback("rowwise"), **options)
    assert fp8_logs(plain) == {}
    assert_bitwise_equal(weights(run.model), weights(plain.model))


def test_the_figures_are_monitor_s(tmp_path):
    model = llama()
    tritonfp8.convert(model, "tensorwise")
    stats = tritonfp8.monitor(model)

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            stats.__enter__()

        def on_step_end(self, args, state, control, **kwargs):
            stats.__exit__(None, None, None)

    train(tmp_path, Watch(), model=model, max_steps=1)
    logged = fp8_logs(train(tmp_path, Float8Callback("tensorwise", health_every=50), max_steps=1))[1]
    assert {name: logged[name] for name in NUMBERS | TEXTS} == stats.summary()


def test_a_resumed_run_samples_the_same_steps_after_a_schedule(tmp_path):
    def callback():
        return Float8Callback(Float8Config(schedule=[(0, "bf16"), (2, "rowwise")], health_every=2))

    whole = train(tmp_path, callback(), save_strategy="steps", save_steps=3, max_steps=6)
    assert {step: entry["fp8/flops_share"] > 0 for step, entry in fp8_logs(whole).items()} == {
        1: False, 3: True, 5: True,
    }  # fmt: skip
    # Nothing was quantized.
    assert not TEXTS & fp8_logs(whole)[1].keys()
    resumed = train(tmp_path, callback(), resume=str(tmp_path / "checkpoint-3"), max_steps=6)
    assert fp8_logs(resumed) == fp8_logs(whole)
    assert_bitwise_equal(weights(resumed.model), weights(whole.model))
    saved = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in saved["log_history"] if "fp8/worst_sqnr_db" in entry] == [3]


def test_a_compiled_model_is_sampled(tmp_path):
    torch._dynamo.reset()
    model = torch.compile(llama(), backend="aot_eager")
    run = train(tmp_path, Float8Callback(health_every=2), model=model, remove_unused_columns=False, max_steps=4)
    assert list(fp8_logs(run)) == [1, 3]


def test_tensorboard_gets_numbers_and_names(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    run = trainer(llama(), tmp_path, Float8Callback(health_every=2))
    from transformers.integrations import TensorBoardCallback

    # As report_to puts it: before the callbacks of the caller.
    run.callback_handler.callbacks.insert(1, TensorBoardCallback())
    run.train()
    board = accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    for name in NUMBERS:
        assert [event.step for event in board.Scalars(f"train/{name}")] == [1, 3]
    text = board.Tensors("train/fp8/worst_layer/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == fp8_logs(run)[1]["fp8/worst_layer"]


def test_an_error_in_a_sampled_step_leaves_nothing_to_the_next_training(tmp_path):
    callback = Float8Callback(health_every=2)
    run = trainer(llama(), tmp_path, callback)
    boom = run.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.train()
    boom.remove()
    run.train()
    assert list(fp8_logs(run)) == [1, 3]
    assert hooks_of(run.model) == 0


def test_a_model_without_a_converted_layer_is_not_sampled(tmp_path):
    # Each layer would get slower.
    callback = Float8Callback(Float8Config(filter="auto"), health_every=1)
    assert fp8_logs(train(tmp_path, callback, max_steps=1)) == {}
    assert callback.report.is_empty


def test_mistakes_are_errors():
    for make in (Float8Callback, Float8Config):
        with pytest.raises(ValueError, match="health_every must be at least 1; got 0"):
            make(health_every=0)
        with pytest.raises(TypeError, match="health_every must be an int; got float"):
            make(health_every=0.5)
    assert Float8Callback(Float8Config("mxfp8", health_every=4)).config.health_every == 4
    assert Float8Callback(Float8Config("mxfp8", health_every=4), health_every=2).config.health_every == 2
