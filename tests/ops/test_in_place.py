"""A compiled backward writes the gradient of SwiGLU over what forward saved for it, which nobody needs then."""

import re

import pytest
import torch
from op_samples import SAMPLES
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import tritonfp8
from tritonfp8 import ops
from tritonfp8.compat import inductor_private
from tritonfp8.ops import direct
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(4)

IN_PLACE = ("swiglu_backward", "swiglu_backward_amax")
CALLED = re.compile(r"tritonfp8_calls\.(swiglu_backward\w*)\(|tritonfp8_site\('(swiglu_backward\w*)'\)")


def tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def gradients(function, *leaves, **options):
    """Of the first result of a compiled function, and which functions of SwiGLU's gradient the code calls."""
    torch.compiler.reset()
    leaves = [x.detach().clone().requires_grad_() for x in leaves]

    def run():
        out = tensors(torch.compile(function, fullgraph=True, **options)(*leaves))[0]
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    with torch._inductor.config.patch(force_disable_caches=True):
        grads, code = run_and_get_code(run)
    return grads, ["".join(found) for found in CALLED.findall("\n".join(code))]


@pytest.mark.parametrize("i", [i for i, (op, _) in enumerate(SAMPLES) if op._opname in IN_PLACE])
def test_the_result_is_written_over_an_argument(i):
    op, args = SAMPLES[i]
    function = getattr(direct.CALLS, f"{op._opname}_")
    expected, over = tensors(op(*args)), args[1].clone()
    found = tensors(function(args[0], over, *args[2:]))
    assert found[0] is over
    assert_bitwise_equal(found, expected)
    # A mode sees the op, which writes over nothing.
    over = args[1].clone()
    with FlopCounterMode(display=False):
        found = tensors(function(args[0], over, *args[2:]))
    assert_bitwise_equal([over, *found], [args[1], *expected])


@pytest.fixture
def leaves():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator).bfloat16() for size in ((24, 40), (64, 40))]


class SwiGLU(torch.autograd.Function):
    """Saves what it is of."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        return ops.swiglu(gate_up)

    @staticmethod
    def backward(ctx, grad):
        return ops.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


class ReadLater(SwiGLU):
    """Its backward reads the saved tensor once more."""

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        return ops.matmul(ops.swiglu_backward(grad.contiguous(), gate_up), torch.eye(64).bfloat16()) * gate_up


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return ops.matmul(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return ops.matmul(grad, weight.t()), ops.matmul(grad.t(), x.t())


def of_parts(x, weight):
    y = Product.apply(x, weight)
    return SwiGLU.apply(y[4:]).sum() + ReadLater.apply(y[:12]).sum()


CASES = {
    "saved for this only": (lambda x, w: SwiGLU.apply(Product.apply(x, w)), ["swiglu_backward_"]),
    "a part that is saved": (lambda x, w: SwiGLU.apply(Product.apply(x, w)[4:]), ["swiglu_backward_"]),
    "read again later": (lambda x, w: ReadLater.apply(Product.apply(x, w)), ["swiglu_backward"]),
    "given to the caller": (lambda x, w: (SwiGLU.apply(y := Product.apply(x, w)), y), ["swiglu_backward"]),
    "an input of the caller": (lambda x, w: SwiGLU.apply(w) * x.sum(), ["swiglu_backward"]),
    "parts of a saved tensor": (of_parts, ["swiglu_backward"] * 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_only_what_nobody_else_needs_is_written_over(leaves, case, monkeypatch):
    function, names = CASES[case]
    found, called = gradients(function, *leaves)
    assert called == names
    monkeypatch.setattr(inductor_private, "is_free_after", lambda node, place: False)
    expected, called = gradients(function, *leaves)
    assert called == ["swiglu_backward"] * len(names)
    assert_bitwise_equal(found, expected)


@pytest.mark.slow
def test_what_shares_its_memory_is_not_written_over(leaves, monkeypatch):
    function, _ = CASES["saved for this only"]
    is_free = inductor_private.is_free_after

    def sharing(node, place):
        placeholders = V.graph.module.graph.find_nodes(op="placeholder")
        (saved,) = (x for x in placeholders if x.target == node.inputs[place].get_name())
        found = is_free(node, place)
        next(x for x in placeholders if x is not saved).meta["val"] = saved.meta["val"].t()
        return [found, is_free(node, place)] == [True, True]

    monkeypatch.setattr(inductor_private, "is_free_after", sharing)
    assert gradients(function, *leaves)[1] == ["swiglu_backward"]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["one size", "sizes that change"])
@pytest.mark.parametrize(("recipe", "name"), [("rowwise", "swiglu_backward_amax_"), ("blockwise", "swiglu_backward_")])
def test_gradients_of_experts(recipe, name, dynamic, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    experts = tritonfp8.Float8Experts(4, 64, 96, recipe=recipe).bfloat16()
    x = torch.randn(48, 64, generator=generator).bfloat16()
    index, factors = torch.randint(0, 4, (48, 2), generator=generator), torch.rand(48, 2, generator=generator)

    def function(x, *weights):
        named = dict(zip(dict(experts.named_parameters()), weights, strict=True))
        return torch.func.functional_call(experts, named, (x, index, factors))

    found, called = gradients(function, x, *experts.parameters(), dynamic=dynamic)
    assert called == [name]
    monkeypatch.setattr(inductor_private, "is_free_after", lambda node, place: False)
    expected, called = gradients(function, x, *experts.parameters(), dynamic=dynamic)
    assert called == [name.removesuffix("_")]
    assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("name", ["DonatedBuffer", "ReinterpretView"])
def test_a_torch_without_the_names_writes_over_nothing(monkeypatch, name):
    monkeypatch.delattr(torch._inductor.ir, name)
    assert inductor_private.is_free_after(None, 1) is False
