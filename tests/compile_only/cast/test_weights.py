"""The casts of several weights compile: for Hopper without spills and in vectors, for Ada and Blackwell at all."""

import re

import pytest
import torch

from tritonfp8.launch.casts import weights
from tritonfp8.specs import ROWWISE, QuantSpec

SPEC = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
# Of a block of GPT-2 XL, and of one whose sizes leave tails.
BLOCKS = {"whole": [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)], "tails": [(1040, 80), (48, 4112)]}


def reports(compiled, cc, shapes, dtype=torch.bfloat16, codes=False):
    first, *others = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    scales = [torch.empty((rows, 1), device="meta") for rows, _ in shapes] if codes else []
    args = (first, others, *SPEC.args, scales, *(SPEC.args if codes else ()))
    return [report for _, report in compiled(cc, lambda: weights.quantize_weights(*args), weights)]


@pytest.mark.parametrize("shapes", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codes", [False, True], ids=["values", "codes"])
def test_both_kernels_run_on_hopper_without_spills_and_store_vectors(compiled, shapes, dtype, codes):
    amax, cast = reports(compiled, 90, shapes, dtype, codes)
    assert not amax.spill_bytes
    assert not cast.spill_bytes
    assert re.search(r"st\.global\.v4\.b32", cast.ptx)
    assert re.search(r"ld\.global\.v4\.b32", cast.ptx)
    assert re.search(r"ld\.global\.v4\.b32", amax.ptx)


@pytest.mark.parametrize("cc", [89, 100])
def test_both_kernels_compile_for_other_targets(compiled, cc):
    for codes in (False, True):
        assert all(report.registers for report in reports(compiled, cc, BLOCKS["whole"], codes=codes))
