"""SwiGLU of the rows of experts, by itself and inside of the casts, and the sum of the rows of a token."""

import pytest
import torch
from cases import each_device, generator, normal, on_devices
from routings import ends

from tritonfp8 import reference
from tritonfp8.launch import casts, rows
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# What one rounding of the last place, in one of two ops, changes.
UNIT = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}
DTYPES = list(UNIT)
TENSOR, ROW = QuantSpec(), QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR, SQUARE = QuantSpec("e4m3", BLOCK_1X128), QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2")
MX = QuantSpec("e5m2", BLOCK_1X32, "e8m0", "pow2")


def inputs(width, dtype, device, rows=190):
    gate_up, grad = normal(rows, 2 * width, dtype=dtype), normal(rows, width, seed=1, dtype=dtype)
    return gate_up.mul(2).to(device), grad.to(device)


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [128, 41])
def test_swiglu_is_that_of_torch(device, dtype, width):
    """But for roundings of the exponential: as a rule the same value, else a neighbour."""
    gate_up, grad = inputs(width, dtype, device)
    found = [rows.swiglu(gate_up), rows.swiglu_backward(grad, gate_up)]
    expected = [reference.swiglu(gate_up), reference.swiglu_backward(grad, gate_up)]
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        # The slope of the SiLU crosses zero, where a float32 has lost its digits.
        torch.testing.assert_close(x, y, rtol=2 * UNIT[dtype], atol=2**-20)
        if dtype != torch.float32:
            assert (x != y).float().mean() < 0.01


def test_the_gradient_is_that_of_autograd():
    gate_up, grad = inputs(64, torch.bfloat16, "cpu")
    gate_up.requires_grad_()
    reference.swiglu(gate_up).backward(grad)
    assert_bitwise_equal(reference.swiglu_backward(grad, gate_up.detach()), gate_up.grad)


@each_device
def test_values_that_are_not_finite(device):
    gate_up, grad = inputs(128, torch.bfloat16, device, 4)
    gate_up[0, 3], gate_up[1, 200], gate_up[2, 5], gate_up[3, 7] = torch.nan, torch.nan, torch.inf, -torch.inf
    grad[1, 9] = torch.inf
    for x, y in (
        (rows.swiglu(gate_up), reference.swiglu(gate_up)),
        (rows.swiglu_backward(grad, gate_up), reference.swiglu_backward(grad, gate_up)),
    ):
        assert torch.equal(x.isfinite(), y.isfinite())


@on_devices(
    [
        (ROW, ROW, 256, torch.bfloat16),
        (VECTOR, VECTOR, 128, torch.float16),
        (TENSOR, SQUARE, 128, torch.bfloat16),
        (MX, MX, 128, torch.float32),
        (ROW, ROW, 72, torch.bfloat16),
    ],
    spec=(TENSOR, ROW, VECTOR, MX),
    spec_t=(TENSOR, ROW, VECTOR, SQUARE, MX),
    width=(768, 72),
    dtype=(torch.bfloat16, torch.float32),
)
def test_casts_of_swiglu_and_of_its_gradient(device, spec, spec_t, width, dtype):
    """They have the bits of casts of what the kernel of SwiGLU writes."""
    gate_up, grad = inputs(width, dtype, device)
    offsets = ends((7, 0, 130, 40)).to(device)
    specs = (*spec.args, *spec_t.args)
    expected = reference.quantize_groups_both(rows.swiglu(gate_up).cpu(), offsets.cpu(), *specs)
    source = (None, None, True)
    check_casts(casts.quantize_groups_both(gate_up, offsets, *specs, *source), expected)
    check_casts(
        casts.quantize_groups(gate_up, offsets, *spec.args, False, *source)
        + casts.quantize_groups(gate_up, offsets, *spec_t.args, True, *source),
        expected,
    )
    if -1 not in (*spec.block, *spec_t.block):
        return
    made = rows.swiglu_backward(grad, gate_up)
    found, amax = casts.swiglu_backward_amax(grad, gate_up, offsets, *specs)
    assert_bitwise_equal(found, made)
    assert_bitwise_equal(amax.cpu(), reference.group_amax(made.cpu(), offsets.cpu(), *specs))
    expected = reference.quantize_groups_both(made.cpu(), offsets.cpu(), *specs)
    check_casts(casts.quantize_groups_both(made, offsets, *specs, amax=amax), expected)
    # Sixteen times each amax: the codes change only if the cast reads the given amaxes.
    larger = casts.quantize_groups_both(made, offsets, *specs, amax=torch.where(amax > 0, amax + (4 << 23), 0))
    assert not all(torch.equal(x.float().cpu(), y.float()) for x, y in zip(larger, expected, strict=True))


@on_devices(
    [((7, 0, 130, 40), 72, torch.bfloat16, True), ((7, 30), 256, torch.float32, False)],
    sizes=((7, 0, 130, 40), (0, 64), (190,)),
    width=(768, 41),
    dtype=(torch.bfloat16, torch.float32),
    contiguous=(True, False),
)
def test_a_gradient_written_over_its_operand(device, sizes, width, dtype, contiguous):
    """The same bits, also of rows of no group, and of operands that only a copy can be written to."""
    gate_up, grad = inputs(width, dtype, device)
    gate_up = gate_up if contiguous else gate_up.t().contiguous().t()
    offsets, specs = ends(sizes).to(device), (*ROW.args, *TENSOR.args)
    expected, expected_amax = casts.swiglu_backward_amax(grad, gate_up, offsets, *specs)
    for over, call in (
        (gate_up.clone(), lambda x: (rows.swiglu_backward_(grad, x), None)),
        (gate_up.clone(), lambda x: casts.swiglu_backward_amax_(grad, x, offsets, *specs)),
    ):
        found, amax = call(over)
        assert found is over
        assert_bitwise_equal(found, expected)
        assert amax is None or torch.equal(amax, expected_amax)


def check_casts(found, expected):
    assert_bitwise_equal(tuple(x.cpu() for x in found), expected)
    assert [x.shape for x in found] == [x.shape for x in expected]


@on_devices(
    [(2, torch.bfloat16, torch.bfloat16, 41), (8, torch.bfloat16, torch.float32, 41), (1, torch.float32, None, 41)],
    each=(1, 2, 6, 8),
    dtype=DTYPES,
    factors=(None, *DTYPES),
    width=(2048, 41),
)
def test_sum_of_rows(device, each, dtype, factors, width):
    """To the bit: rows are added in their order."""
    x = normal(70, width, dtype=dtype)
    places = torch.randint(0, 70, (33, each), generator=generator(3))
    scale = None if factors is None else normal(33, each, seed=2).to(factors)
    found = rows.sum_of_rows(*(None if t is None else t.to(device) for t in (x, places, scale)))
    expected = reference.sum_of_rows(x, places, scale)
    assert found.dtype == expected.dtype
    assert_bitwise_equal(found.cpu(), expected)


@on_devices(
    [
        (2, torch.bfloat16, torch.bfloat16, 41),
        (8, torch.bfloat16, torch.float32, 41),
        (1, torch.float32, torch.float32, 41),
    ],
    each=(1, 2, 6, 8),
    dtype=DTYPES,
    factors=DTYPES,
    width=(2048, 4100, 41),
)
def test_dots_of_rows(device, each, dtype, factors, width):
    """To the bit where every sum of products is exact; else within the roundings of the products."""
    x, grad = normal(70, width, dtype=dtype), normal(33, width, seed=1, dtype=dtype)
    places = torch.randint(0, 70, (33, each), generator=generator(3))
    whole = [t.mul(2).round().clamp(-4, 4) for t in (grad, x)]
    for operands in (whole, (grad, x)):
        found = rows.dots_of_rows(*(t.to(device) for t in operands), places.to(device), factors).cpu()
        expected = reference.dots_of_rows(*operands, places, factors)
        assert found.dtype == expected.dtype
        if operands is whole:
            assert_bitwise_equal(found, expected)
        else:
            exact = reference.dots_of_rows(*(t.double() for t in operands), places, torch.float64)
            size = reference.dots_of_rows(*(t.double().abs() for t in operands), places, torch.float64)
            unit = max(UNIT[dtype] if torch.promote_types(dtype, factors) == dtype else 0, UNIT[factors])
            assert ((found.double() - exact).abs() <= size * unit).all()


@each_device
def test_no_rows(device):
    x, places = torch.ones(0, 16, device=device), torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert rows.sum_of_rows(x, places).shape == (0, 16)
    assert rows.swiglu(x).shape == (0, 8)
    assert rows.swiglu_backward(x[:, :8], x).shape == (0, 16)
    grad, amax = casts.swiglu_backward_amax(x[:, :8], x, ends((0, 0)).to(device), *ROW.args, *ROW.args)
    assert grad.shape == (0, 16)
    assert_bitwise_equal(amax.cpu(), torch.zeros(2 * 16, dtype=torch.int32))
    assert rows.swiglu_backward_(x[:, :8], x) is x
    found = casts.swiglu_backward_amax_(x[:, :8], x, ends((0, 0)).to(device), *ROW.args, *ROW.args)
    assert_bitwise_equal(found[1], amax)


@each_device
def test_operands_that_are_not_contiguous(device):
    x, places = normal(16, 70).t().to(device), torch.arange(70, device=device).view(2, 35).t()
    assert_bitwise_equal(rows.sum_of_rows(x, places).cpu(), reference.sum_of_rows(x.cpu(), places.cpu()))
    gate_up, grad = inputs(128, torch.bfloat16, device)
    turned = gate_up.t().contiguous().t()
    assert_bitwise_equal(rows.swiglu(turned), rows.swiglu(gate_up))
    offsets = ends((7, 180)).to(device)
    expected = casts.swiglu_backward_amax(grad, gate_up, offsets, *ROW.args, *ROW.args)
    assert_bitwise_equal(casts.swiglu_backward_amax(grad, turned, offsets, *ROW.args, *ROW.args), expected)
