"""Transposes made from codes compile: for Hopper without spills, but for one case, for Ada and Blackwell at all."""

import pytest
import torch
from test_casts import CASTS, check_spills, every_target, matrix

from tritonfp8.launch import casts
from tritonfp8.specs import BLOCK_1X32, empty_grouped_scale, empty_scale
from tritonfp8.specs.formats import FORMATS
from tritonfp8.tuning import cast_tiles

POW2 = [spec for spec in CASTS if spec.scale_rounding == "pow2"]
META = torch.device("meta")
# Bytes that the transpose of 1x32 codes may spill: it is faster so (tuning/cast_tiles.py).
SPILLED = 256


def check(found, spec, cc):
    if spec.block != BLOCK_1X32:
        check_spills(found, cc)
    assert cc != 90 or all(report.spill_bytes <= 2 * SPILLED for _, report in found), [r.log for _, r in found]


def codes(x, spec, groups=0):
    """Codes and scales of a matrix, of matrices, or of groups of rows."""
    layout = "matrices" if x.ndim == 3 else "rows"
    scale = (
        empty_grouped_scale(x.shape, spec, layout, groups or x.shape[0], META)
        if groups or x.ndim == 3
        else empty_scale(x.shape, spec.block, spec.scale_format, META)
    )
    return x.to(FORMATS[spec.format].dtype), scale


def transpose(x, spec, source):
    args = (*spec.args, *spec.args)
    q, scale = codes(x, spec)
    amax = torch.empty((x.shape[-1], 1), device=META) if spec.block == (1, -1) else None
    return {
        "codes": lambda: casts.transpose_codes(q, scale, *args, amax),
        "values": lambda: casts.transpose_codes(x, scale, *args, amax),
        "both": lambda: casts.quantize_both(x, *args, True),
        "sum": lambda: casts.quantize_both_sum(x, *args, True),
        "amax": lambda: casts.transpose_codes(q, scale, *args),
    }[source]


ROW, VECTOR, _, MX = POW2


# The pass that makes the codes holds the code of the others: for Ada and Blackwell it is enough.
@pytest.mark.parametrize(
    ("source", "cc"),
    [*((source, 90) for source in ("codes", "values", "both", "sum", "amax")), ("both", 89), ("both", 100)],
)
@pytest.mark.parametrize("spec", [ROW, VECTOR, MX], ids=str)
def test_transposes_of_codes_compile_for_every_target(compiled, spec, source, cc):
    for shape in ((4096, 4096), (4080, 4112)):
        check(compiled(cc, transpose(matrix(*shape), spec, source)), spec, cc)


@pytest.mark.parametrize("spec", [ROW, VECTOR, MX], ids=str)
@every_target
def test_transposes_of_matrices_and_of_groups_compile(compiled, spec, cc):
    args = (*spec.args, *spec.args)
    weights = matrix(4, 2048, 1024)
    q, scale = codes(weights, spec)
    check(compiled(cc, lambda: casts.transpose_codes(q, scale, *args)), spec, cc)
    offsets = torch.empty(8, dtype=torch.int32, device=META)
    tokens, of_tokens = codes(matrix(4096, 2048), spec, 8)
    check(compiled(cc, lambda: casts.transpose_group_codes(tokens, of_tokens, offsets, *args)), spec, cc)
    x = matrix(4096, 2048)
    check(compiled(cc, lambda: casts.quantize_groups_both(x, offsets, *args, codes=True)), spec, cc)


@pytest.mark.parametrize("columns", [4096, 14336, 24576, 32768])
def test_amaxes_of_codes_compile_without_spills(compiled, columns):
    args = (*ROW.args, *ROW.args)
    check_spills(compiled(90, lambda: casts.quantize_with_amax(matrix(4096, columns), *args, True)))
    offsets = torch.empty(8, dtype=torch.int32, device=META)
    check_spills(compiled(90, lambda: casts.quantize_groups_both(matrix(4096, columns), offsets, *args, codes=True)))
    gate_up = matrix(4096, 2 * columns)
    if columns <= max(cast_tiles.ROWS_WITH_COLUMNS):
        check_spills(compiled(90, lambda: casts.quantize_groups_both(gate_up, offsets, *args, swiglu=True, codes=True)))
        check_spills(compiled(90, lambda: casts.quantize_both_sum(matrix(4096, columns), *args, True)))
