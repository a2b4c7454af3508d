"""The casts of several weights compile: for Hopper without spills and in vectors, for Ada and Blackwell at all."""

import re

import pytest
import torch

from tritonfp8.launch.casts import weights
from tritonfp8.specs import ROWWISE, QuantSpec

SPEC = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
# Of a block of GPT-2 XL, and of one whose sizes leave tails.
BLOCKS = {"whole": [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)], "tails": [(1040, 80), (48, 4112)]}


def reports(compiled, cc, shapes, dtype=torch.bfloat16):
    first, *others = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return [report for _, report in compiled(cc, lambda: weights.quantize_weights(first, others, *SPEC.args), weights)]


@pytest.mark.parametrize("shapes", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_kernels_run_on_hopper_without_spills_and_store_vectors(compiled, shapes, dtype):
    amax, cast = reports(compiled, 90, shapes, dtype)
    assert not amax.spill_bytes
    assert not cast.spill_bytes
    assert re.search(r"st\.global\.v4\.b32", cast.ptx)
    assert re.search(r"ld\.global\.v4\.b32", cast.ptx)
    assert re.search(r"ld\.global\.v4\.b32", amax.ptx)


@pytest.mark.parametrize("cc", [89, 100])
def test_both_kernels_compile_for_other_targets(compiled, cc):
    assert all(report.registers for report in reports(compiled, cc, BLOCKS["whole"]))
