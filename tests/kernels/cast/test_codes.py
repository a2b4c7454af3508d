"""Transposes made from codes: kernels equal the reference to the bit."""

import covering
import pytest
import torch
from cases import MATRICES, banded, each_device, finite_patterns, normal, patterns, random_bits, with_specials

from tritonfp8 import reference
from tritonfp8.launch import casts, executor
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, TENSORWISE, QuantSpec, scale_shape
from tritonfp8.specs.formats import BYTE_FORMATS
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning import cast_tiles

pytestmark = [pytest.mark.usefixtures("poisoned_outputs"), pytest.mark.one_in(3)]


def specs(format):
    """The specs whose scales are powers of two, by the name of their block."""
    return {
        "rowwise": QuantSpec(format, ROWWISE, "fp32", "pow2"),
        "1x128": QuantSpec(format, BLOCK_1X128, "fp32", "pow2"),
        "1x32": QuantSpec(format, BLOCK_1X32, "e8m0", "pow2"),
        "1x32 floor": QuantSpec(format, BLOCK_1X32, "e8m0", "floor"),
        "128x128": QuantSpec(format, BLOCK_128X128, "fp32", "pow2"),
        "tensorwise": QuantSpec(format, TENSORWISE, "fp32", "pow2"),
    }


OF_RECIPES = [("rowwise", "rowwise"), ("1x128", "1x128"), ("1x32", "1x32"), ("128x128", "128x128")]
PAIRS = [
    *((format, *pair) for format in BYTE_FORMATS for pair in OF_RECIPES),
    *(("e4m3", *pair) for pair in covering.each(list(specs("e4m3")), list(specs("e4m3")))),
    ("e4m3", "rowwise", "tensorwise"),
    ("e4m3", "1x128", "rowwise"),
    ("e4m3", "rowwise", "1x32"),
    ("e4m3", "1x32 floor", "1x128"),
]
each_pair = pytest.mark.parametrize("pair", list(dict.fromkeys(PAIRS)), ids=" ".join)
of_recipes = pytest.mark.parametrize("pair", [("e4m3", *pair) for pair in OF_RECIPES], ids=" ".join)
OFFSETS = [3, 3, 133, 260]


def texts(pair):
    format, first, second = pair
    return specs(format)[first].args[0], specs(format)[second].args[0]


def quantized(x, spec):
    """What a kernel is given: of matrices, codes and scales of all."""
    return (reference.quantize_matrices if x.ndim == 3 else reference.quantize)(x, spec)


def check(x, pair, device):
    """From codes, and from the values that they were made of."""
    spec, spec_t = texts(pair)
    x = x.to(device)
    codes = quantized(x, spec)
    expected = list(reference.transpose_codes(*codes, spec, spec_t))
    assert_bitwise_equal(list(casts.transpose_codes(*codes, spec, spec_t)), expected)
    assert_bitwise_equal(list(casts.transpose_codes(x, codes[1], spec, spec_t)), expected)


@each_device
@each_pair
def test_all_patterns(device, pair):
    check(patterns(torch.bfloat16), pair, device)
    check(finite_patterns(torch.bfloat16), pair, device)


@each_device
@of_recipes
@pytest.mark.parametrize("shape", MATRICES.values(), ids=MATRICES)
def test_every_shape(device, pair, shape):
    check(banded(*shape, dtype=torch.bfloat16), pair, device)
    check(normal(*shape, dtype=torch.float32), pair, device)


@each_device
@of_recipes
def test_bits_that_are_no_usual_numbers(device, pair):
    check(random_bits(256, 200), pair, device)
    check(with_specials(normal(140, 70)), pair, device)
    check(torch.zeros(130, 40), pair, device)
    check(torch.full((130, 40), 1e-45), pair, device)
    check(torch.full((130, 40), torch.finfo(torch.float32).max), pair, device)


@each_device
@of_recipes
def test_matrices(device, pair):
    check(normal(3, 130, 70, dtype=torch.bfloat16), pair, device)
    check(banded(2, 128, 256, dtype=torch.bfloat16), pair, device)


@each_device
@of_recipes
@pytest.mark.parametrize("shape", [(300, 200), (257, 40)], ids=str)
@pytest.mark.parametrize("matrices", [False, True], ids=["one matrix", "matrices"])
def test_by_the_amaxes_that_the_first_cast_finds(device, pair, shape, matrices):
    spec, spec_t = texts(pair)
    x = banded(*([2] if matrices else []), *shape, dtype=torch.bfloat16).to(device)
    twin = casts.quantize_matrices_with_amax if matrices else casts.quantize_with_amax
    known = reference.quantize_matrices_with_amax if matrices else reference.quantize_with_amax
    *pair, amax = twin(x, spec, spec_t, True)
    *expected, found = known(x, spec, spec_t, True)
    assert_bitwise_equal([*pair, amax], [*expected, found])
    transposed = list(reference.transpose_codes(*expected, spec, spec_t))
    assert_bitwise_equal(list(casts.transpose_codes(*pair, spec, spec_t, amax)), transposed)
    assert_bitwise_equal(list(casts.transpose_codes(x, pair[1], spec, spec_t, amax)), transposed)


@each_device
@pytest.mark.parametrize("columns", [40, max(cast_tiles.ROWS_WITH_COLUMNS) + 8, cast_tiles.LONG_ROWS_WITH_CODES.n + 8])
def test_amaxes_of_the_smallest_values_round_up(device, columns):
    """A column of values below 2^-126: all have the smallest scale, and only a zero has another."""
    spec, spec_t = texts(("e4m3", "rowwise", "rowwise"))
    x = torch.zeros(3, columns)
    x[0, :6] = 2.0 ** torch.tensor([-138.0, -135.0, -134.0, -130.0, -126.0, -120.0])
    x = x.to(device)
    *pair, amax = casts.quantize_with_amax(x, spec, spec_t, True)
    assert_bitwise_equal([*pair, amax], list(reference.quantize_with_amax(x, spec, spec_t, True)))
    expected = list(reference.transpose_codes(*pair, spec, spec_t))
    assert_bitwise_equal(list(casts.transpose_codes(*pair, spec, spec_t, amax)), expected)


@each_device
@each_pair
def test_both_is_one_after_the_other(device, pair):
    spec, spec_t = texts(pair)
    for x in (banded(300, 200, dtype=torch.bfloat16), with_specials(normal(130, 128))):
        x = x.to(device)
        first = list(reference.quantize(x, spec))
        expected = [*first, *reference.transpose_codes(*first, spec, spec_t)]
        assert_bitwise_equal(list(casts.quantize_both(x, spec, spec_t, True)), expected)
        *found, total = casts.quantize_both_sum(x, spec, spec_t, True)
        assert_bitwise_equal(found, expected)
        torch.testing.assert_close(total, x.sum(0), equal_nan=True)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that run."""
    names, run = [], executor.run
    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(executor, "run", lambda kernel, *a, **o: names.append(kernel.__name__) or run(kernel, *a, **o))
    return names


@each_device
@pytest.mark.parametrize("pair", [("e4m3", *pair) for pair in OF_RECIPES[:3]], ids=" ".join)
def test_sums_are_found_in_the_pass_that_casts(device, pair, launched):
    spec, spec_t = texts(pair)
    for x in (normal(1100, 72, dtype=torch.bfloat16), normal(130, 128)):
        launched.clear()
        *_, total = casts.quantize_both_sum(x.to(device), spec, spec_t, True)
        torch.testing.assert_close(total.cpu(), x.double().sum(0).to(x.dtype), rtol=2**-7, atol=1e-4)
        assert launched.count("column_sums_kernel") == 1


@each_device
@pytest.mark.parametrize(
    "pair",
    [("e4m3", *pair) for pair in (*OF_RECIPES[:3], ("tensorwise", "tensorwise"), ("1x128", "rowwise"))]
    + [("e5m2", "rowwise", "rowwise")],
)
@pytest.mark.parametrize("source", ["rows", "picked", "scaled", "swiglu"])
def test_groups(device, pair, source):
    spec, spec_t = texts(pair)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    x = banded(270, 80, dtype=torch.bfloat16).to(device)
    rows = torch.randperm(270, generator=torch.Generator().manual_seed(0)).to(device) if source[-1] == "d" else None
    factors = normal(270, seed=1).to(device) if source == "scaled" else None
    args = (rows, factors, source == "swiglu")
    first = reference.quantize_groups(x, offsets, spec, False, *args)
    second = list(reference.transpose_group_codes(*first, offsets, spec, spec_t))
    assert_bitwise_equal(list(casts.transpose_group_codes(*first, offsets, spec, spec_t)), second)
    assert_bitwise_equal(
        list(casts.quantize_groups_both(x, offsets, spec, spec_t, *args, None, True)), [*first, *second]
    )


@each_device
@pytest.mark.parametrize("ends", [(-5, 70, 3), (0, 0, 0), (128, 256, 290), (1, 2, 500), (290,)], ids=str)
def test_the_cast_of_rows_of_groups_finds_the_amaxes_of_columns(device, ends, launched):
    spec, spec_t = texts(("e4m3", "rowwise", "rowwise"))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    odd = torch.cat([banded(140, 200), with_specials(normal(140, 200)), torch.full((10, 200), 1e-45)])
    for x in (odd, banded(290, 72, dtype=torch.bfloat16), banded(290, 2100, dtype=torch.float16)):
        launched.clear()
        found = casts.quantize_groups_both(x.to(device), offsets, spec, spec_t, codes=True)
        assert_bitwise_equal(found, reference.quantize_groups_both(x.to(device), offsets, spec, spec_t, codes=True))
        kernels = ["row_tiles", "quantize_group_rows", "group_maxima", "quantize_groups"]
        assert launched == [f"{name}_kernel" for name in kernels]


@each_device
def test_empty(device):
    spec, spec_t = texts(("e4m3", "rowwise", "rowwise"))
    for shape in ((0, 8), (8, 0)):
        codes = reference.quantize(torch.zeros(shape, device=device), spec)
        qdata, scale = casts.transpose_codes(*codes, spec, spec_t)
        assert (qdata.shape, scale.shape) == (shape[::-1], scale_shape(shape[::-1], ROWWISE))
