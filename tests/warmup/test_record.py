"""What a step calls is recorded without running it, and can be called again."""

import json

import mixtures
import pytest
import torch
from cases import QUANTIZED
from models import SMALL
from torch._subclasses.fake_tensor import FakeTensorMode

import tritonfp8
from tritonfp8.training import loop
from tritonfp8.training.models import build_model
from tritonfp8.warmup.record import Layout, Recorder, record_linear, record_model, training_step


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


class TestRecording:
    @pytest.mark.parametrize("recipe", QUANTIZED)
    def test_a_model_calls_what_its_step_really_calls(self, config, recipe):
        model = build_model(config, 20, seed=0).train()
        tritonfp8.convert(model, recipe)
        with Recorder() as recorder:
            loop.next_token_loss(model, torch.randint(0, 256, (2, 21))).backward()
        recorded = record_model(config, recipe, (2, 20), "float32")
        assert recorded == list(recorder.calls)
        assert {call.op for call in recorded} >= {"quantize", "scaled_matmul"}
        assert len(recorded) == len(set(recorded)) > 10

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_experts(self, tmp_path, dtype):
        """The ops of the same model that is converted and trained, on tokens that go where its router sends them."""
        path = tmp_path / "config.json"
        model = mixtures.model_of("mixtral")
        path.write_text(json.dumps({**model.config.to_dict(), "vocab_size": 256}))
        model = build_model(str(path), 20, seed=0).train().to(getattr(torch, dtype))
        tritonfp8.convert(model, "rowwise")
        with Recorder() as recorder:
            training_step(model, torch.randint(0, 96, (2, 21)), autocast=dtype == "float32")
        recorded = record_model(str(path), "rowwise", (2, 20), dtype)
        assert recorded == list(recorder.calls)
        assert {call.op for call in recorded} >= {"quantize_groups_both", "quantize_matrices", "scaled_grouped_matmul"}

    @pytest.mark.parametrize("recipe", QUANTIZED)
    def test_a_layer_calls_what_it_really_calls(self, recipe):
        layer = tritonfp8.Float8Linear(50, 70, bias=False, dtype=torch.bfloat16, recipe=recipe)
        with Recorder() as recorder:
            x, grad = (torch.randn(33, size, dtype=torch.bfloat16) for size in (50, 70))
            layer(x.requires_grad_()).backward(grad)
        assert record_linear((33, 70, 50), recipe, "bfloat16") == list(recorder.calls)
        assert record_linear((33, 70, 50), recipe, "float32") == list(recorder.calls)

    def test_nothing_is_left_behind(self, config):
        before = torch.random.get_rng_state()
        record_model(config, "rowwise", (2, 20), "float32")
        assert torch.equal(torch.random.get_rng_state(), before)
        assert type(torch.ones(1)) is torch.Tensor

    def test_a_step_that_decides_by_data_is_a_clear_error(self, config, monkeypatch):
        monkeypatch.setattr(
            "tritonfp8.warmup.record.training_step", lambda model, tokens, autocast: tokens.sum().item()
        )
        with pytest.raises(ValueError, match=r"cannot be recorded on tensors without data .* file of shapes"):
            record_model(config, "rowwise", (2, 20), "float32")

    @pytest.mark.parametrize(
        "x",
        [
            torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(5, 6)[1:, ::2], torch.randn(1, 3).expand(4, 3),
            torch.randn(0, 3), torch.tensor(1.0), torch.randn(4, 4).to(torch.float8_e4m3fn),
            torch.ones(2, 2).to(torch.float8_e8m0fnu),
        ],
    )  # fmt: skip
    def test_layouts_are_made_again(self, x):
        again = Layout.of(x).zeros("cpu")
        assert Layout.of(again) == Layout.of(x)
        assert again.float().count_nonzero() == 0 or x.dtype == torch.float8_e8m0fnu

    @pytest.mark.parametrize("recipe", QUANTIZED)
    def test_calls_can_be_made_again(self, recipe):
        """With the layouts that the fake ops promised."""
        for call in record_linear((33, 70, 50), recipe, "bfloat16"):
            real = call.overload(*call.arguments("cpu"))
            with FakeTensorMode():
                fake = call.overload(*call.arguments("cpu"))
            assert torch.utils._pytree.tree_map(Layout.of, real) == torch.utils._pytree.tree_map(Layout.of, fake)
