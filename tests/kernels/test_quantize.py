"""The cast kernels equal the reference to the bit: in the interpreter on CPU tensors, compiled on CUDA tensors.

Every output is filled with NaN before a launch, so that what a kernel leaves unwritten shows.
"""

import math
from dataclasses import replace

import covering
import pytest
import torch
from cases import (
    INTERPRETER,
    SPEC_AND_DTYPE,
    SPEC_OF_BLOCK,
    SPECS,
    banded,
    each_block,
    each_device,
    each_spec,
    finite_bits,
    finite_patterns,
    generator,
    interesting_amaxes,
    on_devices,
    patterns,
    random_bits,
    views,
    with_specials,
)

from tritonfp8 import launch, reference
from tritonfp8.launch import casts, executor
from tritonfp8.launch.casts.partial_maxima import PartialMaxima
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, TENSORWISE, QuantSpec, scale_shape
from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS, HIGH_PRECISION_DTYPES
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning import cast_tiles
from tritonfp8.tuning.cast_tiles import MAX_ROW_IN_TILE, AmaxPass, CastTile

pytestmark = [pytest.mark.usefixtures("poisoned_outputs"), pytest.mark.one_in(3)]


def significant_strides(x):
    """Strides of the dims that a stride takes part in addressing."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]


def assert_same(actual, expected):
    """Same bytes in the same layout."""
    assert_bitwise_equal(actual, expected)
    assert [significant_strides(t) for t in actual] == [significant_strides(t) for t in expected]


def check_quantize(x, spec, transpose=False, amax=None):
    expected = reference.quantize(x, *spec.args, transpose, amax)
    assert_same(casts.quantize(x, *spec.args, transpose, amax), expected)


def check_both(x, spec, spec_t):
    expected = reference.quantize_both(x, *spec.args, *spec_t.args)
    assert_same(casts.quantize_both(x, *spec.args, *spec_t.args), expected)


def check_every_orientation(x, spec):
    check_quantize(x, spec)
    check_quantize(x, spec, transpose=True)
    check_both(x, spec, spec)


@on_devices(SPEC_AND_DTYPE, spec=SPECS, dtype=[torch.bfloat16, torch.float16])
def test_all_patterns(device, spec, dtype):
    """In order, with NaN and infinities; and at random, without, so that a scale of a whole dim is a number."""
    for x in (patterns(dtype).to(device), finite_patterns(dtype).to(device)):
        if device == "cuda":
            check_every_orientation(x, spec)
        else:
            # The interpreter runs the same code for one orientation: other tests have it do so, on less data.
            check_both(x, spec, spec)


@each_spec
@pytest.mark.parametrize(
    ("device", "rows", "cols"),
    [
        pytest.param(*INTERPRETER.values, 60, 200, marks=INTERPRETER.marks),
        pytest.param("cuda", 1024, 1024, marks=pytest.mark.gpu),
    ],
)
def test_random_float32(spec, device, rows, cols):
    check_every_orientation(random_bits(rows, cols).to(device), spec)
    check_every_orientation(finite_bits(rows, cols, seed=1).to(device), spec)
    check_every_orientation(with_specials(banded(rows, cols, seed=2)).to(device), spec)


# Without their signs they count: -0.0, -7, -inf and negative NaNs.
SIGNED_AMAX_BITS = [-(2**31), 0xC0E00000 - 2**32, 0xFF800000 - 2**32, 0xFF800001 - 2**32, -1]
AMAXES = {
    "usual": torch.tensor([7.0, 0.0, 1e-40, 1e-3, 3e38, math.inf, math.nan]),
    "signed": torch.tensor(SIGNED_AMAX_BITS, dtype=torch.int32).view(torch.float32),
}


@each_device
@each_spec
def test_given_amax_saturates(device, spec):
    """In place of the block's own: every code, saturation included."""
    x = finite_patterns(torch.bfloat16).to(device)
    check_quantize(x, spec, amax=torch.full(scale_shape(x.shape, spec.block), 7.0, device=device))


@each_device
@each_spec
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("amaxes", AMAXES.values(), ids=AMAXES)
def test_given_amax(device, spec, transpose, amaxes):
    """Each amax in turn, in every block."""
    x = banded(70, 150, dtype=torch.bfloat16).to(device)
    shape = scale_shape(x.shape[::-1] if transpose else x.shape, spec.block)
    for first in range(len(amaxes)):
        order = (torch.arange(math.prod(shape)) + first) % len(amaxes)
        check_quantize(x, spec, transpose, amaxes[order].view(shape).to(device))


@each_device
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.block[0] == 1], ids=str)
def test_scales_at_the_edges_of_binades(device, spec):
    """A row for each amax: all scales, and elements next to where they saturate."""
    amaxes = interesting_amaxes().view(-1, 1)
    check_quantize((amaxes * torch.tensor([1.0, -1.0, 0.999, 0.9, -0.5, 0.1, 1e-3])).to(device), spec)


TAILS = [(1, 1), (1, 129), (129, 1), (7, 17), (17, 127), (127, 7), (129, 130), (3, 1000), (1000, 3)]


@each_device
@each_block
@pytest.mark.parametrize("shape", TAILS, ids=str)
def test_tails(device, spec, shape):
    check_every_orientation(banded(*shape, dtype=torch.bfloat16).to(device), spec)


@each_device
@pytest.mark.parametrize("cols", [MAX_ROW_IN_TILE, MAX_ROW_IN_TILE + 1])
@pytest.mark.parametrize("rounding", ["none", "pow2"])
def test_long_rows(device, cols, rounding):
    """A row is reduced in one tile, or, where it does not fit, in a pass of its own."""
    check_quantize(banded(3, cols, dtype=torch.bfloat16).to(device), QuantSpec("e4m3", ROWWISE, "fp32", rounding))


LAYOUTS = list(views(torch.zeros(2, 2)))
# Strides are read in one place for all blocks. Scales of whole rows have a pass of their own.
OF_ROWS = next(spec for spec in SPEC_OF_BLOCK if spec.block == ROWWISE)
FEW_LAYOUTS = {*((layout, OF_ROWS) for layout in LAYOUTS), *covering.each(LAYOUTS, SPEC_OF_BLOCK)}


@on_devices(sorted(FEW_LAYOUTS, key=str), layout=LAYOUTS, spec=SPEC_OF_BLOCK)
def test_layouts(device, layout, spec):
    x = views(banded(130, 150, dtype=torch.bfloat16).to(device))[layout]
    check_quantize(x, spec)
    check_quantize(x, spec, transpose=True)
    if layout in ("transposed", "odd row stride"):
        check_both(x, spec, spec)


@each_device
@pytest.mark.parametrize("spec", SPEC_OF_BLOCK, ids=str)
def test_both_orientations_by_different_specs(device, spec):
    x = banded(90, 150, dtype=torch.bfloat16).to(device)
    for spec_t in SPEC_OF_BLOCK:
        check_both(x, spec, replace(spec_t, format="e5m2"))


LEADING = [(2, 3, 130, 40), (3, 130, 40), (3, 128, 40), (2, 1, 1), (1, 200)]
FEW_LEADING = [*((LEADING[0], spec) for spec in SPEC_OF_BLOCK), *covering.each(LEADING[1:], SPEC_OF_BLOCK)]


@on_devices(FEW_LEADING, shape=LEADING, spec=SPEC_OF_BLOCK)
def test_leading_dims(device, shape, spec):
    x = banded(*shape, dtype=torch.bfloat16).to(device)
    # Under autocast too: torch's own ops between the launches are cast there. They are the same for each shape.
    for autocast in (False, True) if len(shape) == 4 else (False,):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            check_quantize(x, spec)
            if x.ndim > 2:
                check_quantize(x.transpose(0, 1), spec)


@each_device
@pytest.mark.parametrize("spec", [s for s in SPEC_OF_BLOCK if s.block != BLOCK_128X128], ids=str)
def test_vectors(device, spec):
    check_quantize(banded(1, 300, dtype=torch.bfloat16).to(device).flatten(), spec)


@each_device
@each_block
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 3), (0, 3, 4), (3, 4, 0)], ids=str)
def test_empty_dims(device, spec, shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    check_quantize(x, spec)
    if len(shape) == 2:
        check_both(x, spec, spec)


@each_device
@each_block
@pytest.mark.parametrize("shape", [(1, 1), (130, 300), (300, 17), (2, 3, 130, 40), (0, 5), (5, 0)], ids=str)
def test_amax(device, spec, shape):
    x = banded(*shape) if math.prod(shape) else torch.empty(shape)
    for data in (x, with_specials(x)) if x.numel() > 4 else (x,):
        data = data.to(device)
        for block in (spec.block, spec.block[::-1]):
            assert_bitwise_equal(casts.amax(data, block), reference.amax(data, block))


DEQUANTIZED = SPEC_OF_BLOCK, HIGH_PRECISION_DTYPES, [(1, 1), (130, 300), (2, 3, 130, 40), (0, 5)]


@on_devices(covering.pairs(*DEQUANTIZED), **dict(zip(("spec", "dtype", "shape"), DEQUANTIZED, strict=True)))
def test_dequantize(device, spec, dtype, shape):
    x = banded(*shape) if math.prod(shape) else torch.empty(shape)
    q = reference.quantize(x.to(device), *spec.args)
    assert_same([casts.dequantize(*q, *spec.args, dtype)], [reference.dequantize(*q, *spec.args, dtype)])


@each_device
@pytest.mark.parametrize("format", BYTE_FORMATS)
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_dequantize_every_code_by_every_exponent(device, format, dtype):
    spec = QuantSpec(format, BLOCK_1X32, "e8m0", "pow2")
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    qdata = codes.repeat(256, 1).view(FORMATS[format].dtype).to(device)
    scale = codes.view(256, 1).repeat(1, 8).view(torch.float8_e8m0fnu).to(device)
    args = qdata, scale, *spec.args, dtype
    # What arithmetic leaves in the payload of a NaN differs by device.
    actual, expected = casts.dequantize(*args), reference.dequantize(*args)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_bitwise_equal(actual.nan_to_num(0, math.inf, -math.inf), expected.nan_to_num(0, math.inf, -math.inf))


# The share of 2^128 from which on the nearest code of a power-of-two scale stands for 2^128 itself: ties are even.
ROUNDS_TO_INFINITY = {"e4m3": 1 - 2**-5, "e5m2": 1 - 2**-4}


@each_spec
@each_device
def test_the_largest_values_of_float32_come_back_as_documented(device, spec):
    first = ROUNDS_TO_INFINITY[spec.format] * 2.0**64 * 2.0**64
    below = math.nextafter(first, 0) - 2.0**103
    for value, overflows in ((below, False), (first, True), (torch.finfo(torch.float32).max, True)):
        x = torch.full((2, 32), value, device=device)
        qdata, scale = casts.quantize(x, *spec.args)
        assert_same((qdata, scale), reference.quantize(x, *spec.args))
        assert qdata.float().isfinite().all()
        assert scale.float().isfinite().all()
        found = casts.dequantize(qdata, scale, *spec.args, torch.float32)
        assert_same([found], [reference.dequantize(qdata, scale, *spec.args, torch.float32)])
        assert bool(found.isinf().all()) == (overflows and spec.scale_rounding == "pow2")


@each_device
def test_dequantize_of_strided_data(device):
    spec = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
    qdata, scale = reference.quantize(banded(300, 260).to(device), *spec.args)
    args = qdata[::2, 128:], scale[::2, 1:], *spec.args, torch.float32
    assert_same([casts.dequantize(*args)], [reference.dequantize(*args)])


@each_device
@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (7, 0), (128, 128), (144, 272), (130, 300), (17, 129)], ids=str)
@pytest.mark.parametrize("format", BYTE_FORMATS)
def test_transpose_keeps_every_byte(device, format, shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(0))
    qdata = codes.view(FORMATS[format].dtype).to(device)
    assert_same([launch.casts.transpose(qdata)], [reference.transpose(qdata)])
    assert torch.equal(launch.casts.transpose(qdata).view(torch.uint8).cpu(), codes.t())


@each_device
@pytest.mark.parametrize("layout", views(torch.zeros(2, 2)))
def test_transpose_of_strided_data(device, layout):
    qdata = views(banded(130, 150).to(torch.float8_e4m3fn).view(torch.uint8).to(device))[layout]
    qdata = qdata.view(torch.float8_e4m3fn)
    assert_same([launch.casts.transpose(qdata)], [reference.transpose(qdata)])


@each_device
@pytest.mark.parametrize("format", BYTE_FORMATS)
def test_the_transpose_of_square_blocks_needs_no_second_rounding(device, format):
    spec = QuantSpec(format, BLOCK_128X128, "fp32", "pow2")
    x = with_specials(banded(300, 260)).to(device, torch.bfloat16)
    qdata, scale = casts.quantize(x, *spec.args)
    assert_bitwise_equal((launch.casts.transpose(qdata), scale.t()), casts.quantize(x, *spec.args, True))


TILES = [
    CastTile(128, 128, 4, group=8),
    CastTile(128, 128, 8, group=3),
    CastTile(256, 128, 8, group=2),
    CastTile(128, 128, 16),
]


@each_block
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(
    ("device", "shape"),
    [
        pytest.param(*INTERPRETER.values, (390, 144), marks=INTERPRETER.marks, id="interpreter"),
        *(pytest.param("cuda", shape, marks=pytest.mark.gpu, id=str(shape)) for shape in ((512, 384), (390, 257))),
    ],
)
def test_every_tile_gives_the_same(device, spec, tile, shape, monkeypatch):
    """The order of tiles, the rows a thread, reading twice and tiles that are not square are matters of speed."""
    if device == "cpu" and spec.block not in (ROWWISE, BLOCK_1X128):
        pytest.skip("the interpreter takes long, and tiles are the same for amaxes given and found")
    monkeypatch.setattr(cast_tiles, "choose", lambda *args: tile)
    executor.forget()
    x = with_specials(banded(*shape)).to(device, torch.bfloat16)
    check_quantize(x, spec, transpose=True)
    check_both(x, spec, spec)


@pytest.mark.one_in(1)
@each_device
@pytest.mark.parametrize("dtype", [*HIGH_PRECISION_DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("most_parts", [1, 64], ids=["joined", "joined by the cast"])
def test_amax_of_whole_dims_in_parts(device, dtype, most_parts, monkeypatch):
    """Rows, columns and all, with several parts of each, also more than one program takes in one step."""
    if device == "cpu" and dtype in (torch.float16, torch.float64):
        pytest.skip("the interpreter takes long; parts are integers of two widths")
    monkeypatch.setattr(cast_tiles, "amax_pass", lambda *args: AmaxPass(CastTile(16, 32, 4), 64))
    monkeypatch.setattr(cast_tiles, "MOST_PARTS_IN_A_CAST", most_parts)
    for name in ("CAST_STEP_PARTS", "REDUCE_STEP_PARTS"):
        monkeypatch.setattr(cast_tiles, name, 4)
    executor.forget()
    for x in (banded(192, 160).to(device, dtype), with_specials(banded(165, 135)).to(device, dtype)):
        for spec in SPEC_OF_BLOCK:
            if -1 in spec.block:
                assert_bitwise_equal(casts.amax(x, spec.block), reference.amax(x, spec.block))
                check_both(x, spec, spec)
                check_quantize(x, spec, transpose=True)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("device", [INTERPRETER])
@pytest.mark.parametrize(("parts", "both", "launches"), [(3, False, 0), (4, False, 1), (3, True, 1)])
def test_a_cast_joins_few_parts_of_columns_itself(device, parts, both, launches, monkeypatch):
    """A launch that joins them takes longer than reading them, unless rows are to be read too."""
    seen, reduce = [], PartialMaxima.reduce
    monkeypatch.setattr(PartialMaxima, "reduce", lambda *args: seen.append(args) or reduce(*args))
    monkeypatch.setattr(cast_tiles, "MOST_PARTS_IN_A_CAST", 3)
    x = banded(cast_tiles.AMAX_OF_COLUMNS.tile.m * parts, 160).to(device, torch.bfloat16)
    spec = OF_ROWS
    if both:
        check_both(x, spec, spec)
    else:
        check_quantize(x, spec, transpose=True)
    assert len(seen) == launches


@each_device
def test_amax_of_narrow_tensors_takes_little_memory(device, monkeypatch):
    """Many rows of few columns, which many programs could share: their parts of all rows would be larger than x."""
    allocated = []
    allocate = PartialMaxima.allocate
    monkeypatch.setattr(PartialMaxima, "allocate", lambda *args: allocated.append(allocate(*args)) or allocated[-1])
    monkeypatch.setattr(cast_tiles, "amax_pass", lambda *args: AmaxPass(CastTile(16, 512, 4), 10**4))
    x = banded(2500, 520).to(device, torch.bfloat16)
    check_both(x, OF_ROWS, OF_ROWS)
    assert allocated
    assert all(each.buffer.numel() * each.buffer.itemsize <= x.nbytes // 4 for each in allocated)


@pytest.mark.gpu
@pytest.mark.parametrize("transpose", [False, True], ids=["normal", "transposed"])
@pytest.mark.parametrize("spec", [s for s in SPECS if s.format == "e4m3" and s.scale_rounding == "pow2"], ids=str)
def test_more_than_2_to_the_31_elements(spec, transpose):
    """Offsets beyond 32 bits; checked in chunks, as the reference needs many times the memory."""
    rows, cols, chunk = 2**16 + 1, 2**15, 2**13
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.randn(rows, cols, dtype=torch.bfloat16, device="cuda")
    qdata, scale = casts.quantize(x, *spec.args, transpose)
    whole = None
    if spec.block == TENSORWISE:
        whole = torch.stack([part.float().abs().max() for part in x.split(chunk)]).max().view(1, 1)
    # A chunk of rows of the result: whole rows, and whole blocks of rows.
    for start in range(0, qdata.shape[0], chunk):
        rows_of_result = slice(start, start + chunk)
        part = x[:, rows_of_result] if transpose else x[rows_of_result]
        expected = reference.quantize(part, *spec.args, transpose, whole)
        step = spec.block[0] if spec.block[0] > 0 else qdata.shape[0]
        scale_rows = slice(start // step, -(-(start + chunk) // step))
        assert_bitwise_equal((qdata[rows_of_result], scale[scale_rows]), expected)
