"""The tolerance policy must let nothing through that it is there to catch."""

import itertools
import math

import pytest
import torch
from cases import normal

from tritonfp8.specs import QuantSpec
from tritonfp8.specs.quantized import Quantized
from tritonfp8.specs.testing import MATMUL_TOLERANCES, assert_bitwise_equal, assert_matmul_close, sqnr, worst_tile_sqnr


def with_noise(expected, decibels, seed=1):
    """``expected`` with noise of exactly this SQNR."""
    noise = normal(*expected.shape, seed=seed).double()
    energy = expected.double().square().sum() / 10 ** (decibels / 10)
    return expected.double() + noise * (energy / noise.square().sum()).sqrt()


class TestSqnr:
    def test_is_the_ratio_of_energies_in_decibels(self):
        assert sqnr(torch.tensor([11.0, 10.0]), torch.tensor([10.0, 10.0])) == pytest.approx(10 * math.log10(200))
        for decibels in (-3.0, 20.0, 55.6, 90.0):
            assert sqnr(with_noise(normal(64, 64), decibels), normal(64, 64)) == pytest.approx(decibels)

    def test_bf16_rounding_leaves_55_decibels(self):
        x = normal(512, 512)
        assert sqnr(x.bfloat16(), x) == pytest.approx(55.6, abs=0.2)

    def test_is_computed_in_float64(self):
        expected = torch.full((10**6,), 1e-25)
        assert sqnr(expected * 1.001, expected) == pytest.approx(60, abs=0.01)

    def test_equal_is_infinite(self):
        x = normal(4, 5)
        assert sqnr(x, x.clone()) == math.inf
        assert sqnr(torch.zeros(3), torch.zeros(3)) == math.inf
        assert sqnr(torch.zeros(0, 3), torch.zeros(0, 3)) == math.inf

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_finite_in_one_only_is_minus_infinite(self, bad):
        x, y = normal(64, 64), normal(64, 64)
        y[3, 4] = bad
        assert sqnr(y, x) == -math.inf
        assert sqnr(x, y) == -math.inf

    def test_infinities_of_other_sign_or_nan_are_minus_infinite(self):
        for a, b in itertools.permutations((math.inf, -math.inf, math.nan), 2):
            assert sqnr(torch.tensor([1.0, a]), torch.tensor([1.0, b])) == -math.inf

    def test_the_same_special_values_do_not_count(self):
        expected = torch.tensor([1.0, math.nan, math.inf, -math.inf])
        assert sqnr(expected.clone(), expected) == math.inf
        actual = torch.tensor([1.1, math.nan, math.inf, -math.inf])
        assert sqnr(actual, expected) == pytest.approx(20, abs=1e-4)

    def test_noise_on_a_zero_signal_is_minus_infinite(self):
        assert sqnr(torch.tensor([1e-30]), torch.zeros(1)) == -math.inf

    def test_takes_low_precision(self):
        x = torch.tensor([1.0, 2.0, -3.5])
        assert sqnr(x.to(torch.float8_e4m3fn), x) == math.inf
        assert sqnr(x.bfloat16(), x.half()) == math.inf

    def test_shapes_must_be_equal(self):
        with pytest.raises(ValueError, match=r"\(3,\) and \(1, 3\)"):
            sqnr(torch.zeros(3), torch.zeros(1, 3))


class TestWorstTile:
    def test_one_unwritten_tile_shows(self):
        """The case that the policy exists for: overall 25 dB hides a 128 x 128 tile of a 4096 x 2048 output."""
        expected = normal(4096, 2048)
        actual = expected.clone()
        actual[1280:1408, 128:256] = 0
        assert sqnr(actual, expected) > 25
        assert worst_tile_sqnr(actual, expected) == pytest.approx(0, abs=1e-9)

    @pytest.mark.parametrize(("rows", "cols"), [(300, 129), (128, 128), (1, 1), (127, 257), (256, 5)])
    def test_is_the_least_over_all_tiles_ragged_ones_too(self, rows, cols):
        expected = normal(rows, cols)
        actual = with_noise(expected, 40)
        tiles = [
            sqnr(actual[i : i + 128, j : j + 128], expected[i : i + 128, j : j + 128])
            for i in range(0, rows, 128)
            for j in range(0, cols, 128)
        ]
        assert worst_tile_sqnr(actual, expected) == pytest.approx(min(tiles), rel=1e-12)

    @pytest.mark.parametrize("corner", [(0, 0), (255, 0), (0, 200), (256, 200)])
    def test_a_single_element_in_a_ragged_tile_shows(self, corner):
        expected = normal(257, 201)
        actual = expected.clone()
        actual[corner] = math.nan
        assert worst_tile_sqnr(actual, expected) == -math.inf

    def test_a_tile_of_zeros_must_be_zero(self):
        expected = normal(256, 256)
        expected[:128, 128:] = 0
        assert worst_tile_sqnr(expected.clone(), expected) == math.inf
        actual = expected.clone()
        actual[5, 130] = 1e-20
        assert sqnr(actual, expected) > 300
        assert worst_tile_sqnr(actual, expected) == -math.inf

    def test_other_tile_sizes_and_ranks(self):
        expected = normal(3, 64, 64)
        actual = with_noise(expected, 40)
        per_matrix = [worst_tile_sqnr(a, e, tile=16) for a, e in zip(actual, expected, strict=True)]
        assert worst_tile_sqnr(actual, expected, tile=16) == min(per_matrix)
        assert len(set(per_matrix)) == 3
        assert worst_tile_sqnr(actual[0, 0], expected[0, 0]) == pytest.approx(sqnr(actual[0, 0], expected[0, 0]))

    def test_no_elements(self):
        assert worst_tile_sqnr(torch.zeros(0, 5), torch.zeros(0, 5)) == math.inf

    def test_refuses(self):
        with pytest.raises(ValueError, match="tile must be at least 1; got 0"):
            worst_tile_sqnr(torch.zeros(1), torch.zeros(1), tile=0)
        with pytest.raises(ValueError, match="shapes"):
            worst_tile_sqnr(torch.zeros(2, 1), torch.zeros(1, 2))


DTYPES = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.float16, torch.float32,
    torch.float64, torch.int32, torch.uint8, torch.bool,
]  # fmt: skip


class TestBitwise:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_dtype(self, dtype):
        for shape in [(), (0,), (3, 0), (5,), (3, 4), (2, 3, 4)]:
            x = torch.ones(shape).to(dtype)
            assert_bitwise_equal(x, x.clone())
            assert_bitwise_equal(x.T.contiguous().T if x.ndim == 2 else x, x)
        other = torch.ones(3, 4).to(dtype)
        other.view(torch.uint8)[1, 2 * dtype.itemsize] ^= 1
        with pytest.raises(AssertionError, match=r"1 of 12 elements differ(.|\n)*\[1, 2\]:"):
            assert_bitwise_equal(other, torch.ones(3, 4).to(dtype))

    def test_compares_bytes_not_values(self):
        assert_bitwise_equal(torch.tensor([math.nan]), torch.tensor([math.nan]))
        with pytest.raises(AssertionError, match=r"\[0\]: -0\.0 \(0x80000000\) but expected 0\.0 \(0x00000000\)"):
            assert_bitwise_equal(torch.tensor([-0.0]), torch.tensor([0.0]))
        nans = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn)
        with pytest.raises(AssertionError, match=r"nan \(0xff\) but expected nan \(0x7f\)"):
            assert_bitwise_equal(nans[1:], nans[:1])

    def test_reports_count_and_the_first_places(self):
        actual, expected = torch.zeros(10, 30), torch.zeros(10, 30)
        actual[2:, 1::2] = 2.5
        with pytest.raises(AssertionError) as error:
            assert_bitwise_equal(actual, expected)
        lines = str(error.value).splitlines()
        assert lines[0] == "tensor: 120 of 300 elements differ; the first:"
        assert lines[1] == "  [2, 1]: 2.5 (0x40200000) but expected 0.0 (0x00000000)"
        assert lines[2].startswith("  [2, 3]:")
        assert len(lines) == 9

    def test_dtype_and_shape_count(self):
        x = torch.zeros(2, 3)
        with pytest.raises(AssertionError, match=r"bfloat16 \(2, 3\) but expected torch.float32 \(2, 3\)"):
            assert_bitwise_equal(x.bfloat16(), x)
        with pytest.raises(AssertionError, match=r"\(3, 2\) but expected torch.float32 \(2, 3\)"):
            assert_bitwise_equal(x.reshape(3, 2), x)
        with pytest.raises(TypeError, match="actual must be a tensor or a pytree of tensors; got int"):
            assert_bitwise_equal(1, x)

    def test_trees(self):
        spec = QuantSpec()

        def quantized(scale, spec=spec):
            return Quantized(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.full((1, 1), scale), spec)

        assert_bitwise_equal({"a": quantized(1.0), "b": [torch.ones(1)]}, {"a": quantized(1.0), "b": [torch.ones(1)]})
        with pytest.raises(AssertionError, match=r"scale: 1 of 1 elements differ"):
            assert_bitwise_equal(quantized(2.0), quantized(1.0))
        with pytest.raises(AssertionError, match="structures differ"):
            assert_bitwise_equal(quantized(1.0, QuantSpec(scale_rounding="pow2")), quantized(1.0))
        with pytest.raises(AssertionError, match="structures differ"):
            assert_bitwise_equal((torch.ones(1),), (torch.ones(1), torch.ones(1)))


def ones_with_errors(tiles, every, dtype):
    """``[tiles * 128, 128]`` ones; in the first tile each ``every``-th element is off by 2^-7, exact in every dtype.

    That tile has ``10 log10(every * 2^14)`` dB.
    """
    actual = torch.ones(tiles * 128, 128)
    actual[:128].view(-1)[::every] += 2**-7
    return actual.to(dtype), torch.ones_like(actual)


class TestMatmul:
    def test_the_policy(self):
        """Changing a tolerance is a decision, not a repair."""
        figures = {dtype: (t.overall, t.worst_tile) for dtype, t in MATMUL_TOLERANCES.items()}
        assert figures == {torch.float32: (60, 58), torch.bfloat16: (53, 50), torch.float16: (53, 50)}

    @pytest.mark.parametrize(
        ("dtype", "passing", "failing"), [(torch.float32, 62, 60), (torch.bfloat16, 13, 12), (torch.float16, 13, 12)]
    )
    def test_the_overall_limit(self, dtype, passing, failing):
        assert_matmul_close(*ones_with_errors(1, passing, dtype), dtype)
        with pytest.raises(AssertionError, match=r"dB overall.*required (60|53)\.0 and"):
            assert_matmul_close(*ones_with_errors(1, failing, dtype), dtype)

    @pytest.mark.parametrize(
        ("dtype", "passing", "failing"), [(torch.float32, 39, 38), (torch.bfloat16, 7, 6), (torch.float16, 7, 6)]
    )
    def test_the_limit_of_the_worst_tile(self, dtype, passing, failing):
        assert_matmul_close(*ones_with_errors(8, passing, dtype), dtype)
        actual, expected = ones_with_errors(8, failing, dtype)
        assert sqnr(actual, expected) > MATMUL_TOLERANCES[dtype].overall
        with pytest.raises(AssertionError, match=r"in the worst tile; required .* and (58|50)\.0"):
            assert_matmul_close(actual, expected, dtype)

    def test_an_unwritten_element_fails(self):
        actual, expected = torch.ones(300, 300), torch.ones(300, 300)
        assert_matmul_close(actual, expected, torch.float32)
        actual[299, 299] = math.nan
        with pytest.raises(AssertionError, match="-inf dB overall"):
            assert_matmul_close(actual, expected, torch.float32)

    def test_the_dtype_must_be_the_one_asked_for(self):
        with pytest.raises(AssertionError, match=r"must be torch.bfloat16; got torch.float32"):
            assert_matmul_close(torch.ones(2, 2), torch.ones(2, 2), torch.bfloat16)
        with pytest.raises(ValueError, match="out_dtype must be one of"):
            assert_matmul_close(torch.ones(2, 2), torch.ones(2, 2), torch.float64)
