"""The GEMM on a weight of 4-bit codes compiles for Hopper without spills; other devices expand the codes first."""

import pytest
import torch
from matmul_compiles import HOPPER_SHARED_BYTES
from test_casts import check_spills

from tritonfp8.kernels.cast.packed import expand_codes_kernel
from tritonfp8.kernels.gemm.hopper_packed import hopper_packed_matmul_kernel
from tritonfp8.kernels.gemm.hopper_packed_grouped import hopper_packed_grouped_kernel
from tritonfp8.launch import gemms
from tritonfp8.specs import EXPANDED, MXFP4
from tritonfp8.tuning import packed_tiles

(TEXT,), (ROW,) = MXFP4.args, EXPANDED.args


def launch(m, n, k, accumulation="precise", epilogue=(None, None, None), dtype=torch.bfloat16, knows_rows=False):
    def empty(*shape, dtype=torch.uint8):
        return torch.empty(shape, dtype=dtype, device="meta")

    a = empty(m, k, dtype=torch.float8_e4m3fn), empty(m, 1, dtype=torch.float32)
    b = empty(n, k // 2), empty(n, k // 32, dtype=torch.float8_e8m0fnu)
    row_scale = empty(n, 1, dtype=torch.float32) if knows_rows else None
    gemms.packed_matmul(*a, ROW, *b, TEXT, *epilogue, dtype, accumulation, b_row_scale=row_scale)


def abilities(cc):
    return {"has_fp8_mma": True, "has_tma": cc >= 90, "has_warpgroup_mma": cc == 90, "has_dependent_launch": cc >= 90}


@pytest.mark.parametrize("accumulation", ["precise", "fast"])
@pytest.mark.parametrize("m", [1, 16, 32, 64, 128, 512])
def test_every_tile_runs_on_hopper(compiled, m, accumulation):
    for n, k in ((28672, 4096), (4096, 2880)):
        found = compiled(90, lambda n=n, k=k: launch(m, n, k, accumulation), **abilities(90))
        (report,) = [report for kernel, report in found if kernel is hopper_packed_matmul_kernel]
        check_spills([(None, report)], 90)
        assert report.shared_bytes <= HOPPER_SHARED_BYTES
        assert "e4m3.e4m3" in report.ptx


def test_codes_are_read_once_where_the_scales_of_rows_are_known(compiled):
    ((kernel, report),) = compiled(90, lambda: launch(1, 28672, 4096, knows_rows=True), **abilities(90))
    assert kernel is hopper_packed_matmul_kernel
    check_spills([(None, report)], 90)


@pytest.mark.parametrize("m", [16, 32, 64, 128, 512])
def test_float32_results_fit_into_shared_memory(compiled, m):
    """Of programs that share a multiprocessor, all; each takes 1 KiB more than it asks for."""
    found = compiled(90, lambda: launch(m, 28672, 4096, dtype=torch.float32), **abilities(90))
    check_spills(found, 90)
    programs = packed_tiles.choose_packed(m, 28672, 132).blocks_per_sm
    assert programs * (found[-1][1].shared_bytes + 1024) <= HOPPER_SHARED_BYTES + 1024


def test_the_epilogue_takes_no_more_registers_than_there_are(compiled):
    bias, residual = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((28672,), (512, 28672)))
    for epilogue in ((bias, "gelu", residual), (bias, None, None)):
        check_spills(compiled(90, lambda each=epilogue: launch(512, 28672, 4096, epilogue=each), **abilities(90)), 90)


def launch_groups(tokens, groups, n, k, accumulation="precise", dtype=torch.bfloat16, bias=False):
    def empty(*shape, dtype=torch.uint8):
        return torch.empty(shape, dtype=dtype, device="meta")

    gemms.packed_grouped_matmul(
        empty(tokens, k, dtype=torch.float8_e4m3fn), empty(tokens, 1, dtype=torch.float32), ROW,
        empty(groups, n, k // 2), empty(groups, n, k // 32, dtype=torch.float8_e8m0fnu), TEXT,
        empty(groups, dtype=torch.int32), empty(groups, n, dtype=torch.bfloat16) if bias else None, dtype,
        accumulation, b_row_scale=empty(groups, n, 1, dtype=torch.float32),
    )  # fmt: skip


@pytest.mark.parametrize("accumulation", ["precise", "fast"])
@pytest.mark.parametrize("average", [1, 8, 16, 32, 100])
def test_every_tile_of_groups_runs_on_hopper(compiled, average, accumulation):
    for k, dtype, bias in ((2048, torch.bfloat16, False), (2880, torch.float32, True)):
        found = compiled(
            90, lambda k=k, dtype=dtype, bias=bias: launch_groups(32 * average, 32, 1536, k, accumulation, dtype, bias),
            **abilities(90),
        )  # fmt: skip
        (report,) = [report for kernel, report in found if kernel is hopper_packed_grouped_kernel]
        check_spills([(None, report)], 90)
        programs = packed_tiles.choose_packed_groups(32 * average, 32).blocks_per_sm
        assert programs * (report.shared_bytes + 1024) <= HOPPER_SHARED_BYTES + 1024
        assert "e4m3.e4m3" in report.ptx


@pytest.mark.parametrize("cc", [89, 100])
def test_other_devices_expand_the_codes_of_experts(compiled, cc):
    (first, _), *others = compiled(cc, lambda: launch_groups(32, 32, 1536, 2048), **abilities(cc))
    assert first is expand_codes_kernel
    assert hopper_packed_grouped_kernel not in {kernel for kernel, _ in others}


@pytest.mark.parametrize("knows_rows", [False, True])
@pytest.mark.parametrize("cc", [89, 100])
def test_other_devices_expand_the_codes(compiled, cc, knows_rows):
    (first, report), (second, _), *_ = compiled(
        cc, lambda: launch(16, 4096, 4096, knows_rows=knows_rows), **abilities(cc)
    )
    assert first is expand_codes_kernel
    assert second is not hopper_packed_matmul_kernel
    check_spills([(first, report)], cc)
