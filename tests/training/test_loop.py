import copy
import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from models import SMALL
from torch.utils.flop_counter import flop_registry

from tritonfp8 import recipes
from tritonfp8.compat import hardware
from tritonfp8.training import corpus, loop, report
from tritonfp8.training import models as training_models
from tritonfp8.training import settings as training_settings

pytestmark = pytest.mark.one_in(2)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


@pytest.fixture
def settings(config):
    def make(**changes):
        given = {
            "model": config, "recipes": ("bf16", "rowwise"), "steps": 6, "batch_size": 2, "seq_len": 20, "lr": 1e-2,
            "device": "cpu", "data": __file__,
        }  # fmt: skip
        return training_settings.Settings.resolve(**{**given, **changes})

    return make


@pytest.fixture
def compare(settings):
    def run(observer=None, **changes):
        return loop.run(training_settings.prepare(settings(**changes)), observer)

    return run


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tny"}, "no model is named 'tny'.*did you mean 'tiny'"),
        ({"model": "nope"}, r"no model is named 'nope', and no file or folder has this path\. Models: "),
        ({"recipes": ("rowwize",)}, "did you mean 'rowwise'"),
        ({"recipes": ()}, "at least one recipe is needed"),
        ({"recipes": ("bf16", "rowwise", "bf16")}, "got more than once: bf16"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"batch_size": -1}, "batch_size must be at least 1; got -1"),
        ({"seq_len": 0}, "seq_len must be at least 1; got 0"),
        ({"lr": 0.0}, "learning rate must be a positive number; got 0.0"),
        ({"lr": math.nan}, "learning rate must be a positive number; got nan"),
        ({"seed": -1}, "seed must be from 0"),
        ({"device": "gpu"}, "device must be 'cpu' or 'cuda', or 'cuda:N'; got 'gpu'"),
        ({"device": "meta"}, "device must be 'cpu' or 'cuda', or 'cuda:N'; got 'meta'"),
        ({"device": "cuda:99"}, "'cuda:99' does not exist: torch .* finds"),
    ],
)
def test_bad_settings_are_refused(settings, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_defaults_come_from_the_device_and_the_model(settings):
    default = training_settings.Settings.resolve(device="cpu")
    expected = dataclasses.asdict(training_settings.DEFAULTS["cpu"])
    assert {name: getattr(default, name) for name in expected} == expected
    assert default.lr == training_models.MODELS["tiny"].lr
    assert settings(lr=None).lr == training_models.CONFIG_FILE_LR
    assert default.recipes == ("bf16", "rowwise", "blockwise")


def fake_gpu(monkeypatch, name, capability):
    abilities = dataclasses.replace(hardware.CPU, name=name, capability=capability, has_fp8_mma=capability >= (8, 9))
    for function, value in (("is_available", True), ("device_count", 1), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, function, lambda value=value: value)
    monkeypatch.setattr(hardware, "abilities", lambda device: abilities)


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [(None, (0, 0), "No CUDA GPU"), ("NVIDIA A100", (8, 0), "NVIDIA A100 (sm_80) has no FP8 tensor cores")],
)
def test_without_fp8_the_cpu_is_taken_with_a_word_about_speeds(monkeypatch, name, capability, words):
    if name is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    else:
        fake_gpu(monkeypatch, name, capability)
        with pytest.raises(ValueError, match=r"NVIDIA A100 \(sm_80\) has no FP8 tensor cores.*use 'cpu'"):
            training_settings.choose_device("cuda")
    device, notice = training_settings.choose_device(None)
    assert device.type == "cpu"
    assert words in notice
    assert "speeds mean nothing" in notice


def test_gpu_with_fp8_is_taken_without_a_word(monkeypatch):
    fake_gpu(monkeypatch, "NVIDIA L4", (8, 9))
    for asked in (None, "cuda"):
        assert training_settings.choose_device(asked) == (torch.device("cuda", 0), None)
    assert training_settings.choose_device("cpu")[0] == torch.device("cpu")


# Models


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_named_models_have_the_sizes_they_are_named_after():
    with torch.device("meta"):
        models = {name: training_models.build_model(name, 1024, 0) for name in training_models.MODELS}
    assert 1e6 < parameters(models["tiny"]) < 2e6
    assert 150e6 < parameters(models["160m"]) < 170e6
    assert 0.9e9 < parameters(models["1b"]) < 1.1e9
    # Llama-3-8B: 6.98 G parameters in 32 layers.
    assert len(models["8b-slice"].model.layers) == 4
    assert parameters(models["8b-slice"].model.layers) / 4 * 32 == pytest.approx(6.98e9, rel=0.001)
    for model in models.values():
        assert model.lm_head.weight is not model.model.embed_tokens.weight
        assert model.lm_head.out_features == 256


def test_weights_depend_on_the_seed_alone(config, tmp_path):
    models = (training_models.build_model(config, 20, seed) for seed in (0, 0, 1))
    first, again, other = (torch.nn.utils.parameters_to_vector(model.parameters()) for model in models)
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # A folder with a config is a model, too.
    model = training_models.build_model(str(tmp_path), 20, 0)
    assert model.config.hidden_size == SMALL["hidden_size"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a transformers config"),
        ("[1]", "is not a transformers config: a JSON object is needed"),
        ("{}", "is not a transformers config"),
        (json.dumps({**SMALL, "model_type": "no such model"}), "is not a transformers config"),
        (json.dumps({"model_type": "vit"}), "vocab_size must be at least 256; .* has None"),
        (json.dumps({"model_type": "t5", "vocab_size": 300}), "is not the config of a causal language model"),
        (json.dumps({**SMALL, "vocab_size": 255}), "vocab_size must be at least 256; .* has 255"),
        (json.dumps({**SMALL, "max_position_embeddings": 19}), "seq_len must be at most 19"),
    ],
)
def test_config_that_cannot_be_trained_is_refused(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        training_models.build_model(str(path), 20, 0)
    assert str(path) in str(error.value)


def test_missing_packages_are_named_with_what_to_install(monkeypatch, settings):
    monkeypatch.setattr(training_models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'transformers and matplotlib: pip install "tritonfp8\[train\]"'):
        training_settings.prepare(settings())


# The loop


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    factors = [loop.lr_factor(step, 200) for step in range(200)]
    assert factors[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert factors[20] == 1.0
    assert factors[20:] == sorted(factors[20:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)
    assert loop.lr_factor(0, 1) == 1.0
    assert loop.lr_factor(99, 100_000) == 1.0


def test_the_noise_of_a_comparison_is_a_run_of_its_own(compare):
    """bf16 from slightly other weights: nothing is converted, losses are close and not equal."""
    bf16, perturbed = compare(recipes=("bf16", training_settings.PERTURBED)).runs
    assert not perturbed.converted
    assert perturbed.losses != bf16.losses
    assert perturbed.losses == pytest.approx(bf16.losses, rel=1e-2)


def test_losses_are_the_same_for_the_same_seed(compare):
    first, again, other = compare(), compare(), compare(seed=1)
    assert [run.losses for run in first.runs] == [run.losses for run in again.runs]
    assert first.runs[0].losses != other.runs[0].losses


def test_recipes_start_from_the_same_weights_and_text(compare):
    result = compare(recipes=("rowwise", "bf16", "blockwise"))
    base = result.run_of("bf16")
    for run in result.runs:
        assert run.failure is None
        assert len(run.losses) == len(run.step_seconds) == 6
        assert run.losses[0] == pytest.approx(base.losses[0], rel=1e-2)
    assert result.run_of("rowwise").losses[0] != base.losses[0]
    # An earlier recipe leaves nothing behind in a later one.
    assert compare(recipes=("bf16",)).runs[0].losses == base.losses


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "mxfp8"])
def test_the_model_learns(compare, recipe):
    (run,) = compare(recipes=(recipe,), steps=40, batch_size=8).runs
    assert run.failure is None
    assert sum(run.losses[-5:]) / 5 < run.losses[0] - 1.0


def weights_of(result, part=""):
    """The number of elements of the weights of linear layers whose names have this part."""
    modules = result.job.model.named_modules()
    return sum(m.weight.numel() for name, m in modules if isinstance(m, torch.nn.Linear) and part in name)


def head_flops(result):
    """In a step. The head stays in high precision, so its GEMMs are torch's and not counted."""
    return 6 * result.job.model.lm_head.weight.numel() * 2 * 20


@pytest.mark.parametrize("recipe", [name for name in recipes.names() if name != "bf16"])
def test_share_is_counted_and_is_what_the_recipe_states(compare, recipe):
    result = compare(recipes=(recipe,), steps=2)
    (run,) = result.runs
    assert run.failure is None
    head = head_flops(result)
    assert sum(run.flops.values()) == 2 * (result.linear_flops - head)
    shares = report.summarize(result, run).shares
    converted = 1 - head / result.linear_flops
    assert shares["reference"] == pytest.approx(converted * recipes.get(recipe).quantized_share)
    assert list(run.skipped) == ["lm_head"]


def test_layers_left_as_they_are_count_in_the_denominator(compare, monkeypatch):
    convert = functools.partial(loop.convert, filter=lambda module, fqn: "mlp" in fqn)
    monkeypatch.setattr(loop, "convert", lambda model, recipe, **options: convert(model, recipe))
    result = compare(recipes=("rowwise",), steps=1)
    (run,) = result.runs
    mlp, everything = weights_of(result, "mlp"), weights_of(result)
    assert report.summarize(result, run).shares["reference"] == pytest.approx(mlp / everything)
    assert all("mlp" in name for name in run.converted)
    assert "lm_head" in run.skipped


@pytest.mark.slow
def test_compiled_losses_are_close_to_eager_and_counted(compare, config, monkeypatch):
    # The layers are tested with Inductor. Compiling C++ for this model would take half a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    Path(config).write_text(json.dumps({**SMALL, "num_hidden_layers": 1}))
    eager = compare(recipes=("rowwise",), steps=3)
    compiled = compare(recipes=("rowwise",), steps=3, compile=True)
    assert compiled.runs[0].failure is None
    assert compiled.runs[0].losses == pytest.approx(eager.runs[0].losses, rel=1e-2)
    assert compiled.runs[0].flops == eager.runs[0].flops


@pytest.mark.parametrize(("flops_a_thread", "threads"), [(10**20, 1), (1, 3)])
def test_threads_are_as_many_as_the_work_is_worth(compare, monkeypatch, flops_a_thread, threads):
    seen = []
    monkeypatch.setattr(loop, "FLOPS_A_THREAD", flops_a_thread)
    monkeypatch.setattr(loop, "convert", lambda *args, **options: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        result = compare(recipes=("rowwise",))
        assert seen == [result.threads] == [threads]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_held_out_loss_is_the_mean_over_text_that_is_not_trained_on(settings, tmp_path):
    job = training_settings.prepare(settings(recipes=("bf16",), steps=30))
    text = job.text.held_out
    model = copy.deepcopy(job.model)
    found = loop.held_out_loss(job, model)
    count = min(len(text) // (job.settings.seq_len + 1), job.settings.steps * job.settings.batch_size // 10)
    assert count > 1
    windows = torch.cat(list(corpus.windows(text, count=count, batch_size=1, seq_len=job.settings.seq_len))).long()
    with torch.no_grad():
        assert found == pytest.approx(loop.next_token_loss(model, windows).item(), rel=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())
    (run,) = loop.run(job).runs
    # Training changes the weights, and so the loss.
    assert abs(run.held_out_loss - found) > 0.01
    # A text that is too short to hold any out has no such loss.
    (tmp_path / "short.txt").write_text("A text of a few hundred bytes. " * 10)
    job = training_settings.prepare(settings(recipes=("bf16",), data=tmp_path / "short.txt"))
    assert loop.run(job).runs[0].held_out_loss is None


def test_interrupt_keeps_the_steps_done_and_ends_the_run(compare):
    class CtrlC(loop.RunObserver):
        def stepped(self, step, loss, tokens_per_second):
            if step == 4:
                raise KeyboardInterrupt

    result = compare(CtrlC(), recipes=("rowwise", "blockwise"))
    assert result.interrupted
    (run,) = result.runs
    assert (run.recipe, len(run.losses), len(run.step_seconds), run.interrupted) == ("rowwise", 4, 4, True)
    assert sum(run.flops.values()) == 4 * (result.linear_flops - head_flops(result))


def test_failure_of_a_recipe_is_noted_and_the_next_one_runs(compare, monkeypatch):
    convert = loop.convert

    def broken(model, recipe, **options):
        if recipe == "rowwise":
            raise RuntimeError("out of luck\nwith details")
        return convert(model, recipe)

    monkeypatch.setattr(loop, "convert", broken)
    result = compare(recipes=("bf16", "rowwise", "blockwise"))
    assert [run.failure for run in result.runs] == [None, "RuntimeError: out of luck", None]
    assert "with details" in result.runs[1].details
    assert [len(run.losses) for run in result.runs] == [6, 0, 6]
    assert not result.interrupted


@pytest.mark.gpu
@pytest.mark.slow
def test_every_recipe_trains_on_the_gpu():
    names = tuple(recipes.names())
    options = {"steps": 100, "batch_size": 16, "seq_len": 512, "device": "cuda"}
    settings = training_settings.Settings.resolve(model="tiny", recipes=names, **options)
    result = loop.run(training_settings.prepare(settings))
    assert settings.compile
    for run in result.runs:
        summary = report.summarize(result, run)
        assert run.failure is None
        assert summary.first_non_finite is None
        assert abs(summary.difference) < 0.02
        assert summary.peak_bytes > 0
        assert summary.shares.get("reference", 0) == 0
        # Of the converted layers: the head stays in high precision.
        total = sum(run.flops.values())
        quantized = sum(run.flops.get(kind, 0) for kind in ("fp8", "dequantized", "emulated"))
        assert quantized == pytest.approx(recipes.get(run.recipe).quantized_share * total)


def test_flops_of_attention_are_not_asked_for(compare, monkeypatch):
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setitem(flop_registry, op, lambda *args, **options: pytest.fail("torch's refuses grouped queries"))
    assert compare(recipes=("bf16",), steps=1).linear_flops
