"""What a forward decided holds in its recompute, and no thread has the options of another."""

import contextlib
import gc
import threading

import pytest
import torch
from cases import normal
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tritonfp8 import convert, swap_recipe
from tritonfp8.distributed import options, scales, token_counts
from tritonfp8.distributed.options import Options, current
from tritonfp8.layers import recompute
from tritonfp8.specs.testing import assert_bitwise_equal

each_kind = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


class Seen(nn.Module):
    """Notes the options that it runs under."""

    def __init__(self):
        super().__init__()
        self.scale, self.options = nn.Parameter(torch.ones(())), []

    def forward(self, x):
        self.options.append(current())
        return (x * self.scale).tanh()


def run(kind, module, x):
    if kind == "sequential":
        return checkpoint_sequential([module, module], 2, x, use_reentrant=True)
    if kind == "composable":
        return composable_checkpoint(module)(x)
    if kind == "nested":
        # The inner region is run by the recompute of the outer one, and again by its own.
        return checkpoint(lambda x: checkpoint(module, x, use_reentrant=True), x, use_reentrant=True)
    return checkpoint(module, x, use_reentrant=kind == "reentrant")


@pytest.mark.parametrize(
    ("kind", "calls"),
    [("reentrant", 2), ("non-reentrant", 2), ("nested", 3), ("sequential", 3), ("composable", 2)],
)
@pytest.mark.parametrize("other", ["global", None])
def test_a_recompute_has_the_options_of_its_forward(kind, calls, other):
    module, x = Seen(), normal(3).requires_grad_()
    with scales("local"), token_counts([1, 2]):
        out = run(kind, module, x)
    assert current() == Options()
    # Backward has blocks of its own around it, or none.
    around = (scales(other), token_counts([3])) if other else (contextlib.nullcontext(),) * 2
    with around[0], around[1]:
        out.sum().backward()
        assert current() == (Options("global", (3,)) if other else Options())
    assert module.options == [Options("local", (1, 2))] * calls
    assert current() == Options()


@each_kind
def test_a_recompute_outside_of_blocks_is_not_told_of_those_around_backward(reentrant):
    module = Seen()
    out = checkpoint(module, normal(3).requires_grad_(), use_reentrant=reentrant)
    with scales("local"):
        out.sum().backward()
        assert current().scales == "local"
    assert module.options == [Options()] * 2


def test_an_error_in_a_recompute_leaves_nothing_behind():
    def broken(x):
        if torch.is_grad_enabled():
            raise KeyError("again")
        return x * 2

    with scales("local"):
        out = checkpoint(broken, normal(3).requires_grad_(), use_reentrant=True)
    with pytest.raises(KeyError, match="again"):
        out.sum().backward()
    assert current() == Options()


def test_options_are_of_one_thread():
    inside, found = threading.Event(), []

    def other():
        found.append(current())
        with token_counts([4]):
            inside.wait(10)
            found.append(current())

    with scales("local"):
        thread = threading.Thread(target=other)
        thread.start()
        assert current() == Options("local")
        inside.set()
        thread.join()
        assert current() == Options("local")
    assert found == [Options(), Options("global", (4,))]


def test_blocks_may_end_in_another_order_than_they_began_in():
    blocks = [scales("local"), token_counts([1]), scales("global")]
    for block in blocks:
        block.__enter__()
    assert current() == Options("global", (1,))
    for i, left in ((0, Options("global", (1,))), (2, Options("global", (1,))), (1, Options())):
        blocks[i].__exit__(None, None, None)
        assert current() == left


def test_a_block_that_ends_on_another_thread_says_so():
    block = scales("local")
    thread = threading.Thread(target=lambda: (block.__enter__(), options._thread.set(())))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="ends on another thread than it began on"):
        block.__exit__(None, None, None)
    assert current() == Options()


WRONG = [
    (token_counts, [-1], ValueError, "token counts"),
    *((token_counts, value, TypeError, "token counts") for value in ("ab", 3, [1.5], [None], None)),
    *((scales, value, ValueError, "scales must be one of 'global', 'local'") for value in ("rank", None, 3, ["local"])),
]


@pytest.mark.parametrize(("block", "value", "error", "message"), WRONG)
def test_values_of_blocks_are_checked(block, value, error, message):
    with pytest.raises(error, match=message), block(value):
        pass


def test_a_compiled_graph_is_of_the_options_of_its_thread():
    call = torch.compile(lambda x: x * (2 if current().scales == "global" else 3), backend="eager", fullgraph=True)
    one, found = torch.ones(()), []
    assert call(one) == 2
    with scales("local"):
        assert call(one) == 3
        thread = threading.Thread(target=lambda: found.append(call(one)))
        thread.start()
        thread.join()
    assert found == [2]
    assert call(one) == 2


@each_kind
def test_a_compiled_region_has_the_options_of_its_forward(reentrant):
    call = torch.compile(lambda x: (x * (2 if current().scales == "global" else 3)).sin(), backend="aot_eager")
    x = normal(3).requires_grad_()
    with scales("local"):
        out = checkpoint(call, x, use_reentrant=reentrant)
    out.sum().backward()
    assert_bitwise_equal(x.grad, 3 * (3 * x.detach()).cos())


def residual():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    convert(model, "blockwise")
    return model


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "nested"])
def test_a_recompute_follows_the_recipe_of_its_forward(compiled, kind):
    def gradients(swap):
        model, x = residual(), normal(33, 64).requires_grad_()
        for layer in (model[0], model[2]) if compiled else ():
            layer.compile(backend="aot_eager")
        out = run(kind, model, x)
        if swap:
            swap_recipe(model, "tensorwise")
        out.backward(normal(33, 64, seed=1))
        # The next forward follows the new one.
        return [x.grad, *(p.grad for p in model.parameters())], model(x.detach()).detach()

    (expected, before), (found, after) = gradients(False), gradients(True)
    assert_bitwise_equal(found, expected)
    assert not torch.equal(before, after)


def test_nothing_is_kept_of_swaps_that_no_region_may_ask_for():
    model = residual()
    gc.collect()
    swap_recipe(model, "rowwise")
    assert recompute._swaps == []
    out = checkpoint(model, normal(3, 64).requires_grad_(), use_reentrant=False)
    swap_recipe(model, "tensorwise")
    assert len(recompute._swaps) == 2
    out.sum().backward()
    del out
    gc.collect()
    swap_recipe(model, "rowwise")
    assert recompute._swaps == []


def test_two_backwards_recompute_alike():
    model, x = residual(), normal(33, 64).requires_grad_()
    out = checkpoint(model, x, use_reentrant=True)
    swap_recipe(model, "tensorwise")
    out.sum().backward(retain_graph=True)
    first = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    out.sum().backward()
    assert_bitwise_equal([x.grad, *(p.grad for p in model.parameters())], first)
