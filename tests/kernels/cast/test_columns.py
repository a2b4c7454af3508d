"""The cast of matrices to scales of columns, which reads each element once where it can."""

import pytest
import torch
from cases import each_device, normal

from tritonfp8 import launch, reference
from tritonfp8.launch import casts, executor
from tritonfp8.launch.casts import dense, grouped, lines
from tritonfp8.specs import ROWWISE, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning import cast_tiles

SPEC = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
WAYS = ("waits", "leaves", "two passes")
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def go(monkeypatch):
    """Make all casts to scales of columns go a way; in one of them a program does not wait."""

    def change(way):
        monkeypatch.setattr(cast_tiles, "COLUMNS_LEAST", 0)
        if way == "leaves":
            monkeypatch.setattr(cast_tiles, "COLUMNS_LOOKS", 0)
        if way == "two passes":
            for module in (dense, grouped):
                monkeypatch.setattr(module, "run_together", lambda *args: False)
        executor.forget()

    yield change
    executor.forget()


def odd(*shape, dtype=torch.bfloat16):
    x = normal(*shape, dtype=dtype)
    x[..., 1], x[..., 0, 2] = 0.0, torch.nan
    return x


def test_only_strips_that_run_together_wait():
    assert lines.run_together(224 * cast_tiles.COLUMNS.m, 132)
    assert not lines.run_together(300 * cast_tiles.COLUMNS.m, 132)


@each_device
@pytest.mark.parametrize("shape", [(2, 130, 300), (3, 256, 128), (1, 40, 41), (1, 1000, 130)], ids=str)
@each_way
def test_all_ways_have_the_same_bits(device, shape, way, go):
    x = odd(*shape)
    go(way)
    found = casts.quantize_matrices(x.to(device), *SPEC.args, True)
    assert_bitwise_equal(tuple(t.cpu() for t in found), reference.quantize_matrices(x, *SPEC.args, True))


@each_device
@pytest.mark.parametrize("shape", [(130, 300), (256, 128), (40, 41), (1000, 130), (300, 64)], ids=str)
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_way
def test_of_one_matrix_likewise(device, shape, transpose, dtype, way, go):
    """Also the normal cast of a matrix that lies along its columns, whose rows are columns in memory."""
    x = odd(*shape, dtype=dtype)
    given = x if transpose else x.t()
    go(way)
    on_device = x.to(device)
    found = launch.casts.quantize(on_device if transpose else on_device.t(), *SPEC.args, transpose)
    assert_bitwise_equal(tuple(t.cpu() for t in found), reference.quantize(given, *SPEC.args, transpose))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 4096), (8192, 6400), (4100, 1032)], ids=str)
def test_large_matrices_beside_other_work(shape):
    """Another stream keeps the multiprocessors, so that some programs wait in vain."""
    x = odd(*shape).cuda()
    expected = reference.quantize(x, *SPEC.args, True)
    busy, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        with torch.cuda.stream(busy):
            a @ a
        assert_bitwise_equal(launch.casts.quantize(x, *SPEC.args, True), expected)
    torch.cuda.synchronize()
