"""``tritonfp8 train`` on mixtures of experts: what follows the recipe, and how it is counted."""

import json

import pytest

from tritonfp8.training import loop, models, report
from tritonfp8.training.settings import Settings, prepare

pytestmark = pytest.mark.one_in(3)

HIDDEN, INTERMEDIATE, LAYERS, EXPERTS, TOP_K, VOCABULARY = 64, 32, 2, 4, 2, 256
TOKENS = 2 * 32
MIXTURE = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
# Weights that a token meets.
OF_EXPERTS = LAYERS * TOP_K * 3 * HIDDEN * INTERMEDIATE
OF_ATTENTION = LAYERS * 4 * HIDDEN * HIDDEN
OF_ROUTERS_AND_HEAD = LAYERS * EXPERTS * HIDDEN + VOCABULARY * HIDDEN


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTURE))

    def run(*recipes):
        settings = Settings.resolve(
            model=str(path), recipes=recipes, steps=2, batch_size=2, seq_len=32, lr=1e-3, device="cpu", data=__file__,
        )  # fmt: skip
        return loop.run(prepare(settings))

    return run


def test_experts_count_among_linear_layers(train):
    result = train("bf16", "rowwise")
    assert [run.failure for run in result.runs] == [None, None]
    everything = OF_EXPERTS + OF_ATTENTION + OF_ROUTERS_AND_HEAD
    assert result.linear_flops == 6 * TOKENS * everything
    shares = report.summarize(result, result.run_of("rowwise")).shares
    assert shares["reference"] == pytest.approx((OF_ATTENTION + OF_EXPERTS) / everything)


def test_experts_of_the_baseline_compute_in_bf16(train, monkeypatch):
    bf16 = train("bf16").run_of("bf16")
    assert bf16.flops == {"high_precision": 2 * 6 * TOKENS * OF_EXPERTS}
    monkeypatch.setattr(loop, "_run_experts_in_bf16", lambda model: None)
    float32 = train("bf16").run_of("bf16")
    assert float32.losses != bf16.losses
    assert float32.losses == pytest.approx(bf16.losses, rel=1e-3)


def test_the_preset_has_sixteen_experts_in_160_million_parameters():
    model = models.build_model("160m-moe", 64, 0)
    assert {len(layer.mlp.experts.down_proj) for layer in model.model.layers} == {16}
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(160e6, rel=0.05)
