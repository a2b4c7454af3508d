"""``tritonfp8.advise``: measured on the CPU, predicted for a GPU, and what it refuses."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import tritonfp8
from tritonfp8.advice import measure, result, run


def test_every_layer_block_and_step_is_measured(advise):
    found = advise("rowwise", "blockwise", compile=["none", "block"], check=True)
    assert found.measured
    assert found.tokens == 64
    assert {(row.layer, row.contender) for row in found.layers} >= {
        ("embed", "bf16"), ("lm_head", "bf16"), ("embed", "rowwise"), ("blocks.1-3.up (3x)", "blockwise"),
    }  # fmt: skip
    assert ("lm_head", "rowwise") not in {(row.layer, row.contender) for row in found.layers}
    wanted = {(name, mode) for name in ("bf16", "rowwise", "blockwise") for mode in ("none", "block")}
    assert {(row.contender, row.mode) for row in found.steps} >= wanted
    assert {(row.contender, row.mode, row.count) for row in found.blocks} >= {(*each, 3) for each in wanted}
    # The reference of a CPU is slower than bf16.
    assert found.recommendation.contender == "bf16"
    assert found.recommendation.layers is None
    assert [each.contender for each in found.checks] == ["bf16"]
    text = str(found)
    assert "measured on" in text
    assert "stay in bf16" in text


def test_the_model_is_as_before(model, x, advise):
    before = {name: p.clone() for name, p in model.named_parameters()}
    advise(compile=["block"])
    assert {type(module) for module in model.modules()} >= {nn.Linear}
    assert not any("Float8" in type(module).__name__ for module in model.modules())
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_a_step_is_the_first_blocks_and_the_ones_left_out(timing):
    found = measure.extended(timing(10.0, host=3.0), [(4, timing(2.0, host=1.0)), (1, timing(5.0, host=5.0))])
    assert found.seconds == 10 + 8 + 5
    assert found.host_seconds == 3 + 4 + 5
    # The host is the longer of the two.
    host = measure.extended(timing(1.0, host=3.0, gpu=1.0), [(4, timing(2.0, host=2.0, gpu=0.5))])
    assert (host.seconds, host.gpu_seconds) == (11.0, 3.0)


def test_a_kind_of_block_compiles_once(timing):
    first, block = (dataclasses.replace(timing(1.0), first_seconds=seconds) for seconds in (2.0, 30.0))
    assert measure.extended(first, [(31, block), (0, block)]).first_seconds == 62.0


def test_peaks_add_up(timing):
    assert measure.extended(timing(1.0, peak=10), [(3, timing(1.0, peak=5))]).peak_bytes == 25
    assert measure.extended(timing(1.0), [(3, timing(1.0, peak=5))]).peak_bytes is None


class Skips(nn.Module):
    """The second half of the blocks reads what the first half returned: it does not run with one block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        kept = []
        for i in range(4):
            x = self.blocks[i](x) if i < 2 else self.blocks[i](x) + kept.pop()
            kept.append(x)
        return x


def test_a_model_that_needs_all_blocks_is_measured_whole():
    x = torch.randn(32, 32)
    found = tritonfp8.advise(Skips(), x, recipes=["rowwise"], compile=["none"], compiler="eager")
    assert any("does not run with one block of each kind: IndexError" in note for note in found.notes)
    assert found.steps


def test_ctrl_c_keeps_what_is_done(advise, monkeypatch):
    measured, seen = measure._measure_mode, []

    def second(subject, each, *args):
        if seen:
            raise KeyboardInterrupt
        seen.append(each.name)
        measured(subject, each, *args)

    monkeypatch.setattr(measure, "_measure_mode", second)
    found = advise(compile=["none"])
    assert found.interrupted
    assert found.recommendation is None
    assert [row.contender for row in found.steps] == ["bf16"]
    assert "interrupted" in str(found)
    assert "too little was measured" in str(found)


def test_a_recipe_that_does_not_fit_is_a_note(model, x):
    for parameter in model.embed.parameters():
        parameter.requires_grad_(False)
    found = tritonfp8.advise(model, x, recipes=[{"*nowhere": "rowwise"}, "rowwise"], compile=["none"], compiler="eager")
    assert any("decided the recipe of no layer" in note for note in found.notes)
    assert {row.contender for row in found.steps} >= {"bf16", "rowwise"}


class TestPredicted:
    @pytest.fixture
    def large(self):
        class Large(nn.Module):
            def __init__(self, hidden):
                super().__init__()
                self.blocks = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(8))

            def forward(self, x):
                for block in self.blocks:
                    x = torch.relu(block(x))
                return x

        def advised(hidden, tokens, **options):
            with torch.device("meta"):
                model, x = Large(hidden).bfloat16(), torch.empty(tokens, hidden, dtype=torch.bfloat16)
            return tritonfp8.advise(model, x.requires_grad_(), recipes=["rowwise"], **options)

        return advised

    def test_large_layers_gain(self, large):
        found = large(8192, 16384)
        assert not found.measured
        assert "PREDICTED, not measured, for NVIDIA H200" in str(found)
        assert found.recommendation.contender == "rowwise"
        assert 1.3 < found.recommendation.speed_up < 2
        assert found.recommendation.from_tokens < 16384

    def test_small_ones_do_not(self, large):
        found = large(256, 512)
        assert found.recommendation.contender == "bf16"
        assert all(step.timing.host_share > 1 for step in found.steps if step.mode == "none")

    def test_machines(self, large):
        fast, slow = (large(4096, 8192, machine=name).steps[0].timing.seconds for name in ("h200", "h100"))
        assert fast < slow
        with pytest.raises(ValueError, match="machine must be one of 'h200', 'h100'"):
            large(256, 16, machine="a100")

    def test_more_blocks_take_longer(self, large):
        step = next(step for step in large(4096, 8192).steps if step.contender == "bf16" and step.mode == "graph")
        block = next(row for row in large(4096, 8192).blocks if row.contender == "bf16" and row.mode == "block")
        assert step.timing.seconds == pytest.approx(8 * block.timing.gpu_seconds, rel=0.1)

    def test_attention_and_experts_are_counted(self):
        from transformers import AutoModelForCausalLM, OlmoeConfig

        config = OlmoeConfig(
            hidden_size=1024, intermediate_size=512, num_hidden_layers=3, vocab_size=512, num_experts=16,
            num_experts_per_tok=4, eos_token_id=None, use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

        def advised(*tokens):
            return tritonfp8.advise(model, input_ids=torch.zeros(*tokens, dtype=torch.long), recipes=["rowwise"])

        found = advised(8, 256)
        assert (2048, 16, 1024, 512) in [row.sizes for row in found.layers if row.contender == "rowwise"]
        seconds, longer = (
            next(step.timing.gpu_seconds for step in each.steps if step.mode == "graph")
            for each in (found, advised(1, 2048))
        )
        assert longer > 1.05 * seconds


class TestRefused:
    def test_a_converted_model(self, model, x):
        tritonfp8.convert(model, "rowwise")
        with pytest.raises(ValueError, match="converted already"):
            tritonfp8.advise(model, x)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"compile": "block"}, ValueError, "compile must be a list"),
            ({"compile": ["fast"]}, ValueError, "compile must be a list"),
            ({"compile": []}, ValueError, "compile must be a list"),
            ({"recipes": "rowwise"}, TypeError, "recipes must be a list"),
            ({"recipes": []}, ValueError, "at least one recipe"),
            ({"recipes": ["bf16"]}, ValueError, "at least one recipe"),
            ({"recipes": ["rowwize"]}, ValueError, "did you mean 'rowwise'"),
            ({"check": 1}, TypeError, "check must be"),
        ],
    )
    def test_arguments(self, model, x, options, error, message):
        with pytest.raises(error, match=message):
            tritonfp8.advise(model, x, **options)

    def test_models_without_layers_or_gradients(self, x):
        with pytest.raises(ValueError, match="no linear layer and no experts"):
            tritonfp8.advise(nn.LayerNorm(16), x)
        frozen = nn.Linear(16, 16).bfloat16().requires_grad_(False)
        with pytest.raises(ValueError, match="carries no gradient"):
            tritonfp8.advise(frozen, x, compiler="eager", compile=["none"])


def test_files(advise, tmp_path, timing):
    found = advise(compile=["none"])
    found.save(tmp_path / "advice.json")
    data = json.loads((tmp_path / "advice.json").read_text())
    assert data["recommendation"]["contender"] == "bf16"
    assert [row["contender"] for row in data["steps"]] == [row.contender for row in found.steps]
    with pytest.raises(ValueError, match="there is no mapping of layers to save"):
        found.recommendation.save(tmp_path / "recipes.toml")
    quick = dataclasses.replace(found.recommendation, contender="rowwise", layers=run.contender("rowwise").layers)
    quick.save(tmp_path / "recipes.toml")
    assert tritonfp8.recipes.load(tmp_path / "recipes.toml") == {"*": tritonfp8.recipes.get("rowwise")}


def test_the_figure_needs_blocks(advise, tmp_path):
    found = advise(compile=["none"])
    tritonfp8.advice.plot(found, tmp_path / "blocks.png")
    assert (tmp_path / "blocks.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="no block to draw"):
        tritonfp8.advice.plot(dataclasses.replace(found, blocks=()), tmp_path / "none.png")


def test_what_a_step_waits_for(timing):
    def step(mode, **fields):
        return result.StepTime("rowwise", mode, timing(1.0, **fields), 1.0).bound

    assert step("none", host=2.0, gpu=1.0) == "host, host 2.00"
    assert step("none", host=0.5, gpu=1.0) == "GPU, host 0.50"
    assert step("graph", gpu=1.0) == "GPU"
    assert step("none", host=1.0) == "-"
