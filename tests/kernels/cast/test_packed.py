"""Casts of formats of two codes a byte: kernels equal the reference to the bit."""

import pytest
import torch
from cases import MATRICES, banded, each_device, normal, patterns, random_bits, views, with_specials
from strategies import PACKED_SPECS as SPECS

from tritonfp8 import reference
from tritonfp8.launch import casts
from tritonfp8.launch import optimizer as launch
from tritonfp8.reference import rounding_keys
from tritonfp8.specs import BLOCK_1X32
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning import cast_tiles

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)
LONG = cast_tiles.PACKED.n + 38


def check_values(codes, text):
    """Of dequantized values: NaN may have any bits."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found, expected = casts.dequantize(*codes, text, dtype), reference.dequantize(*codes, text, dtype)
        assert torch.equal(found.isnan(), expected.isnan())
        assert_bitwise_equal(found.nan_to_num(), expected.nan_to_num())
        assert torch.equal(found.isinf(), expected.isinf())


def check_rows(codes, text):
    """Compare the codes with a scale a row, and the measures of rows; returns how many values are rounded."""
    for launched, expected in (
        (casts.expand_codes, reference.expand_codes),
        (casts.measure_rows, reference.measure_rows),
    ):
        found = launched(*codes, text)
        assert_bitwise_equal(list(found), list(expected(*codes, text)))
    row_scale, rounded = found
    for launched in (casts.expand_codes, reference.expand_codes):
        assert_bitwise_equal(list(launched(*codes, text, row_scale)), list(reference.expand_codes(*codes, text)))
    return rounded


def check(x, spec, device):
    """The cast, and what is made of its codes."""
    x, (text,) = x.to(device), spec.args
    codes = reference.quantize(x, text)
    assert_bitwise_equal(list(casts.quantize(x, text)), list(codes))
    check_values(codes, text)
    check_rows(codes, text)


@each_device
@each_spec
def test_all_patterns(device, spec):
    check(patterns(torch.bfloat16), spec, device)
    check(patterns(torch.float16), spec, device)


@each_device
@each_spec
def test_bits_that_are_no_usual_numbers(device, spec):
    check(random_bits(256, 200), spec, device)
    check(with_specials(normal(140, 70)), spec, device)
    check(torch.zeros(130, 40), spec, device)
    check(torch.full((130, 40), -1e-45), spec, device)
    check(torch.full((130, 40), torch.finfo(torch.float32).max), spec, device)


@each_device
@pytest.mark.parametrize(
    "shape", [*((m, n + n % 2) for m, n in MATRICES.values()), (3, LONG), (2, 3, 46), (70,)], ids=str
)
def test_every_shape(device, shape):
    for dtype in (torch.bfloat16, torch.float64):
        check((banded(*shape) if len(shape) > 1 else normal(*shape)).to(dtype), SPECS[0], device)


@each_device
def test_every_code_with_every_scale(device):
    """Row ``s`` has each pair of codes in a block of scale ``s``; then scales up to 20 apart in one row."""
    bytes_ = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    (text,) = SPECS[0].args
    for each in (scales, (100 + torch.arange(16)[None, :] * torch.arange(256)[:, None] % 21).to(torch.uint8)):
        codes = bytes_.to(device), each.view(torch.float8_e8m0fnu).to(device)
        check_values(codes, text)
        rounded = check_rows(codes, text)
    assert rounded.any()


@each_device
def test_a_long_row_counts_all_that_is_rounded(device):
    """Values of 2^-20 of the largest, which lies in the last block."""
    (text,), blocks = SPECS[0].args, cast_tiles.PACKED.n // 32 + 3
    qdata = torch.full((2, 16 * blocks), 0x11, dtype=torch.uint8)
    scale = torch.full((2, blocks), 100, dtype=torch.uint8)
    scale[:, -1] = 120
    codes = qdata.to(device), scale.view(torch.float8_e8m0fnu).to(device)
    assert check_rows(codes, text).flatten().tolist() == [32 * (blocks - 1)] * 2


@each_device
def test_layouts_in_memory_and_memory_that_exists(device):
    (text,) = SPECS[1].args
    for name, x in views(normal(33, 70, dtype=torch.bfloat16).to(device)).items():
        expected = list(reference.quantize(x, text))
        assert_bitwise_equal(list(casts.quantize(x, text)), expected), name
        assert_bitwise_equal(list(casts.quantize(x.t(), text, True)), expected)
        buffer = torch.zeros(33, 40, dtype=torch.uint8, device=device)
        scale = torch.zeros(3, 33, device=device, dtype=torch.uint8).view(torch.float8_e8m0fnu).t()
        casts.quantize_into(buffer[:, 2:37], scale, x, text)
        assert_bitwise_equal([buffer[:, 2:37], scale], expected)
        assert not buffer[:, :2].any()
        assert not buffer[:, 37:].any()


@each_device
def test_a_known_amax_is_left_to_the_reference(device):
    (text,), x = SPECS[0].args, normal(33, 70).to(device)
    amax = reference.amax(x, BLOCK_1X32) * 2
    assert_bitwise_equal(list(casts.quantize(x, text, False, amax)), list(reference.quantize(x, text, False, amax)))


@each_device
def test_empty(device):
    (text,) = SPECS[0].args
    for shape in ((0, 8), (8, 0)):
        codes = casts.quantize(torch.zeros(shape, device=device), text)
        assert_bitwise_equal(list(codes), list(reference.quantize(torch.zeros(shape, device=device), text)))
        assert casts.dequantize(*codes, text, torch.float32).shape == shape
        assert [x.shape for x in casts.expand_codes(*codes, text)] == [shape, (shape[0], 1)]
        assert [x.shape for x in casts.measure_rows(*codes, text)] == [(shape[0], 1)] * 2


@each_device
@each_spec
@pytest.mark.parametrize(
    ("shape", "place"), [((3, LONG), (0, 0)), ((70, 96), (41, 8)), ((17, 40), (2**20, 3))], ids=str
)
def test_rounding_at_random(device, spec, shape, place):
    """Also of values beyond the format's, zeros of both signs, subnormal numbers, NaN and infinities."""
    keys = rounding_keys(7, torch.tensor([3]), torch.tensor([5]))[0].to(device)
    special = with_specials(normal(*shape))
    for x in (banded(*shape), normal(*shape).bfloat16(), random_bits(*shape), special, torch.full(shape, -1e-45)):
        found, expected = (
            [each.to(device) for each in reference.quantize(torch.ones(shape), *spec.args)] for _ in range(2)
        )
        launch.quantize_at_random(*found, x.to(device), keys, *spec.args, place)
        reference.quantize_at_random(*expected, x.to(device), keys, *spec.args, place)
        assert_bitwise_equal(found, expected)


@each_device
@pytest.mark.parametrize(
    ("n", "k", "is_left_out"), [(6, 4096, True), (128, 192, True), (5, 4096, False), (6, 40, False)]
)
@pytest.mark.parametrize("knows_rows", [False, True])
def test_matrices_without_tokens_are_left_out(device, n, k, is_left_out, knows_rows):
    (text,) = SPECS[0].args
    codes = reference.quantize(banded(4 * n, k).view(4, n, k).to(device), text)
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=device)
    row_scale = reference.measure_rows(*codes, text)[0] if knows_rows else None
    found, expected = casts.expand_codes(*codes, text, row_scale, offsets), reference.expand_codes(*codes, text)
    for x, wanted in zip(found, expected, strict=True):
        assert_bitwise_equal(x[1::2].contiguous(), wanted[1::2].contiguous())
    for x, wanted in zip(found[0][::2], expected[0][::2], strict=True):
        assert torch.equal(x.view(torch.uint8), wanted.view(torch.uint8)) is not is_left_out
