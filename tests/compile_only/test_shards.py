"""The casts of many shards at once compile: for Hopper without spills, for Ada and Blackwell at all."""

import re

import pytest
import torch
from compile_target import compile_launch, note_launches

from tritonfp8 import QuantSpec
from tritonfp8.compat import triton_since
from tritonfp8.launch import shards
from tritonfp8.specs import BLOCK_128X128, ROWWISE, TENSORWISE

COLUMNWISE = ROWWISE[::-1]


@pytest.fixture
def compiled(monkeypatch):
    """What would be launched on a device of compute capability ``cc``: its report, of a function of a table."""

    def compile_(cc, cast, dtype=torch.float32):
        found = note_launches(monkeypatch, cc, shards)
        fields, owners, like = (torch.empty(4, dtype=d, device="meta") for d in (torch.int64, torch.int32, dtype))
        cast(shards.ShardTable(fields, owners, like, aligned=True))
        [(kernel, arguments, options)] = found
        return compile_launch(cc, kernel, *arguments, **options)

    return compile_


def amaxes():
    return torch.empty(4, device="meta")


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [(TENSORWISE,), (ROWWISE, COLUMNWISE), (BLOCK_128X128,)], ids=str)
def test_amaxes(compiled, blocks, dtype, cc):
    report = compiled(
        cc, lambda table: shards.launch_amax(table, [size for block in blocks for size in block], amaxes()), dtype
    )
    assert report.spill_bytes == 0, report.log
    assert "ld.global.v4.b32" in report.ptx
    assert re.search(r"(red|atom)\.global.*\.max\.", report.ptx)


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize(
    ("block", "transposed", "rounding"),
    [(TENSORWISE, False, "none"), (ROWWISE, False, "pow2"), (COLUMNWISE, True, "pow2"), (BLOCK_128X128, False, "pow2")],
    ids=str,
)
def test_casts(compiled, block, transposed, rounding, cc):
    spec = QuantSpec("e4m3", BLOCK_128X128 if block == BLOCK_128X128 else ROWWISE, "fp32", rounding)

    def cast(table):
        out = torch.empty(4, dtype=torch.uint8, device="meta")
        shards.launch_quantize(table, *spec.args, transposed, torch.bfloat16, amaxes(), out)

    report = compiled(cc, cast)
    assert report.spill_bytes == 0, report.log
    assert "ld.global.v4.b32" in report.ptx
    assert "st.global.v4.b32" in report.ptx if transposed else "st.global" in report.ptx
    direct = cc >= 90 or triton_since("3.9")
    assert ("cvt.rn.satfinite.e4m3x2.f32" in report.ptx) == direct
