"""The kernels that measure operands compile for every target without spills."""

import pytest
import torch
from compile_target import compile_launch, note_launches

from tritonfp8.launch import figures


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("quantized", [False, True])
def test_figures(monkeypatch, quantized, cc):
    found = note_launches(monkeypatch, cc, figures)
    x, whole = torch.empty(2, 64, 256, dtype=torch.bfloat16, device="meta"), torch.empty(2, device="meta")
    loss = (x.float(), x.to(torch.float8_e4m3fn), whole, whole) if quantized else ()
    figures.operand_figures(x, whole, x[0].numel(), 448.0, *loss)
    reports = [compile_launch(cc, kernel, *arguments, **options) for kernel, arguments, options in found]
    assert [report.spill_bytes for report in reports] == [0, 0], [report.log for report in reports]
    assert len(reports) == 2
