"""Groups of tokens: every cast and GEMM of a group is the cast or GEMM of its rows by themselves."""

import pytest
import torch
from cases import each_spec, normal
from hypothesis import given
from hypothesis import strategies as st
from strategies import gemms, specs

from tritonfp8 import reference
from tritonfp8.reference import group_bounds
from tritonfp8.specs import BLOCK_128X128, QuantSpec, group_column
from tritonfp8.specs.testing import assert_bitwise_equal

# Sizes around the sizes of blocks and the alignment of columns.
SIZES = st.lists(st.sampled_from([0, 1, 7, 32, 127, 128, 129]), min_size=1, max_size=5)


def ends(sizes):
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def scale_of(scale, group, places, size):
    """The scales of one group along the dim of the tokens. Each scale covers ``size`` tokens."""
    return scale[group : group + 1] if size == -1 else scale[places.start // size : -(-places.stop // size)]


class TestCasts:
    @given(SIZES, st.integers(0, 9), specs())
    def test_rows_of_a_group_are_those_of_it_alone(self, sizes, after, spec):
        x = normal(sum(sizes) + after, 70)
        if spec.block == BLOCK_128X128:
            with pytest.raises(ValueError, match="perhaps of several groups"):
                reference.quantize_groups(x, ends(sizes), *spec.args)
            return
        qdata, scale = reference.quantize_groups(x, ends(sizes), *spec.args)
        for group, (start, end) in enumerate(group_bounds(ends(sizes), len(x))):
            found = qdata[start:end], scale_of(scale, group, slice(start, end), spec.block[0])
            assert_bitwise_equal(found, reference.quantize(x[start:end], *spec.args))

    @given(SIZES, st.integers(0, 9), specs())
    def test_columns_of_a_group_are_those_of_it_alone(self, sizes, after, spec):
        x = normal(sum(sizes) + after, 70)
        qdata, scale = reference.quantize_groups(x, ends(sizes), *spec.args, True)
        rest = qdata.view(torch.uint8).clone()
        for group, (start, end) in enumerate(group_bounds(ends(sizes), len(x))):
            at = group_column(start, group)
            places = slice(at, at + end - start)
            found = qdata[:, places], scale_of(scale.t(), group, places, spec.block[1]).t()
            assert_bitwise_equal(found, reference.quantize(x[start:end], *spec.args, True))
            rest[:, places] = 0
        assert not rest.any(), "between groups there must be zeros"

    def test_both_are_the_two_casts(self):
        x, offsets, spec = normal(140, 70), ends([3, 130]), QuantSpec("e4m3")
        spec_t = QuantSpec("e5m2", (1, 32), "e8m0", "pow2")
        both = reference.quantize_groups_both(x, offsets, *spec.args, *spec_t.args)
        assert_bitwise_equal(both[:2], reference.quantize_groups(x, offsets, *spec.args))
        assert_bitwise_equal(both[2:], reference.quantize_groups(x, offsets, *spec_t.args, True))

    @each_spec
    def test_matrices_are_those_of_each_alone(self, spec):
        x = normal(3, 140, 70)
        for transpose in (False, True):
            qdata, scale = reference.quantize_matrices(x, *spec.args, transpose)
            for i, matrix in enumerate(x):
                assert_bitwise_equal((qdata[i], scale[i]), reference.quantize(matrix, *spec.args, transpose))


def in_float64(q, spec):
    return reference.dequantize(*q, *spec.args, torch.float32).double()


class TestGemms:
    @given(SIZES, gemms().filter(lambda gemm: gemm.quantized and gemm.lhs.block != BLOCK_128X128))
    def test_rows_by_matrices(self, sizes, gemm):
        x, weight, bias = normal(sum(sizes) + 3, 70), normal(len(sizes), 24, 70, seed=1), normal(len(sizes), 24, seed=2)
        lhs, rhs = gemm.lhs, gemm.rhs
        out = reference.scaled_grouped_matmul(
            *reference.quantize_groups(x, ends(sizes), *lhs.args), *lhs.args,
            *reference.quantize_matrices(weight, *rhs.args), *rhs.args, ends(sizes), bias, torch.float32,
        )  # fmt: skip
        expected = torch.zeros(len(x), 24, dtype=torch.float64)
        for group, (start, end) in enumerate(group_bounds(ends(sizes), len(x))):
            a = in_float64(reference.quantize(x[start:end], *lhs.args), lhs)
            b = in_float64(reference.quantize(weight[group], *rhs.args), rhs)
            expected[start:end] = a @ b.t() + bias[group]
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
        assert not out[sum(sizes) :].any()

    @given(SIZES, gemms().filter(lambda gemm: gemm.quantized))
    def test_columns_by_columns(self, sizes, gemm):
        tokens = sum(sizes) + 3
        grad, x = normal(tokens, 24), normal(tokens, 70, seed=1)
        operands = [
            part
            for each, spec in ((grad, gemm.lhs), (x, gemm.rhs))
            for part in (*reference.quantize_groups(each, ends(sizes), *spec.args, True), *spec.args)
        ]
        out = reference.scaled_grouped_matmul(*operands, ends(sizes), None, torch.float32, tokens=tokens)
        for group, (start, end) in enumerate(group_bounds(ends(sizes), tokens)):
            a, b = (
                in_float64(reference.quantize(each[start:end], *spec.args, True), spec)
                for each, spec in ((grad, gemm.lhs), (x, gemm.rhs))
            )
            torch.testing.assert_close(out[group].double(), a @ b.t(), rtol=1e-5, atol=1e-4)

    def test_high_precision_and_sums(self):
        x, grad, weight, offsets = normal(12, 8), normal(12, 5, seed=1), normal(3, 5, 8, seed=2), ends([4, 0, 6])
        out = reference.grouped_matmul(x, weight, offsets)
        torch.testing.assert_close(out[:4], x[:4] @ weight[0].t())
        torch.testing.assert_close(out[4:10], x[4:10] @ weight[2].t())
        assert not out[10:].any()
        grads, sums = reference.grouped_matmul(grad.t(), x.t(), offsets), reference.grouped_sum(grad, offsets)
        torch.testing.assert_close(grads[2], grad[4:10].t() @ x[4:10])
        torch.testing.assert_close(sums[2], grad[4:10].sum(0))
        assert not grads[1].any()
        assert not sums[1].any()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6), st.integers(0, 300))
def test_hostile_offsets_stay_inside(offsets, tokens):
    """As kernels will read them: no end is before the one before it, or beyond the tokens."""
    offsets = torch.tensor(offsets, dtype=torch.int32)
    bounds = group_bounds(offsets, tokens)
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert all(0 <= start <= end <= tokens for start, end in bounds)
    x, spec = normal(tokens, 16), QuantSpec("e4m3", (1, 32), "e8m0", "pow2")
    clamped = torch.tensor([end for _, end in bounds], dtype=torch.int32)
    for transpose in (False, True):
        assert_bitwise_equal(
            reference.quantize_groups(x, offsets, *spec.args, transpose),
            reference.quantize_groups(x, clamped, *spec.args, transpose),
        )
