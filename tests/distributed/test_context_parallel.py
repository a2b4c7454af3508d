"""Context parallelism around converted layers: each rank computes its tokens, attention sees the tokens of all."""

import copy
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from cases import each_recipe, normal
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from tp_cases import assert_same, whole

import tritonfp8
from tritonfp8 import recipes

pytestmark = pytest.mark.xdist_group("ranks")

HIDDEN, HEADS = 48, 3
# On a GPU attention saves tensors for backward in multiples of 32 tokens. With 256 tokens each of four ranks has two
# such slices.
TOKENS = {"cpu": 48, "cuda": 256}


class Layer(nn.Module):
    """Attention and an MLP, around an attention function of ``[batch, heads, tokens, features]``.

    Args:
        recipe: what its linear layers are converted to.
        attention: function of queries, keys and values.
        normed: whether queries and keys are normalized, which keeps logits small.
        parts: the tokens of each rank, to compute each part separately as on its rank, or None.
    """

    def __init__(self, recipe, attention, normed=False, parts=None):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.normed, self.parts = attention, normed, parts
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 131), nn.Linear(131, HIDDEN)
        tritonfp8.convert(self, recipe)

    def of_tokens(self, layer, x):
        if self.parts is None:
            return layer(x)
        whole = torch.cat([layer(x[:, part]) for part in self.parts], 1)
        return whole[:, torch.cat(self.parts).argsort()]

    def forward(self, x):
        q, k, v = (self.of_tokens(layer, x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                   for layer in (self.q, self.k, self.v))  # fmt: skip
        if self.normed:
            q, k = (F.rms_norm(each, each.shape[-1:]) for each in (q, k))
        x = x + self.of_tokens(self.o, self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.of_tokens(self.down, F.gelu(self.of_tokens(self.up, x)))


def full_attention(q, k, v):
    # torch replaces the function of this name within ``context_parallel``.
    return F.scaled_dot_product_attention(q, k, v)


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def operands(device):
    count = TOKENS[device]
    # Tokens of the ranks differ in magnitude, so that local and global scales differ.
    scale = torch.exp2(torch.arange(count) % 11 - torch.arange(count) * 6 // count).view(1, -1, 1)
    return (normal(2, count, HIDDEN, seed=5) * scale).to(device), normal(2, count, HIDDEN, seed=6).to(device)


def run(layer, x, grad_output):
    """The output, and the gradients of all weights."""
    out = layer(x)
    out.backward(grad_output)
    return out.detach(), [whole(parameter.grad) for parameter in layer.parameters()]


def summed(grads, mesh):
    for grad in grads:
        torch.distributed.all_reduce(grad, group=mesh.get_group())
    return grads


def check_torch(mesh, recipe, causal, backend):
    """Within torch's ``context_parallel``.

    On GPUs queries and keys are normalized. Otherwise logits reach 8e5, and their rounding to float32 leaves fused
    attention of one process only 42 dB SQNR against float64: smaller differences between ranks would not show.
    """
    attention = causal_attention if causal else full_attention
    layer = Layer(recipe, attention, normed=mesh.device_type == "cuda").to(mesh.device_type)
    alone = copy.deepcopy(layer)
    x, grad_output = operands(mesh.device_type)
    mine, my_grad, positions = x.clone(), grad_output.clone(), torch.arange(x.shape[1], device=x.device)[None]
    # torch can balance load only for a causal mask.
    options = patch.object(_cp_options, "enable_load_balance", causal)
    with sdpa_kernel(getattr(SDPBackend, backend)), options:
        with context_parallel(
            mesh, buffers=[mine, my_grad, positions], buffer_seq_dims=[1, 1, 1], no_restore_buffers={mine, my_grad}
        ):
            out, grads = run(layer, mine, my_grad)
            here = positions[0].clone()
        parts = [torch.empty_like(here) for _ in range(mesh.size())]
        torch.distributed.all_gather(parts, here, group=mesh.get_group())
        alone.parts = parts
        wanted, wanted_grads = run(alone, x, grad_output)
    assert sorted(torch.cat(parts).tolist()) == list(range(x.shape[1]))
    assert_same([out, *summed(grads, mesh)], [wanted[:, here], *wanted_grads])


@each_recipe
def test_context_parallel_of_torch(ranks, recipe):
    """Without a causal mask: for that torch shards no CPU kernel."""
    ranks.run(2, check_torch, recipe, causal=False, backend="MATH")


@pytest.mark.multigpu
@pytest.mark.parametrize("causal", [True, False])
@each_recipe
def test_context_parallel_of_torch_on_gpus(gpus, recipe, causal):
    gpus.run(gpus.size, check_torch, recipe, causal, backend="EFFICIENT_ATTENTION")


def gathering_attention(mesh):
    """Causal attention of this rank's queries on all ranks' keys and values; torch's has no CPU kernel for it."""

    def attention(q, k, v):
        k, v = (all_gather_tensor_autograd(t.contiguous(), 2, mesh.get_group()) for t in (k, v))
        first = mesh.get_local_rank() * q.shape[2]
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(first)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attention


def check_gathered_keys(mesh, recipe, global_scales):
    """Causal attention; each rank computes with its own tokens.

    Layers scale their tokens as plain tensors, or, in the style ``SequenceParallel`` on the same mesh, by the tokens of
    all ranks.
    """
    parts = list(torch.arange(TOKENS["cpu"]).chunk(mesh.size()))
    layer = Layer(recipe, gathering_attention(mesh))
    alone = Layer(recipe, causal_attention, parts=None if global_scales else parts)
    if global_scales:
        style = SequenceParallel(sequence_dim=1, use_local_output=True)
        parallelize_module(layer, mesh, dict.fromkeys(("q", "k", "v", "o", "up", "down"), style))
    here, (x, grad_output) = parts[mesh.get_local_rank()], operands("cpu")
    out, grads = run(layer, x[:, here], grad_output[:, here])
    wanted, wanted_grads = run(alone, x, grad_output)
    assert_same([out, *(grads if global_scales else summed(grads, mesh))], [wanted[:, here], *wanted_grads])


@each_recipe
def test_causal_attention_on_gathered_keys(ranks, recipe):
    ranks.run(2, check_gathered_keys, recipe, global_scales=False)


@each_recipe
def test_sequence_parallel_layers_have_the_scales_of_all_tokens(ranks, recipe):
    ranks.run(2, check_gathered_keys, recipe, global_scales=True)


@each_recipe
def test_only_a_scale_of_the_whole_input_depends_on_the_ranks(recipe):
    """Output and grad_input scale each token by itself in all recipes but tensorwise."""
    found = []
    # One process, and one whose layers scale the tokens of two ranks separately.
    for parts in (None, list(torch.arange(TOKENS["cpu"]).chunk(2))):
        x, grad_output = operands("cpu")
        out, _ = run(Layer(recipe, causal_attention, parts=parts), x.requires_grad_(), grad_output)
        found.append((out, x.grad))
    for gemm, alone, in_parts in zip(("output", "grad_input"), *found, strict=True):
        per_tensor = getattr(getattr(recipes.get(recipe), gemm).lhs, "block", None) == (-1, -1)
        assert torch.equal(alone, in_parts) != per_tensor
