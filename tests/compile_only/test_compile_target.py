"""The compile-without-a-GPU infrastructure, on kernels small enough to know what must come out."""

import importlib
import pkgutil
import re

import compile_target
import pytest
import triton
import triton.language as tl
from compile_target import compile_kernel, descriptor, read_report

from tritonfp8 import kernels
from tritonfp8.compat import triton_private, triton_since
from tritonfp8.kernels.pdl import begin

TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}


@triton.jit
def descriptor_matmul_kernel(
    a_desc, b_desc, out_desc, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_M
    col = tl.program_id(1) * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a_desc.load([row, k]), b_desc.load([col, k]).T, acc)
    out_desc.store([row, col], acc.to(tl.bfloat16))


@triton.jit
def cast_kernel(x_ptr, q_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(q_ptr + offsets, tl.load(x_ptr + offsets).to(q_ptr.dtype.element_ty))


@triton.jit
def dependent_kernel(x_ptr, out_ptr, EARLY: tl.constexpr, WAITS: tl.constexpr, DEPENDENT: tl.constexpr):
    offsets = tl.arange(0, 128)
    early = tl.load(x_ptr + offsets) if EARLY else 0
    begin(DEPENDENT and WAITS)
    tl.store(out_ptr + offsets, early + tl.load(x_ptr + offsets))


def compile_matmul(cc, element="fp8e4nv", tile=TILE, **options):
    m, n, k = tile["BLOCK_M"], tile["BLOCK_N"], tile["BLOCK_K"]
    operands = {"a_desc": descriptor(element, (m, k)), "b_desc": descriptor(element, (n, k))}
    signature = {**operands, "out_desc": descriptor("bf16", (m, n)), "K": "i32"}
    return compile_kernel(descriptor_matmul_kernel, signature, tile, cc, divisible_by_16=("K",), **options)


@pytest.mark.parametrize(("element", "instruction"), [("fp8e4nv", "e4m3.e4m3"), ("fp8e5", "e5m2.e5m2")])
def test_fp8_dot_from_host_descriptors_is_wgmma_fed_by_tma_on_hopper(element, instruction):
    report = compile_matmul(90, element)
    assert ".target sm_90a" in report.ptx
    assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{instruction}" in report.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global", report.ptx)
    assert report.spill_bytes == 0
    assert 64 <= report.registers <= 255


def test_shared_memory_is_that_of_the_pipeline():
    """Each further stage holds one more tile of each operand, 16 KiB apiece here."""
    shared = [compile_matmul(90, num_stages=stages).shared_bytes for stages in (3, 4)]
    assert 2**15 <= shared[1] - shared[0] < 2**15 + 256
    assert shared[0] >= 3 * 2**15


def test_spills_and_registers_are_seen():
    """A 128 x 256 fp32 accumulator is 256 registers a thread in four warps, more than there are, and 128 in eight."""
    wide = {**TILE, "BLOCK_N": 256}
    four_warps, eight_warps = (compile_matmul(90, tile=wide, num_warps=warps) for warps in (4, 8))
    assert four_warps.registers == 255
    assert four_warps.spill_bytes > 0
    assert 128 <= eight_warps.registers < 255
    assert eight_warps.spill_bytes == 0


def test_launch_options_reach_the_compiler():
    assert compile_matmul(90, maxnreg=96).registers <= 96 < compile_matmul(90).registers


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize(("pointer", "instruction"), [("*fp8e4nv", "e4m3x2"), ("*fp8e5", "e5m2x2")])
def test_casts_saturate_in_hardware(cc, pointer, instruction):
    report = compile_kernel(cast_kernel, {"x_ptr": "*fp32", "q_ptr": pointer}, {"BLOCK": 1024}, cc)
    # On Ada triton before 3.9 goes through fp16, rounded toward zero.
    source = "f16x2" if cc == 89 and not triton_since("3.9") else "f32"
    assert f"cvt.rn.satfinite.{instruction}.{source}" in report.ptx
    assert report.spill_bytes == 0


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_kernel_that_does_not_wait_first_is_an_error_where_it_may_start_early(cc, early, waits):
    def ptx():
        signature, constexprs = {"x_ptr": "*i32", "out_ptr": "*i32"}, {"EARLY": early, "WAITS": waits}
        return compile_kernel(dependent_kernel, {**signature, "DEPENDENT": "i32"}, constexprs, cc).ptx

    if cc == 89 or (waits and not early):
        assert ("griddepcontrol.wait" in ptx()) == (cc > 89)
    else:
        with pytest.raises(RuntimeError, match="dependent_kernel reads or writes memory before it waits"):
            ptx()


def test_every_argument_must_be_named_once():
    pointers = {"x_ptr": "*fp32", "q_ptr": "*fp8e4nv"}
    for signature, constants, divisible, message in (
        (pointers, {}, (), "BLOCK"),
        ({**pointers, "BLOCK": "i32"}, {"BLOCK": 64}, (), "once"),
        (pointers, {"BLOCK": 64}, ("y_ptr",), "divisible_by_16"),
    ):
        with pytest.raises(ValueError, match=message):
            compile_kernel(cast_kernel, signature, constants, 90, divisible_by_16=divisible)


def test_a_log_without_figures_is_an_error_not_zero():
    with pytest.raises(RuntimeError, match="ptxas"):
        read_report("", 0, "ptxas info    : something else")


@triton.jit
def product_and_sum_kernel(x_ptr, y_ptr, out_ptr):
    offsets = tl.arange(0, 128)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * tl.load(y_ptr + offsets) + tl.load(out_ptr + offsets))


@pytest.mark.parametrize("default", [False, True])
def test_products_and_sums_are_fused_whatever_the_default_is(default, monkeypatch):
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", default)
    ptx = compile_kernel(product_and_sum_kernel, dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*fp32"), {}, 90).ptx
    assert "fma.rn.f32" in ptx or "fma.rn.f32x2" in ptx
    assert "mul.rn.f32" not in ptx


def test_a_kernel_is_compiled_once_for_all_processes(monkeypatch):
    """By its source, arguments and target; a knob that decides the code counts as well."""
    signature, constants = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), "*fp16"), {}
    first = compile_kernel(product_and_sum_kernel, signature, constants, 90)

    def compile_(*args):
        raise LookupError

    monkeypatch.setattr(compile_target, "_compile", compile_)
    assert compile_kernel(product_and_sum_kernel, signature, constants, 90) == first
    others = [(signature, 89, {}), (signature, 90, {"num_warps": 8}), ({**signature, "x_ptr": "*fp32"}, 90, {})]
    for other, cc, options in others:
        with pytest.raises(LookupError):
            compile_kernel(product_and_sum_kernel, other, constants, cc, **options)
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", not triton.knobs.language.default_fp_fusion)
    with pytest.raises(LookupError):
        compile_kernel(product_and_sum_kernel, signature, constants, 90)


def test_divisibility_turns_into_wide_loads():
    signature = {"x_ptr": "*bf16", "q_ptr": "*fp8e4nv"}
    narrow = compile_kernel(cast_kernel, signature, {"BLOCK": 1024}, 90)
    wide = compile_kernel(cast_kernel, signature, {"BLOCK": 1024}, 90, divisible_by_16=tuple(signature))
    assert "ld.global.v4" in wide.ptx
    assert "ld.global.v4" not in narrow.ptx


def keys(order, settle):
    """The key of each function of the package that Triton compiles, when they get their keys in an order."""
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        members = vars(importlib.import_module(module.name)).items()
        found |= {(module.name, name): value for name, value in members if isinstance(value, triton.JITFunction)}
    for function in found.values():
        function.hash, function.used_global_vals = None, {}
    triton_private._settled.clear()
    for place in order(found):
        settle(found[place])
    return {place: function.cache_key for place, function in found.items()}


def test_keys_do_not_depend_on_what_a_process_launched_before():
    """Triton's cache on disk finds a kernel by its key. Before 3.8, the order of first launches decides."""
    orders = (sorted, lambda found: sorted(found, reverse=True))
    alone, other = (keys(order, lambda function: function.cache_key) for order in orders)
    assert (alone == other) == triton_since("3.8")
    first, second = (keys(order, triton_private.settle_key) for order in orders)
    assert len(first) > 100
    assert first == second
