"""The compile-time arguments of a kernel that follow from a spec."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.specs import QuantSpec


@functools.cache
def kernel_constants(spec: QuantSpec, block: tuple[int, int], suffix: str = "") -> Mapping[str, object]:
    """The constants of one result of a kernel, in the order in which kernels take them.

    Args:
        spec: of the result.
        block: its block in the coordinates of the input, -1 for a whole dim.
        suffix: of every name, ``"_T"`` for a transposed result.
    """
    fmt = FORMATS[spec.format]
    values = {
        "ROWS": block[0],
        "COLS": block[1],
        "QMAX": fmt.qmax,
        "EMAX": fmt.emax,
        "QMAX_MANTISSA": fmt.qmax_mantissa,
        "MANTISSA_BITS": fmt.mantissa_bits,
        "EMIN": fmt.emin,
        "E8M0": SCALE_FORMATS[spec.scale_format].exponent_only,
        "POW2": spec.scale_rounding == "pow2",
    }
    return MappingProxyType({f"{name}{suffix}": value for name, value in values.items()})
