"""The kernels that measure operands compile for every target without spills."""

import pytest
import torch

from tritonfp8.launch import figures


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("quantized", [False, True])
def test_figures(compiled, quantized, cc):
    x, whole = torch.empty(2, 64, 256, dtype=torch.bfloat16, device="meta"), torch.empty(2, device="meta")
    loss = (x.float(), x.to(torch.float8_e4m3fn), whole, whole) if quantized else ()
    found = compiled(cc, lambda: figures.operand_figures(x, whole, x[0].numel(), 448.0, *loss), figures)
    assert [report.spill_bytes for _, report in found] == [0, 0], [report.log for _, report in found]
