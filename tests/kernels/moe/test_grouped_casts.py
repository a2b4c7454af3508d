"""The casts of groups equal the reference to the bit: in the interpreter on CPU tensors, compiled on CUDA tensors."""

from dataclasses import replace

import pytest
import torch
from cases import SPECS, each_device, generator, normal, on_devices, patterns
from routings import ROUTINGS, ends, routing_cases

from tritonfp8 import reference
from tritonfp8.launch import casts
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, TENSORWISE, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = [pytest.mark.usefixtures("poisoned_outputs"), pytest.mark.one_in(3)]

# By block: as recipes use them.
ROW_SPECS = (
    QuantSpec(),
    QuantSpec("e4m3", ROWWISE, "fp32", "pow2"),
    QuantSpec("e4m3", BLOCK_1X128),
    QuantSpec("e5m2", BLOCK_1X32, "e8m0", "pow2"),
)
COLUMN_SPECS = (*ROW_SPECS, QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2"))


def assert_same(found, expected):
    found = tuple(x.cpu() for x in found)
    assert_bitwise_equal(found, expected)
    assert [x.shape for x in found] == [x.shape for x in expected]


def check_tokens(x, offsets, spec, spec_t, device):
    """Rows, columns and both."""
    on_device, ends_on_device = x.to(device), offsets.to(device)
    expected = reference.quantize_groups_both(x, offsets, *spec.args, *spec_t.args)
    found = casts.quantize_groups_both(on_device, ends_on_device, *spec.args, *spec_t.args)
    assert_same(found, expected)
    for each, transpose, wanted in ((spec, False, expected[:2]), (spec_t, True, expected[2:])):
        found = casts.quantize_groups(on_device, ends_on_device, *each.args, transpose)
        assert_same(found, wanted)


@each_device
@pytest.mark.parametrize(("spec", "spec_t"), list(zip(ROW_SPECS, ROW_SPECS, strict=True)), ids=str)
@pytest.mark.parametrize(("tokens", "sizes"), routing_cases())
def test_groups_of_any_size(device, spec, spec_t, tokens, sizes):
    x = normal(tokens, 160, dtype=torch.bfloat16)
    check_tokens(x, ends(sizes), spec, spec_t, device)


@on_devices(
    [(ROW_SPECS[1], COLUMN_SPECS[4], 72, torch.float32), (ROW_SPECS[0], COLUMN_SPECS[2], 41, torch.float16)],
    spec=ROW_SPECS,
    spec_t=COLUMN_SPECS,
    width=(128, 72, 41),
    dtype=(torch.bfloat16, torch.float32),
)
def test_widths_and_dtypes(device, spec, spec_t, width, dtype):
    check_tokens(normal(200, width, dtype=dtype), ends((7, 0, 130, 40)), spec, spec_t, device)


@each_device
@pytest.mark.parametrize("spec", ROW_SPECS, ids=str)
def test_patterns(device, spec):
    """NaN and infinities mark their own scales only."""
    x = patterns(torch.bfloat16)
    check_tokens(x, ends((100, 0, 29, 200, 150)), spec, replace(spec, format="e5m2"), device)


@each_device
@pytest.mark.parametrize("hostile", [(-5, 70, 3), (90, 10, 300), (2**31 - 1, -(2**31), 0)], ids=str)
def test_hostile_offsets_are_clamped(device, hostile):
    offsets = torch.tensor(hostile, dtype=torch.int32)
    check_tokens(normal(100, 64, dtype=torch.bfloat16), offsets, ROW_SPECS[1], ROW_SPECS[1], device)


@each_device
def test_inputs_of_other_layouts(device):
    x = normal(64, 100, dtype=torch.bfloat16).t()
    check_tokens(x, torch.tensor([[30, 0], [100, 0]], dtype=torch.int32)[:, 0], ROW_SPECS[1], ROW_SPECS[1], device)


@each_device
@pytest.mark.parametrize("shape", [(0, 32), (10, 0)], ids=str)
def test_inputs_without_elements(device, shape):
    check_tokens(torch.empty(shape, dtype=torch.bfloat16), ends((0, 0)), ROW_SPECS[2], ROW_SPECS[2], device)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
}


@on_devices(
    [
        (COLUMN_SPECS[0], True, (3, 40, 72), "contiguous"),
        (COLUMN_SPECS[1], True, (2, 136, 160), "transposed"),
        (COLUMN_SPECS[1], False, (2, 136, 160), "contiguous"),
        (COLUMN_SPECS[2], True, (2, 130, 41), "transposed"),
        (COLUMN_SPECS[3], False, (2, 40, 64), "transposed"),
        (COLUMN_SPECS[4], False, (2, 200, 130), "contiguous"),
        (COLUMN_SPECS[4], True, (2, 128, 256), "strided"),
        (COLUMN_SPECS[0], False, (2, 128, 256), "transposed"),
    ],
    spec=COLUMN_SPECS,
    transpose=(False, True),
    shape=((3, 40, 72), (2, 256, 384), (2, 130, 41)),
    layout=tuple(LAYOUTS),
)
def test_matrices(device, spec, transpose, shape, layout):
    x = LAYOUTS[layout](normal(*shape, dtype=torch.bfloat16))
    expected = reference.quantize_matrices(x, *spec.args, transpose)
    found = casts.quantize_matrices(x.to(device), *spec.args, transpose)
    assert_same(found, expected)
    assert [y.stride() for y in found] == [y.stride() for y in expected]


@on_devices(
    [
        (COLUMN_SPECS[0], (3, 40, 72), "contiguous"),
        (COLUMN_SPECS[1], (2, 136, 160), "contiguous"),
        (COLUMN_SPECS[1], (5, 130, 41), "contiguous"),
        (COLUMN_SPECS[1], (2, 40, 64), "transposed"),
        (COLUMN_SPECS[2], (2, 40, 64), "contiguous"),
    ],
    spec=COLUMN_SPECS,
    shape=((3, 40, 72), (2, 256, 384), (2, 130, 41)),
    layout=tuple(LAYOUTS),
)
def test_matrices_whose_transposes_are_cast_later(device, spec, shape, layout):
    """The amaxes equal the reference's, and the cast by them is the cast without."""
    x = LAYOUTS[layout](normal(*shape, dtype=torch.bfloat16))
    x[1, 3, 5], x[0, :, 7] = torch.nan, 0.0
    *expected, amax = reference.quantize_matrices_with_amax(x, *spec.args, *spec.args)
    *found, found_amax = casts.quantize_matrices_with_amax(x.to(device), *spec.args, *spec.args)
    assert_same(tuple(found), tuple(expected))
    assert torch.equal(found_amax.cpu().nan_to_num(-1.0), amax.nan_to_num(-1.0))
    later = casts.quantize_matrices(x.to(device), *spec.args, True, found_amax)
    assert_same(later, reference.quantize_matrices(x, *spec.args, True))


@each_device
@pytest.mark.parametrize("spec", COLUMN_SPECS, ids=str)
@pytest.mark.parametrize("transpose", [False, True])
def test_an_amax_of_a_caller_replaces_that_of_the_block(device, spec, transpose):
    """Also one with a sign, which does not count."""
    x = normal(2, 136, 160, dtype=torch.bfloat16)
    of = x.transpose(1, 2) if transpose else x
    amax = torch.stack([reference.amax(matrix, spec.block) for matrix in of]).mul_(-3)
    amax[1].flatten()[0] = -torch.inf
    found = casts.quantize_matrices(x.to(device), *spec.args, transpose, amax.to(device))
    assert_same(found, reference.quantize_matrices(x, *spec.args, transpose, amax))


@each_device
def test_matrices_without_elements(device):
    x, spec = torch.empty(2, 0, 32), COLUMN_SPECS[1].args
    assert_same(casts.quantize_matrices(x.to(device), *spec), reference.quantize_matrices(x, *spec))


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", list(ROUTINGS.values()), ids=list(ROUTINGS))
def test_sums(device, sizes, dtype):
    """Exact on integers; NaN in rows of no group is not added."""
    x = normal(sum(sizes) + 9, 136).mul(4).round().to(dtype)
    x[sum(sizes) :] = torch.nan
    offsets = ends(sizes)
    assert_bitwise_equal(casts.grouped_sum(x.to(device), offsets.to(device)).cpu(), reference.grouped_sum(x, offsets))


@each_device
def test_rows_with_a_block_of_several_tokens_are_an_error(device):
    x, offsets, spec = normal(10, 32).to(device), ends((10,)).to(device), COLUMN_SPECS[4].args
    for cast, specs in ((casts.quantize_groups, spec), (casts.quantize_groups_both, spec * 2)):
        with pytest.raises(ValueError, match="scales for each token"):
            cast(x, offsets, *specs)


def test_every_block_is_cast():
    assert {spec.block for spec in COLUMN_SPECS} == {spec.block for spec in SPECS} == {
        TENSORWISE, ROWWISE, BLOCK_1X128, BLOCK_128X128, BLOCK_1X32,
    }  # fmt: skip


@pytest.mark.one_in(1)
@on_devices(
    [
        (ROW_SPECS[1], COLUMN_SPECS[1], torch.bfloat16, True),
        (ROW_SPECS[2], COLUMN_SPECS[2], torch.float32, False),
        (ROW_SPECS[0], COLUMN_SPECS[4], torch.bfloat16, False),
        (ROW_SPECS[3], COLUMN_SPECS[3], torch.float16, True),
    ],
    spec=ROW_SPECS,
    spec_t=COLUMN_SPECS,
    dtype=(torch.bfloat16, torch.float32),
    scaled=(False, True),
)
def test_picked_rows(device, spec, spec_t, dtype, scaled):
    """Rows of another tensor, some more than once, each times a factor."""
    x, offsets = normal(70, 168, dtype=dtype), ends((7, 0, 130, 40)).to(device)
    rows = torch.randint(0, 70, (190,), generator=generator(3))
    factors = normal(190, seed=2).to(dtype) if scaled else None
    expected = reference.quantize_groups_both(x, offsets.cpu(), *spec.args, *spec_t.args, rows, factors)
    picked = (rows.to(device), None if factors is None else factors.to(device))
    found = casts.quantize_groups_both(x.to(device), offsets, *spec.args, *spec_t.args, *picked)
    assert_same(found, expected)
    assert_same(casts.quantize_groups(x.to(device), offsets, *spec.args, False, *picked), expected[:2])
    assert_same(casts.quantize_groups(x.to(device), offsets, *spec_t.args, True, *picked), expected[2:])
