"""The casts compile: for Hopper without spills and in vectors, for Ada and Blackwell at all."""

import dataclasses
import re
from dataclasses import dataclass

import pytest
import torch
from compile_target import compile_launch, note_launches

from tritonfp8 import reference
from tritonfp8.kernels.cast.columns import quantize_columns_kernel, quantize_left_kernel
from tritonfp8.kernels.cast.quantize import column_sums_kernel, maxima_kernel, partial_amax_kernel, quantize_kernel
from tritonfp8.kernels.cast.rows import quantize_rows_kernel
from tritonfp8.launch import casts, executor
from tritonfp8.launch.gemms import widened
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, QuantSpec
from tritonfp8.tuning import cast_tiles


@dataclass(frozen=True)
class Launch:
    kernel: object
    arguments: tuple
    options: dict

    def compile(self, cc):
        return compile_launch(cc, self.kernel, *self.arguments, **self.options)


@pytest.fixture
def launches(monkeypatch):
    """What the launcher would launch on a device of compute capability ``cc``: a function of ``cc`` and a cast."""

    def record(cc, cast):
        found = note_launches(monkeypatch, cc)
        cast()
        return [Launch(*each) for each in found]

    return record


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
SIDES = ("normal", "transposed", "both")


def matrix(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def check_spills(launched, cc=90):
    """Compile launches; for Hopper without spills."""
    reports = [launch.compile(cc) for launch in launched]
    assert cc != 90 or not any(report.spill_bytes for report in reports), [report.log for report in reports]
    return reports


# A cast to both orientations holds the code of each: for Ada and Blackwell, where spills are not checked, it is enough.
@pytest.mark.parametrize(("side", "cc"), [*((side, 90) for side in SIDES), ("both", 89), ("both", 100)])
@each_cast
def test_casts_compile_for_every_target(launches, spec, side, cc):
    for launched in launches(cc, cast(matrix(4096, 4096), spec, side)):
        report = launched.compile(cc)
        quantizes = launched.kernel in (quantize_kernel, quantize_columns_kernel, quantize_left_kernel)
        assert ("cvt.rn.satfinite.e4m3x2" in report.ptx) == (quantizes and side != "transposed")
        assert ("cvt.rn.satfinite.e5m2x2" in report.ptx) == (quantizes and side != "normal")
        if cc == 90:
            assert report.spill_bytes == 0, report.log


@each_cast
@pytest.mark.parametrize("cc", [90, 89, 100])
def test_casts_with_sums_compile_for_every_target(launches, spec, cc):
    found = launches(cc, cast(matrix(4096, 4096), spec, "sums"))
    assert [launched.kernel for launched in found[-2:]] == [quantize_kernel, column_sums_kernel]
    check_spills(found, cc)


@pytest.mark.parametrize("cc", [90, 89, 100])
@pytest.mark.parametrize(
    ("spec", "kernels"),
    [
        (CASTS[0], [partial_amax_kernel, maxima_kernel, quantize_kernel]),
        (CASTS[1], [quantize_rows_kernel, maxima_kernel]),
    ],
)
def test_casts_with_the_amax_compile_for_every_target(launches, spec, kernels, cc):
    found = launches(cc, cast(matrix(4096, 4096), spec, "amax"))
    assert [launched.kernel for launched in found] == kernels
    check_spills(found, cc)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", sorted(cast_tiles.ROWS_WITH_COLUMNS))
def test_rows_with_the_amaxes_of_columns_compile_without_spills(launches, columns, dtype):
    for width in (columns, columns - 8):
        check_spills(launches(90, cast(matrix(4096, width, dtype=dtype), CASTS[1], "amax")))


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
def test_casts_of_other_dtypes_and_with_tails_run_on_hopper_without_spills(launches, spec, side, shape, dtype):
    check_spills(launches(90, cast(matrix(*shape, dtype=dtype), spec, side)))


@each_cast
def test_casts_without_vectors_compile(launches, spec):
    for launched in launches(90, cast(matrix(1001, 4097), spec, "both")):
        assert launched.compile(90).registers


def shared_bytes_at_once(ptx):
    """Widths of the accesses to shared memory, in bytes."""
    accesses = re.findall(r"(?:st|ld)\.shared(?:::cta)?(?:\.v(\d))?\.[a-z](\d+)", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in accesses]


@each_cast
@pytest.mark.parametrize("side", ["transposed", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transposed_tiles_move_as_vectors(launches, spec, side, dtype):
    """No element goes through shared memory by itself, nor to memory as less than 16 bytes."""
    launched = launches(90, cast(matrix(4096, 4096, dtype=dtype), spec, side))[-1]
    report = launched.compile(90)
    # Scales of one byte are few: four rows of tiles of a thread at most.
    assert shared_bytes_at_once(report.ptx).count(1) <= (32 if spec.scale_format == "e8m0" else 0)
    assert "st.global.v4.b32" in report.ptx


@pytest.mark.parametrize("cc", [89, 90, 100])
def test_transposes_move_as_vectors(launches, cc):
    qdata = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta")
    (launched,) = launches(cc, lambda: casts.transpose(qdata))
    report = launched.compile(cc)
    assert report.spill_bytes == 0, report.log
    assert min(shared_bytes_at_once(report.ptx), default=16) >= 4
    assert "ld.global.v4.b32" in report.ptx
    assert "st.global.v4.b32" in report.ptx


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32), (1, -1), (-1, -1)], ids=str)
def test_amax_compiles_for_every_target(launches, block, cc):
    # Rows of so many parts that a launch of their own joins them.
    found = launches(cc, lambda: casts.amax(matrix(512, 32768), block))
    assert len(found) == (2 if block == ROWWISE else 1)
    for launched in found:
        assert launched.compile(cc).spill_bytes == 0


@pytest.mark.parametrize("cc", [89, 90, 100])
def test_a_cast_that_joins_parts_of_columns_compiles_for_every_target(launches, cc):
    (spec,) = (spec for spec in CASTS if spec.block == ROWWISE)
    found = launches(cc, lambda: casts.quantize(matrix(2048, 2048), *spec.args, True))
    assert len(found) == 2
    for launched in found:
        assert launched.compile(cc).spill_bytes == 0


@pytest.mark.parametrize("cc", [89, 90, 100])
def test_dequantize_compiles_for_every_target(launches, cc):
    spec = CASTS[-1]
    qdata, scale = reference.quantize(torch.zeros(4096, 64), *spec.args)
    (launched,) = launches(cc, lambda: casts.dequantize(qdata, scale, *spec.args, torch.bfloat16))
    assert launched.compile(cc).spill_bytes == 0


@pytest.mark.parametrize("cc", [89, 90, 100])
def test_mx_codes_become_bf16_as_vectors(launches, cc):
    q = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(4096, 128, dtype=torch.float8_e8m0fnu, device="meta")
    found = launches(cc, lambda: executor.planned(widened.plan_operands, (q, scale, q[:2048], scale[:2048]), ()))
    assert len(found) == 2
    for launched in found:
        report = launched.compile(cc)
        assert report.spill_bytes == 0, report.log
        assert "ld.global.v4.b32" in report.ptx
        assert "st.global.v4.b32" in report.ptx
        # Of a thread: one scale, which is one byte.
        assert shared_bytes_at_once(report.ptx).count(1) <= 1
