"""Classes of modules whose rows depend on their own tokens only: each is joined with the class that a module had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8 import ops
from tritonfp8.layers import register_computing
from tritonfp8.layers.linear import autocast_all, autocast_dtype, is_distributed
from tritonfp8.rollout.exact.functions import exact_linear, gated, rms_norm, routed

# By the classes of activations in transformers and torch: the name in :func:`gated`.
ACTIVATIONS = {
    "SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh", "ReLU": "relu",
}  # fmt: skip


class ExactLinear(nn.Linear):
    """``nn.Linear`` whose GEMM never splits K, and adds along K in one order for each number of rows."""

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``; under autocast in its dtype."""
        return _linear(input, self.weight, self.bias)


register_computing(ExactLinear, nn.Linear)


class ExactRMSNorm(nn.Module):
    """RMSNorm with the roundings of Llama."""

    weight: Tensor
    unit_offset = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., K]``; the norm of the last dim times the weight, under autocast in its dtype: see ExactRotary."""
        out = rms_norm(hidden_states, self.weight, _eps_of(self), self.unit_offset)
        (found,) = autocast_all(out.device.type, out)
        return out if found is None else found


class ExactUnitOffsetNorm(ExactRMSNorm):
    """RMSNorm with the roundings of Gemma, whose factor is ``1 + weight``."""

    unit_offset = True


class ExactMLP(nn.Module):
    """A gated MLP: two linear layers, the product of an activation and a gate, and a linear layer."""

    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Any

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        out: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x), activation_of(self.act_fn)))
        return out


class ExactRotary(nn.Module):
    """Rotary embeddings whose cosines and sines compiled code does not compute by itself."""

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, T, D]`` in the dtype of ``x``, under autocast in its dtype.

        In float32 a compiler could join the product and the sum of a rotation in one FMA, and round once less.
        """
        prefix = "" if layer_type is None else f"{layer_type}_"
        inv_freq, scaling = getattr(self, f"{prefix}inv_freq"), getattr(self, f"{prefix}attention_scaling")
        cos, sin = ops.rotary_tables(position_ids, inv_freq.to(x.device), float(scaling))
        dtype = autocast_dtype(x.device.type) or x.dtype
        return cos.to(dtype), sin.to(dtype)


class ExactRouter(nn.Module):
    """A router that weighs the experts of a token by softmax. Ties go to the lower index."""

    weight: Tensor
    top_k: int
    hidden_dim: int
    normalizes = True
    rounds = False

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``[T, E]``, and the weights and indices ``[T, top_k]`` of the experts of each token."""
        logits = _linear(hidden_states.reshape(-1, self.hidden_dim), self.weight, None)
        weights, indices = routed(logits, self.top_k, getattr(self, "norm_topk_prob", self.normalizes))
        return logits, weights.to(logits.dtype) if self.rounds else weights, indices


class ExactRoundedRouter(ExactRouter):
    """As :class:`ExactRouter`, with weights in the dtype of the logits."""

    rounds = True


def activation_of(act_fn: Any) -> str:
    """The name of an activation for :func:`gated`; empty for an unknown one."""
    return ACTIVATIONS.get(type(act_fn).__name__, "")


def _eps_of(norm: Any) -> float:
    """The eps, which families name differently."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not torch.compiler.is_compiling() and is_distributed(weight):
        raise ValueError(
            "a layer of an exact model needs its whole weight: FSDP2 gathers it, tensor parallelism does not"
        )
    input, weight, bias = autocast_all(input.device.type, input, weight, bias)  # type: ignore[assignment]
    return exact_linear(input, weight, bias)
