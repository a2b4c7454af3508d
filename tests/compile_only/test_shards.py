"""The casts of many shards at once compile: for Hopper without spills, for Ada and Blackwell at all."""

import re

import pytest
import torch

from tritonfp8 import QuantSpec
from tritonfp8.compat import triton_since
from tritonfp8.launch import shards
from tritonfp8.specs import BLOCK_128X128, ROWWISE, TENSORWISE

COLUMNWISE = ROWWISE[::-1]
# The table says where shards lie, and is made by hand.
SHARDS, PLACES = [torch.empty(4, 4, device="meta")], torch.empty(1, 4, device="meta")


def empty(dtype=torch.float32):
    return torch.empty(4, dtype=dtype, device="meta")


@pytest.fixture
def report_of(compiled, monkeypatch):
    """What a cast would launch on a device of compute capability ``cc``: its report."""

    def compile_(cc, cast, dtype=torch.float32):
        table = shards.ShardTable(*map(empty, (torch.int64, torch.int32, dtype)), aligned=True)
        monkeypatch.setattr(shards, "_table_of", lambda *args, **options: table)
        [(_, report)] = compiled(cc, cast, shards)
        return report

    return compile_


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [(TENSORWISE,), (ROWWISE, COLUMNWISE), (BLOCK_128X128,)], ids=str)
def test_amaxes(report_of, blocks, dtype, cc):
    sizes = [size for block in blocks for size in block]
    report = report_of(cc, lambda: shards.amax_of_shards(empty(), SHARDS, PLACES, sizes), dtype)
    assert report.spill_bytes == 0, report.log
    assert "ld.global.v4.b32" in report.ptx
    assert re.search(r"(red|atom)\.global.*\.max\.", report.ptx)


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize(
    ("block", "transposed", "rounding"),
    [(TENSORWISE, False, "none"), (ROWWISE, False, "pow2"), (COLUMNWISE, True, "pow2"), (BLOCK_128X128, False, "pow2")],
    ids=str,
)
def test_casts(report_of, block, transposed, rounding, cc):
    spec = QuantSpec("e4m3", BLOCK_128X128 if block == BLOCK_128X128 else ROWWISE, "fp32", rounding)
    args = empty(torch.uint8), SHARDS, PLACES, empty(), *spec.args, transposed, torch.bfloat16
    report = report_of(cc, lambda: shards.quantize_shards(*args))
    assert report.spill_bytes == 0, report.log
    assert "ld.global.v4.b32" in report.ptx
    assert "st.global.v4.b32" in report.ptx if transposed else "st.global" in report.ptx
    direct = cc >= 90 or triton_since("3.9")
    assert ("cvt.rn.satfinite.e4m3x2.f32" in report.ptx) == direct
