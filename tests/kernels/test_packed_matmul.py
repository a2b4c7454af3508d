"""GEMMs on a weight of 4-bit codes have the bits of the FP8 GEMM on the codes that are expanded."""

import pytest
import torch
from cases import each_device, normal
from tuned import ADA, H200

from tritonfp8 import ops, reference
from tritonfp8.kernels.cast.packed import scale_rows_kernel
from tritonfp8.kernels.gemm.hopper_packed import hopper_packed_matmul_kernel
from tritonfp8.kernels.gemm.hopper_packed_grouped import hopper_packed_grouped_kernel
from tritonfp8.kernels.group_table import row_tiles_kernel
from tritonfp8.launch import casts, gemms
from tritonfp8.launch.executor import planned
from tritonfp8.launch.gemms.packed import plan_packed_grouped_matmul, plan_packed_matmul
from tritonfp8.launch.plan import View, make_plan
from tritonfp8.specs import EXPANDED, MXFP4, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning import MatmulConfig, packed_tiles

(TEXT,), (OF_ROWS,) = MXFP4.args, EXPANDED.args
(ROW,) = QuantSpec("e4m3", (1, -1)).args
TOKENS = (1, 8, 9, 30, 64, 65, 128, 129, 300, 512)


def weight(n, k, apart, device, first=110):
    """Codes of every kind; exponents of blocks of a row are up to ``apart`` apart."""
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(first, first + apart + 1, (n, k // 32), generator=generator).to(torch.uint8)
    return codes.to(device), scale.view(torch.float8_e8m0fnu).to(device)


def view(slot, *shape, dtype=torch.float8_e4m3fn):
    return View.of(torch.empty(shape, dtype=dtype, device="meta"), slot)._replace(aligned=True)


def plan_of(m, n, k, device, batch_invariant=False, has_row_scale=False):
    operands = [
        view(0, m, k), view(1, m, 1, dtype=torch.float32),
        view(2, n, k // 2, dtype=torch.uint8), view(3, n, k // 32, dtype=torch.uint8), None, None,
        view(4, n, 1, dtype=torch.float32) if has_row_scale else None,
    ]  # fmt: skip
    return make_plan(plan_packed_matmul, operands, (ROW, TEXT, None, None, "precise", batch_invariant), device)


def row_scales(plan, q, scale, spec):
    return [casts.add_row_scales(plan, q, scale.retyped(torch.uint8), MXFP4)]


@each_device
@pytest.mark.parametrize(("n", "k", "apart"), [(5, 32, 0), (130, 2880, 12), (9, 4128, 40)])
def test_scales_of_rows(device, n, k, apart):
    q, scale = weight(n, k, apart, device)
    # A row of zeros, one with a NaN, one beyond float32, one whose only block that is not zero is the last.
    q[0] = 0x80
    scale.view(torch.uint8)[1, -1] = 255
    scale.view(torch.uint8)[2, 0] = 254
    q[3, :-16] = 0
    (found,) = planned(row_scales, (q, scale), (TEXT,))
    assert_bitwise_equal(found, reference.expand_codes(q, scale, TEXT)[1])


@each_device
@pytest.mark.parametrize(("m", "n", "k"), [(3, 24, 96), (40, 130, 64), (5, 8, 40), (0, 8, 32), (5, 0, 32)])
def test_the_op_expands_the_codes_and_multiplies(device, m, n, k):
    """Small integers: the sums are exact in whatever order."""
    x = torch.randint(-4, 5, (m, k), generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    w = torch.randint(-1, 2, (n, k), generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    a, b = reference.quantize(x, ROW), reference.quantize(w, TEXT)
    out = gemms.packed_matmul(*a, ROW, *b, TEXT, None, "relu", None, torch.float32)
    expected = gemms.scaled_matmul(*a, ROW, *casts.expand_codes(*b, TEXT), OF_ROWS, None, "relu", None, torch.float32)
    assert_bitwise_equal(out, expected)
    row_scale, _ = reference.measure_rows(*b, TEXT)
    out = gemms.packed_matmul(*a, ROW, *b, TEXT, None, "relu", None, torch.float32, b_row_scale=row_scale)
    assert_bitwise_equal(out, expected)
    assert ops.packed_matmul(*a, ROW, *b, TEXT).shape == (m, n)


class TestPlans:
    @pytest.mark.parametrize("m", TOKENS)
    @pytest.mark.parametrize("n", [64, 4096, 28672])
    def test_hopper_reads_the_codes_of_a_weight_for_few_tokens(self, m, n):
        first, second, *others = plan_of(m, n, 4096, H200).launches
        assert (first.kernel, second.kernel) == (scale_rows_kernel, hopper_packed_matmul_kernel)
        config = packed_tiles.choose_packed(m, n, H200.num_sms)
        assert bool(others) == second.constants["SPLIT"] == (config.split_k > 1)
        assert config.block_m >= min(m, 128)

    def test_codes_are_read_once_where_the_scales_of_rows_are_known(self):
        first, *others = plan_of(1, 28672, 4096, H200, has_row_scale=True).launches
        assert (first.kernel, others) == (hopper_packed_matmul_kernel, [])

    def test_other_calls_expand_it_first(self):
        assert plan_of(packed_tiles.MOST_TOKENS + 1, 4096, 4096, H200) is None
        assert plan_of(4, 4096, 4096, H200, batch_invariant=True) is None
        assert plan_of(4, 4096, 4096, ADA) is None
        # Rows that TMA cannot address: of the output, and of the codes.
        assert plan_of(4, 4100, 4096, H200) is None
        assert plan_of(4, 4096, 4096 + 32, H200) is not None
        assert plan_of(4, 4096, 4096 + 16, H200) is None

    def test_splits_fill_the_multiprocessors_and_not_more(self):
        splits = {n: packed_tiles.choose_packed(1, n, 132).split_k for n in (4096, 6144, 14336, 28672)}
        assert splits == {4096: 4, 6144: 4, 14336: 2, 28672: 1}
        assert packed_tiles.choose_packed(256, 28672, 132).block_m == 256
        assert packed_tiles.choose_packed(256, 4096, 132).block_m == 128
        assert packed_tiles.choose_packed(256, 28672, 132, False).block_m == 128


def experts(sizes, n, k, apart, device, none=0):
    """Tokens of groups of these sizes, and ``none`` of no group; codes of their matrices; ends of the groups."""
    x = normal(sum(sizes) + none, k, dtype=torch.bfloat16).to(device)
    q, scale = weight(len(sizes) * n, k, apart, device)
    ends = torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    matrices = q.view(len(sizes), n, -1), scale.view(len(sizes), n, -1)
    return casts.quantize_groups(x, ends, ROW), matrices, ends


def grouped_expectation(a, b, ends, *options):
    codes, scales = casts.expand_codes(*b, TEXT)
    return gemms.scaled_grouped_matmul(*a, ROW, codes, scales, OF_ROWS, ends, *options)


@each_device
@pytest.mark.parametrize("sizes", [(3, 0, 5), (0, 0), (40, 2, 1, 9)])
def test_groups_are_multiplied_by_the_codes_of_their_experts(sizes, device):
    a, b, ends = experts(sizes, 24, 64, 3, device, none=2)
    bias = normal(len(sizes), 24, dtype=torch.bfloat16).to(device)
    for options in ((), (bias, torch.float32), (None, None, "fast")):
        expected = grouped_expectation(a, b, ends, *options)
        assert_bitwise_equal(gemms.packed_grouped_matmul(*a, ROW, *b, TEXT, ends, *options), expected)
    of_rows = reference.measure_rows(*b, TEXT)[0]
    found = gemms.packed_grouped_matmul(*a, ROW, *b, TEXT, ends, b_row_scale=of_rows)
    assert_bitwise_equal(found, grouped_expectation(a, b, ends))


def plan_of_groups(tokens, groups, n, k, device, has_row_scale=True):
    operands = [
        view(0, tokens, k), view(1, tokens, 1, dtype=torch.float32), view(2, groups, n, k // 2, dtype=torch.uint8),
        view(3, groups, n, k // 32, dtype=torch.uint8), view(4, groups, dtype=torch.int32), None,
        view(5, groups, n, 1, dtype=torch.float32) if has_row_scale else None,
    ]  # fmt: skip
    return make_plan(plan_packed_grouped_matmul, operands, (ROW, TEXT, None, "precise", False), device)


def test_hopper_reads_the_codes_of_experts_for_few_tokens():
    for tokens, block in ((8, 8), (128, 8), (1024, 16), (4096, 64), (32768, 128)):
        first, second = plan_of_groups(tokens, 128, 1536, 2048, H200).launches
        assert (first.kernel, second.kernel) == (row_tiles_kernel, hopper_packed_grouped_kernel)
        assert second.constants["BLOCK_N"] == block
    first, *_ = plan_of_groups(8, 128, 1536, 2048, H200, has_row_scale=False).launches
    assert first.kernel is scale_rows_kernel
    assert plan_of_groups(packed_tiles.MOST_TOKENS_OF_EXPERT * 4 + 1, 4, 1536, 2048, H200) is None
    assert plan_of_groups(8, 128, 1536, 2048, ADA) is None
    # Rows of codes that TMA cannot address.
    assert plan_of_groups(8, 128, 1536, 2048 + 16, H200) is None


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["precise", "fast"])
@pytest.mark.parametrize(("n", "k", "apart"), [(512, 2880, 12), (1000, 1152, 30), (1536, 2048, 40)])
@pytest.mark.parametrize("sizes", [(1,), (3, 0, 5, 1), (0, 40, 2, 1, 9, 0), (130, 1, 64, 8), (300, 257, 4)])
def test_bits_of_the_grouped_gemm_on_expanded_codes(sizes, n, k, apart, accumulation, poisoned_outputs):
    a, b, ends = experts(sizes, n, k, apart, "cuda", none=3)
    b[1].view(torch.uint8)[0, 5, 3] = 255
    bias = normal(len(sizes), n, dtype=torch.bfloat16).cuda()
    of_rows = reference.measure_rows(*b, TEXT)[0]
    for options in ((None, None, accumulation), (bias, torch.float32, accumulation)):
        expected = grouped_expectation(a, b, ends, *options)
        found = gemms.packed_grouped_matmul(*a, ROW, *b, TEXT, ends, *options, b_row_scale=of_rows)
        assert torch.equal(found.isnan(), expected.isnan())
        assert_bitwise_equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["precise", "fast"])
@pytest.mark.parametrize(("n", "k", "apart"), [(512, 2880, 12), (1000, 1152, 30), (4096, 4096, 40), (8192, 4096, 4)])
def test_bits_of_the_gemm_on_expanded_codes(n, k, apart, accumulation, poisoned_outputs):
    q, scale = weight(n, k, apart, "cuda")
    expanded = casts.expand_codes(q, scale, TEXT)
    for m in TOKENS:
        a = casts.quantize(normal(m, k, dtype=torch.bfloat16).cuda(), ROW)
        config = packed_tiles.choose_packed(m, n, 132)
        options = (ROW, TEXT, None, torch.bfloat16, accumulation, False, config)
        row_scale = expanded[1] if m % 2 else None
        (found,) = planned(plan_packed_matmul, (*a, q, scale, None, None, row_scale), options)
        like = MatmulConfig(
            min(max(config.block_m, 16), 128), config.block_n, 128, 4, 4,
            swap=True, specialized=True, split_k=config.split_k,
        )  # fmt: skip
        expected = gemms.scaled_matmul(*a, ROW, *expanded, OF_ROWS, accumulation=accumulation, config=like)
        assert_bitwise_equal(found, expected)


@pytest.mark.gpu
def test_the_epilogue_and_rows_that_are_no_numbers(poisoned_outputs):
    q, scale = weight(640, 1024, 12, "cuda")
    scale.view(torch.uint8)[5, 3] = 255
    q[6] = 0
    for m in (4, 200):
        a = casts.quantize(normal(m, 1024, dtype=torch.bfloat16).cuda(), ROW)
        bias, residual = normal(640, dtype=torch.bfloat16).cuda(), normal(m, 640, dtype=torch.bfloat16, seed=3).cuda()
        found = ops.packed_matmul(*a, ROW, q, scale, TEXT, bias, "relu", residual)
        expanded = casts.expand_codes(q, scale, TEXT)
        config = packed_tiles.choose_packed(m, 640, 132, False)
        like = MatmulConfig(
            min(max(config.block_m, 16), 128), config.block_n, 128, 4, 4,
            swap=True, specialized=True, split_k=config.split_k,
        )  # fmt: skip
        expected = gemms.scaled_matmul(*a, ROW, *expanded, OF_ROWS, bias, "relu", residual, config=like)
        assert torch.equal(found.isnan(), expected.isnan())
        assert_bitwise_equal(found.nan_to_num(), expected.nan_to_num())
        assert found[:, 5].isnan().all()
