"""GEMMs of MX operands on devices without MX tensor cores: dequantized to bf16 by a kernel, multiplied by torch."""

import math
import threading

import pytest
import torch
from cases import each_device, normal, surrounded
from matmul_cases import EPILOGUES, PAIRS, Product, integers

from tritonfp8 import reference, tuning
from tritonfp8.compat import hardware
from tritonfp8.launch import gemms
from tritonfp8.launch.executor import planned
from tritonfp8.launch.gemms import widened
from tritonfp8.specs import BLOCK_1X32, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning.matmul_space import MAX_M_OF_CODES, SPACES

MX = PAIRS["mx"]
SPECS = [QuantSpec(format, BLOCK_1X32, "e8m0", "pow2") for format in ("e4m3", "e5m2")]
ROWS = MAX_M_OF_CODES + 1


def every_pair_of_code_and_scale(spec, device):
    """``[256, 8192]``: row ``s`` has each code in a block of scale ``s``, as often as a block is long."""
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).expand(256, -1).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1).expand(-1, 256).contiguous()
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[spec.format]
    return codes.view(dtype).to(device), scales.view(torch.float8_e8m0fnu).to(device)


def widen(q, scale):
    out, _ = planned(widened.plan_operands, (q, scale, q[:1], scale[:1]), ())
    return out


@each_device
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_code_with_every_scale(device, spec):
    """Subnormal, infinite and NaN as the reference dequantizes to bf16: to the bit."""
    q, scale = every_pair_of_code_and_scale(spec, device)
    out, expected = widen(q, scale), reference.dequantize(q, scale, *spec.args, torch.bfloat16)
    assert torch.equal(out.isnan(), expected.isnan())
    assert_bitwise_equal(out.nan_to_num(), expected.nan_to_num())
    assert torch.equal(out.isinf(), expected.isinf())


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bf16_holds_every_value_that_is_not_subnormal_there(spec):
    """The claim of the module: what float32 has and bf16 has not is below 2^-130."""
    q, scale = every_pair_of_code_and_scale(spec, "cpu")
    exact = reference.dequantize(q, scale, *spec.args, torch.float32)
    rounded = reference.dequantize(q, scale, *spec.args, torch.bfloat16)
    differs = (rounded.float() != exact) & ~exact.isnan()
    assert differs.any()
    assert exact[differs].abs().max() < 2.0**-130
    assert torch.equal(rounded.isinf(), exact.isinf())


@each_device
@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (5, 33), (130, 100), (70, 4128)])
@pytest.mark.parametrize(
    "layout", [lambda x: x, lambda x: surrounded(x, row_padding=3), lambda x: surrounded(x.t().contiguous()).t()],
    ids=["contiguous", "padded rows", "transposed"],
)  # fmt: skip
def test_shapes_and_layouts(device, shape, layout):
    spec = SPECS[0]
    q, scale = reference.quantize(normal(*shape).to(device), *spec.args)
    out = widen(layout(q), layout(scale))
    assert_bitwise_equal(out, reference.dequantize(q, scale, *spec.args, torch.bfloat16))
    assert out.stride(0) % 8 == 0, "cuBLAS reads aligned rows fastest"


def odd_k(device, k):
    """``k`` on a GPU. On a CPU rows without a gap: there torch's GEMM in bf16 may read gaps, which nobody wrote."""
    return k if device == "cuda" else -(-k // 8) * 8


@each_device
@pytest.mark.parametrize(("bias", "activation", "residual", "out_dtype"), EPILOGUES)
def test_epilogues(device, bias, activation, residual, out_dtype):
    product = Product.of(normal, MX, (ROWS, 77, odd_k(device, 100)), device)
    product.check_epilogue((bias, activation, residual, out_dtype))


@each_device
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_product_of_the_kernel_that_reads_codes(device, out_dtype):
    """Exact sums: the same bits as the kernels give that are chosen for fewer rows."""
    product = Product.of(integers, MX, (ROWS, 130, odd_k(device, 257)), device)
    kernel = SPACES["mx"]["precise"][-1]
    found, expected = product.run(out_dtype=out_dtype), product.run(out_dtype=out_dtype, config=kernel)
    # The order of the additions decides the sign of a zero.
    assert_bitwise_equal(found + 0, expected + 0)


@each_device
def test_nothing_to_add_up(device):
    product = Product.of(normal, MX, (ROWS, 20, 0), device)
    assert not product.run().any()
    bias = normal(20, seed=3, dtype=torch.bfloat16, device=device)
    assert torch.equal(product.run(out_dtype=torch.bfloat16, epilogue=(bias, None, None)), bias.expand(ROWS, -1))


@each_device
def test_autocast_does_not_change_the_dtype_of_the_operands(device):
    product = Product.of(normal, MX, (ROWS, 24, 64), device)
    expected = product.run(out_dtype=torch.bfloat16)
    with torch.autocast(torch.device(device).type, dtype=torch.float16):
        assert_bitwise_equal(product.run(out_dtype=torch.bfloat16), expected)


@pytest.fixture
def setting():
    """Torch's settings of matmuls, as they were after the test."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    yield settings
    settings.allow_bf16_reduced_precision_reduction = before


def test_sums_are_not_reduced_in_bf16_and_the_setting_is_restored(setting, monkeypatch):
    seen, plain = [], torch.mm

    def noted(*args, **options):
        seen.append(setting.allow_bf16_reduced_precision_reduction)
        return plain(*args, **options)

    monkeypatch.setattr(torch, "mm", noted)
    a = torch.ones(2, 8, dtype=torch.bfloat16)
    for allowed in (True, False):
        setting.allow_bf16_reduced_precision_reduction = allowed
        widened._multiply(a, a, None, torch.empty(2, 2, dtype=torch.bfloat16))
        assert setting.allow_bf16_reduced_precision_reduction == allowed
    assert seen == [False, False]


def test_a_thread_does_not_restore_the_setting_under_another_one_s_gemm(setting):
    """Backward runs on threads of its own, one for each GPU."""
    setting.allow_bf16_reduced_precision_reduction = True
    entered, seen = threading.Event(), []

    def other():
        with widened._sums_in_float32():
            entered.set()
            seen.append(setting.allow_bf16_reduced_precision_reduction)

    thread = threading.Thread(target=other)
    with widened._sums_in_float32():
        thread.start()
        assert not entered.wait(0.2)
        seen.append(setting.allow_bf16_reduced_precision_reduction)
    thread.join()
    assert seen == [False, False]
    assert setting.allow_bf16_reduced_precision_reduction


class TestChoice:
    def test_rows_decide_where_no_tensor_core_takes_mx(self):
        assert not tuning.is_widened(MAX_M_OF_CODES, native_mx=False)
        assert tuning.is_widened(MAX_M_OF_CODES + 1, native_mx=False)
        assert not tuning.is_widened(16384, native_mx=True)

    @pytest.mark.parametrize("native", [True, False])
    def test_a_count_names_what_ran(self, native, monkeypatch):
        abilities = hardware.CPU.__class__("gpu", (9, 0), True, True, True, True, True, native, 132, 232448)
        monkeypatch.setattr(hardware, "abilities", lambda device: abilities)
        kinds = [gemms.product_kind(*MX[0].args, torch.device("cuda"), m) for m in (64, 65)]
        assert kinds == (["fp8", "fp8"] if native else ["emulated", "dequantized"])
        assert gemms.product_kind(*PAIRS["rowwise"][0].args, torch.device("cuda"), 65) == "fp8"

    @each_device
    def test_the_op_runs_what_is_chosen(self, device, monkeypatch):
        if device == "cuda" and hardware.abilities(device).has_native_mx:
            pytest.skip("tensor cores take MX operands")
        calls = []
        monkeypatch.setattr(
            widened, "_multiply", lambda a, b, bias, out: calls.append(a.shape[0]) or out.fill_(math.nan)
        )
        for m in (MAX_M_OF_CODES, ROWS):
            Product.of(normal, MX, (m, 16, 32), device).run()
        assert calls == [ROWS]
