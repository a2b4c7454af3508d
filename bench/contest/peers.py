"""Peers of the package: torch's own GEMMs, Inductor's casts, torchao's layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import ScalingType

from tritonfp8 import Quantized

# Contenders share the code of a layer, so they share Dynamo's cache of compiled versions.
COMPILED_VERSIONS = 64
TORCHAO_RECIPES = ("rowwise", "tensorwise")


def compiled(function: Any, smoke: bool) -> Any:
    """``function`` compiled by Inductor for static shapes. A smoke test only traces it, which needs no compiler."""
    torch._dynamo.config.recompile_limit = COMPILED_VERSIONS
    return torch.compile(function, backend="eager" if smoke else "inductor", fullgraph=True, dynamic=False)


def epilogue_scaled(a: Quantized, b: Quantized, accumulation: str) -> Callable[[], torch.Tensor]:
    """``torch._scaled_mm``, tensorwise or rowwise by the operands."""
    scales = (a.scale, b.scale.t()) if a.spec.block == (1, -1) else (a.scale.view(()), b.scale.view(()))
    fast = accumulation == "fast"
    return lambda: torch._scaled_mm(
        a.qdata, b.qdata.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def block_scaled(a: Quantized, b: Quantized, accumulation: str) -> Callable[[], torch.Tensor]:
    """``F.scaled_mm`` on 1x128 x 128x128 or 1x128 x 1x128 operands; it always promotes.

    It requires dense column-major 1x128 scales, and 128x128 scales that are contiguous along K.
    """
    vector, square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    a_scale = _without_gaps(a.scale)
    b_scale, b_type = (b.scale.t(), square) if b.spec.block == (128, 128) else (_without_gaps(b.scale), vector)
    return lambda: F.scaled_mm(
        a.qdata, b.qdata.t(), a_scale, vector, b_scale, b_type, output_dtype=torch.bfloat16
    )  # fmt: skip


def _without_gaps(scale: torch.Tensor) -> torch.Tensor:
    return scale.t().contiguous().t()


def torchao_layers(model: nn.Module, recipe: str, **options: Any) -> nn.Module:
    """``model`` with its linear layers converted by torchao, in place if torchao does so.

    ``options`` are further fields of torchao's config. A layer named ``adaln_modulation`` is left out.

    Raises:
        ModuleNotFoundError: torchao is not installed.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), **options)
    if next(model.parameters()).device.type == "cpu":
        config = dataclasses.replace(config, emulate=True)
    return convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: not name.endswith("adaln_modulation")
    )
