"""Device helpers that no launch on this machine's abilities reaches."""

import pytest
import torch
import triton
import triton.language as tl
from cases import each_device

from tritonfp8.kernels.numerics import round_to_format
from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS
from tritonfp8.specs.testing import assert_bitwise_equal


@triton.jit
def round_kernel(x_ptr, out_ptr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + offsets, round_to_format(tl.load(x_ptr + offsets), MANTISSA_BITS, EMIN))


@each_device
@pytest.mark.parametrize("name", BYTE_FORMATS)
def test_rounding_ahead_of_an_indirect_conversion(name, device):
    """It is what a direct conversion does, also just beside a tie, where rounding twice goes wrong."""
    fmt = FORMATS[name]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype).float()
    values = codes[codes.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    inf = torch.tensor(torch.inf)
    near = [ties, torch.nextafter(ties, inf), torch.nextafter(ties, -inf), values, torch.tensor([torch.nan, -0.0, 0.0])]
    x = torch.cat([torch.cat(near), torch.randn(5000).clamp(-fmt.qmax, fmt.qmax)])
    x = torch.cat([x, x.new_zeros(-len(x) % 1024)]).to(device)
    out = torch.full_like(x, torch.nan)
    round_kernel[(len(x) // 1024,)](x, out, fmt.mantissa_bits, fmt.emin, 1024)
    assert_bitwise_equal(out.cpu().nan_to_num(-1.0), x.cpu().to(fmt.dtype).float().nan_to_num(-1.0))
    assert torch.equal(out.isnan(), x.isnan())
