"""Casts and figures compile: for Hopper without spills and in vectors, for Ada and Blackwell at all."""

import dataclasses
import re

import pytest
import torch

from tritonfp8.kernels.cast.columns import quantize_columns_kernel, quantize_left_kernel
from tritonfp8.kernels.cast.quantize import column_sums_kernel, maxima_kernel, partial_amax_kernel, quantize_kernel
from tritonfp8.kernels.cast.rows import quantize_rows_kernel
from tritonfp8.launch import casts, executor, figures
from tritonfp8.launch.gemms import widened
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, QuantSpec
from tritonfp8.tuning import cast_tiles


def cast(x, spec, side):
    """``spec`` in one orientation or both, the transposed one as e5m2."""
    spec_t = dataclasses.replace(spec, format="e5m2")
    return {
        "normal": lambda: casts.quantize(x, *spec.args),
        "transposed": lambda: casts.quantize(x, *spec_t.args, True),
        "both": lambda: casts.quantize_both(x, *spec.args, *spec_t.args),
        "amax": lambda: casts.quantize_with_amax(x, *spec.args, *spec.args),
        "sums": lambda: casts.quantize_both_sum(x, *spec.args, *spec_t.args),
    }[side]


# Specs by block shape, as recipes use them.
CASTS = [
    QuantSpec(),
    QuantSpec("e4m3", ROWWISE, "fp32", "pow2"),
    QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2"),
    QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2"),
    QuantSpec("e4m3", BLOCK_1X32, "e8m0", "pow2"),
]
each_cast = pytest.mark.parametrize("spec", CASTS, ids=str)
every_target = pytest.mark.parametrize("cc", [89, 90, 100])
SIDES = ("normal", "transposed", "both")


def matrix(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def check_spills(found, cc=90):
    """For Hopper without spills."""
    assert cc != 90 or not any(report.spill_bytes for _, report in found), [report.log for _, report in found]


# A cast to both orientations holds the code of each: for Ada and Blackwell, where spills are not checked, it is enough.
@pytest.mark.parametrize(("side", "cc"), [*((side, 90) for side in SIDES), ("both", 89), ("both", 100)])
@each_cast
def test_casts_compile_for_every_target(compiled, spec, side, cc):
    found = compiled(cc, cast(matrix(4096, 4096), spec, side))
    check_spills(found, cc)
    for kernel, report in found:
        quantizes = kernel in (quantize_kernel, quantize_columns_kernel, quantize_left_kernel)
        assert ("cvt.rn.satfinite.e4m3x2" in report.ptx) == (quantizes and side != "transposed")
        assert ("cvt.rn.satfinite.e5m2x2" in report.ptx) == (quantizes and side != "normal")


@each_cast
@every_target
def test_casts_with_sums_compile_for_every_target(compiled, spec, cc):
    found = compiled(cc, cast(matrix(4096, 4096), spec, "sums"))
    assert [kernel for kernel, _ in found[-2:]] == [quantize_kernel, column_sums_kernel]
    check_spills(found, cc)


@every_target
@pytest.mark.parametrize(
    ("spec", "kernels"),
    [
        (CASTS[0], [partial_amax_kernel, maxima_kernel, quantize_kernel]),
        (CASTS[1], [quantize_rows_kernel, maxima_kernel]),
    ],
)
def test_casts_with_the_amax_compile_for_every_target(compiled, spec, kernels, cc):
    found = compiled(cc, cast(matrix(4096, 4096), spec, "amax"))
    assert [kernel for kernel, _ in found] == kernels
    check_spills(found, cc)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", sorted(cast_tiles.ROWS_WITH_COLUMNS))
def test_rows_with_the_amaxes_of_columns_compile_without_spills(compiled, columns, dtype):
    for width in (columns, columns - 8):
        check_spills(compiled(90, cast(matrix(4096, width, dtype=dtype), CASTS[1], "amax")))


WHOLE, TAILS = (4096, 4096), (4080, 4112)


# Of the 16-bit dtypes one is as wide as the other, and one orientation takes less than both.
@each_cast
@pytest.mark.parametrize(
    ("side", "shape", "dtype"),
    [
        *((side, WHOLE, torch.float32) for side in ("transposed", "both")), ("both", WHOLE, torch.float16),
        *((side, TAILS, torch.bfloat16) for side in ("normal", "both")),
    ],
    ids=str,
)  # fmt: skip
def test_casts_of_other_dtypes_and_with_tails_run_on_hopper_without_spills(compiled, spec, side, shape, dtype):
    check_spills(compiled(90, cast(matrix(*shape, dtype=dtype), spec, side)))


@each_cast
def test_casts_without_vectors_compile(compiled, spec):
    assert all(report.registers for _, report in compiled(90, cast(matrix(1001, 4097), spec, "both")))


def shared_bytes_at_once(ptx):
    """Widths of the accesses to shared memory, in bytes."""
    accesses = re.findall(r"(?:st|ld)\.shared(?:::cta)?(?:\.v(\d))?\.[a-z](\d+)", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in accesses]


@each_cast
@pytest.mark.parametrize("side", ["transposed", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transposed_tiles_move_as_vectors(compiled, spec, side, dtype):
    """No element goes through shared memory by itself, nor to memory as less than 16 bytes."""
    _, report = compiled(90, cast(matrix(4096, 4096, dtype=dtype), spec, side))[-1]
    # Scales of one byte are few: four rows of tiles of a thread at most.
    assert shared_bytes_at_once(report.ptx).count(1) <= (32 if spec.scale_format == "e8m0" else 0)
    assert "st.global.v4.b32" in report.ptx


@each_cast
@every_target
def test_amax_compiles_for_every_target(compiled, spec, cc):
    # Rows of so many parts that a launch of their own joins them.
    found = compiled(cc, lambda: casts.amax(matrix(512, 32768), spec.block))
    assert len(found) == (2 if spec.block == ROWWISE else 1)
    for _, report in found:
        assert report.spill_bytes == 0, report.log


CODES = matrix(4096, 4096, dtype=torch.float8_e4m3fn)
SCALE = matrix(4096, 128, dtype=torch.float8_e8m0fnu)
OF_TWO_BLOCKS = matrix(4096, 64, dtype=torch.float8_e4m3fn), matrix(4096, 2, dtype=torch.float8_e8m0fnu)
# Calls, how many launches each is, and of one that moves vectors, how many accesses to shared memory may be narrower
# than how many bytes.
CALLS = {
    "joined parts of columns": (lambda: casts.quantize(matrix(2048, 2048), *CASTS[1].args, True), 2, None),
    "dequantize": (lambda: casts.dequantize(*OF_TWO_BLOCKS, *CASTS[-1].args, torch.bfloat16), 1, None),
    "transpose": (lambda: casts.transpose(CODES), 1, (0, 4)),
    # Of a thread: one scale, which is one byte.
    "MX codes to bf16": (
        lambda: executor.planned(widened.plan_operands, (CODES, SCALE, CODES[:2048], SCALE[:2048]), ()), 2, (1, 2)
    ),
}  # fmt: skip


@every_target
@pytest.mark.parametrize(("call", "count", "narrow"), CALLS.values(), ids=CALLS)
def test_other_calls_compile_for_every_target(compiled, call, count, narrow, cc):
    found = compiled(cc, call)
    assert len(found) == count
    for _, report in found:
        assert report.spill_bytes == 0, report.log
        if narrow is not None:
            most, size = narrow
            assert sum(width < size for width in shared_bytes_at_once(report.ptx)) <= most
            assert "ld.global.v4.b32" in report.ptx
            assert "st.global.v4.b32" in report.ptx


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("quantized", [False, True])
def test_figures(compiled, quantized, cc):
    x, whole = torch.empty(2, 64, 256, dtype=torch.bfloat16, device="meta"), torch.empty(2, device="meta")
    loss = (x.float(), x.to(torch.float8_e4m3fn), whole, whole) if quantized else ()
    found = compiled(cc, lambda: figures.operand_figures(x, whole, x[0].numel(), 448.0, *loss), figures)
    assert [report.spill_bytes for _, report in found] == [0, 0], [report.log for _, report in found]
