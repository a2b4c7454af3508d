"""The host side of the kernels: plan a call (choose tiles, describe buffers and launches), run the plan, repeat it.

Exports what repeats a plan, how GEMMs run, and the Triton twins of the ops (:data:`LAUNCHES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tritonfp8.launch import casts, chains, exact, figures, gemms, gradients, optimizer, rows, shards
from tritonfp8.launch.casts import MOST_WEIGHTS
from tritonfp8.launch.chains import may_chain
from tritonfp8.launch.executor import generation, repeat_of
from tritonfp8.launch.gemms import grouped_product_kind, has_tma_layout, product_kind
from tritonfp8.launch.launcher import Plannable, flat
from tritonfp8.launch.plan import ALIGNMENT

LAUNCHES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            casts.amax,
            casts.dequantize,
            casts.expand_codes,
            casts.measure_rows,
            casts.quantize,
            casts.quantize_both,
            casts.quantize_into,
            casts.quantize_both_sum,
            casts.quantize_weights,
            casts.quantize_with_amax,
            casts.transpose,
            casts.transpose_codes,
            casts.transpose_group_codes,
            chains.chain,
            exact.exact_attention,
            exact.exact_attention_backward,
            exact.gated,
            exact.gated_backward,
            exact.matmul,
            exact.rms_norm,
            exact.rms_norm_backward,
            exact.row_logsumexp,
            figures.operand_figures,
            gemms.packed_grouped_matmul,
            gemms.packed_matmul,
            gemms.scaled_matmul,
            gradients.quantize_parts,
            gradients.sum_in_pairs,
            rows.dots_of_rows,
            gemms.grouped_matmul,
            casts.grouped_sum,
            casts.quantize_groups,
            casts.quantize_groups_both,
            casts.quantize_matrices,
            casts.quantize_matrices_with_amax,
            gemms.scaled_grouped_matmul,
            rows.sum_of_rows,
            rows.swiglu,
            rows.swiglu_backward,
            casts.swiglu_backward_amax,
            optimizer.adamw,
            optimizer.adamw_amax,
            optimizer.quantize_at_random,
            shards.amax_of_shards,
            shards.quantize_shards,
        )
    }
)
"""The function of each op that launches kernels, by the name of the op."""
IN_PLACE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"swiglu_backward": rows.swiglu_backward_, "swiglu_backward_amax": casts.swiglu_backward_amax_}
)
"""Functions that write the first result of an op over one of its arguments, by the name of the op."""
