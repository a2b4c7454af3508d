"""Number formats: the one place where a low-precision element or scale format is defined.

A format is a row of a table. All other code takes its numbers (``qmax``, ``emax``, the torch dtype) from here: a new
format is a new row and no new branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Format:
    """A floating-point element format (OCP "8-bit Floating Point Specification", rev. 1.0; 4-bit ones: OCP MX, v1.0).

    Attributes:
        name: the name a :class:`~tritonfp8.QuantSpec` and the ops use.
        dtype: the torch storage dtype: of a code, or of the byte of several.
        qmax: the largest finite magnitude.
        emax: exponent of ``qmax``, i.e. ``floor(log2(qmax))``.
        qmax_mantissa: the 23 fraction bits of ``qmax`` as an IEEE float32. With ``emax`` it decides in integer
            arithmetic whether a scale is rounded up.
        mantissa_bits: stored fraction bits.
        emin: exponent of the smallest normal number; subnormal numbers share its spacing.
        nan: the code stored for NaN. 8-bit formats have several; we store one, so that bytes can be compared. A format
            without one stores a zero, and the scale of its block is NaN.
        codes_a_byte: how many codes a byte holds, along the last dim. The code with the even index has the low bits.
    """

    name: str
    dtype: torch.dtype
    qmax: float
    emax: int
    qmax_mantissa: int
    mantissa_bits: int
    emin: int
    nan: int
    codes_a_byte: int = 1

    @property
    def sign_bit(self) -> int:
        """The place of the sign in a code, its highest bit."""
        return 8 // self.codes_a_byte - 1


@dataclass(frozen=True)
class ScaleFormat:
    """The storage format of the scale of a block.

    Attributes:
        name: the name a :class:`~tritonfp8.QuantSpec` and the ops use.
        dtype: the torch storage dtype.
        roundings: the scale roundings that this format supports.
        exponent_only: whether a scale is one byte: an exponent biased by 127, with 255 for NaN.
    """

    name: str
    dtype: torch.dtype
    roundings: tuple[str, ...]
    exponent_only: bool


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "e4m3": Format("e4m3", torch.float8_e4m3fn, 448.0, 8, 0x600000, 3, -6, 0x7F),
        "e5m2": Format("e5m2", torch.float8_e5m2, 57344.0, 15, 0x600000, 2, -14, 0x7F),
        "e2m1": Format("e2m1", torch.uint8, 6.0, 2, 0x400000, 1, 0, 0x0, codes_a_byte=2),
    }
)
"""Element formats by name."""

BYTE_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.codes_a_byte == 1)
"""Element formats of 8 bits: GEMMs multiply them, and every cast makes them."""

SCALE_FORMATS: Mapping[str, ScaleFormat] = MappingProxyType(
    {
        "fp32": ScaleFormat("fp32", torch.float32, ("none", "pow2"), False),
        "e8m0": ScaleFormat("e8m0", torch.float8_e8m0fnu, ("pow2", "floor"), True),
    }
)
"""Formats of scales by name."""

HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that a GEMM may return and in which a linear layer may compute."""


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.stack`` that also works for 8-bit floats under autocast, which cannot promote their dtypes."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.stack(list(tensors))
    return torch.stack([x.view(torch.uint8) for x in tensors]).view(dtype)
