"""The linear layer: its three GEMMs, what it saves, and what it composes with."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import CODES, cpu_and_cuda, named, normal, rounded, with_gradients
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import tritonfp8
from tritonfp8 import QuantSpec, Recipe, ops, recipes
from tritonfp8.compat.counting import count_gemms
from tritonfp8.functional import linear
from tritonfp8.layers.linear import dispatch
from tritonfp8.recipes import GEMMS, Gemm
from tritonfp8.specs import BLOCK_1X128, ROWWISE
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES
from tritonfp8.specs.testing import assert_bitwise_equal

ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
each_recipe = pytest.mark.parametrize("name", recipes.names())


def layer(shape, n, dtype=torch.bfloat16, device="cpu", bias=True, needs=(True, True, True)):
    """input, weight, bias (or None) and a gradient of the output."""
    k = shape[-1]
    x = normal(*shape, dtype=dtype, device=device)
    weight = normal(n, k, seed=1, dtype=dtype, device=device)
    b = normal(n, seed=2, dtype=dtype, device=device) if bias else None
    for tensor, needed in zip((x, weight, b), needs, strict=True):
        if tensor is not None:
            tensor.requires_grad_(needed)
    return x, weight, b, normal(*shape[:-1], n, seed=3, dtype=dtype, device=device)


def product(gemm, lhs, rhs, bias, dtype):
    """``lhs [., C] @ rhs [., C].T`` by one line of a recipe, out of the public functions."""
    if not gemm.quantized:
        return F.linear(lhs, rhs, bias)
    a, b = tritonfp8.quantize(lhs, gemm.lhs), tritonfp8.quantize(rhs, gemm.rhs)
    return tritonfp8.scaled_matmul(a, b, bias, out_dtype=dtype, accumulation=gemm.accumulation)


def sum_of_rows(grad, recipe):
    """The gradient of the bias: a GPU sums in the pass that casts the gradient to both orientations."""
    spec, spec_t = recipe.grad_input.lhs, recipe.grad_weight.lhs
    if spec is None or spec_t is None:
        return grad.sum(0)
    total = ops.quantize_both_sum(grad, *spec.args, *spec_t.args)[-1]
    torch.testing.assert_close(total, grad.sum(0))
    return total


@torch.no_grad()
def expected_of(x, weight, bias, grad, recipe):
    """Output and the three gradients as the recipe's equations say."""
    rows, of_rows = x.detach().reshape(-1, x.shape[-1]), grad.reshape(-1, weight.shape[0])
    weight = rounded(weight.detach(), recipe)
    return (
        product(recipe.output, rows, weight, bias, x.dtype).view(grad.shape),
        product(recipe.grad_input, of_rows, weight.t(), None, x.dtype).view(x.shape),
        product(recipe.grad_weight, of_rows.t(), rows.t(), None, x.dtype),
        sum_of_rows(of_rows, recipe),
    )


def results(x, weight, bias, grad, recipe):
    wanted = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    return tuple(with_gradients(linear(x, weight, bias, recipe), wanted, grad))


class TestLinear:
    @cpu_and_cuda
    @each_recipe
    @pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
    def test_is_the_recipe_to_the_bit(self, device, name, dtype):
        recipe = recipes.get(name)
        for shape, n in (((48, 64), 32), ((150, 70), 130)):
            args = layer(shape, n, dtype, device)
            assert_bitwise_equal(results(*args, recipe), expected_of(*args, recipe))

    @cpu_and_cuda
    @each_recipe
    @pytest.mark.parametrize("shape", [(70,), (1, 70), (2, 3, 70), (2, 1, 3, 70), (1, 1), (17, 1)], ids=str)
    @pytest.mark.parametrize("n", [1, 20])
    def test_any_leading_dims_and_sizes(self, device, name, shape, n):
        args = layer(shape, n, device=device)
        actual = results(*args, name)
        assert actual[0].shape == (*shape[:-1], n)
        assert_bitwise_equal(actual, expected_of(*args, recipes.get(name)))

    @cpu_and_cuda
    @each_recipe
    @pytest.mark.parametrize(("shape", "n"), [((0, 40), 20), ((2, 0, 40), 20), ((3, 40), 0), ((2, 3, 0), 20)], ids=str)
    def test_empty_dims(self, device, name, shape, n):
        x, weight, bias, grad = layer(shape, n, torch.float32, device)
        out, grad_input, grad_weight, grad_bias = results(x, weight, bias, grad, name)
        assert_bitwise_equal(out, F.linear(x, weight, bias).detach())
        assert_bitwise_equal(grad_input, torch.zeros_like(x))
        assert_bitwise_equal(grad_weight, torch.zeros_like(weight))
        torch.testing.assert_close(grad_bias, grad.reshape(-1, n).sum(0) if n else torch.zeros_like(bias))

    @each_recipe
    def test_operands_of_any_layout(self, name):
        x, weight, bias, grad = layer((40, 70), 33)
        expected = results(x, weight, bias, grad, name)
        x_strided = x.detach().t().contiguous().t().requires_grad_()
        weight_strided = weight.detach().repeat_interleave(2, 1)[:, ::2].requires_grad_()
        grad_strided = grad.t().contiguous().t()
        assert_bitwise_equal(results(x_strided, weight_strided, bias, grad_strided, name), expected)
        ones = torch.ones_like(grad), torch.ones((), dtype=grad.dtype).expand(grad.shape)
        assert_bitwise_equal(*(results(x, weight, bias, grad, name) for grad in ones))

    @each_recipe
    @pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
    def test_only_the_products_that_are_needed_run(self, name, needs):
        x, weight, bias, grad = layer((33, 70), 20, needs=needs)
        recipe = recipes.get(name)
        with count_gemms() as counts:
            out = linear(x, weight, bias, recipe)
        assert counts.calls.total() == 1
        assert out.requires_grad == any(needs)
        if not any(needs):
            return
        with count_gemms() as counts:
            out.backward(grad)
        ran = [getattr(recipe, gemm).quantized for gemm, needed in zip(GEMMS[1:], needs[:2], strict=True) if needed]
        assert counts.calls["reference"] == ran.count(True)
        assert counts.calls["high_precision"] == ran.count(False)
        expected = expected_of(x, weight, bias, grad, recipe)[1:]
        for tensor, needed, want in zip((x, weight, bias), needs, expected, strict=True):
            assert (tensor.grad is not None) == needed
            if needed:
                assert_bitwise_equal(tensor.grad, want)

    def test_each_product_by_its_own_recipe(self):
        """One product quantized, the two others not, and the other way round."""
        for gemm in GEMMS:
            for recipe in (
                Recipe("one", **{gemm: Gemm(ROW, ROW)}),
                Recipe("two", **dict.fromkeys(set(GEMMS) - {gemm}, Gemm(VECTOR, VECTOR))),
            ):
                args = layer((33, 150), 20)
                assert_bitwise_equal(results(*args, recipe), expected_of(*args, recipe))

    @each_recipe
    def test_without_bias(self, name):
        args = layer((33, 70), 20, bias=False)
        assert_bitwise_equal(results(*args, name), expected_of(*args, recipes.get(name))[:3])

    @cpu_and_cuda
    @each_recipe
    def test_autocast(self, device, name):
        """Computes in autocast's dtype, as F.linear does; a gradient has the dtype of its tensor."""
        x, weight, bias, grad = layer((33, 70), 20, torch.float32, device)
        low = [t.detach().bfloat16().requires_grad_() for t in (x, weight, bias)]
        expected = results(*low, grad.bfloat16(), name)
        with torch.autocast(device, torch.bfloat16):
            out = linear(x, weight, bias, name)
            mixed = linear(low[0], weight, bias, name)
        assert_bitwise_equal(out.detach(), expected[0])
        assert_bitwise_equal(mixed, out)
        grads = torch.autograd.grad(out, (x, weight, bias), grad.bfloat16())
        assert_bitwise_equal(grads, tuple(g.float() for g in expected[1:]))

    def saved_bytes(self, name, shape=(256, 384), n=64, **kwargs):
        x, weight, bias, _ = layer(shape, n, **kwargs)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            linear(x, weight, bias, name)
        # The parameter itself is alive anyway.
        return sum(t.nbytes for t in saved if t.data_ptr() != weight.data_ptr())

    @pytest.mark.parametrize(
        ("name", "scales"),
        [
            ("tensorwise", lambda m, k: 4),
            ("rowwise", lambda m, k: 4 * k),
            ("blockwise", lambda m, k: m * k // 32),
            ("mxfp8", lambda m, k: m * k // 32),
        ],
    )
    def test_saves_the_quantized_input(self, name, scales):
        m, k = 256, 384
        # Of the weight, for the cast of its transpose: one number, or one a column.
        amax = {"tensorwise": 4, "rowwise": 4 * k}.get(name, 0)
        assert self.saved_bytes(name, (m, k)) == m * k + scales(m, k) + amax
        assert self.saved_bytes(name, (2, m // 2, k)) == m * k + scales(m, k) + amax
        assert self.saved_bytes(name, (m, k), needs=(True, False, True)) == amax
        assert self.saved_bytes(name, (m, k), needs=(False, True, False)) == m * k + scales(m, k)

    @pytest.mark.parametrize("name", ["bf16", "rowwise_hp_grad_weight"])
    def test_saves_the_input_where_the_recipe_needs_it(self, name):
        assert self.saved_bytes(name) == 2 * 256 * 384
        assert self.saved_bytes(name, needs=(True, False, True)) == 0

    @each_recipe
    def test_gradients_accumulate(self, name):
        first, second = layer((33, 70), 20), layer((16, 70), 20)
        weight = first[1]
        expected = results(*first, name)[2] + results(second[0], weight, *second[2:], name)[2]
        for x, _, bias, grad in (first, second):
            linear(x, weight, bias, name).backward(grad)
        assert_bitwise_equal(weight.grad, expected)

    @each_recipe
    def test_a_gradient_of_the_gradient_is_an_error(self, name):
        x, weight, bias, _ = layer((33, 70), 20)
        (grad,) = torch.autograd.grad(linear(x, weight, bias, name).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()

    @each_recipe
    def test_no_grad_and_inference_mode(self, name):
        x, weight, bias, _ = layer((33, 70), 20)
        expected = linear(x, weight, bias, name).detach()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                out = linear(x, weight, bias, name)
            assert not out.requires_grad
            assert_bitwise_equal(out.clone(), expected)
        with torch.inference_mode():
            assert_bitwise_equal(linear(x.clone(), weight.clone(), bias, name), expected)


def selective():
    gemms = [torch.ops.tritonfp8.scaled_matmul.default, torch.ops.tritonfp8.matmul.default]
    return create_selective_checkpoint_contexts(gemms)


class TestCheckpointing:
    @cpu_and_cuda
    @pytest.mark.parametrize("name", [*recipes.names(), *CODES.values()], ids=named)
    @pytest.mark.parametrize(
        ("options", "products"),
        [
            ({"use_reentrant": True}, 8),
            ({"use_reentrant": False}, 8),
            ({"use_reentrant": False, "context_fn": selective}, 6),
        ],
        ids=["reentrant", "full", "selective"],
    )
    def test_changes_nothing_but_what_is_recomputed(self, device, name, options, products):
        """Two layers have six products; full checkpointing repeats both outputs, selective saves them."""

        def block(x, w1, w2, b1, b2):
            return linear(torch.tanh(linear(x, w1, b1, name)), w2, b2, name)

        x, w1, b1, _ = layer((33, 70), 20, device=device)
        _, w2, b2, grad = layer((33, 20), 50, device=device)
        wanted = (x, w1, w2, b1, b2)
        expected = with_gradients(block(*wanted), wanted, grad)
        with count_gemms() as counts:
            recomputed = checkpoint(block, *wanted, **options)
            recomputed.backward(grad)
        assert_bitwise_equal([recomputed.detach(), *(t.grad for t in wanted)], expected)
        assert counts.calls.total() == products


NEEDS = [(True, True, True), (True, False, False), (False, True, True), (True, True, False), (False, True, False)]


@cpu_and_cuda
@each_recipe
@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize("shares", [False, True])
def test_small_layers_in_one_call_each_way_have_the_bits_of_calls_of_each_op(monkeypatch, device, name, needs, shares):
    """On a GPU the third step repeats what the second one repeated at other addresses."""

    def steps():
        found = []
        for _ in range(3):
            x, weight, bias, grad = layer((3, 40, 96), 64, needs=needs, device=device)
            siblings = tritonfp8.functional.SharedInput.group(2) if shares else [None, None]
            outs = [linear(x, weight, bias, name, shared_input=each) for each in siblings]
            wanted = [each for each in (x, weight, bias) if each.requires_grad]
            found.append([*outs, *with_gradients(outs[0] + outs[1], wanted, grad)])
        return found

    in_one = []
    real = ops.CALLS.chain
    with monkeypatch.context() as patch:
        patch.setattr(ops.CALLS, "chain", lambda *args: in_one.append(args[2]) or real(*args))
        found = steps()
    # Forward and backward of both layers; not of a recipe with GEMMs in high precision. torch sums a bias by itself
    # where only one of the gradients beside it is wanted.
    chained = recipes.get(name).quantized_share == 1 and "mx" not in name
    backward = needs[2] <= all(needs[:2])
    assert len(in_one) == 3 * 2 * (1 + backward) * chained
    monkeypatch.setattr(dispatch, "MOST_WORK", 0)
    assert_bitwise_equal(found, steps())


def test_layers_with_a_batch_invariant_output_call_each_op(monkeypatch):
    """The rows of a batch-invariant GEMM may be copied before it, which no plan does."""
    called = []
    monkeypatch.setattr(ops.CALLS, "chain", lambda *args: called.append(args))
    x, weight, bias, grad = layer((40, 96), 64)
    recipe = recipes.get("rowwise", batch_invariant=True)
    found = with_gradients(linear(x, weight, bias, recipe), (x, weight, bias), grad)
    assert not called
    monkeypatch.setattr(dispatch, "MOST_WORK", 0)
    assert_bitwise_equal(found, with_gradients(linear(x, weight, bias, recipe), (x, weight, bias), grad))


def test_large_layers_call_each_op(monkeypatch):
    """Where a GEMM takes longer than the host, what the last op writes has no memory from the beginning."""
    called = []
    monkeypatch.setattr(ops.CALLS, "chain", lambda *args: called.append(args))
    x, weight, bias, _ = layer((40, 96), 64)
    monkeypatch.setattr(dispatch, "MOST_WORK", 40 * 96 * 64 - 1)
    linear(x, weight, bias, "rowwise")
    assert not called


def test_modes_and_logs_see_each_op_of_a_small_layer():
    x, weight, bias, grad = layer((40, 96), 64)
    with count_gemms() as counts:
        linear(x, weight, bias, "rowwise").backward(grad)
    assert sum(counts.calls.values()) == 3
    out = linear(x, weight, bias, "rowwise")
    with FlopCounterMode(display=False) as counter:
        out.backward(grad)
    assert counter.get_total_flops() == 2 * 40 * 96 * 64 * 2
