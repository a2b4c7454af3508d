"""Functions of each rank in the tests of context parallelism. Each raises if a result differs."""

import copy
from unittest.mock import patch

import torch
import torch.nn.functional as F
from cases import normal
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from tp_cases import tolerance

import tritonfp8
from tritonfp8.specs.testing import sqnr

HIDDEN, HEADS = 48, 3
# On a GPU attention saves tensors for backward in multiples of 32 tokens. With 256 tokens each of four ranks has two
# such slices.
TOKENS = {"cpu": 48, "cuda": 256}


class Layer(nn.Module):
    """Attention and an MLP, around an attention function of ``[batch, heads, tokens, features]``.

    Args:
        attention: function of queries, keys and values.
        normed: whether queries and keys are normalized, which keeps logits small.
    """

    def __init__(self, attention, normed=False):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.normed = attention, normed
        self.parts = None
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 131), nn.Linear(131, HIDDEN)

    def of_tokens(self, layer, x):
        """``layer(x)``. If ``parts`` lists the tokens of each rank, computes each part separately, as on its rank."""
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
    grads = {}
    for name, parameter in layer.named_parameters():
        grads[name] = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    return out.detach(), grads


def check_same(got, wanted):
    for name, value in got.items():
        found = sqnr(value, wanted[name])
        assert found > tolerance(), f"{name}: {found} dB"


def summed(grads, mesh):
    for grad in grads.values():
        torch.distributed.all_reduce(grad, group=mesh.get_group())
    return grads


def check_torch(mesh, recipe, causal, backend):
    """Within torch's ``context_parallel``.

    On GPUs queries and keys are normalized. Otherwise logits reach 8e5, and their rounding to float32 leaves fused
    attention of one process only 42 dB SQNR against float64: smaller differences between ranks would not show.
    """
    attention, on_gpu = causal_attention if causal else full_attention, mesh.device_type == "cuda"
    layer = Layer(attention, normed=on_gpu).to(mesh.device_type)
    tritonfp8.convert(layer, recipe)
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
    check_same({"output": out}, {"output": wanted[:, here]})
    check_same(summed(grads, mesh), wanted_grads)


def gathering_attention(mesh):
    """Causal attention of this rank's queries on all ranks' keys and values; torch's has no CPU kernel for it."""

    def attention(q, k, v):
        k, v = (all_gather_tensor_autograd(t.contiguous(), 2, mesh.get_group()) for t in (k, v))
        first = mesh.get_local_rank() * q.shape[2]
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(first)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attention


def _chunks(mesh, *tensors):
    return [x.chunk(mesh.size(), 1)[mesh.get_local_rank()] for x in tensors]


def check_gathered_keys(mesh, recipe):
    """Causal attention; each rank computes with its own tokens, as plain tensors."""
    layer, alone = Layer(gathering_attention(mesh)), Layer(causal_attention)
    for each in (layer, alone):
        tritonfp8.convert(each, recipe)
    x, grad_output = operands("cpu")
    alone.parts = list(torch.arange(TOKENS["cpu"]).chunk(mesh.size()))
    out, grads = run(layer, *_chunks(mesh, x, grad_output))
    wanted, wanted_grads = run(alone, x, grad_output)
    check_same({"output": out}, {"output": _chunks(mesh, wanted)[0]})
    check_same(summed(grads, mesh), wanted_grads)


def check_global_scales(mesh, recipe):
    """Layers in the style ``SequenceParallel`` on the same mesh scale by the tokens of all ranks."""
    layer, alone = Layer(gathering_attention(mesh)), Layer(causal_attention)
    for each in (layer, alone):
        tritonfp8.convert(each, recipe)
    style = SequenceParallel(sequence_dim=1, use_local_output=True)
    parallelize_module(layer, mesh, dict.fromkeys(("q", "k", "v", "o", "up", "down"), style))
    x, grad_output = operands("cpu")
    out, grads = run(layer, *_chunks(mesh, x, grad_output))
    wanted, wanted_grads = run(alone, x, grad_output)
    check_same({"output": out}, {"output": _chunks(mesh, wanted)[0]})
    check_same(grads, wanted_grads)


def alone_and_in_parts(recipe):
    """Output and grad_input of one process, and of one whose layers scale the tokens of two ranks separately."""
    found = []
    for parts in (None, list(torch.arange(TOKENS["cpu"]).chunk(2))):
        layer = Layer(causal_attention)
        tritonfp8.convert(layer, recipe)
        layer.parts = parts
        x, grad_output = operands("cpu")
        out, _ = run(layer, x.requires_grad_(), grad_output)
        found.append((out, x.grad))
    return zip(*found, strict=True)
