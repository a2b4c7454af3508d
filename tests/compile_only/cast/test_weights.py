"""The casts of several weights compile: for Hopper without spills and in vectors, for Ada and Blackwell at all."""

import re

import pytest
import torch
from compile_target import compile_launch, note_launches

from tritonfp8.launch.casts import weights
from tritonfp8.specs import ROWWISE, QuantSpec

SPEC = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
# Of a block of GPT-2 XL, and of one whose sizes leave tails.
BLOCKS = {"whole": [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)], "tails": [(1040, 80), (48, 4112)]}


@pytest.fixture
def compiled(monkeypatch):
    def compile(cc, shapes, dtype=torch.bfloat16):
        found = note_launches(monkeypatch, cc, weights)
        xs = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
        weights.quantize_weights(xs[0], xs[1:], *SPEC.args)
        return [compile_launch(cc, kernel, *arguments, **options) for kernel, arguments, options in found]

    return compile


@pytest.mark.parametrize("shapes", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_kernels_run_on_hopper_without_spills_and_store_vectors(compiled, shapes, dtype):
    amax, cast = compiled(90, shapes, dtype)
    assert not amax.spill_bytes
    assert not cast.spill_bytes
    assert re.search(r"st\.global\.v4\.b32", cast.ptx)
    assert re.search(r"ld\.global\.v4\.b32", cast.ptx)
    assert re.search(r"ld\.global\.v4\.b32", amax.ptx)


@pytest.mark.parametrize("cc", [89, 100])
def test_both_kernels_compile_for_other_targets(compiled, cc):
    assert all(report.registers for report in compiled(cc, BLOCKS["whole"]))
