"""Layers that read one input quantize it once: the same bits, fewer casts, one saved copy, and never a stale one."""

import copy
import threading

import pytest
import torch
from cases import QUANTIZED, llama, normal, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8 import convert, recipes, revert
from tritonfp8.functional import SharedInput
from tritonfp8.operands import Quantizer
from tritonfp8.testing import assert_bitwise_equal

each_recipe = pytest.mark.parametrize("name", recipes.names())


class Heads(nn.Module):
    """Three linears on one input, the third of another width, and what is done between their calls."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(40, 24), nn.Linear(40, 16, bias=False), nn.Linear(40, 16)
        self.o = nn.Linear(56, 40)
        self.between = between

    def forward(self, x):
        q = self.q(x)
        x = self.between(x)
        return self.o(torch.cat([q, self.k(x), self.v(x)], -1))


class Casts(TorchDispatchMode):
    """Counts the casts that run, by op."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.tritonfp8.quantize.default, torch.ops.tritonfp8.quantize_both.default):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def casts_of(function, shape):
    """How often ``function`` quantized a tensor of this shape, and what it returned."""
    with Casts() as casts:
        out = function()
    return casts.shapes.count(shape), out


def run(module, x):
    out = module(x)
    return out, *torch.autograd.grad(out, [x, *module.parameters()], normal(*out.shape, seed=7))


def separate(module):
    """A copy whose layers each quantize for themselves."""
    twin = copy.deepcopy(module)
    for layer in twin.modules():
        if isinstance(layer, tritonfp8.Float8Linear):
            layer.shared_input = None
    return twin


@each_recipe
def test_same_bits_and_one_cast(name):
    module, x = Heads(), normal(33, 40).requires_grad_()
    convert(module, name)
    before, expected = casts_of(lambda: run(separate(module), x), (33, 40))
    after, got = casts_of(lambda: run(module, x), (33, 40))
    assert_bitwise_equal(got, expected)
    assert before - after == (2 if name in QUANTIZED else 0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_siblings_save_one_copy(name):
    module, x = Heads(), normal(33, 40).requires_grad_()
    convert(module, name)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        module(x)
    kept = [t for t in saved if t.shape == (40, 33) or (t.shape == (33, 40) and t.dtype == x.dtype)]
    assert len(kept) == 3
    assert len({t.data_ptr() for t in kept}) == 1


@pytest.mark.parametrize(
    "between",
    [lambda x: x.mul_(2), lambda x: x * 2, lambda x: x[:], lambda x: x.clone()],
    ids=["in place", "another", "view", "clone"],
)
def test_another_tensor_or_version_is_quantized_anew(between):
    module = Heads(between)
    convert(module, "rowwise")
    x = normal(33, 40)
    with torch.no_grad():
        expected = separate(module)(x.clone())
        casts, out = casts_of(lambda: module(x.clone()), (33, 40))
    assert_bitwise_equal(out, expected)
    assert casts == 2


def test_nothing_is_kept_between_passes():
    """The same tensor object with other values that torch cannot see: the case of a static input buffer."""
    module, x = Heads(), normal(33, 40)
    convert(module, "rowwise")
    with torch.no_grad():
        first = module(x)
        x.data.mul_(3)
        assert_bitwise_equal(module(x), separate(module)(x))
        assert not torch.equal(module(x), first)
    shared = module.q.shared_input
    assert not shared._entries
    assert not shared._depth


def test_nothing_is_shared_outside_the_parent():
    module, x = Heads(), normal(33, 40)
    convert(module, "rowwise")
    casts, _ = casts_of(lambda: (module.q(x), module.k(x)), (33, 40))
    assert casts == 2
    assert not module.q.shared_input._entries


def test_an_error_in_the_parent_closes():
    def fail(x):
        raise RuntimeError("between")

    module, x = Heads(fail), normal(33, 40)
    convert(module, "rowwise")
    with pytest.raises(RuntimeError, match="between"):
        module(x)
    assert not module.q.shared_input._depth
    assert not module.q.shared_input._entries


def test_an_input_that_dies_leaves_no_match():
    """A new tensor may take the place of one that is gone."""
    shared = SharedInput()
    spec = recipes.get("rowwise").output.lhs
    shared.open()
    for seed in range(50):
        x = normal(33, 40, seed=seed)
        pairs = shared.quantize(x, x, (spec, None), Quantizer())
        assert_bitwise_equal(pairs[0], (lambda q: (q.qdata, q.scale))(tritonfp8.quantize(x, spec)))
        del x
    shared.close()


def test_inference_mode():
    module, x = Heads(), normal(33, 40)
    convert(module, "rowwise")
    with torch.inference_mode():
        y = x * 1
        casts, out = casts_of(lambda: module(y), (33, 40))
    assert casts == 1
    assert_bitwise_equal(out.clone(), separate(module)(x).detach())


def test_frozen_and_trained_siblings():
    module, x = Heads(), normal(33, 40).requires_grad_()
    module.q.requires_grad_(False)
    convert(module, "rowwise")
    twin = separate(module)
    for each in (module, twin):
        each(x).sum().backward()
    assert module.q.weight.grad is None
    assert_bitwise_equal(module.k.weight.grad, twin.k.weight.grad)


def test_threads_share_nothing():
    inputs = [normal(33, 40, seed=seed) for seed in range(4)]
    barrier = threading.Barrier(len(inputs), timeout=60)
    module = Heads(lambda x: (barrier.wait(), x)[1])
    convert(module, "rowwise")
    plain = copy.deepcopy(separate(module))
    plain.between = lambda x: x
    with torch.no_grad():
        expected = [plain(x) for x in inputs]
    results = [None] * len(inputs)

    def work(i):
        with torch.no_grad():
            results[i] = module(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_bitwise_equal(results, expected)


def test_copies_share_among_themselves():
    module = Heads()
    convert(module, "rowwise")
    twin = copy.deepcopy(module)
    assert twin.q.shared_input is twin.k.shared_input is twin.v.shared_input
    assert twin.q.shared_input is not module.q.shared_input
    x = normal(33, 40)
    assert casts_of(lambda: twin(x), (33, 40))[0] == 1
    assert "shared_input" not in twin.o.__dict__


def test_revert_leaves_no_trace():
    module, other = Heads(), Heads()
    seen = []
    hook = module.register_forward_hook(lambda *args: seen.append(args))
    convert(module, "rowwise")
    revert(module)
    module(normal(3, 40))
    assert len(seen) == 1
    hook.remove()
    for ours, plain in zip(module.modules(), other.modules(), strict=True):
        assert type(ours) is type(plain)
        assert ours.__dict__.keys() == plain.__dict__.keys()
        assert not ours._forward_hooks
        assert not ours._forward_pre_hooks
        assert not ours._forward_hooks_always_called


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    module, x = Heads(), normal(33, 40).requires_grad_()
    convert(module, "rowwise")
    expected = run(separate(module), x)
    out = checkpoint(module, x, use_reentrant=reentrant)
    out.backward(normal(*out.shape, seed=7))
    assert_bitwise_equal((x.grad, *(p.grad for p in module.parameters())), expected[1:])


def test_llama_shares_where_inputs_are_one():
    model, ids = llama(), tokens()
    convert(model, "rowwise")
    hidden = (ids.numel(), 64)
    with torch.no_grad():
        before, expected = casts_of(lambda: separate(model)(ids).logits, hidden)
        after, logits = casts_of(lambda: model(ids).logits, hidden)
    assert_bitwise_equal(logits, expected)
    # A layer has q, k, v and gate, up on one input each, and o; the head reads one more.
    assert (before, after) == (2 * 6 + 1, 2 * 3 + 1)
