"""Formats of two codes a byte against exact arithmetic, torchao and the cases of the OCP specification."""

import importlib.util

import oracle
import pytest
import torch
from cases import banded, finite_bits, interesting_amaxes, normal, patterns, with_specials
from hypothesis import given
from hypothesis import strategies as st
from strategies import PACKED_SPECS

import tritonfp8
from tritonfp8 import reference
from tritonfp8.recipes import Gemm
from tritonfp8.specs import EXPANDED, ROWWISE, QuantSpec
from tritonfp8.specs.formats import FORMATS
from tritonfp8.specs.quantized import QuantizedGroups
from tritonfp8.specs.testing import assert_bitwise_equal

SPEC, RCEIL = (next(s for s in PACKED_SPECS if s.scale_rounding == rounding) for rounding in ("floor", "pow2"))
ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
each_packed = pytest.mark.parametrize("spec", PACKED_SPECS, ids=str)
# OCP MX v1.0, section 5.3.3: the magnitudes of the codes in their order.
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def scales(*exponents):
    """e8m0 of powers of two, one row."""
    return torch.tensor([[e + 127 for e in exponents]], dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_every_code_has_the_value_of_the_specification():
    """A byte's low bits are the element with the even index, as torch.float4_e2m1fn_x2 and gpt-oss have it."""
    values = [*MAGNITUDES, *(-m for m in MAGNITUDES)]
    qdata = torch.arange(256, dtype=torch.uint8).view(16, 16)
    found = reference.dequantize(qdata, scales(1).expand(16, 1), *SPEC.args, torch.float32)
    expected = torch.tensor([[2 * values[byte & 15], 2 * values[byte >> 4]] for byte in range(256)])
    assert_bitwise_equal(found, expected.view(16, 32))
    assert [float(oracle.LAYOUTS["e2m1"].value(code)) for code in range(8)] == MAGNITUDES
    fmt = FORMATS["e2m1"]
    assert (1 + fmt.qmax_mantissa / 2**23) * 2**fmt.emax == fmt.qmax == MAGNITUDES[-1]
    assert fmt.emin == 0
    assert fmt.sign_bit == 3


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.25, 0), (0.26, 1), (0.75, 2), (0.74, 1), (1.25, 2), (1.26, 3), (1.75, 4), (2.5, 4), (2.51, 5), (3.5, 6),
        (3.49, 5), (5.0, 6), (5.01, 7), (7.9, 7), (-0.0, 8), (-0.25, 8), (-0.75, 10), (-7.9, 15),
    ],
)  # fmt: skip
def test_ties_go_to_the_even_code_and_large_values_saturate(value, code):
    qdata, scale = reference.quantize(torch.tensor([[value, 4.0]]), *SPEC.args)
    assert (qdata & 15).item() == code
    assert_bitwise_equal(scale, scales(0))


@each_packed
def test_it_is_exact_arithmetic(spec):
    amaxes = interesting_amaxes().view(-1, 1) * torch.tensor([1.0, -0.3])
    for x in (amaxes, with_specials(banded(100, 70)), finite_bits(64, 64), patterns(torch.bfloat16).float()[::5]):
        codes, expected = (torch.from_numpy(each) for each in oracle.quantize(x.numpy(), spec))
        qdata, scale = reference.quantize(x, *spec.args)
        assert_bitwise_equal([qdata, scale.view(torch.uint8)], [codes, expected])


@each_packed
def test_a_nan_or_an_infinity_makes_its_block_nan(spec):
    x = normal(4, 96)
    x[0, 3], x[1, 40], x[2, 95] = torch.nan, torch.inf, -torch.inf
    qdata, scale = reference.quantize(x, *spec.args)
    found = reference.dequantize(qdata, scale, *spec.args, torch.float32)
    expected = torch.zeros(4, 3, dtype=torch.bool)
    expected[[0, 1, 2], [0, 1, 2]] = True
    assert torch.equal(scale.view(torch.uint8) == 255, expected)
    assert torch.equal(found.isnan(), expected.repeat_interleave(32, 1))
    assert not qdata[expected.repeat_interleave(16, 1)].any()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao, the other implementation")
@each_packed
def test_it_is_torchao_s(spec):
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode, to_mx

    mode = {"pow2": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}[spec.scale_rounding]
    for x in (patterns(torch.bfloat16).nan_to_num(0, 0, 0).float(), finite_bits(512, 128), banded(64, 256)):
        expected_scale, expected = to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
        qdata, scale = reference.quantize(x, *spec.args)
        assert_bitwise_equal(scale.view(torch.uint8), expected_scale.view(torch.uint8))
        # torchao does not scale the elements of a block at the lower clamp.
        clamped = (scale.view(torch.uint8) == 0).repeat_interleave(16, 1)
        assert clamped.sum() < qdata.numel() / 8
        assert_bitwise_equal(qdata[~clamped], expected[~clamped])
    theirs = MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32, mode).dequantize(torch.float32)
    assert torch.equal(reference.dequantize(qdata, scale, *spec.args, torch.float32), theirs)


def rounded_of(qdata, scale, of_row):
    """How many values of each row are rounded; the scales measured are ``of_row``, by which codes are expanded."""
    measured, rounded = reference.measure_rows(qdata, scale, *SPEC.args)
    assert_bitwise_equal(measured, of_row)
    return rounded


class TestExpandCodes:
    @given(
        st.integers(-110, 100),
        st.lists(st.tuples(st.integers(0, 14), st.binary(min_size=16, max_size=16)), min_size=1, max_size=5),
    )
    def test_values_stay_within_14_binades(self, top, blocks):
        """Of blocks up to 14 below a block that is not zero."""
        qdata = torch.tensor(
            [[*bytes([0x77] * 16), *(byte for _, block in blocks for byte in block)]], dtype=torch.uint8
        )
        scale = scales(top, *(top - below for below, _ in blocks))
        codes, of_row = reference.expand_codes(qdata, scale, *SPEC.args)
        rounded = rounded_of(qdata, scale, of_row)
        values = reference.dequantize(qdata, scale, *SPEC.args, torch.float32)
        assert_bitwise_equal(reference.dequantize(codes, of_row, *EXPANDED.args, torch.float32), values)
        assert of_row.item() == 2.0 ** (top - 6)
        assert not rounded.any()

    @given(st.lists(st.tuples(st.integers(60, 190), st.binary(min_size=16, max_size=16)), min_size=1, max_size=5))
    def test_what_is_rounded_is_counted(self, blocks):
        qdata = torch.tensor([[byte for _, block in blocks for byte in block]], dtype=torch.uint8)
        scale = scales(*(exponent - 127 for exponent, _ in blocks))
        codes, of_row = reference.expand_codes(qdata, scale, *SPEC.args)
        rounded = rounded_of(qdata, scale, of_row)
        values = reference.dequantize(qdata, scale, *SPEC.args, torch.float32)
        found = reference.dequantize(codes, of_row, *EXPANDED.args, torch.float32)
        assert rounded.item() == (found != values).sum()
        assert ((found - values).abs() <= of_row * 2.0**-10).all()

    def test_it_is_the_rowwise_cast_of_the_values(self):
        x = with_specials(banded(60, 4, 70)).view(4, 60, 70)
        qdata, scale = reference.quantize(x, *SPEC.args)
        values = reference.dequantize(qdata, scale, *SPEC.args, torch.float32)
        found = reference.expand_codes(qdata, scale, *SPEC.args)
        rounded = rounded_of(qdata, scale, found[1])
        assert_bitwise_equal(list(found), list(reference.quantize(values, *ROW.args)))
        assert (rounded.shape, rounded.dtype) == ((4, 60, 1), torch.int32)

    def test_a_block_far_below_counts_only_what_changes(self):
        """2^-15 below: a code of 0.5 is half of the smallest e4m3, one of 1 is exact."""
        blocks = [0x77] * 16, [0x21] * 16, [0x00] * 16
        qdata = torch.tensor([[byte for block in blocks for byte in block]], dtype=torch.uint8)
        _, rounded = reference.measure_rows(qdata, scales(0, -15, -90), *SPEC.args)
        assert rounded.item() == 16

    def test_zeros_nan_and_values_beyond_float32(self):
        qdata = torch.tensor([[0x00] * 16, [0x11] * 16, [0x77] * 16], dtype=torch.uint8)
        scale = torch.tensor([[3], [255], [254]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        codes, of_row = reference.expand_codes(qdata, scale, *SPEC.args)
        rounded = rounded_of(qdata, scale, of_row)
        assert of_row[0].item() == 1.0
        assert not codes[0].float().any()
        assert of_row[1:].isnan().all()
        assert codes[1:].float().isnan().all()
        assert not rounded.any()


class TestWhatTakesThem:
    def test_a_container_has_the_shape_of_the_values(self):
        q = tritonfp8.quantize(normal(5, 70), SPEC)
        assert (q.shape, q.qdata.shape, q.scale.shape) == ((5, 70), (5, 35), (5, 3))
        assert q.nbytes == 5 * 38
        assert tritonfp8.dequantize(q).shape == (5, 70)
        groups = QuantizedGroups(q.qdata.view(1, 5, 35), q.scale.view(1, 5, 3), SPEC, "matrices", 1)
        assert groups.shape == (1, 5, 70)
        with pytest.raises(ValueError, match=r"of shape \(5, 70\) must have shape \(5, 3\); got \(5, 2\)"):
            tritonfp8.Quantized(q.qdata, q.scale[:, :2], SPEC)

    def test_odd_columns_are_an_error(self):
        for x, transpose in ((normal(4, 33), False), (normal(33, 4), True)):
            with pytest.raises(ValueError, match=r"e2m1 has 2 codes a byte.*multiple of 2; got shape \(4, 33\)"):
                tritonfp8.quantize(x, SPEC, transpose)

    def test_gemms_and_other_casts_refuse_them(self):
        x = normal(4, 64)
        q, mx = tritonfp8.quantize(x, SPEC), tritonfp8.quantize(x, QuantSpec("e4m3", (1, 32), "e8m0", "pow2"))
        for call in (
            lambda: tritonfp8.scaled_matmul(q, q),
            lambda: tritonfp8.scaled_matmul(mx, q),
            lambda: tritonfp8.quantize_both(x, SPEC, SPEC),
            lambda: tritonfp8.functional.quantize_matrices(x.view(1, 4, 64), SPEC),
        ):
            with pytest.raises(ValueError, match=r"takes codes of 8 bits \(e4m3, e5m2\); got e2m1 1x32"):
                call()
        with pytest.raises(ValueError, match=r"rhs must have a format of 8 bits \(e4m3, e5m2\); got e2m1 1x32"):
            Gemm(QuantSpec("e4m3", (1, 32), "e8m0", "pow2"), SPEC)
