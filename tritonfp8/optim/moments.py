"""The moments of AdamW: in float32, bfloat16, or e4m3 with a power-of-two scale for each 128 elements of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.stored import exponents_of, scales_of
from tritonfp8.specs import BLOCK_1X128, QuantSpec, scale_shape
from tritonfp8.specs.formats import FORMATS

SPEC = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
KINDS = ("fp32", "bf16", "fp8")
DTYPES: Mapping[str, torch.dtype] = dict(
    zip(KINDS, (torch.float32, torch.bfloat16, FORMATS[SPEC.format].dtype), strict=True)
)
NAMES = {"exp_avg": False, "exp_avg_sq": True}
"""The moments, and whether 8 bits keep the square root of one: squares have twice the range in octaves."""
ONE = 127
"""The exponent of a scale of 1."""
_LEAST = 1
"""The code of the smallest positive number."""


def scale_name(name: str) -> str:
    """The key of the scales of a moment."""
    return f"{name}_scale"


def zeros(size: Sequence[int], device: torch.device, kind: str) -> dict[str, Tensor]:
    """Moments of value zero for a weight ``[n, k]``, as :func:`tritonfp8.reference.adamw` takes them."""
    found = {}
    for name in NAMES:
        found[name] = torch.zeros(size, dtype=DTYPES[kind], device=device)
        if kind == "fp8":
            shape = scale_shape(size, SPEC.block)
            found[scale_name(name)] = torch.full(shape, ONE, dtype=torch.uint8, device=device)
    return found


def values(state: Mapping[str, Any], name: str) -> Tensor:
    """The float32 values of a moment."""
    stored, exponents = state[name], state.get(scale_name(name))
    if exponents is None:
        return stored.float()
    found = ops.dequantize(stored, scales_of(exponents), *SPEC.args, torch.float32)
    return found.square() if NAMES[name] else found


def stored(x: Tensor, name: str, kind: str) -> dict[str, Tensor]:
    """The values ``[n, k]`` of a moment, rounded to nearest: the inverse of :func:`values`, exact for its results."""
    if kind != "fp8":
        return {name: x.to(DTYPES[kind]).clone(memory_format=torch.contiguous_format)}
    # In float64: on some CPUs a float32 root is not the nearest one, and the root of a square would not be exact.
    x = x.double().sqrt().float() if NAMES[name] else x.float()
    qdata, scale = ops.quantize(x.contiguous(), *SPEC.args)
    if NAMES[name]:
        codes = qdata.view(torch.uint8)
        # A zero in the denominator of the step would make it infinite.
        codes.copy_(torch.where((x > 0) & (codes == 0), _LEAST, codes))
    return {name: qdata, scale_name(name): exponents_of(scale.contiguous())}
