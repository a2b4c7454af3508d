"""The figures of an operand equal a computation in plain torch."""

import math

import pytest
import torch
from figures import measure
from strategies import VALID_SPECS

from tritonfp8.reference import dequantize, quantize
from tritonfp8.specs import SPECS, QuantSpec
from tritonfp8.specs.formats import FORMATS
from tritonfp8.specs.testing import sqnr
from tritonfp8.workflow.health.statistics import FIELDS, local_matrix, some_rows

FLOOR = QuantSpec("e4m3", (1, 32), "e8m0", "floor")


def data(rows=64, columns=256, dtype=torch.bfloat16):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 3
    # Magnitudes of many orders, so that some are flushed; and zeros.
    x = x * 10.0 ** torch.randint(-7, 3, x.shape, generator=torch.Generator().manual_seed(1)).float()
    x[::7, ::5] = 0
    return x.to(dtype)


def figures(x, spec, rows=1024):
    return dict(zip(FIELDS, measure(x, spec, rows).tolist(), strict=True))


@pytest.mark.parametrize("text", [spec.args[0] for spec in VALID_SPECS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_figures_equal_plain_torch(text, dtype):
    x, spec = data(dtype=dtype), SPECS[text]
    found = figures(x, spec)
    qdata, scale = quantize(x, text)
    result, values = dequantize(qdata, scale, text, torch.float32), x.float()
    full = dequantize(torch.ones_like(qdata), scale, text, torch.float32)
    assert found["amax"] == x.abs().max().item()
    assert (found["scale_min"], found["scale_max"]) == (scale.float().min().item(), scale.float().max().item())
    beyond = values.abs() / full > FORMATS[spec.format].qmax * (1 + 1e-6)
    assert found["saturated_share"] == beyond.double().mean().item()
    assert found["flushed_share"] == ((result == 0) & (values != 0)).double().mean().item()
    assert found["zero_share"] == (x == 0).double().mean().item()
    assert found["nonfinite_share"] == 0
    assert found["sqnr"] == pytest.approx(sqnr(result, values), abs=1e-9)
    columns = values.abs().amax(0)
    assert found["outlier_channel"] == columns.argmax().item()
    assert found["outlier_ratio"] == pytest.approx((columns.max() / columns[columns > 0].median()).item())


def test_only_scales_that_are_rounded_down_saturate():
    x = torch.full((4, 64), 1.9)
    assert figures(x, FLOOR)["saturated_share"] == 1.0
    assert figures(x, QuantSpec("e4m3", (1, 32), "e8m0", "pow2"))["saturated_share"] == 0.0
    assert figures(torch.randn(8, 64), QuantSpec("e4m3"))["saturated_share"] == 0.0
    # A tensor of zeros has no error.
    found = figures(torch.zeros(8, 64), QuantSpec("e4m3"))
    assert (found["amax"], found["zero_share"], found["sqnr"]) == (0.0, 1.0, math.inf)
    assert (found["flushed_share"], found["saturated_share"], found["outlier_ratio"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_counted(value):
    x = torch.randn(8, 64)
    x[3, 5] = value
    whole, rows = figures(x, QuantSpec("e4m3")), figures(x, QuantSpec("e4m3", (1, -1)))
    assert whole["nonfinite_share"] == rows["nonfinite_share"] == 1 / 512
    assert not math.isfinite(whole["amax"])
    assert whole["sqnr"] == rows["sqnr"] == -math.inf
    assert math.isnan(whole["scale_max"])
    high = figures(x, None)
    assert (high["nonfinite_share"], high["sqnr"]) == (1 / 512, math.inf)


def test_amax_and_values_that_are_not_finite_are_found_in_rows_that_are_not_measured():
    x = torch.randn(1024, 64)
    x[200, 3] = 1000.0
    found = figures(x, QuantSpec("e4m3"), rows=128)
    assert (found["amax"], found["outlier_ratio"] < 10) == (1000.0, True)
    # One scale covers all rows, also the ones that are not sampled.
    assert found["scale_max"] == figures(x, QuantSpec("e4m3"))["scale_max"]
    x[200, 3] = math.inf
    assert figures(x, QuantSpec("e4m3"), rows=128)["nonfinite_share"] == 1 / x.numel()


@pytest.mark.parametrize("rows", [1, 100, 128, 129, 256, 300, 1000, 1024, 4096])
def test_measured_rows_are_runs_of_whole_blocks(rows):
    x = torch.arange(1000.0)[:, None]
    part = some_rows(x, rows)[:, 0]
    assert len(part) == (1000 if rows >= 1000 else max(rows // 128, 1) * 128)
    if rows < 1000:
        starts = part[::128]
        assert (starts % 128 == 0).all()
        assert torch.equal(part, torch.cat([torch.arange(s, s + 128) for s in starts.tolist()]).float())


def test_large_values_do_not_overflow_the_sums_and_autocast_changes_no_figure():
    x = torch.randn(8, 64) * 1e30
    assert figures(x, QuantSpec("e4m3"))["sqnr"] == pytest.approx(figures(x / 1e30, QuantSpec("e4m3"))["sqnr"], abs=0.3)
    x = data()
    with torch.autocast("cpu", torch.bfloat16):
        inside = measure(x, QuantSpec("e4m3"), 1024)
    assert torch.equal(inside, measure(x, QuantSpec("e4m3"), 1024))


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (0, 8)])
def test_leading_dims_are_rows(shape):
    x = torch.ones(shape, requires_grad=True)
    assert local_matrix(x).shape == (x.numel() // 8, 8)
    assert not local_matrix(x).requires_grad
