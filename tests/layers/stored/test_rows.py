"""The part of a stored weight that one rank has: cut, padded and joined, it has the values and scales of the whole."""

import copy

import pytest
import torch
from cases import SPECS, normal

from tritonfp8.layers.stored import StoredRows, exponents_of, scales_of, store
from tritonfp8.specs.formats import SCALE_FORMATS
from tritonfp8.specs.testing import assert_bitwise_equal

STORABLE = [spec for spec in SPECS if spec.scale_rounding == "pow2"]
each_spec = pytest.mark.parametrize("spec", STORABLE, ids=str)


def weight(spec, n=201, k=137):
    values = normal(n, k) * torch.exp(3 * normal(n, k, seed=1))
    values[5, 40] = torch.nan
    values[:, 96:128] = 0
    return store(values.bfloat16(), spec)


def as_bits(x):
    return x.contiguous().view(torch.uint8 if x.dtype.itemsize == 1 else torch.int32)


def assert_same_operand(rows, whole, spec):
    for got, wanted in zip(rows.read_operand(spec, False), whole.read_operand(spec, False), strict=True):
        assert got.shape == wanted.shape
        assert torch.equal(as_bits(got), as_bits(wanted))
    assert_bitwise_equal([rows.dequantize()], [whole.dequantize()])


@each_spec
def test_rows_are_the_weight(spec):
    whole = weight(spec)
    rows = whole.as_shard()
    assert rows._qdata is whole._qdata
    assert_same_operand(rows, whole, spec)
    assert rows.nbytes <= 1.04 * rows.numel()


@each_spec
@pytest.mark.parametrize("cuts", [(1, 200), (100, 101), (64, 65, 72)])
def test_shards_joined_are_the_weight(spec, cuts):
    whole = weight(spec)
    rows, start, found = whole.as_shard(), 0, []
    for n in cuts:
        part = rows.narrow(0, start, n)
        assert_bitwise_equal([part.dequantize()], [whole.dequantize()[start : start + n]])
        found.append(part)
        start += n
    codes = torch.cat([part._qdata.view(torch.uint8) for part in found]).view(whole._qdata.dtype)
    joined = StoredRows(codes, torch.cat([part._exponents for part in found]), spec, whole.dtype, rows.cols)
    assert_same_operand(joined, whole, spec)


@each_spec
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_columns_have_their_values_and_equally_many_exponents(spec, parts):
    whole = weight(spec)
    found = torch.chunk(whole.as_shard(), parts, dim=1)
    assert_bitwise_equal([torch.cat([part.dequantize() for part in found], 1)], [whole.dequantize()])
    full = [part._exponents.shape for part in found if part.shape[1] == found[0].shape[1]]
    assert len(set(full)) == 1


@each_spec
def test_zeros_before_a_part_move_its_blocks(spec):
    # A part that begins 73 rows and 40 columns inside the weight; its blocks are the blocks of the weight.
    whole = weight(spec)
    part = whole.as_shard()[73:, 40:]
    above, left = (0 if block == -1 else at % block for at, block in zip((73, 40), spec.block, strict=True))
    padded = torch.nn.functional.pad(part, (left, 0, above, 0))
    qdata, scale = padded.read_operand(spec, False)
    assert torch.equal(as_bits(qdata[above:, left:]), as_bits(whole._qdata[73:, 40:]))
    rows, cols = (0 if block == -1 else at // block for at, block in zip((73, 40), spec.block, strict=True))
    assert torch.equal(as_bits(scale), as_bits(whole._scale[rows:, cols:]))


def test_exponents_are_those_of_every_scale():
    powers = torch.arange(1, 255, dtype=torch.int32)
    scale = torch.cat([(powers << 23).view(torch.float32), torch.tensor([torch.nan])])
    assert torch.equal(exponents_of(scale), torch.arange(1, 256).to(torch.uint8))
    assert_bitwise_equal([scales_of(exponents_of(scale))], [scale])
    every = torch.arange(255).to(torch.uint8)
    assert_bitwise_equal([scales_of(every)], [every.view(SCALE_FORMATS["e8m0"].dtype).float()])


def test_copies_and_casts_keep_codes():
    rows = weight(STORABLE[0]).as_shard()
    for other in (copy.deepcopy(rows), rows.clone(), rows.to(torch.float32), rows.detach()):
        assert type(other) is StoredRows
        assert torch.equal(as_bits(other._qdata), as_bits(rows._qdata))
    assert rows.to("meta").device.type == "meta"
    x = normal(2, 137).bfloat16()
    assert_bitwise_equal([x @ rows.t()], [x @ rows.dequantize().t()])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda rows: rows.add_(1), "add_.* does not write to a weight .* in 8 bits and sharded.*float32_copy"),
        (lambda rows: rows[::2], "a slice of step 2"),
        (lambda rows: rows.view(137, 201), "a view"),
        (lambda rows: rows.copy_(torch.zeros(201, 137)), "values cannot be copied into a shard.*load_state_dict"),
    ],
)
def test_any_other_use_is_an_error(use, message):
    with pytest.raises(NotImplementedError, match=message):
        use(weight(STORABLE[0]).as_shard())
