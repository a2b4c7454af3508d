"""The host side of the kernels: plan a call (choose tiles, describe buffers and launches), run the plan, repeat it.

Exports what repeats a plan, how GEMMs run, and the Triton twins of the ops (:data:`LAUNCHES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tritonfp8.launch import cast, casts, figures, matmul, moe, optimizer, shards
from tritonfp8.launch.casts import MOST_WEIGHTS
from tritonfp8.launch.executor import generation, repeat_of
from tritonfp8.launch.launcher import Plannable
from tritonfp8.launch.matmul import has_tma_layout, product_kind
from tritonfp8.launch.moe import grouped_product_kind
from tritonfp8.launch.plan import ALIGNMENT

LAUNCHES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            cast.amax,
            cast.dequantize,
            cast.quantize,
            cast.quantize_both,
            casts.quantize_both_sum,
            casts.quantize_weights,
            casts.quantize_with_amax,
            casts.transpose,
            figures.operand_figures,
            matmul.scaled_matmul,
            moe.dots_of_rows,
            moe.grouped_matmul,
            moe.grouped_sum,
            moe.quantize_groups,
            moe.quantize_groups_both,
            moe.quantize_matrices,
            moe.quantize_matrices_with_amax,
            moe.scaled_grouped_matmul,
            moe.sum_of_rows,
            moe.swiglu,
            moe.swiglu_backward,
            moe.swiglu_backward_amax,
            optimizer.adamw,
            optimizer.adamw_amax,
            shards.amax_of_shards,
            shards.quantize_shards,
        )
    }
)
"""The function of each op that launches kernels, by the name of the op."""
IN_PLACE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"swiglu_backward": moe.swiglu_backward_, "swiglu_backward_amax": moe.swiglu_backward_amax_}
)
"""Functions that write the first result of an op over one of its arguments, by the name of the op."""
