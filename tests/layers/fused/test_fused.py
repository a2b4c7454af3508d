"""Fused layers are the plain layers after one another, in fewer passes: their values, gradients and saved tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import cpu_and_cuda, normal
from cast_counts import casts_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8 import QuantSpec, recipes, reference
from tritonfp8.counting import count_gemms
from tritonfp8.formats import HIGH_PRECISION_DTYPES
from tritonfp8.functional import linear
from tritonfp8.layers.fused.functional import rms_norm_quantize, silu_mul_backward_quantize, silu_mul_quantize
from tritonfp8.layers.fused.modules import Float8RMSNorm, Float8SwiGLU
from tritonfp8.layers.fused.rms_norm import quantized_rms_norm, rms_norm
from tritonfp8.layers.fused.swiglu import swiglu
from tritonfp8.layers.linear import QuantizedInput, is_fusable, quantize_input, quantized_linear
from tritonfp8.specs import BLOCK_1X128, RMS_NORM_ROUNDINGS, ROWWISE
from tritonfp8.testing import assert_bitwise_equal, sqnr

ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
EPS = 1e-5
FUSABLE = [name for name in recipes.names() if is_fusable(name)]
each_fusable = pytest.mark.parametrize("name", FUSABLE)
# Gradients of a norm or an activation that rounds once to bf16, not at each step.
BF16_STEPS = 45.0


def test_fusable_recipes_quantize_all_products():
    assert set(recipes.names()) - set(FUSABLE) == {"bf16", "rowwise_hp_grad_weight"}


class TestFunctions:
    def test_are_the_reference(self):
        x, up, grad = (normal(33, 70, seed=i, dtype=torch.bfloat16) for i in range(3))
        weight = normal(70, seed=3)
        for rounding in RMS_NORM_ROUNDINGS:
            made = rms_norm_quantize(x, weight, EPS, ROW, VECTOR, rounding, keep=True)
            y, rstd = reference.rms_norm(x, weight, EPS, rounding)
            assert_bitwise_equal((made.value, made.rstd), (y, rstd))
            assert_bitwise_equal(made.normal, tritonfp8.quantize(y, ROW))
            assert_bitwise_equal(made.transposed, tritonfp8.quantize(y, VECTOR, transpose=True))
        h = reference.silu_mul(x, up)
        made = silu_mul_quantize(x, up, ROW, VECTOR)
        assert made[2:] == (None, None)
        assert_bitwise_equal(made[:2], (tritonfp8.quantize(h, ROW), tritonfp8.quantize(h, VECTOR, True)))
        for made, g in zip(
            silu_mul_backward_quantize(grad, x, up, ROW, VECTOR),
            reference.silu_mul_backward(grad, x, up),
            strict=True,
        ):
            assert made[2:] == (None, None)
            assert_bitwise_equal(made[:2], (tritonfp8.quantize(g, ROW), tritonfp8.quantize(g, VECTOR, True)))

    @pytest.mark.parametrize(("spec", "spec_t"), [(ROW, None), (None, VECTOR)])
    def test_one_orientation(self, spec, spec_t):
        x, up = (normal(33, 70, seed=i, dtype=torch.bfloat16) for i in range(2))
        both = silu_mul_quantize(x, up, ROW, VECTOR, keep=True)
        made = silu_mul_quantize(x, up, spec, spec_t, keep=True)
        assert (made.normal is None, made.transposed is None) == (spec is None, spec_t is None)
        assert_bitwise_equal(made.normal or made.transposed, both.normal if spec else both.transposed)
        assert_bitwise_equal(made.value, both.value)
        made = rms_norm_quantize(x, normal(70), EPS, spec, spec_t)
        assert (made.normal is None, made.transposed is None, made.value) == (spec is None, spec_t is None, None)
        assert made.rstd.shape == (33,)

    def test_results_carry_no_gradient(self):
        x = normal(33, 70).requires_grad_()
        made = silu_mul_quantize(x, x, ROW, VECTOR, keep=True)
        assert not any(t.requires_grad for t in (made.normal.qdata, made.transposed.scale, made.value))


X, WEIGHT = normal(4, 40), normal(40)
ERRORS = {
    "no spec": (lambda: silu_mul_quantize(X, X, None), ValueError, "spec_t.*None for both"),
    "a name": (lambda: silu_mul_quantize(X, X, "e4m3"), TypeError, "QuantSpec or None; got str"),
    "two shapes": (lambda: silu_mul_quantize(X, X[:2], ROW), ValueError, r"up must be as gate.*\(2, 40\)"),
    "two dtypes": (lambda: silu_mul_quantize(X, X.half(), ROW), ValueError, "up must be as gate.*float16"),
    "float64": (lambda: silu_mul_quantize(X.double(), X.double(), ROW), TypeError, "float64.*Cast"),
    "3-D": (lambda: silu_mul_quantize(X[None], X[None], ROW), ValueError, r"2-D.*\(1, 4, 40\).*Flatten"),
    "no tensor": (lambda: silu_mul_quantize(1.0, X, ROW), TypeError, "gate must be a torch.Tensor; got float"),
    "gradient": (lambda: silu_mul_backward_quantize(X, X, X.T, ROW), ValueError, r"up must be as grad.*\(40, 4\)"),
    "weight": (lambda: rms_norm_quantize(X, X[:, 0], EPS, ROW), ValueError, r"weight.*\(40,\).*\(4,\)"),
    "rounding": (lambda: rms_norm_quantize(X, WEIGHT, EPS, ROW, rounding="up"), ValueError, "'normalized'; got 'up'"),
    "norm of float64": (lambda: quantized_rms_norm(X.double(), WEIGHT, EPS, "rowwise"), TypeError, "float64.*Cast"),
    "norm of a scalar": (lambda: quantize_input(torch.ones(()), "rowwise"), ValueError, "at least one dim"),
    "norm by bf16": (lambda: quantized_rms_norm(X, WEIGHT, EPS, "bf16"), ValueError, "'bf16' keeps one in high"),
    "another recipe": (
        lambda: quantized_linear(quantize_input(X, "rowwise"), X, recipe="mxfp8"),
        ValueError,
        "as e4m3 rowwise.*reads e4m3 1x32",
    ),
    "another K": (
        lambda: quantized_linear(quantize_input(X, "rowwise"), X.T), ValueError, r"got \(4, 40\) and \(40, 4\)"
    ),
    "another dtype": (lambda: quantized_linear(quantize_input(X, "rowwise"), X.half()), TypeError, "float16 with"),
    "bias": (
        lambda: quantized_linear(quantize_input(X, "rowwise"), X, WEIGHT), ValueError, r"bias.*\(4,\); got \(40,\)"
    ),
    "swiglu shapes": (lambda: swiglu(X, X, X, X), ValueError, r"down_weight \[N, F\].*\(4, 40\)"),
    "module rounding": (lambda: Float8RMSNorm(40, rounding="no"), ValueError, "'output', 'normalized'; got 'no'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_was_required_and_what_came(case):
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        call()


def layer(name, dtype=torch.bfloat16, device="cpu", shape=(2, 33), k=70, f=90, needs=(True,) * 5):
    """x, norm weight, the three weights of an MLP, and a gradient of its output."""
    x = normal(*shape, k, dtype=dtype, device=device)
    norm = 1 + normal(k, seed=1, dtype=dtype, device=device) / 4
    weights = [
        normal(rows, cols, seed=2 + i, dtype=dtype, device=device) / cols**0.5
        for i, (rows, cols) in enumerate(((f, k), (f, k), (k, f)))
    ]
    tensors = [t.detach().requires_grad_(needed) for t, needed in zip((x, norm, *weights), needs, strict=True)]
    return tensors, normal(*shape, k, seed=9, dtype=dtype, device=device)


def fused(x, norm, gate, up, down, name):
    return swiglu(quantized_rms_norm(x, norm, EPS, name), gate, up, down, name)


def plain(x, norm, gate, up, down, name):
    """The same layers one by one; the activation rounds once, as the fused one does."""
    y = rms_norm(x, norm, EPS)
    hidden = F.silu(linear(y, gate, None, name).float()) * linear(y, up, None, name).float()
    return linear(hidden.to(x.dtype), down, None, name)


def results(call, tensors, grad, name):
    out = call(*tensors, name)
    wanted = [t for t in tensors if t.requires_grad]
    return out.detach(), torch.autograd.grad(out, wanted, grad)


class TestLayers:
    @cpu_and_cuda
    @each_fusable
    @pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
    def test_are_the_plain_layers(self, device, name, dtype):
        tensors, grad = layer(name, dtype, device)
        out, grads = results(fused, tensors, grad, name)
        expected, expected_grads = results(plain, tensors, grad, name)
        if device == "cpu":
            # Producers are the same arithmetic here; autograd's own rounds more often on the way back.
            assert_bitwise_equal(out, expected)
            assert_bitwise_equal(grads[4], expected_grads[4])
        for actual, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
            assert actual.dtype == wanted.dtype
            assert actual.shape == wanted.shape
            assert sqnr(actual, wanted) > (BF16_STEPS if dtype != torch.float32 else 60.0)

    @cpu_and_cuda
    @each_fusable
    def test_linears_of_one_input_are_the_plain_ones(self, device, name):
        """To the bit, forward and backward; the gradient of the input is the sum over them."""
        x = normal(2, 33, 70, dtype=torch.bfloat16, device=device).requires_grad_()
        weights = [normal(n, 70, seed=n, dtype=torch.bfloat16, device=device).requires_grad_() for n in (20, 50)]
        bias = normal(20, dtype=torch.bfloat16, device=device).requires_grad_()
        grads = [normal(2, 33, n, seed=n + 1, dtype=torch.bfloat16, device=device) for n in (20, 50)]
        shared = quantize_input(x, name)
        assert (shared.shape, shared.ndim, shared.dtype, shared.device) == (x.shape, 3, x.dtype, x.device)
        outs = [quantized_linear(shared, w, b, name) for w, b in zip(weights, (bias, None), strict=True)]
        expected = [linear(x, w, b, name) for w, b in zip(weights, (bias, None), strict=True)]
        assert_bitwise_equal(outs, expected)
        wanted = (x, *weights, bias)
        assert_bitwise_equal(torch.autograd.grad(outs, wanted, grads), torch.autograd.grad(expected, wanted, grads))

    @each_fusable
    def test_only_what_is_needed_runs(self, name):
        """Nine products for everything; frozen tensors save theirs."""
        for needs, backward in (
            ((True,) * 5, 6),
            ((True, False, False, False, False), 3),
            ((False, False, True, True, False), 3),
            ((False, False, False, False, True), 1),
            ((False, False, False, True, False), 2),
        ):
            tensors, grad = layer(name, needs=needs)
            with count_gemms() as counts:
                out = fused(*tensors, name)
            assert counts.calls.total() == 3
            with count_gemms() as counts:
                grads = torch.autograd.grad(out, [t for t in tensors if t.requires_grad], grad)
            assert counts.calls.total() == backward
            everything, _ = layer(name)
            expected = results(fused, everything, grad, name)[1]
            assert_bitwise_equal(grads, tuple(g for g, needed in zip(expected, needs, strict=True) if needed))

    @each_fusable
    def test_what_is_saved(self, name):
        """One copy of the quantized input for gate and up, and gate and up themselves: their product is made again."""
        m, k, f = 256, 128, 384
        tensors, _ = layer(name, shape=(m,), k=k, f=f)
        saved = {}

        def note(t):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            fused(*tensors, name)
        alive = {t.untyped_storage().data_ptr() for t in tensors}
        scales = {
            "tensorwise": 4,
            "rowwise": 4 * k,
            "blockwise": m * k // 32,
            "mxfp8": m * k // 32,
        }
        expected = 2 * 2 * m * f + m * k + 4 * m + scales[name]
        assert sum(size for pointer, size in saved.items() if pointer not in alive) == expected

    @each_fusable
    def test_no_grad_quantizes_one_orientation(self, name):
        tensors, _ = layer(name)
        expected = fused(*tensors, name)
        with torch.no_grad():
            shared = quantized_rms_norm(*tensors[:2], EPS, name)
            assert shared.transposed is None
            assert_bitwise_equal(fused(*tensors, name), expected)
        with pytest.raises(ValueError, match="no gradients were recorded"):
            swiglu(shared, *tensors[2:], name)
        with torch.inference_mode():
            assert_bitwise_equal(fused(*tensors, name).clone(), expected)

    @each_fusable
    def test_a_gradient_of_the_gradient_is_an_error(self, name):
        tensors, _ = layer(name)
        (grad,) = torch.autograd.grad(fused(*tensors, name).square().sum(), tensors[0], create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()

    @each_fusable
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpointing(self, name, reentrant):
        tensors, grad = layer(name)
        expected = results(fused, tensors, grad, name)
        out = checkpoint(lambda *t: fused(*t, name), *tensors, use_reentrant=reentrant)
        out.backward(grad)
        assert_bitwise_equal((out.detach(), tuple(t.grad for t in tensors)), expected)

    @each_fusable
    @pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0)], ids=str)
    def test_leading_dims(self, name, shape):
        tensors, grad = layer(name, shape=shape)
        out, grads = results(fused, tensors, grad, name)
        assert out.shape == (*shape, 70)
        assert grads[0].shape == tensors[0].shape
        if out.numel():
            assert_bitwise_equal(out, results(plain, tensors, grad, name)[0])
        else:
            assert not any(g.any() for g in grads[1:])

    @cpu_and_cuda
    @each_fusable
    def test_autocast(self, device, name):
        """Linears compute in autocast's dtype, gradients have that of their tensors."""
        tensors, grad = layer(name, torch.float32, device)
        low = [t.detach().bfloat16().requires_grad_() for t in tensors]
        with torch.autocast(device, torch.bfloat16):
            out = fused(*tensors, name)
            assert_bitwise_equal(swiglu(low[0], *tensors[2:], name), swiglu(low[0], *low[2:], name))
        assert out.dtype == torch.bfloat16
        grads = torch.autograd.grad(out, tensors, grad.bfloat16())
        assert {g.dtype for g in grads} == {torch.float32}

    @cpu_and_cuda
    @each_fusable
    def test_backward_under_autocast(self, device, name):
        tensors, grad = layer(name, torch.float32, device)
        found = []
        for inside in (False, True):
            with torch.autocast(device, torch.bfloat16):
                out = fused(*tensors, name)
            with torch.autocast(device, torch.bfloat16, enabled=inside):
                found.append(torch.autograd.grad(out, tensors, grad.bfloat16()))
        assert_bitwise_equal(found[1], found[0])

    @pytest.mark.parametrize("name", sorted(set(recipes.names()) - set(FUSABLE)))
    def test_other_recipes_run_as_they_are(self, name):
        tensors, _ = layer(name)
        x, _, *weights = tensors
        hidden = F.silu(linear(x, weights[0], None, name)) * linear(x, weights[1], None, name)
        assert_bitwise_equal(swiglu(x, *weights, name), linear(hidden, weights[2], None, name))

    @each_fusable
    def test_compiles_without_a_break(self, name):
        torch._dynamo.reset()
        tensors, grad = layer(name)
        expected = results(fused, tensors, grad, name)
        compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
        assert_bitwise_equal(results(compiled, tensors, grad, name), expected)


class TestModules:
    def block(self, name, rounding="output"):
        torch.manual_seed(0)
        norm = Float8RMSNorm(70, EPS, recipe=name, rounding=rounding, dtype=torch.bfloat16)
        return nn.Sequential(norm, Float8SwiGLU(70, 90, recipe=name, dtype=torch.bfloat16))

    @pytest.mark.parametrize("name", recipes.names())
    def test_are_the_functions(self, name):
        block = self.block(name)
        x = normal(2, 33, 70, dtype=torch.bfloat16)
        weights = [block[1].gate_proj.weight, block[1].up_proj.weight, block[1].down_proj.weight]
        call = fused if is_fusable(name) else lambda x, n, *rest: swiglu(rms_norm(x, n, EPS), *rest)
        assert_bitwise_equal(block(x), call(x, block[0].weight, *weights, name))

    def test_state_dict_is_that_of_the_plain_modules(self):
        block = self.block("rowwise")
        names = [f"1.{linear}_proj.weight" for linear in ("gate", "up", "down")]
        assert list(block.state_dict()) == ["0.weight", *names]
        plain_norm = nn.RMSNorm(70, EPS, dtype=torch.bfloat16)
        plain_norm.load_state_dict(block[0].state_dict())

    def test_epsilon_of_none_is_that_of_the_dtype(self):
        norm = Float8RMSNorm(70, None, dtype=torch.bfloat16, recipe="bf16")
        x = normal(5, 70, dtype=torch.bfloat16) * 0.05
        assert_bitwise_equal(norm(x), rms_norm(x, norm.weight, torch.finfo(torch.bfloat16).eps))

    def test_a_linear_takes_what_a_norm_returns(self):
        norm = Float8RMSNorm(70, EPS, dtype=torch.bfloat16)
        linear_layer = tritonfp8.Float8Linear(70, 20, dtype=torch.bfloat16, recipe="rowwise")
        x = normal(2, 33, 70, dtype=torch.bfloat16)
        shared = norm(x)
        assert isinstance(shared, QuantizedInput)
        expected = linear(rms_norm(x, norm.weight, EPS), linear_layer.weight, linear_layer.bias)
        assert_bitwise_equal(linear_layer(shared), expected)

    @pytest.mark.parametrize("name", recipes.names())
    def test_weights_quantized_once(self, name):
        """The same bits, and no cast of a weight in any pass."""
        block = nn.Sequential(*self.block(name), tritonfp8.Float8Linear(70, 20, dtype=torch.bfloat16, recipe=name))
        x = normal(2, 33, 70, dtype=torch.bfloat16)

        def gradients():
            block.zero_grad()
            out = block(x)
            out.backward(torch.ones_like(out))
            return out.detach(), *(p.grad for p in block.parameters())

        expected = gradients()
        with tritonfp8.quantize_weights_once(block):
            assert_bitwise_equal(gradients(), expected)
            if recipes.get(name).output.quantized:
                counts = [casts_of(gradients, tuple(p.shape)) for p in block.parameters() if p.ndim == 2]
                assert sum(count for count, _ in counts) == 0

    def test_a_held_weight_that_changed_is_an_error(self):
        block = self.block("rowwise")

        def change_and_use():
            with tritonfp8.quantize_weights_once(block):
                block[1].down_proj.weight.detach().mul_(2)
                block(normal(2, 70, dtype=torch.bfloat16))

        with pytest.raises(RuntimeError, match="a weight was changed inside"):
            change_and_use()

    def test_two_recipes_in_one_mlp_are_an_error(self):
        block = self.block("rowwise")
        block[1].up_proj.recipe = recipes.get("mxfp8")
        with pytest.raises(ValueError, match="one recipe; got 'rowwise', 'mxfp8', 'rowwise'"):
            block(normal(2, 70, dtype=torch.bfloat16))

    def test_copies_and_names(self):
        block = self.block("mxfp8", "normalized")
        twin = copy.deepcopy(block)
        assert twin[0].recipe is block[0].recipe
        assert repr(twin[0]) == "Float8RMSNorm(70, eps=1e-05, rounding='normalized', recipe='mxfp8')"
        assert repr(twin[1].up_proj).endswith("recipe='mxfp8')")

    def test_is_a_llama_mlp_and_norm(self):
        """Under the weights of transformers' modules, within what 8 bits cost."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

        config = LlamaConfig(hidden_size=70, intermediate_size=90, num_attention_heads=2, num_key_value_heads=2)
        theirs = nn.Sequential(LlamaRMSNorm(70, EPS), LlamaMLP(config)).bfloat16()
        ours = self.block("rowwise", "normalized")
        ours.load_state_dict(theirs.state_dict(), strict=True)
        x = normal(2, 33, 70, dtype=torch.bfloat16)
        assert 20 < sqnr(ours(x), theirs(x)) < 40
