"""Casts of formats of two codes a byte compile: for Hopper without spills, for Ada and Blackwell at all."""

import pytest
import torch
from strategies import PACKED_SPECS
from test_casts import check_spills, every_target, matrix

from tritonfp8.launch import casts


@every_target
@pytest.mark.parametrize("shape", [(4096, 4096), (2880, 2880), (33, 70)], ids=str)
def test_casts_compile_for_every_target(compiled, shape, cc):
    (text,), (m, k) = PACKED_SPECS[0].args, shape
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device="meta")
    scale = torch.empty(m, -(-k // 32), dtype=torch.float8_e8m0fnu, device="meta")
    row_scale = torch.empty(m, 1, dtype=torch.float32, device="meta")
    offsets = torch.empty(1, dtype=torch.int32, device="meta")
    for call in (
        lambda: casts.quantize(matrix(*shape), text),
        lambda: casts.quantize(matrix(*shape, dtype=torch.float32), text),
        lambda: casts.dequantize(codes, scale, text, torch.bfloat16),
        lambda: casts.expand_codes(codes, scale, text),
        lambda: casts.expand_codes(codes, scale, text, row_scale),
        lambda: casts.expand_codes(codes[None], scale[None], text, row_scale, offsets),
        lambda: casts.measure_rows(codes, scale, text),
    ):
        ((_, report),) = compiled(cc, call)
        check_spills([(None, report)], cc)


def test_rows_are_read_and_written_in_vectors(compiled):
    """Where rows are aligned: 16 bytes of values, of e4m3, and of codes to be expanded."""
    (text,) = PACKED_SPECS[0].args
    codes = torch.empty(4096, 2048, dtype=torch.uint8, device="meta")
    scale = torch.empty(4096, 128, dtype=torch.float8_e8m0fnu, device="meta")
    for call, read, written in (
        (lambda: casts.quantize(matrix(4096, 4096), text), 4, 2),
        (lambda: casts.expand_codes(codes, scale, text), 4, 4),
    ):
        ((_, report),) = compiled(90, call)
        assert f"ld.global.v{read}.b32" in report.ptx
        assert f"st.global.v{written}.b32" in report.ptx
