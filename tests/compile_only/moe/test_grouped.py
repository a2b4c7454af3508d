"""The casts and GEMMs of groups compile: for Hopper without spills, for Ada and Blackwell at all."""

import re

import pytest
import torch
from matmul_compiles import HOPPER_SHARED_BYTES
from tuned import H200

from tritonfp8 import launch, specs
from tritonfp8.layers.linear import found_together
from tritonfp8.ops import fakes
from tritonfp8.recipes import get
from tritonfp8.tuning import grouped_tiles, matmul_space
from tritonfp8.tuning.matmul_space import shared_bytes

TOKENS, GROUPS, N, K = 4096, 8, 1024, 2048
RECIPES = ("rowwise", "tensorwise", "blockwise", "mxfp8")
META = torch.device("meta")


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)


OFFSETS = empty(GROUPS, dtype=torch.int32)
STRIDED = empty(2 * GROUPS, dtype=torch.int32)[::2]


@pytest.fixture
def compiled(compiled):
    """With the abilities of that GPU."""
    return lambda cc, call: compiled(cc, call, has_tma=cc >= 90, has_warpgroup_mma=cc == 90, has_native_mx=cc == 100)


def check(found, cc):
    for kernel, report in found:
        if cc == 90:
            assert report.spill_bytes == 0, (kernel.__name__, report.log)
            assert report.shared_bytes <= HOPPER_SHARED_BYTES


def specialized(found):
    """The report of the warp-specialized kernel, which is the last of a call."""
    check(found, 90)
    kernel, report = found[-1]
    assert kernel.__name__ == "hopper_grouped_kernel"
    assert "wgmma.mma_async.sync" in report.ptx
    assert "cp.async.bulk.tensor.2d" in report.ptx
    assert "serialized" not in report.log, report.log
    # The rows of a tile that its group does not fill.
    assert set(re.findall(r"st\.global[.:\w]*", report.ptx)) == {"st.global.v4.b32"}
    return report


def casts(recipe, dtype):
    """Calls of the casts of a recipe, by name."""
    gemms = get(recipe)
    x, weight = empty(TOKENS, K, dtype=dtype), empty(GROUPS, N, K, dtype=dtype)
    rows, columns = gemms.output.lhs.args[0], gemms.grad_weight.rhs.args[0]
    swapped = empty(GROUPS, K, N, dtype=dtype).transpose(1, 2)
    inner, grad = empty(TOKENS, 2 * K, dtype=dtype), empty(TOKENS, K, dtype=dtype)
    of_weight = gemms.output.rhs.args[0], gemms.grad_input.rhs.args[0]
    amax = fakes.quantize_matrices_with_amax(weight, *of_weight)[2]
    of_amaxes = {
        "matrices with amaxes": lambda: launch.casts.quantize_matrices_with_amax(weight, *of_weight),
        "matrices by amaxes": lambda: launch.casts.quantize_matrices(weight, of_weight[1], True, amax),
    }
    factors, places = empty(TOKENS, dtype=dtype), empty(TOKENS, dtype=torch.int64)

    def both_of_gradient():
        made, amax = launch.casts.swiglu_backward_amax(grad, inner, OFFSETS, rows, columns)
        return launch.casts.quantize_groups_both(made, OFFSETS, rows, columns, amax=amax)

    return {
        "rows": lambda: launch.casts.quantize_groups(x, OFFSETS, rows),
        "columns": lambda: launch.casts.quantize_groups(x, OFFSETS, columns, True),
        "both": lambda: launch.casts.quantize_groups_both(x, OFFSETS, rows, columns),
        "matrices": lambda: launch.casts.quantize_matrices(weight, gemms.output.rhs.args[0]),
        "matrices transposed": lambda: launch.casts.quantize_matrices(weight, gemms.grad_input.rhs.args[0], True),
        **(of_amaxes if found_together(gemms.output.rhs, gemms.grad_input.rhs) else {}),
        "matrices of another layout": lambda: launch.casts.quantize_matrices(swapped, gemms.output.rhs.args[0]),
        "both of a routed gradient": lambda: launch.casts.quantize_groups_both(
            x, OFFSETS, rows, columns, places, factors
        ),
        "both of SwiGLU": lambda: launch.casts.quantize_groups_both(inner, OFFSETS, rows, columns, None, None, True),
        "both of its gradient": both_of_gradient,
        "sum": lambda: launch.casts.grouped_sum(x, OFFSETS),
        "SwiGLU": lambda: launch.rows.swiglu(inner),
        "gradient of SwiGLU": lambda: launch.rows.swiglu_backward(grad, inner),
        "dots of rows": lambda: launch.rows.dots_of_rows(
            empty(TOKENS // 8, K, dtype=dtype), x, places.view(-1, 8), torch.float32
        ),
        "sum of rows": lambda: launch.rows.sum_of_rows(x, places.view(-1, 8), factors.view(-1, 8)),
    }


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("recipe", RECIPES)
def test_casts(compiled, recipe, cc):
    for call in casts(recipe, torch.bfloat16).values():
        found = compiled(cc, call)
        assert found
        check(found, cc)


@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_of_float32(compiled, recipe):
    calls = casts(recipe, torch.float32)
    for name in ("both", "both of SwiGLU", "both of its gradient", "matrices transposed"):
        check(compiled(90, calls[name]), 90)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_thread_reads_before_it_writes_over(compiled, dtype):
    """Nothing orders the loads of one thread before the stores of another, so each stores what it loaded itself."""
    inner, grad = empty(TOKENS, 2 * K, dtype=dtype), empty(TOKENS, K, dtype=dtype)
    specs = ("e4m3:rowwise:fp32:pow2",) * 2
    for call, name in (
        (lambda: launch.rows.swiglu_backward_(grad, inner), "swiglu_kernel"),
        (lambda: launch.casts.swiglu_backward_amax_(grad, inner, OFFSETS, *specs), "group_swiglu_kernel"),
    ):
        found = compiled(90, call)
        check(found, 90)
        (ptx,) = (report.ptx for kernel, report in found if kernel.__name__ == name)
        wide = re.findall(r"\b(ld|st)\.global\.v4|\b(bar)\.sync|\b(ld|st)\.shared", ptx)
        steps = ["".join(step) for step in wide]
        first = steps.index("st")
        # The loads of gate, the other branch and its gradient, as wide as the stores, and no exchange between them.
        assert set(steps[:first]) == {"ld"}
        assert "ld.global.v4" not in ptx[ptx.index("st.global.v4") :]


def quantized(shape, spec, layout):
    qdata = empty(*shape, dtype=torch.float8_e4m3fn)
    return qdata, specs.empty_grouped_scale(shape, spec, layout, GROUPS, META), spec.args[0]


def gemm(
    recipe, columns, bias=False, out_dtype=torch.bfloat16, config=None, accumulation="precise", offsets=OFFSETS
):  # fmt: skip
    """A call of one of the two kinds of GEMMs of a recipe."""
    gemms = get(recipe)
    if columns:
        width = specs.grouped_columns(TOKENS, GROUPS)
        lhs = quantized((N, width), gemms.grad_weight.lhs, "columns")
        rhs = quantized((K, width), gemms.grad_weight.rhs, "columns")
    else:
        lhs = quantized((TOKENS, K), gemms.output.lhs, "rows")
        rhs = quantized((GROUPS, N, K), gemms.output.rhs, "matrices")
    vector = empty(GROUPS, N) if bias else None
    tokens = TOKENS if columns else 0
    return lambda: launch.gemms.scaled_grouped_matmul(
        *lhs, *rhs, offsets, vector, out_dtype, accumulation, False, tokens, config=config
    )


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_portable_gemms(compiled, recipe, columns, cc):
    family = specs.matmul_family(get(recipe).output.lhs.block, get(recipe).output.rhs.block)
    for config in grouped_tiles.PORTABLE[family]:
        check(compiled(cc, gemm(recipe, columns, bias=not columns, config=config)), cc)


# On Hopper torch sums bf16 over tokens; see by_torch.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [False, True])
def test_gemms_of_high_precision(compiled, columns, dtype):
    a, b = empty(TOKENS, K, dtype=dtype), empty(GROUPS, N, K, dtype=dtype)
    if columns:
        a, b = empty(TOKENS, N, dtype=dtype).t(), empty(TOKENS, K, dtype=dtype).t()
    check(compiled(90, lambda: launch.gemms.grouped_matmul(a, b, OFFSETS)), 90)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", grouped_tiles.WIDE, ids=lambda config: config.name)
def test_specialized_gemms_of_two_bytes_run_without_spills(compiled, monkeypatch, config, out):
    """Of bf16, and of MX operands that were dequantized, in rows and in columns."""
    monkeypatch.setattr(grouped_tiles, "WIDE", (config,))
    if grouped_tiles.wide(TOKENS, GROUPS, False, out.itemsize, H200) is None:
        pytest.skip("this configuration does not fit such outputs")
    a, b = empty(TOKENS, K), empty(GROUPS, N, K)
    calls = [lambda: launch.gemms.grouped_matmul(a, b, OFFSETS)] if out == torch.bfloat16 else []
    calls += [gemm("mxfp8", columns, bias=not columns, out_dtype=out) for columns in (False, True)]
    for call in calls:
        assert "bf16.bf16" in specialized(compiled(90, call)).ptx


@pytest.mark.parametrize("columns", [False, True])
def test_mx_operands_of_few_tokens_and_on_other_gpus_are_not_dequantized(compiled, monkeypatch, columns):
    def kernels(cc, call):
        return [kernel.__name__ for kernel, _ in compiled(cc, call)]

    assert kernels(90, gemm("mxfp8", columns)).count("widen_kernel") == 2
    assert kernels(90, gemm("mxfp8", columns, offsets=STRIDED)).count("widen_kernel") == 2
    assert "widen_kernel" not in kernels(89, gemm("mxfp8", columns))
    assert "widen_kernel" not in kernels(100, gemm("mxfp8", columns))
    monkeypatch.setattr(matmul_space, "MAX_M_OF_CODES", TOKENS // GROUPS)
    assert "widen_kernel" not in kernels(90, gemm("mxfp8", columns))


SPECIALIZED = [
    pytest.param(family, accumulation, config, id=f"{family}-{accumulation}-{config.name}")
    for (family, accumulation), configs in grouped_tiles.SPECIALIZED.items()
    for config in configs
]


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("family", "accumulation", "config"), SPECIALIZED)
def test_specialized_gemms_run_without_spills(compiled, family, accumulation, config, columns, out):
    rows = (1, 1) if columns else (1, 128)
    problem = grouped_tiles.GroupedGemm(family, accumulation, rows, GROUPS, TOKENS, (N, K), columns, out.itemsize)
    if not grouped_tiles.serves(config, problem, H200, True):
        pytest.skip("this configuration is not chosen for this GEMM")
    recipe = {"epilogue": "rowwise", "blockwise": "blockwise"}[family]
    call = gemm(recipe, columns, bias=not columns, out_dtype=out, config=config, accumulation=accumulation)
    report = specialized(compiled(90, call))
    assert report.shared_bytes <= shared_bytes(config, family, out.itemsize)
    assert report.ptx.count("mbarrier.init") == 2 * config.num_stages + (config.stagger and not columns)
