"""The reference computes what its formulas say: checked by exact arithmetic and against other implementations."""

import importlib.util
import itertools
import math
from fractions import Fraction

import covering
import numpy as np
import oracle
import pytest
import torch
from cases import (
    SPEC_AND_DTYPE,
    SPEC_OF_BLOCK,
    SPECS,
    banded,
    each_spec,
    finite_bits,
    finite_patterns,
    interesting_amaxes,
    normal,
    patterns,
    random_bits,
    with_specials,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tritonfp8 import reference
from tritonfp8.specs import BLOCK_1X32, BLOCK_128X128, ROWWISE, TENSORWISE, QuantSpec, scale_shape
from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(2)

BLOCK_WIDTH = 32
E8M0_SPECS = [spec for spec in SPECS if spec.scale_format == "e8m0"]
SHORT = [(1, 1), (1, 129), (129, 1), (7, 17), (127, 300), (257, 33)]
NOT_FINITE = [0x7FC00000, 0xFFC00001, 0x7F800001, 0x7F800000, 0xFF800000]
AMAXES = [0, 0x40E00000, 0x7F800000, 0x7F800001, 0x7FFFFFFF]


def with_blocks(values):
    """Each value with each block shape, and each spec with a value: blocks decide where a value is met."""
    return list(dict.fromkeys([*itertools.product(values, SPEC_OF_BLOCK), *covering.each(values, SPECS)]))


def float32_of(tensor):
    return tensor.float().numpy().astype(np.float64)


def quantize(x, spec, **kwargs):
    return reference.quantize(x, *spec.args, **kwargs)


def dequantize(q, spec, dtype=torch.float32):
    return reference.dequantize(*q, *spec.args, dtype)


def check_against_oracle(x, spec):
    codes, scales = (torch.from_numpy(a) for a in oracle.quantize(x.float().numpy(), spec))
    qdata, scale = quantize(x, spec)
    assert_bitwise_equal(qdata.view(torch.uint8), codes)
    assert_bitwise_equal(scale.view(torch.uint8) if scales.dtype == torch.uint8 else scale, scales)


@pytest.mark.parametrize("name", BYTE_FORMATS)
def test_format_table_is_the_standard(name):
    fmt, layout = FORMATS[name], oracle.LAYOUTS[name]
    assert fmt.qmax == layout.qmax
    assert fmt.emax == oracle.floor_log2(layout.qmax)
    assert (1 + Fraction(fmt.qmax_mantissa, 2**23)) * 2**fmt.emax == layout.qmax
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = codes.view(fmt.dtype).float().tolist()
    for code in range(layout.largest_code + 1):
        assert Fraction(values[code]) == layout.value(code)
        assert Fraction(values[code | oracle.SIGN]) == -layout.value(code)
    assert math.isnan(values[fmt.nan])


class TestScale:
    """enc and scale of single amax values, on exact fractions."""

    @each_spec
    def test_formula(self, spec):
        amaxes = interesting_amaxes()
        given = amaxes.view(-1, 1)
        _, scale = quantize(torch.ones(len(amaxes), 1), QuantSpec(*self.row_spec(spec)), amax=given)
        expected = [oracle.encode(Fraction(a), spec)[1] for a in amaxes.tolist()]
        for amax, got, want in zip(amaxes.tolist(), float32_of(scale).ravel(), expected, strict=True):
            assert Fraction(float(got)) == want, f"amax {amax!r}: scale {got!r}"

    @staticmethod
    def row_spec(spec):
        block = BLOCK_1X32 if spec.scale_format == "e8m0" else ROWWISE
        return spec.format, block, spec.scale_format, spec.scale_rounding

    @pytest.mark.parametrize("spec", E8M0_SPECS, ids=str)
    def test_e8m0_is_the_smallest_power_that_does_not_saturate_or_the_ocp_rule(self, spec):
        amaxes = interesting_amaxes()
        _, scale = quantize(amaxes.view(-1, 1), spec)
        qmax = Fraction(FORMATS[spec.format].qmax)
        for amax, got in zip(map(Fraction, amaxes.tolist()), map(Fraction, float32_of(scale).ravel()), strict=True):
            at_lower_clamp = got == Fraction(2) ** -127
            if spec.scale_rounding == "pow2":
                assert amax / got <= qmax
                assert at_lower_clamp or amax / (got / 2) > qmax
            elif not at_lower_clamp:
                # The amax lands in the binade of qmax: it saturates where it is above qmax.
                assert 2 ** FORMATS[spec.format].emax <= amax / got < 2 ** (FORMATS[spec.format].emax + 1)

    @pytest.mark.parametrize("format", BYTE_FORMATS)
    def test_pow2_of_fp32_and_of_e8m0_agree_on_normal_sizes(self, format):
        amaxes = interesting_amaxes()
        # Where neither is clamped: scales from 2^-126 on.
        x = amaxes[amaxes >= FORMATS[format].qmax * 2.0**-126].view(-1, 1)
        fp32 = quantize(x, QuantSpec(format, ROWWISE, "fp32", "pow2"))
        e8m0 = quantize(x, QuantSpec(format, BLOCK_1X32, "e8m0", "pow2"))
        assert_bitwise_equal(fp32[0], e8m0[0])
        assert_bitwise_equal(fp32[1], e8m0[1].float())

    @each_spec
    def test_zero_amax(self, spec):
        x = torch.tensor([[0.0, -0.0] * 100])
        qdata, scale = quantize(x, spec)
        assert_bitwise_equal(qdata.view(torch.uint8), torch.tensor([[0x00, 0x80] * 100], dtype=torch.uint8))
        assert (scale.float() == (2.0**-127 if spec.scale_format == "e8m0" else 1.0)).all()
        assert_bitwise_equal(dequantize((qdata, scale), spec), x)


class TestElements:
    def test_patterns_meet_both_dtypes(self):
        for option in ("format", "block", "scale_format", "scale_rounding"):
            seen = {(getattr(spec, option), dtype) for spec, dtype in SPEC_AND_DTYPE}
            assert len(seen) == 2 * len({value for value, _ in seen}), option

    @pytest.mark.parametrize(("spec", "dtype"), SPEC_AND_DTYPE, ids=str)
    def test_all_patterns(self, spec, dtype):
        check_against_oracle(patterns(dtype), spec)
        check_against_oracle(finite_patterns(dtype), spec)

    @each_spec
    def test_all_patterns_by_a_given_amax(self, spec):
        """Every value against one scale: all codes, subnormal ones and saturation."""
        x = finite_patterns(torch.bfloat16)
        layout = oracle.LAYOUTS[spec.format]
        for amax in (2.0**-126, 1e-3, 7.0, 3e38):
            qdata, scale = quantize(x, spec, amax=torch.full(scale_shape(x.shape, spec.block), amax))
            enc, expected = oracle.encode(Fraction(float(np.float32(amax))), spec)
            codes = oracle.cast(x.float().numpy(), enc, layout)
            assert_bitwise_equal(qdata.view(torch.uint8), torch.from_numpy(codes))
            assert (scale.float() == float(expected)).all()

    @each_spec
    def test_random_float32_bits(self, spec):
        check_against_oracle(random_bits(130, 160), spec)
        check_against_oracle(finite_bits(130, 160, seed=1), spec)
        check_against_oracle(with_specials(banded(130, 160, seed=2)), spec)

    @pytest.mark.parametrize(("shape", "spec"), with_blocks(SHORT), ids=str)
    def test_last_blocks_are_short(self, shape, spec):
        check_against_oracle(banded(*shape), spec)

    @each_spec
    def test_float64_is_rounded_to_float32_first(self, spec):
        x = banded(5, 160).double() * (1 + 2**-30)
        assert_bitwise_equal(quantize(x, spec), quantize(x.float(), spec))

    @pytest.mark.parametrize(("bits", "spec"), with_blocks(NOT_FINITE), ids=str)
    def test_what_is_not_finite_spoils_its_own_block_and_no_other(self, bits, spec):
        x = normal(130, 260)
        clean = quantize(x, spec)
        spoiled = x.clone()
        spoiled.view(torch.int32)[3, 131] = bits - 2**32 if bits >= 2**31 else bits
        qdata, scale = quantize(spoiled, spec)
        sizes = [b if b > 0 else size for size, b in zip(x.shape, spec.block, strict=True)]
        index = (3 // sizes[0], 131 // sizes[1])
        block = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True))
        assert (qdata[block].view(torch.uint8) == FORMATS[spec.format].nan).all()
        assert scale[index].float().isnan()
        qdata[block], scale[index] = clean[0][block], clean[1][index]
        assert_bitwise_equal((qdata, scale), clean)

    def test_a_given_amax_replaces_its_own(self):
        spec = QuantSpec("e4m3", ROWWISE, "fp32", "none")
        qdata, scale = quantize(torch.tensor([[1.0, 2.0, -9.0]]), spec, amax=torch.tensor([[4.0]]))
        assert qdata.float().tolist() == [[112.0, 224.0, -448.0]]
        assert scale.item() == np.float32(1) / np.float32(112)

    @pytest.mark.parametrize(("bits", "spec"), with_blocks(AMAXES), ids=str)
    def test_a_given_amax_has_no_sign(self, bits, spec):
        x = normal(20, 160)
        shape = scale_shape(x.shape, spec.block)
        amaxes = (torch.full(shape, value, dtype=torch.int32).view(torch.float32) for value in (bits, bits - 2**31))
        assert_bitwise_equal(*(quantize(x, spec, amax=amax) for amax in amaxes))


class TestShapes:
    @each_spec
    def test_transpose_is_the_quantized_transpose(self, spec):
        x = banded(130, 300)
        actual = quantize(x, spec, transpose=True)
        assert_bitwise_equal(actual, quantize(x.t().contiguous(), spec))
        assert actual[0].is_contiguous()

    @pytest.mark.parametrize("spec_t", SPECS[::3], ids=str)
    def test_both_is_each_of_the_two(self, spec_t):
        x = banded(130, 300)
        for spec in SPECS[1::3]:
            both = reference.quantize_both(x, *spec.args, *spec_t.args)
            assert_bitwise_equal(both, (*quantize(x, spec), *quantize(x, spec_t, transpose=True)))

    @each_spec
    def test_leading_dims(self, spec):
        x = banded(2, 3, 130, 40)
        qdata, scale = quantize(x, spec)
        assert qdata.shape == x.shape
        assert scale.shape == scale_shape(x.shape, spec.block)
        if spec.block == TENSORWISE:
            flat = quantize(x.view(-1, 40), spec)
            assert_bitwise_equal((qdata.view(-1, 40), scale.view(1, 1)), flat)
        else:
            for i, j in itertools.product(range(2), range(3)):
                assert_bitwise_equal((qdata[i, j], scale[i, j]), quantize(x[i, j], spec))

    @pytest.mark.parametrize("spec", [s for s in SPECS if s.block != BLOCK_128X128], ids=str)
    def test_vector_is_one_row(self, spec):
        x = banded(1, 300).flatten()
        qdata, scale = quantize(x, spec)
        assert_bitwise_equal((qdata[None], scale[None]), quantize(x[None], spec))

    @each_spec
    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 3), (0, 3, 4), (3, 4, 0)], ids=str)
    def test_empty_dims(self, spec, shape):
        qdata, scale = quantize(torch.empty(shape), spec)
        assert qdata.shape == shape
        assert scale.shape == scale_shape(shape, spec.block)
        assert (scale.float() == 1).all() if spec.scale_format == "fp32" else scale.numel() == 0
        assert dequantize((qdata, scale), spec).shape == shape

    @each_spec
    def test_layout_of_results(self, spec):
        qdata, scale = quantize(banded(301, 202).t(), spec)
        assert qdata.is_contiguous()
        # The 1x128 scales of consecutive rows lie next to each other, in aligned columns; all others are row-major.
        assert scale.stride() == ((1, 204) if spec.block == (1, 128) else (scale.shape[1], 1))

    def test_amax(self):
        x = with_specials(normal(130, 300, dtype=torch.bfloat16))
        for spec in SPECS:
            expected = quantize(x.nan_to_num(), spec, amax=reference.amax(x.nan_to_num(), spec.block))
            assert_bitwise_equal(expected, quantize(x.nan_to_num(), spec))
        amax = reference.amax(x, (1, 128))
        assert amax.dtype == torch.float32
        for row in range(130):
            for block, values in enumerate(x[row].float().split(128)):
                # torch's maximum keeps NaN above infinity too.
                torch.testing.assert_close(amax[row, block], values.abs().max(), rtol=0, atol=0, equal_nan=True)
        assert reference.amax(torch.empty(0, 4), (-1, -1)).tolist() == [[0.0]]


class TestDequantize:
    @each_spec
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_is_the_product_in_float32_rounded_once(self, spec, dtype):
        q = quantize(banded(130, 300), spec)
        rows, cols = (np.arange(size) // (b if b > 0 else size) for size, b in zip(q[0].shape, spec.block, strict=True))
        scale = float32_of(q[1])[np.ix_(rows, cols)]
        product = (float32_of(q[0]) * scale).astype(np.float32)
        assert_bitwise_equal(dequantize(q, spec, dtype), torch.from_numpy(product).to(dtype))

    @pytest.mark.parametrize("format", BYTE_FORMATS)
    def test_every_code(self, format):
        spec = QuantSpec(format, BLOCK_1X32, "e8m0", "pow2")
        qdata = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FORMATS[format].dtype).view(8, 32)
        scale = torch.full((8, 1), 2.0).to(torch.float8_e8m0fnu)
        layout, got = oracle.LAYOUTS[format], dequantize((qdata, scale), spec).flatten().tolist()
        for code in range(layout.largest_code + 1):
            value = 2 * layout.value(code)
            assert (Fraction(got[code]), Fraction(got[code | 0x80])) == (value, -value)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao, the other implementation")
class TestAgainstTorchao:
    @pytest.mark.parametrize("spec", E8M0_SPECS, ids=str)
    @pytest.mark.parametrize("order", ["natural", "random"])
    def test_mx(self, spec, order):
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

        mode = {"pow2": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}[spec.scale_rounding]
        x = (patterns(torch.bfloat16).nan_to_num(0, 0, 0) if order == "natural" else finite_bits(512, 128)).float()
        expected_scale, expected = to_mx(x, FORMATS[spec.format].dtype, BLOCK_WIDTH, mode)
        qdata, scale = quantize(x, spec)
        assert_bitwise_equal(scale, expected_scale)
        # torchao does not scale the elements of a block at the lower clamp.
        clamped = (scale.view(torch.uint8) == 0).repeat_interleave(BLOCK_WIDTH, 1)
        assert clamped.sum() < x.numel() / 8
        assert_bitwise_equal(qdata[~clamped], expected[~clamped])


specs = st.sampled_from(SPECS)
# Exponents far from both ends, so that multiplying by a power of two stays exact.
moderate = st.floats(-(2.0**30), 2.0**30, width=32).filter(lambda v: v == 0 or abs(v) >= 2.0**-30)
rows = st.lists(moderate, min_size=1, max_size=40)
anything = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
properties = settings(max_examples=200)


class TestProperties:
    @properties
    @given(specs, anything)
    def test_error_is_at_most_half_the_spacing(self, spec, values):
        x = torch.tensor([values])
        qdata, scale = quantize(x, spec)
        steps = oracle.LAYOUTS[spec.format].values
        code = (qdata.view(torch.uint8).numpy() & 0x7F).astype(int)
        upper = steps[np.minimum(code + 1, len(steps) - 1)] - steps[code]
        spacing = np.maximum(upper, steps[code] - steps[np.maximum(code - 1, 0)])
        width = len(values) if spec.block[1] == -1 else spec.block[1]
        scale = np.repeat(float32_of(scale), width, 1)[:, : len(values)]
        exact = x.double().numpy()
        error = np.abs(exact - float32_of(qdata) * scale)
        # A scale that is no power of two was rounded twice; a product in float32 may be subnormal.
        slack = np.abs(exact) * 2.0**-22 if spec.scale_rounding == "none" else 0
        may_saturate = spec.scale_rounding == "floor"
        in_range = np.abs(exact) <= steps[-1] * scale if may_saturate else np.full(exact.shape, True)
        assert (error <= 0.5 * spacing * scale + slack + 2.0**-149)[in_range].all()

    @properties
    @given(specs, anything)
    def test_quantizing_again_changes_nothing(self, spec, values):
        q = quantize(torch.tensor([values]), spec)
        x = dequantize(q, spec)
        again = quantize(x, spec)
        if spec.scale_rounding == "none":
            assert_bitwise_equal(again[0], q[0])
        elif x.isfinite().all():
            assert torch.equal(dequantize(again, spec), x)

    @properties
    @given(specs, rows, st.integers(-40, 40))
    def test_powers_of_two_go_to_the_scale(self, spec, values, exponent):
        x = torch.tensor([values])
        x = torch.where(x.abs().amax() > 0, x, 1.0)
        q, scale = quantize(x, spec)
        q_scaled, scale_scaled = quantize(x * 2.0**exponent, spec)
        assert_bitwise_equal(q_scaled, q)
        zero_blocks = reference.amax(x, spec.block) == 0
        assert torch.equal(scale_scaled.float(), torch.where(zero_blocks, scale.float(), scale.float() * 2.0**exponent))

    @properties
    @given(specs, anything)
    def test_order_within_a_block_is_kept(self, spec, values):
        x = torch.tensor([sorted(values[:BLOCK_WIDTH])])
        assert (quantize(x, spec)[0].float().diff(dim=1) >= 0).all()

    @properties
    @given(specs, anything)
    def test_is_odd(self, spec, values):
        x = torch.tensor([values])
        (q, scale), (q_negative, scale_negative) = quantize(x, spec), quantize(-x, spec)
        assert_bitwise_equal(q_negative.view(torch.uint8), q.view(torch.uint8) ^ 0x80)
        assert_bitwise_equal(scale_negative, scale)

    @properties
    @given(specs, st.integers(1, 5), st.integers(1, 300), st.integers(0, 2), st.integers(0, 200), st.randoms())
    def test_zeros_beyond_the_edge_change_nothing(self, spec, m, k, more_rows, more_cols, random):
        x = banded(m, k, seed=random.randrange(2**31))
        q, scale = quantize(x, spec)
        padded, padded_scale = quantize(torch.nn.functional.pad(x, (0, more_cols, 0, more_rows)), spec)
        assert_bitwise_equal(padded[:m, :k], q)
        assert_bitwise_equal(padded_scale[: scale.shape[0], : scale.shape[1]], scale)
