"""Layers that read one input quantize it once: the same bits, fewer casts, one saved copy, and never a stale one."""

import copy
import functools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import QUANTIZED, llama, normal, tokens, with_gradients, with_head
from cast_counts import casts_of
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tritonfp8
from tritonfp8 import convert, recipes, revert
from tritonfp8.functional import SharedInput
from tritonfp8.layers.linear import input_cache
from tritonfp8.layers.linear.operands import OperandProvider
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

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


def entry():
    """What this thread shares now."""
    return input_cache._thread.entry


def run(module, x):
    return with_gradients(module(x), [x, *module.parameters()], normal(33, 40, seed=7))


def heads(*args, recipe="rowwise", requires_grad=False):
    """Converted heads, and an input."""
    module = Heads(*args)
    convert(module, recipe)
    return module, normal(33, 40).requires_grad_(requires_grad)


def casts_in(function):
    return casts_of(function, (33, 40))


def separate(module):
    """A copy whose layers each quantize for themselves."""
    twin = copy.deepcopy(module)
    for layer in twin.modules():
        if isinstance(layer, tritonfp8.Float8Linear):
            layer.shared_input = None
    return twin


@each_recipe
def test_same_bits_and_one_cast(name):
    module, x = heads(recipe=name, requires_grad=True)
    before, expected = casts_in(lambda: run(separate(module), x))
    after, got = casts_in(lambda: run(module, x))
    assert_bitwise_equal(got, expected)
    assert before - after == (2 if name in QUANTIZED else 0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_siblings_save_one_copy(name):
    (module, x), saved = heads(recipe=name, requires_grad=True), []
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
    module, x = heads(between)
    with torch.no_grad():
        expected = separate(module)(x.clone())
        casts, out = casts_in(lambda: module(x.clone()))
    assert_bitwise_equal(out, expected)
    assert casts == 2


def test_nothing_is_kept_between_passes():
    """The same tensor object with other values that torch cannot see: the case of a static input buffer."""
    module, x = heads()
    with torch.no_grad():
        first = module(x)
        x.data.mul_(3)
        assert_bitwise_equal(module(x), separate(module)(x))
        assert not torch.equal(module(x), first)
    assert entry() is None
    # Nor after the last sibling.
    module.q(x)
    module.k(x)
    assert len(entry().values) == 1
    module.v(x)
    assert entry() is None


def test_a_sibling_takes_what_is_shared_once():
    """A pass in which only some siblings run, and another with the same tensor, written as torch cannot see."""
    module, x = heads()
    for _ in range(2):
        for layer in (module.q, module.k):
            assert_bitwise_equal(layer(x), separate(layer)(x))
        x.data.mul_(3)


@pytest.mark.parametrize("ends", ["the input dies", "another layer", "another tensor", "another group"])
def test_a_cast_that_not_all_take_is_not_kept(ends):
    model = nn.Sequential(Heads(), Heads())
    convert(model, "rowwise")
    module, x, other = model[0], normal(33, 40), normal(5, 40)
    with torch.no_grad():
        module.q(x)
        held = weakref.ref(next(iter(entry().values.values()))[0][0])
        if ends == "the input dies":
            del x
        elif ends == "another layer":
            module.o(normal(33, 56))
        else:
            (model[1] if ends == "another group" else module).k(other)
    assert held() is None


def test_an_interrupt_leaves_nothing_open():
    class Stop(BaseException):
        pass

    def stop(x):
        raise Stop

    module, x = heads(stop)
    with pytest.raises(Stop), torch.no_grad():
        module(x)
    module.between = lambda x: x
    x.data.mul_(3)
    assert_bitwise_equal(module(x), separate(module)(x))
    assert entry() is None


def test_an_input_that_dies_leaves_no_match():
    """A new tensor may take the place of one that is gone."""
    spec = recipes.get("rowwise").output.lhs
    for seed in range(50):
        x = normal(33, 40, seed=seed)
        # Each is the first of two siblings.
        pairs = SharedInput.group(2)[0].quantize(x, x, (spec, None), OperandProvider())
        assert_bitwise_equal(pairs[0], (lambda q: (q.qdata, q.scale))(tritonfp8.quantize(x, spec)))
        del x


class Residual(Heads):
    """Siblings around a residual that is added in place."""

    def forward(self, x):
        x = x.clone()
        x[..., :16] += self.k(x)
        x[..., :16] += self.v(x)
        return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_residual_that_is_added_in_place(mode):
    module, x = Residual(), normal(33, 40)
    expected = module(x)
    convert(module, "rowwise")
    with mode():
        out = module(x)
        assert_bitwise_equal(out, separate(module)(x))
        assert sqnr(out.clone(), expected) > 25


def test_inference_tensors_are_not_shared():
    """They count no writes."""
    module, x = heads()
    with torch.inference_mode():
        casts, out = casts_in(lambda: module(x * 1))
    assert casts == 3
    assert_bitwise_equal(out.clone(), separate(module)(x).detach())
    # Nor is a cast that inference mode made trained on.
    with torch.inference_mode():
        module.q(x)
    with torch.no_grad():
        module.k(x)
    assert not next(iter(entry().values.values()))[0][0].is_inference()


def test_writes_to_the_tensor_inside_a_subclass_are_seen():
    class Wrapper(torch.Tensor):
        """As a DTensor: it counts the writes to itself, and the tensor inside its own."""

        __torch_dispatch__ = None

        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner, self.mesh = inner, object()

        def __tensor_flatten__(self):
            return ["inner", "mesh"], None

    inner = normal(33, 40)
    x = Wrapper(inner)
    first, second = SharedInput.group(2)
    assert first.once(x, "sum", lambda: inner.sum().item()) == inner.sum().item()
    inner.mul_(2)
    assert second.once(x, "sum", lambda: inner.sum().item()) == inner.sum().item()


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
    module, _ = heads(lambda x: (barrier.wait(), x)[1])
    plain = copy.deepcopy(separate(module))
    plain.between = lambda x: x
    with torch.no_grad():
        expected = [plain(x) for x in inputs]
    with ThreadPoolExecutor(len(inputs)) as pool:
        assert_bitwise_equal(list(pool.map(torch.no_grad()(module), inputs)), expected)


def test_copies_share_among_themselves():
    module, x = heads()
    twin = copy.deepcopy(module)
    assert casts_in(lambda: (module.q(x), twin.k(x)))[0] == 2
    assert casts_in(lambda: twin(x))[0] == 1
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
        assert not any((ours._forward_hooks, ours._forward_pre_hooks, ours._forward_hooks_always_called))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    module, x = heads(requires_grad=True)
    expected = run(separate(module), x)
    out = checkpoint(module, x, use_reentrant=reentrant)
    out.backward(normal(*out.shape, seed=7))
    assert_bitwise_equal([x.grad, *(p.grad for p in module.parameters())], expected[1:])


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
@each_recipe
def test_selective_checkpointing_inside_the_parent(name, policy):
    """What is shared across the border of the checkpoint must not be missing, or there twice, when it runs again."""

    class Parent(Heads):
        policy = None

        def rest(self, q, x):
            return self.o(torch.cat([q, self.k(x), self.v(x)], -1))

        def forward(self, x):
            q = self.q(x)
            if self.policy is None:
                return self.rest(q, x)
            contexts = functools.partial(create_selective_checkpoint_contexts, lambda *args, **kwargs: self.policy)
            out = checkpoint(self.rest, q, x, use_reentrant=False, context_fn=contexts)
            # What it left of the group must not be found when it runs again.
            self.k(x)
            return out

    module, x = Parent(), normal(33, 40).requires_grad_()
    convert(module, name)
    expected = run(separate(module), x)
    module.policy = policy
    assert_bitwise_equal(run(module, x), expected)


def test_llama_shares_where_inputs_are_one():
    model, ids = llama(), tokens()
    convert(model, with_head("rowwise"))
    hidden = (ids.numel(), 64)
    with torch.no_grad():
        before, expected = casts_of(lambda: separate(model)(ids).logits, hidden)
        after, logits = casts_of(lambda: model(ids).logits, hidden)
    assert_bitwise_equal(logits, expected)
    # A layer has q, k, v and gate, up on one input each, and o; the head reads one more.
    assert (before, after) == (2 * 6 + 1, 2 * 3 + 1)
