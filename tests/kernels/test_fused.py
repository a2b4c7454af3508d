"""The fused producers: their quantization equals the reference to the bit, their values are within what it states.

A kernel's own rstd, or its own unquantized result, is what the exact part is held against. Every output is filled with
NaN before a launch, so that what a kernel leaves unwritten shows.
"""

import math
from dataclasses import replace

import pytest
import torch
from cases import (
    SPEC_OF_BLOCK,
    banded,
    each_block,
    each_device,
    each_spec,
    finite_patterns,
    normal,
    surrounded,
    views,
    with_specials,
)
from fused_checks import (
    EPS,
    PRODUCERS,
    ROW,
    TENSOR,
    VECTOR,
    backward_args,
    check,
    check_backward,
    inputs,
    launch_of,
    reference_of,
    ulps,
)

from tritonfp8.formats import HIGH_PRECISION_DTYPES
from tritonfp8.launch import executor
from tritonfp8.launch import fused as launch_fused
from tritonfp8.reference import fused as reference_fused
from tritonfp8.specs import BLOCK_1X128, ORIENTATIONS, RMS_NORM_ROUNDINGS
from tritonfp8.testing import assert_bitwise_equal
from tritonfp8.tuning import fused_tiles
from tritonfp8.tuning.fused_tiles import MAX_ROW

pytestmark = [pytest.mark.usefixtures("poisoned_outputs"), pytest.mark.in_turn(2)]
each_producer = pytest.mark.parametrize("producer", PRODUCERS)
each_dtype = pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)


# What the interpreter runs takes seconds on much more.
ROWS = {"cpu": 36, "cuda": 700}
# Of specs and sizes one or two tell what the interpreter can: it runs one code for all of them.
SOME = {"cpu": (ROW, VECTOR), "cuda": tuple(SPEC_OF_BLOCK)}


def skip_what_is_interpreted_alike(device, producer, others=False):
    """On the CPU the tile kernels of the producers differ in the formula alone: all cases of one of them are run."""
    if device == "cpu" and producer != "silu_mul" and not others:
        pytest.skip("the interpreter runs the same code for silu_mul")


@each_device
@each_spec
@each_producer
def test_every_spec(device, spec, producer):
    skip_what_is_interpreted_alike(device, producer, spec in SPEC_OF_BLOCK)
    check(producer, inputs(producer, ROWS[device], 150, device=device), spec)


@each_device
@each_block
@each_producer
def test_what_is_not_kept_is_the_same(device, spec, producer):
    skip_what_is_interpreted_alike(device, producer, spec.block == BLOCK_1X128)
    args = *inputs(producer, 36, 150, device=device), *spec.args, *spec.args, "both"
    assert_bitwise_equal(launch_of(producer)(*args, False), launch_of(producer)(*args, True)[:-1])


@each_device
@each_block
@each_producer
@pytest.mark.parametrize("orientation", ["normal", "transposed"])
def test_one_orientation(device, spec, producer, orientation):
    skip_what_is_interpreted_alike(device, producer, producer == "rms_norm")
    check(producer, inputs(producer, ROWS[device], 150, device=device), spec, orientation=orientation)


@each_device
@each_dtype
@each_producer
def test_dtypes(device, dtype, producer):
    for spec in (VECTOR,) if device == "cpu" and producer == "silu_mul_backward" else (ROW, VECTOR):
        check(producer, inputs(producer, ROWS[device], 150, dtype, device), spec)


@each_device
@each_producer
@pytest.mark.parametrize("spec", SPEC_OF_BLOCK, ids=str)
def test_both_orientations_by_different_specs(device, producer, spec):
    skip_what_is_interpreted_alike(device, producer)
    args = inputs(producer, ROWS[device], 100 if device == "cpu" else 300, device=device)
    for spec_t in SPEC_OF_BLOCK if device == "cuda" else SOME[device]:
        check(producer, args, spec, replace(spec_t, format="e5m2"))


TAILS = [(1, 1), (1, 129), (129, 1), (7, 17), (130, 127), (34, 260), (3, 1030), (133, 3)]
FEW_TAILS = TAILS[:5]


@each_device
@each_producer
@pytest.mark.parametrize("shape", TAILS, ids=str)
def test_tails(device, producer, shape):
    if device == "cpu" and shape not in FEW_TAILS:
        pytest.skip("more tiles of the same kind")
    skip_what_is_interpreted_alike(device, producer, shape == (130, 127))
    for spec in SOME[device]:
        check(producer, inputs(producer, *shape, device=device), spec)


def test_constants_are_in_the_order_of_the_kernels(monkeypatch):
    """A compiled kernel is launched again by position; the interpreter passes them by name."""
    seen = {}

    def record(kernel, programs, pointers, integers, constants, **options):
        *names, last = kernel.arg_names
        assert last == "DEPENDENT"
        assert len(names) == len(pointers) + len(integers) + len(constants)
        assert names[-len(constants) :] == list(constants)
        assert all(name.endswith("_ptr") for name in names[: len(pointers)])
        assert not any(name.endswith("_ptr") for name in names[len(pointers) :])
        seen[kernel.__name__] = options

    monkeypatch.setattr(executor, "run", record)
    for producer in PRODUCERS:
        for spec in SPEC_OF_BLOCK:
            for orientation in ORIENTATIONS:
                launch_of(producer)(*inputs(producer, 8, 150), *spec.args, *spec.args, orientation, True)
    launch_fused.rms_norm_backward(*backward_args(8, 150, torch.float32, "cpu")[:4], "output", None, True)
    assert len(seen) == 7
    assert all(set(options) == {"num_warps"} for options in seen.values())


@each_device
@each_producer
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(device, producer, shape):
    args = inputs(producer, *shape, device=device)
    for spec in SPEC_OF_BLOCK:
        specs = *spec.args, *spec.args, "both", True
        actual, expected = launch_of(producer)(*args, *specs), reference_of(producer)(*args, *specs)
        assert_bitwise_equal(actual, expected)


@each_device
@each_producer
@pytest.mark.parametrize("layout", views(torch.zeros(2, 2)))
def test_layouts(device, producer, layout):
    if device == "cpu" and producer == "silu_mul":
        pytest.skip("silu_mul_backward reads the same two tensors and a third one")
    first, *rest = inputs(producer, 30, 150, device=device)
    strided = [views(t)[layout] if torch.is_tensor(t) and t.ndim == 2 else t for t in (first, *rest)]
    for spec in (ROW,) if device == "cpu" else (ROW, VECTOR):
        check(producer, strided, spec)


@each_device
def test_halves_of_one_tensor(device):
    """gate and up as one product writes them, and weight as every other element."""
    gate_up = normal(30, 300, dtype=torch.bfloat16, device=device)
    gate, up = gate_up[:, :150], gate_up[:, 150:]
    grad = normal(30, 150, seed=1, dtype=torch.bfloat16, device=device)
    weight = surrounded(normal(1, 150, seed=2, device=device), col_step=2)[0]
    for spec in (ROW,) if device == "cpu" else (ROW, VECTOR):
        check("silu_mul", (gate, up), spec)
        check("silu_mul_backward", (grad, gate, up), spec)
        check("rms_norm", (gate, weight, EPS, "normalized"), spec)


@each_device
@each_dtype
@pytest.mark.parametrize("weight_dtype", HIGH_PRECISION_DTYPES, ids=str)
@pytest.mark.parametrize("rounding", RMS_NORM_ROUNDINGS)
def test_rms_norm_roundings(device, dtype, weight_dtype, rounding):
    if device == "cpu" and weight_dtype not in (dtype, torch.float32):
        pytest.skip("on the GPU alone: in float32 all weights are one")
    x = normal(30, 150, dtype=dtype, device=device)
    check("rms_norm", (x, normal(150, seed=1, dtype=weight_dtype, device=device), 1e-6, rounding), TENSOR, ROW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_roundings_are_those_of_torch_and_transformers(dtype):
    """The two differ; each option is one of them."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight = normal(64, 128, dtype=dtype), normal(128, seed=1, dtype=dtype)
    theirs = torch.nn.functional.rms_norm(x.float(), (128,), weight.float(), 1e-6).to(dtype)
    llama = LlamaRMSNorm(128, 1e-6).to(dtype)
    llama.weight.data = weight
    for rounding, expected in (("output", theirs), ("normalized", llama(x))):
        y, _ = reference_fused.rms_norm(x, weight, 1e-6, rounding)
        # The mean square is summed in another order: hardly an element rounds differently.
        assert (y != expected).float().mean() < 1e-3
        assert ulps(y, expected) <= 2
    assert (theirs != llama(x)).float().mean() > 0.1


@each_device
@pytest.mark.parametrize("spec", [ROW, VECTOR, TENSOR], ids=str)
def test_rms_norm_of_any_values(device, spec):
    """Rows of all magnitudes, of zeros (with and without eps), with NaN and infinities: never in another row."""
    weight = normal(150, seed=1, device=device)
    for x in (banded(30, 150, dtype=torch.bfloat16), with_specials(banded(30, 150))):
        for eps in (1e-6, 0.0):
            check("rms_norm", (x.to(device), weight, eps, "output"), spec)
    x = normal(30, 150, dtype=torch.bfloat16, device=device)
    for value in (math.nan, math.inf):
        weight[3] = value
        check("rms_norm", (x, weight, EPS, "output"), spec)


@each_device
@pytest.mark.parametrize("producer", ["silu_mul", "silu_mul_backward"])
def test_silu_mul_of_any_values(device, producer):
    """Every gate of 16 bits, the extremes included; then NaN and infinities. Values as stated for |gate| < 8."""
    gate = finite_patterns(torch.bfloat16).view(128, 512).to(device)
    up = normal(*gate.shape, dtype=torch.bfloat16, device=device)
    args = (gate, up) if producer == "silu_mul" else (torch.ones_like(up), gate, up)
    check(producer, args, VECTOR, values=False)
    small = torch.where(gate.abs() < 8, gate, 1.0)
    check(producer, (small, up) if producer == "silu_mul" else (torch.ones_like(up), small, up), VECTOR)
    special = [with_specials(t.float()) for t in args]
    check(producer, special, ROW, values=False)


@each_device
@pytest.mark.parametrize("n", [1024, 4096, 5000, MAX_ROW])
def test_long_rows(device, n):
    """Each configuration of the rows kernels."""
    if device == "cpu" and n in (4096, MAX_ROW):
        pytest.skip("configurations differ in what the interpreter does not know")
    # By tiles a row is as long as any other: what takes long is left to the GPU.
    rows, orientation = (9, "both") if device == "cuda" else (5, "normal")
    check("rms_norm", inputs("rms_norm", rows, n, device=device), ROW, orientation=orientation)
    check("silu_mul", inputs("silu_mul", rows, n, device=device), ROW, orientation="normal")
    check_backward(rows, n, torch.bfloat16, device)


@each_device
def test_rows_longer_than_any_tile_takes(device, monkeypatch):
    n = MAX_ROW + 1
    if device == "cpu":
        # The longest row is a number; the interpreter takes seconds for the real one.
        n = 150
        monkeypatch.setattr(fused_tiles, "MAX_ROW", n - 1)
    check("rms_norm", inputs("rms_norm", 9, n, device=device), ROW)
    check("silu_mul", inputs("silu_mul", 9, n, device=device), ROW, orientation="normal")
    check_backward(9, n, torch.bfloat16, device)


@each_device
def test_many_rows(device):
    """More rows than run at once: programs walk over them, and over tiles."""
    for producer in PRODUCERS if device == "cuda" else PRODUCERS[:2]:
        check(producer, inputs(producer, 133, 140, device=device), VECTOR, ROW)
    check_backward(133, 140, torch.bfloat16, device)


@each_device
@each_dtype
@pytest.mark.parametrize("rounding", RMS_NORM_ROUNDINGS)
def test_rms_norm_backward(device, dtype, rounding):
    check_backward(37, 150, dtype, device, rounding)
    check_backward(5, 17, dtype, device, rounding, torch.float32)


@each_device
def test_rms_norm_backward_is_repeatable(device):
    args = *backward_args(131, 150, torch.bfloat16, device)[:4], "output", None, True
    assert_bitwise_equal(launch_fused.rms_norm_backward(*args), launch_fused.rms_norm_backward(*args))


@each_device
@pytest.mark.parametrize("layout", views(torch.zeros(2, 2)))
def test_layouts_of_rms_norm_backward(device, layout):
    """Values, not bits: a thread reads what lies together, so the layout decides the order of the sums."""
    check_backward(30, 150, torch.float32, device, layout=layout)


@each_device
def test_empty_rms_norm_backward(device):
    for shape in ((0, 5), (5, 0)):
        args = *backward_args(*shape, torch.bfloat16, device)[:4], "output", None, True
        assert_bitwise_equal(launch_fused.rms_norm_backward(*args), reference_fused.rms_norm_backward(*args))


@pytest.mark.parametrize("rounding", RMS_NORM_ROUNDINGS)
def test_backward_references_are_the_derivatives(rounding):
    """Of the float64 forward formulas, by autograd."""
    grad, x, weight, rstd, residual = backward_args(20, 30, torch.float32, "cpu")
    wide_x, wide_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    y = wide_x * torch.rsqrt(wide_x.square().mean(1, keepdim=True) + EPS) * wide_weight
    expected = torch.autograd.grad(y, (wide_x, wide_weight), grad.double())
    actual = reference_fused.rms_norm_backward(grad, x, weight, rstd, rounding, residual, True)
    torch.testing.assert_close(actual[0].double(), expected[0] + residual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=1e-5, atol=1e-5)
    gate, up = x.double().requires_grad_(), residual.double().requires_grad_()
    expected = torch.autograd.grad(torch.nn.functional.silu(gate) * up, (gate, up), grad.double())
    for a, e in zip(reference_fused.silu_mul_backward(grad, x, residual), expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    """Offsets beyond 32 bits: the last rows, against those of a small tensor."""
    m, n, tail = 2**16 + 128, 2**15, 128
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    gate_up = torch.randn(m, n, dtype=torch.bfloat16, device="cuda")
    for args in ((VECTOR, VECTOR), (ROW, VECTOR)):
        specs = *args[0].args, *args[1].args, "both", False
        q, s, qt, st = launch_fused.silu_mul_quantize(gate_up, gate_up, *specs)
        last = gate_up[-tail:]
        expected = launch_fused.silu_mul_quantize(last, last, *specs)
        assert_bitwise_equal((q[-tail:], s[-tail:], qt[:, -tail:], st[:, -1:]), tuple(expected))
