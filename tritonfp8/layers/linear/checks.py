"""Checks of a linear layer's operands, and the casts that autocast makes."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8.layers.codes import refuse_codes
from tritonfp8.specs.checks import check_strided
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES

_STRIDED = torch.strided


def is_distributed(x: Tensor | None) -> bool:
    """Whether ``x`` is a DTensor; does not import ``torch.distributed``."""
    return type(x).__module__.startswith("torch.distributed")


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast on this device; None if it is off."""
    # Autocast does not know the meta device, on which callers try out shapes.
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def autocast_all(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype of autocast, as ``F.linear`` casts them; unchanged if autocast is off."""
    dtype = autocast_dtype(device)
    return list(tensors) if dtype is None else [cast_to(dtype, x) for x in tensors]


def cast_to(dtype: torch.dtype, x: Tensor | None) -> Tensor | None:
    """``x`` as autocast to ``dtype`` casts it."""
    return x if x is None or x.dtype in (torch.float64, dtype) else x.to(dtype)


def check_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless the operands, after autocast, fit together."""
    check_dtypes(input, weight, bias)
    check_shapes(input, weight, bias)


def fit(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether operands certainly pass :func:`check_linear`, at little host time."""
    dtype, device = input.dtype, input.device
    if dtype not in HIGH_PRECISION_DTYPES or weight.dtype is not dtype or weight.device != device:
        return False
    if torch.compiler.is_dynamo_compiling() or input.layout is not _STRIDED or weight.layout is not _STRIDED:
        return False
    if weight.ndim != 2 or input.ndim == 0 or input.is_nested or weight.is_nested or input.shape[-1] != weight.shape[1]:
        return False
    return bias is None or (
        bias.dtype is dtype
        and bias.device == device
        and bias.layout is _STRIDED
        and not bias.is_nested
        and bias.shape == weight.shape[:1]
    )


def check_dtypes(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless all are dense, on one device, and of one dtype that layers compute in."""
    dtype, device = input.dtype, input.device
    fits = weight.dtype is dtype and weight.device == device and dtype in HIGH_PRECISION_DTYPES
    fits = fits and (bias is None or (bias.dtype is dtype and bias.device == device))
    if fits and torch.compiler.is_dynamo_compiling():
        return
    for name, x in (("input", input), ("weight", weight), ("bias", bias)):
        if x is None:
            continue
        check_strided(name, x)
        if x.device != input.device:
            raise ValueError(
                f"linear needs input, weight and bias on one device; got {name} on {x.device} with input on "
                f"{input.device}. Move one."
            )
        refuse_codes(name, x)
        if x.dtype not in HIGH_PRECISION_DTYPES or x.dtype != input.dtype:
            raise TypeError(
                f"linear needs input, weight and bias of one dtype among bfloat16, float16 and float32; got {name} of "
                f"{x.dtype} with input of {input.dtype}. Cast one, or use torch.autocast."
            )


def check_shapes(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless the shapes fit a linear layer."""
    if weight.ndim != 2 or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear needs input [..., K] and weight [N, K]; got {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must have shape ({weight.shape[0]},); got {tuple(bias.shape)}")
