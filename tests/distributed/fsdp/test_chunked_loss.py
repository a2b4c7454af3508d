"""A loss that multiplies by the weight of the head outside of its layer, as losses in chunks do."""

import logging

import covering
import pytest
import torch
import torch.nn.functional as F
from cases import QUANTIZED, each_recipe
from fsdp_cases import digest, full_parameters, tokens_of
from fsdp_models import Llama, initialize
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]

CHUNK = 5
HEADS = {"head in high precision": False, "converted head": True}
HOW = {"inside forward": {}, "after forward": {"outside": True}, "autocast": {"autocast": True}}


def linear(x, weight, bias, targets):
    """``F.linear`` a chunk of tokens, again in backward."""

    def chunk(x, targets):
        return F.cross_entropy(F.linear(x, weight, bias).float(), targets, reduction="sum")

    chunks = zip(x.split(CHUNK), targets.split(CHUNK), strict=True)
    return sum(checkpoint(chunk, *each, use_reentrant=False) for each in chunks) / len(x)


class _InForward(torch.autograd.Function):
    """The gradients in forward, a chunk of tokens at a time, as the kernels of Liger do."""

    @staticmethod
    def forward(ctx, x, weight, bias, targets):
        total, grad_x = x.new_zeros((), dtype=torch.float32), []
        grad_weight, grad_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        for part, target in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
            with torch.enable_grad():
                logits = F.linear(part, weight, bias).detach().requires_grad_()
                loss = F.cross_entropy(logits.float(), target, reduction="sum") / len(x)
            (grad,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            grad_x.append(grad @ weight)
            grad_weight += grad.t() @ part
            grad_bias += grad.sum(0)
        ctx.save_for_backward(torch.cat(grad_x), grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        return *(grad_output.to(each.dtype) * each for each in ctx.saved_tensors), None


def vocabulary(x, weight, bias, targets):
    """A part of the vocabulary at a time."""
    parts = [F.linear(x, weight[i : i + 30], bias[i : i + 30]).float() for i in range(0, len(weight), 30)]
    largest = torch.stack([part.logsumexp(1) for part in parts], 1).logsumexp(1)
    return (largest - torch.cat(parts, 1).gather(1, targets[:, None])[:, 0]).mean()


def of_torch(x, weight, bias, targets):
    return F.linear_cross_entropy(x, weight, targets, linear_bias=bias)


LOSSES = {"linear": linear, "in_forward": _InForward.apply, "vocabulary": vocabulary, "of_torch": of_torch}


class Chunked(Llama):
    """``forward`` gives the loss, or (``outside``) what the head would read."""

    def __init__(self, loss, outside):
        super().__init__()
        self.loss, self.outside = loss, outside

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return x if self.outside else self.loss_of(x, tokens)

    def loss_of(self, x, tokens):
        x, targets = x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        if not torch.is_autocast_enabled("cpu"):
            x = x.to(self.last.weight.dtype)
        return LOSSES[self.loss](x, self.last.weight, self.last.bias, targets)


def build(loss, head, outside=False, recipe="rowwise"):
    model = initialize(Chunked(loss, outside))
    tritonfp8.convert(model, recipe, filter=lambda module, name: head or name != "last")
    return model


def loss_of(model, tokens):
    found = model(tokens)
    return model.loss_of(found, tokens) if model.outside else found


class Warnings(logging.Handler):
    """Keeps the messages of warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def train(mesh, loss, head, enabled, recipe, outside=False, autocast=False):
    """Three steps: losses and a hash of the weights; warnings; gathers of a step."""
    model = build(loss, head, outside, recipe)
    if enabled:
        enable_float8_all_gather(model)
    policy = MixedPrecisionPolicy(param_dtype=None if autocast else torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    before = full_parameters(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    warnings, log = Warnings(), logging.getLogger("tritonfp8")
    log.addHandler(warnings)
    for number in range(3):
        with count_collective_bytes() as counted:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = loss_of(model, tokens_of(number))
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    log.removeHandler(warnings)
    assert not any(torch.equal(value, before[name]) for name, value in full_parameters(model).items())
    return (losses, digest(model)), warnings.messages, counted.calls["all_gather"]


def skip_if_missing(loss):
    if loss == "of_torch" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("loss", "how", "head", "recipe"), covering.pairs(list(LOSSES), list(HOW), list(HEADS), QUANTIZED)
)
def test_the_gather_changes_no_bit(ranks, loss, how, head, recipe):
    skip_if_missing(loss)
    head, options = HEADS[head], {"loss": loss, "recipe": recipe, **HOW[how]}
    on, off = (ranks.run(2, train, head=head, enabled=enabled, **options) for enabled in (True, False))
    assert [trained for trained, *_ in on] == [trained for trained, *_ in off]
    ((losses, _), messages, gathers), (_, no_messages, gathers_off) = on[0], off[0]
    assert len(set(losses)) == 3
    assert len([message for message in messages if "outside of last" in message]) == head, messages
    # The chunks share one gather of the values.
    assert gathers - gathers_off <= head + 2
    assert not no_messages


@each_recipe
@pytest.mark.parametrize("loss", LOSSES)
def test_without_sharding_a_converted_head_is_the_matrix_of_the_loss(loss, recipe):
    skip_if_missing(loss)
    found = []
    for head in (False, True):
        model = build(loss, head, recipe=recipe)
        value = loss_of(model, torch.arange(24).view(2, 12))
        value.backward()
        found.append([value.detach(), *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))
