"""The kernels that measure operands find what plain torch finds."""

import math

import pytest
import torch
from cases import cpu_and_cuda
from strategies import VALID_SPECS

from tritonfp8 import reference
from tritonfp8.launch import executor, figures
from tritonfp8.specs import SPECS
from tritonfp8.specs.formats import FORMATS

# The sums are float64, in another order; the logarithm differs in the last bits.
TOLERANCE = {"rtol": 1e-12, "atol": 1e-10}


def operands(dtype, shape=(3, 40, 150), device="cpu"):
    """Magnitudes of many orders, zeros, and a column that stands out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-7, 3, shape, generator=generator)
    x[:, ::7, ::5] = 0
    x[0, :, 17] *= 1000
    return x.to(dtype).to(device)


def arguments(x, spec, limit=None):
    """Of the op, for operands that are measured whole."""
    whole = torch.linalg.vector_norm(x.float(), math.inf, dim=(1, 2))
    if spec is None:
        return x, whole, x[0].numel(), math.inf
    qdata, scale = reference.quantize(x, *spec.args)
    result = reference.dequantize(qdata, scale, *spec.args, torch.float32)
    low, high = scale.float().flatten(1).expand(len(x), -1).aminmax(dim=1)
    if limit is None:
        limit = FORMATS[spec.format].qmax if spec.scale_rounding == "floor" else math.inf
    return x, whole, x[0].numel(), limit, result, qdata, low, high


def check(args):
    planned = executor.planned(
        figures.plan_operand_figures, (args[0], args[1], *args[4:], *[None] * (8 - len(args))), args[2:4]
    )
    assert planned is not None
    found, expected = figures.operand_figures(*args), reference.operand_figures(*args)
    assert torch.equal(planned[0].isnan(), found.isnan())
    torch.testing.assert_close(found, expected, equal_nan=True, **TOLERANCE)
    shares, others = [3, 4, 5, 6], [0, 1, 2, 8, 9]
    torch.testing.assert_close(found[:, others], expected[:, others], equal_nan=True, rtol=0, atol=0)
    # Counts are equal. On a GPU torch divides them by multiplying, so a share may differ in the last bit.
    count = args[0][0].numel()
    assert torch.equal((found[:, shares] * count).round(), (expected[:, shares] * count).round())
    torch.testing.assert_close(found[:, shares], expected[:, shares], rtol=2.3e-16, atol=0)
    return found


@cpu_and_cuda
@pytest.mark.parametrize("text", [None, *(spec.args[0] for spec in VALID_SPECS)])
def test_figures_of_every_spec(text, device):
    spec = None if text is None else SPECS[text]
    found = check(arguments(operands(torch.bfloat16, device=device), spec))
    assert found[0, 9] == 17


@cpu_and_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 16, 128), (2, 33, 129), (1, 5, 2100)], ids=str)
def test_dtypes_and_shapes(dtype, shape, device):
    x = operands(dtype, (shape[0], shape[1], max(shape[2], 18)), device)[:, :, : shape[2]].contiguous()
    for spec in (None, SPECS["e4m3:1x32:e8m0:floor"]):
        check(arguments(x, spec))


@cpu_and_cuda
def test_clipped_values_are_counted(device):
    x = torch.full((2, 4, 64), 1.9, device=device)
    found = check(arguments(x, SPECS["e4m3:1x32:e8m0:floor"]))
    assert found[:, 3].tolist() == [1.0, 1.0]


@cpu_and_cuda
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(value, device):
    x = operands(torch.float32, device=device)
    x[1, 3, 5] = value
    for spec in (None, SPECS["e4m3:rowwise:fp32:pow2"], SPECS["e4m3:1x128:fp32:pow2"]):
        check(arguments(x, spec))


@cpu_and_cuda
def test_a_value_in_rows_that_are_not_measured(device):
    x, _, *rest = arguments(operands(torch.float32, device=device), None)
    whole = torch.tensor([1.0, math.nan, math.inf], device=device)
    found = check((x, whole, 10**7, *rest[1:]))
    assert found[:, 6].tolist() == [0.0, 1e-7, 1e-7]


@cpu_and_cuda
def test_zeros_and_large_values(device):
    x = torch.zeros(2, 8, 64, device=device)
    x[1] = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(device) * 1e30
    # The ratio of this operand is beyond float32.
    x[1, 0, 0], x[1, 1:, 1:] = 3e38, 1e-30
    x[1, 0, 1:] = 1e-30
    for spec in (None, SPECS["e4m3:rowwise:fp32:pow2"]):
        found = check(arguments(x, spec))
        assert found[0, [5, 7, 8]].tolist() == [1.0, math.inf, 1.0]
        assert found[1, 8] == torch.finfo(torch.float32).max


def test_the_median_is_the_lower_one_of_columns_that_are_not_zero():
    for columns in ([1, 2, 3, 4, 0, 0], [5, 0, 1], [7], [0, 0, 2, 2, 9]):
        x = torch.tensor([[columns]], dtype=torch.float32)
        found = check(arguments(x, None))
        of_columns = x.flatten()[x.flatten() > 0]
        assert found[0, 8] == of_columns.max() / of_columns.median()


def test_what_no_plan_serves_is_copied_or_computed_in_plain_torch():
    x, whole, elements, limit = arguments(operands(torch.bfloat16), None)
    view = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not view.is_contiguous()
    torch.testing.assert_close(
        figures.operand_figures(view, whole, elements, limit), figures.operand_figures(x, whole, elements, limit),
        rtol=0, atol=0, equal_nan=True,
    )  # fmt: skip
    wide = x.double()
    assert torch.equal(
        figures.operand_figures(wide, whole, elements, limit).nan_to_num(),
        reference.operand_figures(wide, whole, elements, limit).nan_to_num(),
    )
