"""Small models that train and generate, and what a rollout has in memory."""

import types

import torch
import torch.nn.functional as F
from checkpoints import EXPERTS, WHOLE, model_of
from torch import nn

import tritonfp8
from tritonfp8.layers.stored import StoredWeight

# Three experts a token: a sum of two has no order.
FAMILIES = {"qwen3": WHOLE, "llama": WHOLE, "moe": EXPERTS | {"num_experts_per_tok": 3}}
RECIPES = ("rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8", "mxfp4_weights")
IDS = torch.arange(3, 21).reshape(3, 6)
# Two prompts are padded.
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
OPTIONS = {"max_new_tokens": 6, "seed": 1, "eos_token_id": 1, "pad_token_id": 0}


def plain(kind="qwen3", dtype=torch.bfloat16, **options):
    """A model with weights of one size, so that its tokens are not all alike."""
    model = model_of(kind, FAMILIES[kind], dtype=dtype, num_hidden_layers=2, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.05)
    return model


def trainer(kind="qwen3", recipe="rowwise", dtype=torch.bfloat16, **options):
    model = plain(kind, dtype, **options)
    tritonfp8.convert(model, recipe, batch_invariant=True)
    return model


class TokenByToken(nn.Module):
    """In the place of attention: no token reads another one."""

    def __init__(self, attention):
        super().__init__()
        self.v_proj, self.o_proj = attention.v_proj, attention.o_proj

    def forward(self, hidden_states, **options):
        return self.o_proj(self.v_proj(hidden_states)), None


def _scores_by_row(router, hidden_states):
    """The forward of a router whose GEMM takes one row at a time: a BLAS sums in an order that depends on the rows."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = torch.stack([F.linear(row.clone(), router.weight) for row in rows])
    weights, indices = torch.softmax(logits.float(), -1).topk(router.top_k)
    return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), indices


def exact_trainer(kind="qwen3", recipe="rowwise", dtype=torch.bfloat16):
    """A model whose log-probs of a token depend on this token only, to the bit."""
    model = plain(kind, dtype)
    for layer in model.model.layers:
        layer.self_attn = TokenByToken(layer.self_attn)
        if kind == "moe":
            layer.mlp.gate.forward = types.MethodType(_scores_by_row, layer.mlp.gate)
    tritonfp8.convert(model, {"*lm_head": recipe, "*": recipe}, batch_invariant=True)
    return model


def bits_of(rollout):
    """Bytes of what the rollout has in memory of its own, by name: codes and scales, or values."""
    found = {}
    for each in rollout.own:
        x = each.tensor
        parts = x._both() if isinstance(x, StoredWeight) else (x.detach(),)
        found |= {(each.name, i): part.contiguous().view(torch.uint8).clone() for i, part in enumerate(parts)}
    return found


def addresses_of(rollout):
    found = [each.tensor for each in rollout.own]
    return [part.data_ptr() for x in found for part in (x._both() if isinstance(x, StoredWeight) else (x,))]


def step(model, rate=0.5):
    """A step of SGD on the prompts."""
    ids = IDS.to(model.device)
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    model.zero_grad()


def generate(rollout, **options):
    return rollout.generate(IDS, MASK, **OPTIONS | options)


def given(mesh):
    """What the first snippet of the page uses."""
    return {"model": plain(), "batches": [(IDS, MASK)] * 2, "reward": lambda sequences: sequences[:, -1] / 64 - 0.5}


def check_trained(names):
    assert not torch.equal(names["model"].lm_head.weight, plain().lm_head.weight)
    assert names["rollout"].changed() == []
    assert names["scored"].requires_grad
    torch.testing.assert_close(names["scored"].detach(), names["made"].log_probs, atol=0.1, rtol=0)


def exact_given(mesh):
    """What the second snippet of the page uses."""
    return {"model": plain(), "prompts": IDS, "attention_mask": MASK}


def check_exact(names):
    found = names["check"](names["model"], names["Rollout"](names["model"]), IDS, MASK, max_new_tokens=8)
    assert found.max_difference == 0
