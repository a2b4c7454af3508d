"""``grouped_linear``: each group has the bits of ``linear`` on only that group, forward and backward."""

import pytest
import routings
import torch
from cases import each_recipe, normal, rounded
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import recipes as any_recipe

import tritonfp8
from tritonfp8 import QuantSpec, functional, recipes
from tritonfp8.compat.counting import count_gemms
from tritonfp8.specs import BLOCK_128X128
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

SIZES = st.lists(st.sampled_from([0, 1, 7, 127, 128, 129]), min_size=1, max_size=4)


def ends(*sizes):
    return routings.ends(sizes)


def leaves(tokens, groups, n=24, k=40, bias=True, dtype=torch.float32):
    """Weights of different magnitudes, so that the scales of one matrix do not fit another."""
    shapes = [(tokens, k), (groups, n, k), *([(groups, n)] if bias else [])]
    found = [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    found[1] *= 3.0 ** torch.arange(groups)[:, None, None]
    return [x.requires_grad_() for x in found]


def grouped(tensors, offsets, recipe):
    input, weight, bias = [*tensors, None][:3]
    return functional.grouped_linear(input, weight, offsets, bias, recipe)


def loop(tensors, offsets, recipe):
    """:func:`grouped` by ``linear``, group by group."""
    input, weight, bias = [*tensors, None][:3]
    rows, start = [], 0
    for group, end in enumerate(offsets.tolist()):
        if end > start:
            of_group = None if bias is None else bias[group]
            rows.append(functional.linear(input[start:end], weight[group], of_group, recipe))
        start = end
    return torch.cat([*rows, input.new_zeros(len(input) - start, weight.shape[1])])


def gradients(function, tensors, offsets, recipe, grad=None):
    tensors = [x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    out = function(tensors, offsets, recipe)
    if out.requires_grad:  # The loop over groups that are all empty has nothing to differentiate.
        out.backward(normal(*out.shape, seed=9, dtype=out.dtype) if grad is None else grad)
    return out, [x.grad if x.grad is not None or not x.requires_grad else torch.zeros_like(x) for x in tensors]


def is_for_groups(recipe):
    return all(gemm.lhs is None or gemm.lhs.block != BLOCK_128X128 for gemm in (recipe.output, recipe.grad_input))


@settings(max_examples=60)
@given(SIZES, st.integers(0, 5), any_recipe(), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_a_group_has_the_bits_of_linear(sizes, after, recipe, dtype, bias):
    tensors, offsets = leaves(sum(sizes) + after, len(sizes), bias=bias, dtype=dtype), ends(*sizes)
    if not is_for_groups(recipe):
        with pytest.raises(ValueError, match="perhaps of several groups"):
            grouped(tensors, offsets, recipe)
        return
    assert_bitwise_equal(gradients(grouped, tensors, offsets, recipe), gradients(loop, tensors, offsets, recipe))


@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_recipe_has_the_bits_of_linear(recipe, dtype):
    tensors, offsets = leaves(138, 4, dtype=dtype), ends(5, 0, 129, 4)
    assert_bitwise_equal(gradients(grouped, tensors, offsets, recipe), gradients(loop, tensors, offsets, recipe))


@each_recipe
def test_weights_and_gradients_of_any_strides(recipe):
    input, weight, bias = leaves(11, 3)
    turned = weight.detach().transpose(1, 2).contiguous().requires_grad_()
    out = functional.grouped_linear(input, turned.transpose(1, 2), ends(4, 0, 6), bias, recipe)
    out.backward(torch.ones(()).expand(11, 24))
    expected, grads = gradients(grouped, (input, weight, bias), ends(4, 0, 6), recipe, torch.ones(11, 24))
    found, wanted = [out, turned.grad.transpose(1, 2).contiguous()], [expected, grads[1]]
    if recipe == "bf16":
        # torch's GEMM of float32, which adds in another order for other strides on some CPUs.
        assert all(sqnr(x, y) > 120 for x, y in zip(found, wanted, strict=True))
    else:
        assert_bitwise_equal(found, wanted)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_whatever_the_routing(backend):
    compiled = torch.compile(grouped, fullgraph=True, backend=backend)
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for recipe in ("rowwise", "mxfp8"):
        batches = (140, (3, 130, 0)), (140, (0, 0, 140)), (140, (0, 0, 0)), (9, (1, 1, 1)), (33, (30, 1, 1))
        for tokens, sizes in batches:
            args = leaves(tokens, 3, dtype=torch.bfloat16), ends(*sizes), recipe
            assert_bitwise_equal(gradients(compiled, *args), gradients(grouped, *args))
    assert 2 <= graphs["unique_graphs"] - before <= 4, "one of the first size and one of any, for each recipe"


def test_autocast():
    tensors = leaves(11, 3)
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped(tensors, ends(4, 0, 6), "rowwise")
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert tensors[1].grad.dtype == torch.float32
    assert_bitwise_equal(out, grouped([x.bfloat16() for x in tensors], ends(4, 0, 6), "rowwise"))


def test_no_second_derivative():
    input, weight, _ = leaves(11, 3)
    out = functional.grouped_linear(input, weight, ends(4, 0, 6))
    (grad,) = torch.autograd.grad(out.sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_checkpointing_keeps_the_recipe_of_the_forward():
    tensors, offsets = leaves(11, 3), ends(4, 0, 6)
    expected = gradients(grouped, tensors, offsets, "blockwise")[1]
    out = torch.utils.checkpoint.checkpoint(grouped, tensors, offsets, "blockwise", use_reentrant=False)
    out.backward(normal(11, 24, seed=9))
    assert_bitwise_equal([x.grad for x in tensors], expected)


def test_flops():
    tensors = leaves(140, 3)
    for function in (grouped, loop):
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            function(tensors, ends(3, 130, 7), "rowwise").sum().backward()
        assert counter.get_total_flops() == 3 * 2 * 140 * 24 * 40
    with count_gemms() as counts:
        grouped(tensors, ends(3, 130, 7), "rowwise").sum().backward()
    assert counts.flops == {"reference": 3 * 2 * 140 * 24 * 40}


class TestErrors:
    INPUT, WEIGHT, BIAS = (x.detach() for x in leaves(11, 3))

    def run(self, input=INPUT, weight=WEIGHT, offsets=None, bias=BIAS, recipe="rowwise"):
        return functional.grouped_linear(input, weight, ends(4, 0, 6) if offsets is None else offsets, bias, recipe)

    @pytest.mark.parametrize(
        ("offsets", "error", "message"),
        [
            (ends(4, 0, 8), ValueError, r"from 0 to the 11 rows of the input; got \[4, 4, 12\]"),
            (torch.tensor([4, 2, 6], dtype=torch.int32), ValueError, r"increasing.*got \[4, 2, 6\]"),
            (torch.tensor([-1, 2, 6], dtype=torch.int32), ValueError, r"got \[-1, 2, 6\]"),
            (ends(4, 0, 6).long(), TypeError, "int32.*got torch.int64"),
            (ends(4, 6), ValueError, r"shape \(3,\).*got \(2,\)"),
            (ends(4, 0, 6).to("meta"), ValueError, "offsets on meta with input on cpu"),
            (torch.nn.Parameter(ends(4, 0, 8), requires_grad=False), ValueError, r"got \[4, 4, 12\]"),
            ([4, 4, 10], TypeError, "offsets must be a torch.Tensor; got list"),
            (ends(4, 0, 6).numpy(), TypeError, "offsets must be a torch.Tensor; got ndarray"),
            (3, TypeError, "offsets must be a torch.Tensor; got int"),
            (ends(4)[0], ValueError, r"shape \(3,\).*got \(\)"),
        ],
    )
    def test_offsets(self, offsets, error, message):
        with pytest.raises(error, match=message):
            self.run(offsets=offsets)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"input": INPUT[None]}, ValueError, r"input \[T, K\] and weight \[E, N, K\]; got \(1, 11, 40\)"),
            ({"weight": WEIGHT[:, :, :-1]}, ValueError, r"got \(11, 40\) and \(3, 24, 39\)"),
            ({"weight": WEIGHT[:0]}, ValueError, "one group or more"),
            ({"bias": BIAS[0]}, ValueError, r"bias must have shape \(3, 24\); got \(24,\)"),
            ({"weight": WEIGHT.bfloat16()}, TypeError, "weight of torch.bfloat16 with input of torch.float32"),
            ({"input": INPUT.double()}, TypeError, "got input of torch.float64"),
            ({"recipe": "no such"}, ValueError, "no such"),
            ({"recipe": 3}, TypeError, "a recipe must be a name or a tritonfp8.Recipe; got int"),
            ({"weight": [*WEIGHT]}, TypeError, "weight must be a torch.Tensor; got list"),
            ({"weight": None}, TypeError, "weight must be a torch.Tensor; got NoneType"),
            ({"weight": WEIGHT[0]}, ValueError, r"weight \[E, N, K\]; got \(11, 40\) and \(24, 40\)"),
            ({"weight": WEIGHT.to("meta")}, ValueError, "weight on meta with input on cpu"),
            ({"input": INPUT.tolist()}, TypeError, "input must be a torch.Tensor; got list"),
            ({"input": INPUT.numpy()}, TypeError, "input must be a torch.Tensor; got ndarray"),
            ({"bias": "no"}, TypeError, "bias must be a torch.Tensor or None; got str"),
        ],
    )
    def test_operands(self, arguments, error, message):
        with pytest.raises(error, match=message):
            self.run(**arguments)

    def test_offsets_that_are_missing_and_of_quantize_groups(self):
        with pytest.raises(TypeError, match="offsets must be a torch.Tensor; got NoneType"):
            functional.grouped_linear(self.INPUT, self.WEIGHT, None)
        for offsets, error, message in (
            (None, TypeError, "offsets must be a torch.Tensor; got NoneType"),
            (5, TypeError, "offsets must be a torch.Tensor; got int"),
            (ends(4)[0], ValueError, r"must have shape \(1,\).*got \(\)"),
        ):
            with pytest.raises(error, match=message):
                functional.quantize_groups(self.INPUT, offsets, QuantSpec("e4m3", (1, -1), "fp32", "pow2"))

    def test_transforms(self):
        with pytest.raises(RuntimeError, match="grouped_linear"):
            torch.func.grad(lambda x: self.run(input=x).sum())(self.INPUT)


class TestOperands:
    """The public functions of quantized groups."""

    @each_recipe
    def test_they_multiply_as_the_layer_does(self, recipe):
        recipe = recipes.get(recipe)
        if not recipe.grad_weight.quantized:
            return
        input, weight, bias = (x.detach() for x in leaves(140, 3))
        grad, offsets = normal(140, 24, seed=9), ends(3, 130, 0)
        quantize, multiply = functional.quantize_groups, tritonfp8.scaled_grouped_matmul
        out, grads = gradients(grouped, [x.requires_grad_() for x in (input, weight, bias)], offsets, recipe, grad)
        values = rounded(weight.detach(), recipe)
        a, b = quantize(input, offsets, recipe.output.lhs), functional.quantize_matrices(values, recipe.output.rhs)
        assert_bitwise_equal(multiply(a, b, offsets, torch.float32, bias=bias.detach()), out.detach())
        a, b = (
            quantize(x, offsets, spec, transpose=True)
            for x, spec in ((grad, recipe.grad_weight.lhs), (input, recipe.grad_weight.rhs))
        )
        assert_bitwise_equal(multiply(a, b, offsets, torch.float32, tokens=140), grads[1])

    def test_they_are_a_pytree_and_say_their_size(self):
        q = functional.quantize_matrices(normal(3, 24, 40), recipes.get("rowwise").output.rhs)
        copy = torch.utils._pytree.tree_map(torch.clone, q)
        assert isinstance(copy, tritonfp8.QuantizedGroups)
        assert_bitwise_equal((copy.qdata, copy.scale), (q.qdata, q.scale))
        assert q.nbytes == 3 * 24 * 40 + 3 * 24 * 4
        assert repr(q) == (
            "QuantizedGroups(e4m3 rowwise (fp32 pow2), shape=(3, 24, 40), 3 groups in matrices, device='cpu')"
        )

    def test_errors(self):
        spec, offsets = recipes.get("rowwise").output.lhs, ends(4, 0, 6)
        x = normal(11, 40)
        rows, columns = (functional.quantize_groups(x, offsets, spec, transpose) for transpose in (False, True))
        matrices = functional.quantize_matrices(normal(3, 24, 40), spec)
        multiply = tritonfp8.scaled_grouped_matmul
        for a, b, more, message in (
            (rows, rows, {}, "3 groups in rows and 3 in rows"),
            (rows, functional.quantize_matrices(normal(2, 24, 40), spec), {}, "3 groups in rows and 2 in matrices"),
            (rows, functional.quantize_matrices(normal(3, 24, 41), spec), {}, r"got \(11, 40\) and \(3, 24, 41\)"),
            (rows, matrices, {"tokens": 5}, "tokens are for columns only; got 5 with 11 rows"),
            (columns, columns, {}, "3 groups have 384 columns; got None"),
            (columns, columns, {"tokens": 128}, "3 groups have 384 columns; got 128"),
            (columns, columns, {"tokens": 11, "bias": normal(3, 24)}, "takes no bias"),
            (rows, matrices, {"bias": normal(24)}, r"bias must have shape \(3, 24\)"),
        ):
            with pytest.raises(ValueError, match=message):
                multiply(a, b, offsets, **more)
        with pytest.raises(TypeError, match="a must be a tritonfp8.QuantizedGroups"):
            multiply(tritonfp8.quantize(x, spec), matrices, offsets)
        with pytest.raises(ValueError, match=r"columns must be \[N, columns\].*got shape \(40, 11\)"):
            tritonfp8.QuantizedGroups(columns.qdata[:, :11], columns.scale, spec, "columns", 3)
        with pytest.raises(ValueError, match=r"must have shape \(40, 3\); got \(40, 1\)"):
            tritonfp8.QuantizedGroups(columns.qdata, columns.scale[:, :1], spec, "columns", 3)
