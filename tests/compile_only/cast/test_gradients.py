"""The casts and sums of parts of gradients compile: for Hopper without spills, for Ada and Blackwell at all."""

import pytest
import torch

from tritonfp8 import reference
from tritonfp8.launch import gradients

CAPABILITIES = (89, 90, 100)
N = 1 << 20


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "rank"), [(torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 3)], ids=str)
def test_codes(compiled, dtype, rank, cc):
    """Triton makes a constant of an argument that is 1."""
    [(_, report)] = compiled(cc, lambda: gradients.quantize_parts(empty(4 * N, dtype=dtype), 4, rank), gradients)
    assert report.spill_bytes == 0, report.log
    assert "ld.global.v" in report.ptx
    assert "mul.rn.f32" in report.ptx
    assert "fma.rn.f32" not in report.ptx


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("parts", [2, 3, 8, 32])
def test_sums(compiled, parts, quantized, cc):
    size = reference.part_sizes(N)[1]
    each = empty(parts, size, dtype=torch.uint8) if quantized else empty(parts, N)
    [(_, report)] = compiled(cc, lambda: gradients.sum_in_pairs(empty(N), each, 1 / 3), gradients)
    assert report.spill_bytes == 0, report.log
    assert "fma.rn.f32" not in report.ptx
    assert "st.global.v4.b32" in report.ptx
