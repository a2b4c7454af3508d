"""The cast of matrices to scales of columns, which reads each element once where it can."""

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


def test_only_strips_that_run_together_wait():
    assert columns.run_together(224, 132)
    assert not columns.run_together(300, 132)


@each_device
@pytest.mark.parametrize("shape", [(2, 130, 300), (3, 256, 128), (1, 40, 41), (1, 1000, 130)], ids=str)
@pytest.mark.parametrize("way", ["waits", "leaves", "two passes"])
def test_all_ways_have_the_same_bits(device, shape, way, monkeypatch):
    """Also of a program that does not wait, whose tile the second launch casts."""
    if way == "two passes":
        monkeypatch.setattr(columns, "run_together", lambda *args: False)
    if way == "leaves":
        monkeypatch.setattr(cast_tiles, "COLUMNS_LOOKS", 0)
    x = normal(*shape, dtype=torch.bfloat16)
    x[0, :, 1], x[0, 0, 2] = 0.0, torch.nan
    executor.forget()
    found = moe.quantize_matrices(x.to(device), *SPEC.args, True)
    executor.forget()
    assert_bitwise_equal(tuple(t.cpu() for t in found), reference.quantize_matrices(x, *SPEC.args, True))
