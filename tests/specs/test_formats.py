"""The table of formats against what the formats are: torch's casts, all 256 codes, IEEE bits."""

import math

import pytest
import torch

from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS, HIGH_PRECISION_DTYPES, SCALE_FORMATS

CODES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("name", BYTE_FORMATS)
class TestFormat:
    def test_is_filed_under_its_name(self, name):
        assert FORMATS[name].name == name
        assert name in str(FORMATS[name].dtype)

    def test_qmax_is_the_largest_finite_code(self, name):
        values = CODES.view(FORMATS[name].dtype).double()
        assert values[values.isfinite()].max() == FORMATS[name].qmax
        assert values[values.isfinite()].min() == -FORMATS[name].qmax
        assert torch.finfo(FORMATS[name].dtype).max == FORMATS[name].qmax

    def test_nan_is_the_byte_that_torch_stores(self, name):
        fmt = FORMATS[name]
        assert CODES[fmt.nan : fmt.nan + 1].view(fmt.dtype).float().isnan()
        assert torch.tensor([math.nan]).to(fmt.dtype).view(torch.uint8).item() == fmt.nan


@pytest.mark.parametrize("name", SCALE_FORMATS)
class TestScaleFormat:
    def test_is_filed_under_its_name(self, name):
        assert SCALE_FORMATS[name].name == name

    def test_holds_powers_of_two_exactly(self, name):
        exponents = torch.arange(-126, 127, dtype=torch.float64)
        assert torch.equal(torch.exp2(exponents).to(SCALE_FORMATS[name].dtype).double(), torch.exp2(exponents))

    def test_roundings_are_those_it_can_hold(self, name):
        """Only a scale that is not a power of two can go unrounded."""
        scale_format = SCALE_FORMATS[name]
        holds_thirds = torch.tensor(1 / 3).to(scale_format.dtype).float() == torch.tensor(1 / 3)
        assert ("none" in scale_format.roundings) == holds_thirds.item()
        assert "pow2" in scale_format.roundings

    def test_exponent_only_formats_are_biased_exponents(self, name):
        scale_format = SCALE_FORMATS[name]
        assert scale_format.exponent_only == (scale_format.dtype.itemsize == 1)
        if scale_format.exponent_only:
            values = CODES.view(scale_format.dtype).double()
            assert torch.equal(values[:255], torch.exp2(CODES[:255].double() - 127))
            assert values[255].isnan()


def test_the_formats_of_the_specification():
    """OCP 8-bit Floating Point Specification, table 1; OCP MX, section 5.4.1."""
    assert {name: fmt.qmax for name, fmt in FORMATS.items()} == {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
    assert [FORMATS[name].dtype for name in ("e4m3", "e5m2")] == [torch.float8_e4m3fn, torch.float8_e5m2]
    assert {name: fmt.codes_a_byte for name, fmt in FORMATS.items()} == {"e4m3": 1, "e5m2": 1, "e2m1": 2}
    assert SCALE_FORMATS["e8m0"].dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("table", [FORMATS, SCALE_FORMATS])
def test_the_tables_cannot_be_changed(table):
    with pytest.raises(TypeError):
        table["another"] = next(iter(table.values()))


def test_names_are_told_apart():
    assert not set(FORMATS) & set(SCALE_FORMATS)
    assert len({fmt.dtype for fmt in FORMATS.values()}) == len(FORMATS)


def test_high_precision_is_wider_than_any_format():
    assert all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in HIGH_PRECISION_DTYPES)
