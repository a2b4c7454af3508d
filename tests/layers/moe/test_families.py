"""Experts of transformers with a gate or a layout of their own, converted, against the loop of their own forward."""

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from cases import normal
from torch import nn

import tritonfp8
from tritonfp8.specs.testing import sqnr

# A class of each kind of gate, and whether the casts may compute it as SwiGLU.
KINDS = {
    "deepseek_v4.DeepseekV4Experts": False,
    "gemma4.Gemma4TextExperts": False,
    "glm5_next.Glm5NextTextExperts": False,
    "gpt_oss.GptOssExperts": False,
    "hy_v4.HYV4Experts": False,
    "lfm2_moe.Lfm2MoeExperts": True,
    "minimax_m3_vl.MiniMaxM3VLExperts": False,
    "nemotron_h.NemotronHExperts": False,
    "openai_privacy_filter.OpenAIPrivacyFilterExperts": False,
    "qwen3_moe.Qwen3MoeExperts": True,
}
EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 48
# Under the names of all these families; a limit that clamps some values, and an activation that is no SiLU.
CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), INTERMEDIATE),
    "hidden_size": HIDDEN, "hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh", "mlp_hidden_act": "relu2",
    "swiglu_limit": 1.5, "swiglu_alpha": 1.7, "moe_latent_size": None, "_experts_implementation": "eager",
}  # fmt: skip


def experts_of(kind):
    family, name = kind.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    experts = getattr(module, name)(SimpleNamespace(**CONFIG))
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return experts


def run(experts):
    """The output for fixed tokens, and the gradients of the tokens and of all parameters."""
    tokens = normal(24, HIDDEN).float().requires_grad_()
    index = torch.arange(48).view(24, 2) % EXPERTS
    out = experts(tokens, index, torch.linspace(0.1, 1, 48).view(24, 2))
    return [out, *torch.autograd.grad(out.square().sum(), [tokens, *experts.parameters()])]


@pytest.mark.parametrize("kind", KINDS)
def test_compute_what_their_own_forward_does(kind):
    experts = experts_of(kind)
    expected = run(experts)
    for recipe in ("bf16", "rowwise"):
        model = nn.ModuleDict({"experts": copy.deepcopy(experts)})
        assert "experts" in tritonfp8.convert(model, recipe).converted
        assert model["experts"].is_swiglu == KINDS[kind]
        found = run(model["experts"])
        if recipe == "bf16":
            for each, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
        else:
            # Not of gradients: one of a clamp is 0 or 1, and rounding moves values over its limit.
            assert sqnr(found[0], expected[0]) > 20
