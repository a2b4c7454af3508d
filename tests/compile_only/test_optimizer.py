"""The optimizer step of stored weights compiles: for Hopper without spills, for Ada and Blackwell at all."""

import math

import pytest
import torch
from compile_target import compile_launch, note_launches

from tritonfp8 import QuantSpec
from tritonfp8.launch import optimizer
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, TENSORWISE, empty_scale, scale_shape

BLOCKS = (TENSORWISE, ROWWISE, BLOCK_1X128, BLOCK_128X128, BLOCK_1X32)
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


# Of a correctly rounded root and quotient; all other operations are of the reference.
FUSED_AN_ELEMENT = 6


def reports(monkeypatch, cc, block, kind, by_rows=False, k=4096, grad=torch.bfloat16, stochastic=True):
    """What a step launches, with the elements of a thread."""
    found = note_launches(monkeypatch, cc, optimizer)
    monkeypatch.setattr(optimizer.reference, "write_scales", lambda *args: None)
    scale_format = "e8m0" if block == BLOCK_1X32 else "fp32"
    spec, shape = QuantSpec("e4m3", block, scale_format, "pow2"), (2048, k)

    def empty(size, dtype):
        return torch.empty(size, dtype=dtype, device="meta")

    qdata = empty(shape, torch.float8_e4m3fn)
    scale, scale_block = empty_scale(shape, block, scale_format, torch.device("meta")), block
    if by_rows:
        scale_block = (1, block[1])
        scale = empty(scale_shape(shape, scale_block), torch.uint8)
    moments = [empty(shape, KINDS[kind]) for _ in range(2)]
    scales = [empty((2048, -(-k // 128)), torch.uint8) if kind == "fp8" else None for _ in moments]
    optimizer.adamw(
        qdata, scale, *moments, empty(shape, grad), empty(8, torch.float32), empty(4, torch.int32), *spec.args,
        scale_block, (0, 0), stochastic, *scales,
    )  # fmt: skip
    compiled = []
    for kernel, arguments, options in found:
        sizes = ("TILE_M", "TILE_N", "DOWN", "RIGHT")
        elements = math.prod(arguments[2].get(name, 1) for name in sizes) // (32 * options["num_warps"])
        compiled.append((compile_launch(cc, kernel, *arguments, **options), elements))
    return compiled


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_step(monkeypatch, block, kind, cc):
    found = reports(monkeypatch, cc, block, kind)
    assert len(found) == (2 if block == TENSORWISE else 1)
    for report, elements in found:
        assert report.spill_bytes == 0, report.log
        # 16 bytes of float32 at once; and as the reference rounds, without other fused multiplications and additions.
        assert "ld.global.v4.b32" in report.ptx
        assert "mul.rn.f32" in report.ptx
        assert report.ptx.count("fma") == FUSED_AN_ELEMENT * elements


OTHERS = [
    *({"block": ROWWISE, "kind": "fp32", "k": k, "grad": torch.float32} for k in (64, 2048, 8192, 16384, 28672, 32768)),
    # Tiles that reach beyond a weight.
    *({"block": block, "kind": kind, "k": 4112} for block in BLOCKS for kind in KINDS),
    # Shards.
    *({"block": block, "kind": "fp8", "by_rows": True, "stochastic": False} for block in BLOCKS),
]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_rows_tails_and_shards(monkeypatch, options):
    for report, _ in reports(monkeypatch, 90, **options):
        assert report.spill_bytes == 0, report.log


def test_a_long_row_keeps_no_more_than_its_weights_in_local_memory(monkeypatch):
    k = 14336
    ((report, elements),) = reports(monkeypatch, 90, ROWWISE, "fp8", k=k)
    stored_and_loaded = 2 * 4
    assert report.spill_bytes <= stored_and_loaded * elements
