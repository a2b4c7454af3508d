"""The cast of matrices to scales of columns, in one launch."""

import pytest
import torch
from cases import each_device, normal

from tritonfp8 import reference
from tritonfp8.launch import executor, moe
from tritonfp8.launch.moe import columns
from tritonfp8.specs import ROWWISE, QuantSpec
from tritonfp8.testing import assert_bitwise_equal
from tritonfp8.tuning import cast_tiles

SPEC = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
SMS = 132


@pytest.mark.parametrize("shape", [(4096, 7168), (7168, 2048), (1536, 2048), (2048, 768), (28672, 4096), (100, 41)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_chunks(shape, itemsize):
    """Every tile is in one chunk; casts begin late enough, and soon enough for the cache."""
    tile, (rows, n) = cast_tiles.COLUMNS, shape
    found = columns.chunks_of(3, rows, n, itemsize, SMS)
    if found is None:
        height = -(-rows // tile.m)
        lag = 1 + -(-SMS * cast_tiles.COLUMNS_PER_SM // (2 * height))
        assert (lag + 1) * height * tile.m * tile.n * itemsize > cast_tiles.COLUMNS_CACHE
        return
    assert found.tiles == -(-rows // tile.m) * found.strips
    assert found.number * found.tiles == 3 * tile.programs(rows, n)
    assert (found.lag - 1) * 2 * found.tiles >= SMS * cast_tiles.COLUMNS_PER_SM
    assert (found.lag + 1) * found.tiles * tile.m * tile.n * itemsize <= cast_tiles.COLUMNS_CACHE
    assert found.programs == 2 * found.tiles * (found.number + found.lag)


@each_device
@pytest.mark.parametrize("shape", [(2, 130, 300), (3, 256, 128), (1, 40, 41)], ids=str)
@pytest.mark.parametrize("cached", [True, False])
def test_both_ways_have_the_same_bits(device, shape, cached, monkeypatch):
    """Also where the cache is too small, and the passes are two launches."""
    if not cached:
        monkeypatch.setattr(columns, "chunks_of", lambda *args: None)
    x = normal(*shape, dtype=torch.bfloat16)
    x[0, :, 1], x[0, 0, 2] = 0.0, torch.nan
    executor.forget()
    found = moe.quantize_matrices(x.to(device), *SPEC.args, True)
    executor.forget()
    assert_bitwise_equal(tuple(t.cpu() for t in found), reference.quantize_matrices(x, *SPEC.args, True))
