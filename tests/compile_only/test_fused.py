"""The fused producers compile for every target, on Hopper without spills, with wide loads and stores."""

import pytest
from compile_target import compile_kernel

from tritonfp8.kernels.fused.rms_norm import rms_norm_backward_kernel, rms_norm_rows_kernel, sum_partials_kernel
from tritonfp8.kernels.fused.swiglu import partial_amax_of_result_kernel, quantize_tile_kernel, silu_mul_rows_kernel
from tritonfp8.launch.plan import kernel_constants
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, TENSORWISE, QuantSpec
from tritonfp8.tuning.fused_tiles import (
    AMAX_TILES,
    LONG_BLOCK,
    MAX_ROW,
    QUANTIZE_TILES,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    SILU_MUL_ROWS,
    SQUARE_TILES,
    SUM_TILES,
)

HOPPER_SHARED_BYTES = 232448
TARGETS = [89, 90, 100]
BLOCKS = [TENSORWISE, ROWWISE, BLOCK_1X128, BLOCK_128X128, BLOCK_1X32]
PRODUCERS = ("rms_norm", "silu_mul", "silu_mul_backward")
each_target = pytest.mark.parametrize("cc", TARGETS)


def on_hopper_and_one_elsewhere(*sizes):
    """Each on Hopper; the first also on the other targets, which compile the same code."""
    return [(size, 90) for size in sizes] + [(sizes[0], cc) for cc in TARGETS if cc != 90]


def constants_of(suffix, block, format="e4m3"):
    mx = block == BLOCK_1X32
    spec = QuantSpec(format, BLOCK_1X32 if mx else ROWWISE, "e8m0" if mx else "fp32", "pow2")
    return kernel_constants(spec, block, suffix)


def compile_for(kernel, types, constants, cc, warps, aligned=()):
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    divisible = [name for name in signature if signature[name][0] == "*" or name in aligned]
    report = compile_kernel(kernel, signature, constants, cc, warps, divisible_by_16=divisible)
    if cc == 90:
        assert report.spill_bytes == 0, report.log
    assert report.shared_bytes <= HOPPER_SHARED_BYTES
    return report


def scale_type(block):
    return "*u8" if block == BLOCK_1X32 else "*fp32"


def compile_tiles(producer, kind, block, cc, tiles, dtype="bf16", keep=False, packed=True, **more):
    normal, transposed = kind != "transposed", kind != "normal"
    constants = {**constants_of("", block), **constants_of("_T", (block[1], block[0]), "e5m2")}
    constants |= {"NORMAL": normal, "TRANSPOSED": transposed, "KEEP": keep, "PACKED": packed, "DIRECT_CAST": cc >= 90}
    constants |= {"PRODUCER": producer, "ROUND_NORMALIZED": True, "TILE_M": tiles.m, "TILE_N": tiles.n}
    constants |= {"STAGES": tiles.stages, "stride_an": 1, "stride_bn": 1, "stride_cn": 1, **more}
    types = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr", "y_ptr"), f"*{dtype}")
    types |= {"q_ptr": "*fp8e4nv", "qt_ptr": "*fp8e5", "s_ptr": scale_type(block), "st_ptr": scale_type(block)}
    types |= {"amax_ptr": "*i32", "amax_t_ptr": "*i32"}
    if producer == "rms_norm":
        types["b_ptr"] = "*fp32"
        constants |= {"stride_bm": 1, "stride_cm": 1}
    aligned = ("M", "N", "words", "size", "stride_am", "stride_bm", "stride_cm")
    return compile_for(quantize_tile_kernel, types, constants, cc, tiles.warps, aligned)


def tile_cases():
    for producer in PRODUCERS:
        for block in BLOCKS:
            for kind in ("normal", "transposed"):
                square = block == BLOCK_128X128
                yield producer, kind, block, SQUARE_TILES if square else QUANTIZE_TILES[producer, kind]
            if block == BLOCK_128X128:
                continue
            whole = -1 in block
            if producer == "rms_norm" and block != TENSORWISE:
                continue  # The normal result comes from the rows kernel.
            if LONG_BLOCK in block:
                continue  # Two launches.
            kind = "both" if whole else "both in blocks"
            yield producer, "both", block, QUANTIZE_TILES[producer, kind]


CASES = [pytest.param(*case, id=f"{case[0]}-{case[1]}-{'x'.join(map(str, case[2]))}") for case in tile_cases()]


def test_every_tile_is_compiled():
    compiled = {case[3] for case in tile_cases()}
    assert compiled == {*QUANTIZE_TILES.values(), SQUARE_TILES}


@pytest.mark.parametrize(("producer", "kind", "block", "tiles"), CASES)
def test_tiles_on_hopper(producer, kind, block, tiles):
    report = compile_tiles(producer, kind, block, 90, tiles)
    # What is written in either orientation leaves 8 bytes at a time or more, and no byte crosses shared memory alone.
    assert "ld.global.v4.b32" in report.ptx or "cp.async" in report.ptx
    assert "st.global.v4.b32" in report.ptx or "st.global.v2.b32" in report.ptx
    assert ("cvt.rn.satfinite.e4m3x2" in report.ptx) == (kind != "transposed")
    assert ("cvt.rn.satfinite.e5m2x2" in report.ptx) == (kind != "normal")
    assert ("cp.async" in report.ptx) == (tiles.stages > 1)
    if block != BLOCK_1X32:
        assert "st.shared.b8" not in report.ptx


@pytest.mark.parametrize("cc", [89, 100])
@pytest.mark.parametrize(("producer", "kind", "block", "tiles"), CASES[::13])
def test_tiles_on_other_targets(producer, kind, block, tiles, cc):
    report = compile_tiles(producer, kind, block, cc, tiles)
    assert "cvt.rn.satfinite" in report.ptx


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_tiles_of_other_dtypes(producer, dtype):
    """And with the unquantized result, and byte by byte where rows of the transposed one are no whole words."""
    # Of fp16, which is as wide as bf16, one will do; the normal result of a norm comes from the rows kernel.
    for kind in ("normal", "transposed") if dtype == "fp32" and producer != "rms_norm" else ("transposed",):
        tiles = QUANTIZE_TILES[producer, kind]
        compile_tiles(producer, kind, BLOCK_1X128, 90, tiles, dtype, keep=kind == "transposed")
    compile_tiles(producer, "transposed", ROWWISE, 90, QUANTIZE_TILES[producer, "transposed"], dtype, False, False)


@pytest.mark.parametrize("producer", ["rms_norm", "silu_mul_backward"])
def test_tiles_of_one_row_or_column(producer):
    """Sizes of 1 are constants to the compiler."""
    for kind, block in (("transposed", BLOCK_1X128), ("both", ROWWISE), ("normal", BLOCK_1X128)):
        for one in ({"M": 1}, {"N": 1}, {"M": 1, "N": 1, "size": 1}):
            compile_tiles(producer, kind, block, 90, QUANTIZE_TILES[producer, kind], "bf16", False, False, **one)


def test_rows_of_one_row_or_column():
    constants = {**constants_of("", ROWWISE), "EPS": 1e-5, "ROUND_NORMALIZED": True, "NORMAL": True, "KEEP": True}
    constants |= {"COLUMN_AMAX": True, "TENSOR_AMAX": True, "DIRECT_CAST": True, "PREFETCH": True, "HOLD_WEIGHT": True}
    constants |= {"TILE_M": 4, "TILE_N": 128, "HAS_RESIDUAL": True, "GRAD_WEIGHT": True}
    types = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr", "grad_ptr", "residual_ptr", "out_ptr"), "*bf16")
    types |= dict.fromkeys(("s_ptr", "rstd_ptr", "partial_ptr"), "*fp32")
    types |= {"columns_ptr": "*i16", "tensor_ptr": "*i16", "q_ptr": "*fp8e4nv", "gate_ptr": "*bf16", "up_ptr": "*bf16"}
    for kernel in (rms_norm_rows_kernel, rms_norm_backward_kernel, silu_mul_rows_kernel):
        for one in ({"M": 1}, {"N": 1}):
            compile_for(kernel, types, {**constants, **one}, 90, 4)


@each_target
@pytest.mark.parametrize("producer", list(AMAX_TILES))
@pytest.mark.parametrize("block", [TENSORWISE, ROWWISE])
def test_amax(producer, block, cc):
    tiles = AMAX_TILES[producer]
    constants = {"ROW": block == ROWWISE, "COL": block == ROWWISE, "WHOLE": block == TENSORWISE, "PRODUCER": producer}
    constants |= {"TILE_M": tiles.m, "TILE_N": tiles.n, "stride_an": 1, "stride_bn": 1, "stride_cn": 1}
    types = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16")
    types |= dict.fromkeys(("row_ptr", "col_ptr", "whole_ptr"), "*i16")
    aligned = ("M", "N", "stride_am", "stride_bm", "stride_cm", "stride_part")
    report = compile_for(partial_amax_of_result_kernel, types, constants, cc, tiles.warps, aligned)
    assert "ld.global.v4.b32" in report.ptx


@pytest.mark.parametrize(("limit", "cc"), on_hopper_and_one_elsewhere(*RMS_NORM))
@pytest.mark.parametrize("block", [ROWWISE, BLOCK_1X128, BLOCK_1X32])
def test_rms_norm_rows(limit, block, cc):
    config = RMS_NORM[limit]
    constants = {**constants_of("", block), "EPS": 1e-5, "ROUND_NORMALIZED": True, "NORMAL": True, "KEEP": False}
    constants |= {"COLUMN_AMAX": block == ROWWISE, "TENSOR_AMAX": False, "DIRECT_CAST": cc >= 90}
    constants |= {"PREFETCH": config.prefetch, "HOLD_WEIGHT": config.hold, "TILE_M": config.rows, "TILE_N": limit}
    constants |= {"stride_xn": 1, "stride_w": 1}
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "y_ptr": "*bf16", "rstd_ptr": "*fp32", "q_ptr": "*fp8e4nv"}
    types |= {"s_ptr": scale_type(block), "columns_ptr": "*i16", "tensor_ptr": "*i16"}
    report = compile_for(rms_norm_rows_kernel, types, constants, cc, config.warps, ("N", "stride_xm"))
    assert "ld.global.v4.b32" in report.ptx


@pytest.mark.parametrize(("limit", "cc"), on_hopper_and_one_elsewhere(*RMS_NORM_BACKWARD))
def test_rms_norm_backward(limit, cc):
    config = RMS_NORM_BACKWARD[limit]
    constants = {"ROUND_NORMALIZED": True, "HAS_RESIDUAL": True, "GRAD_WEIGHT": True, "PREFETCH": config.prefetch}
    constants |= {"TILE_M": config.rows, "TILE_N": limit, "stride_w": 1}
    constants |= {"stride_gn": 1, "stride_xn": 1, "stride_rn": 1}
    types = dict.fromkeys(("grad_ptr", "x_ptr", "weight_ptr", "residual_ptr", "out_ptr"), "*bf16")
    types |= {"rstd_ptr": "*fp32", "partial_ptr": "*fp32"}
    aligned = ("N", "stride_gm", "stride_xm", "stride_rm")
    report = compile_for(rms_norm_backward_kernel, types, constants, cc, config.warps, aligned)
    assert "ld.global.v4.b32" in report.ptx


@pytest.mark.parametrize(("limit", "cc"), on_hopper_and_one_elsewhere(*SILU_MUL_ROWS))
def test_silu_mul_rows(limit, cc):
    config = SILU_MUL_ROWS[limit]
    constants = {**constants_of("", ROWWISE), "KEEP": False, "DIRECT_CAST": cc >= 90}
    constants |= {"TILE_M": config.rows, "TILE_N": limit, "stride_gn": 1, "stride_un": 1}
    types = {"gate_ptr": "*bf16", "up_ptr": "*bf16", "y_ptr": "*bf16", "q_ptr": "*fp8e4nv", "s_ptr": "*fp32"}
    report = compile_for(silu_mul_rows_kernel, types, constants, cc, config.warps, ("N", "stride_gm", "stride_um"))
    assert "ld.global.v4.b32" in report.ptx


@each_target
def test_sum_of_partials(cc):
    constants = {"TILE_P": SUM_TILES.m, "TILE_N": SUM_TILES.n}
    compile_for(
        sum_partials_kernel, {"partial_ptr": "*fp32", "out_ptr": "*bf16"}, constants, cc, SUM_TILES.warps, ("N",)
    )


def test_the_longest_rows_have_a_configuration():
    for table in (RMS_NORM, RMS_NORM_BACKWARD, SILU_MUL_ROWS):
        assert max(table) == MAX_ROW
        assert list(table) == sorted(table)
