"""The weights of experts that are kept as 8-bit codes and scales, and how the grouped GEMMs read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.linear import Pair
from tritonfp8.layers.moe import MatricesReader, register_matrices
from tritonfp8.layers.stored.rows import row_spec
from tritonfp8.layers.stored.weight import StoredWeight
from tritonfp8.specs import QuantSpec, empty_scale


class StoredMatrices(StoredWeight):
    """A frozen weight ``[E, N, K]`` of experts that has codes and scales, and no copy in high precision.

    Each matrix has scales of its own. All else is as of :class:`StoredWeight`; it cannot be sharded.

    Args:
        qdata: 8-bit ``[E, N, K]``, contiguous.
        scale: its scales, as a :class:`~tritonfp8.quantized.QuantizedGroups` in ``"matrices"`` has them.
        spec: of both; its scales are powers of two.
        dtype: bfloat16 or float32.
        is_transposed: whether this tensor is ``[E, K, N]``, as the weights of gpt-oss. The codes stay ``[E, N, K]``.
    """

    _cast: Callable[..., tuple[Tensor, Tensor]] = staticmethod(ops.quantize_matrices)

    def _values(self) -> Tensor:
        experts, n, k = self._qdata.shape
        rows, scale, spec = self.spec.block[0], self._scale, row_spec(self.spec)
        # As one matrix, whose rows have the scales of their blocks: one launch in place of one for each expert.
        if rows != 1:
            scale = scale.expand(-1, n, -1) if rows == -1 else scale.repeat_interleave(rows, 1)[:, :n]
        of_rows = empty_scale((experts * n, k), spec.block, spec.scale_format, scale.device)
        of_rows.copy_(scale.reshape(of_rows.shape))
        flat = ops.dequantize(self._qdata.view(experts * n, k), of_rows, *spec.args, self.dtype)
        return flat.view(experts, n, k)

    def as_rows(self) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            f"the weights of experts {tuple(self.shape)} cannot be sharded while they are stored in 8 bits. Shard the "
            "model without experts=True, which leaves its experts in high precision, or keep it on each rank"
        )


@dataclass(frozen=True)
class _Reader(MatricesReader):
    """Reads the operands of a :class:`StoredMatrices` from its codes."""

    def operand(self, weight: Any, spec: QuantSpec, transposed: bool, grad_output: Tensor | None = None) -> Pair:
        """As of :class:`MatricesReader`.

        Raises:
            ValueError: the weight is stored for another recipe.
        """
        if torch.compiler.is_compiling():
            # A graph does not look into subclasses. This op dispatches to _operand when the graph is made.
            qdata, scale = ops.matrices_operand(weight.detach(), *spec.args, transposed, grad_output)
            return qdata, scale
        found: Pair = weight._operand(spec, transposed)
        return found


register_matrices(StoredMatrices, _Reader())
