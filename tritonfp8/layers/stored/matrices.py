"""The weights of experts that are kept as 8-bit codes and scales, and how the grouped GEMMs read them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.extensions import READERS
from tritonfp8.layers.linear import Pair
from tritonfp8.layers.moe import MatricesReader
from tritonfp8.layers.stored.base import Gathered
from tritonfp8.layers.stored.rows import row_spec
from tritonfp8.layers.stored.weight import StoredWeight
from tritonfp8.specs import BLOCKS, QuantSpec, empty_scale

aten = torch.ops.aten


class StoredMatrices(StoredWeight):
    """A frozen weight ``[E, N, K]`` of experts that has codes and scales, and no copy in high precision.

    Each matrix has scales of its own. All else is as of :class:`StoredWeight`.

    Args:
        qdata: 8-bit ``[E, N, K]``, contiguous.
        scale: its scales, as a :class:`~tritonfp8.quantized.QuantizedGroups` in ``"matrices"`` has them.
        spec: of both; its scales are powers of two.
        dtype: bfloat16 or float32.
        is_transposed: whether this tensor is ``[E, K, N]``, as the weights of gpt-oss. The codes stay ``[E, N, K]``.
    """

    _cast: Callable[..., tuple[Tensor, Tensor]] = staticmethod(ops.quantize_matrices)

    def _of_codes(self, dtype: torch.dtype) -> Tensor:
        experts, n, k = self._qdata.shape
        rows, scale, spec = self.spec.block[0], self._scale, row_spec(self.spec)
        # As one matrix, whose rows have the scales of their blocks: one launch in place of one for each expert.
        if rows != 1:
            scale = scale.expand(-1, n, -1) if rows == -1 else scale.repeat_interleave(rows, 1)[:, :n]
        of_rows = scale.reshape(experts * n, scale.shape[2])
        if BLOCKS[spec.block].rows_contiguous:
            of_rows = empty_scale((experts * n, k), spec.block, spec.scale_format, scale.device).copy_(of_rows)
        flat = ops.dequantize(self._qdata.view(experts * n, k), of_rows, *spec.args, dtype)
        return flat.view(experts, n, k)

    def as_bytes(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as uint8, experts first, not copied: what ranks send to each other."""
        return self._qdata.detach().view(torch.uint8), self._scale.detach().view(torch.uint8)

    def of_bytes(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of bytes as :meth:`as_bytes` returns them, of any number of experts."""
        found = []
        for x, like in ((codes, self._qdata), (scales, self._scale)):
            shape = like.view(torch.uint8).shape[1:]
            found.append(x.view(x.numel() // math.prod(shape), *shape).view(like.dtype))
        return found[0], found[1]

    def as_shard(self) -> MatricesShard:
        """The weight in the form that can be sharded; nothing is copied."""
        return MatricesShard(*self._both(), self.spec, self.dtype, self.is_transposed)


class MatricesShard(StoredMatrices, Gathered):
    """Experts of a weight that is stored in 8 bits: the shard of a rank, or what ranks gathered.

    Experts are whole and have scales of their own, so FSDP2 shards and gathers codes and scales as bytes; a rank may
    have no expert.

    Its arguments are those of :class:`StoredMatrices`, for these experts.
    """

    total: int | None = None
    is_part = True

    def _with(self, qdata: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> MatricesShard:
        found = MatricesShard(qdata, scale, self.spec, dtype or self.dtype, self.is_transposed)
        found.total = self.total
        return found

    def _experts(self, start: int, end: int) -> MatricesShard:
        return self._with(self._qdata[start:end], self._scale[start:end])

    def _empty(self, experts: int, device: Any, total: int | None) -> MatricesShard:
        """So many experts that hold zeros."""
        codes, scales = (x.new_zeros((experts, *x.shape[1:]), device=device) for x in self.as_bytes())
        found = self._with(*self.of_bytes(codes, scales))
        found.total = total
        return found

    def _of_gathered(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> MatricesShard:
        return MatricesShard(*self.of_bytes(codes, scales), self.spec, dtype, self.is_transposed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, MatricesShard) and func in _SHARD_OPERATIONS:
            return _SHARD_OPERATIONS[func](first, *args[1:], **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _new_experts(x: MatricesShard, size: Any, device: Any = None, **options: Any) -> Tensor:
    """Memory for a shard, as FSDP2 makes it."""
    if tuple(size[1:]) != tuple(x.shape[1:]):
        return torch.zeros(size, dtype=x.dtype, device=device or x.device)
    return x._empty(size[0], device or x.device, x.shape[0] if x.total is None else x.total)


def _slice(x: MatricesShard, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Tensor:
    first, last, by = slice(start, end, step).indices(x.shape[dim])
    if by == 1 and (dim == 0 or last - first == x.shape[dim]):
        return x._experts(first, max(first, last)) if dim == 0 else x._with(*x._both())
    raise NotImplementedError(
        "a weight of experts that is stored in 8 bits and sharded can be cut between experts only"
    )


def _split(x: MatricesShard, size: int, dim: int = 0) -> list[MatricesShard]:
    if dim != 0:
        raise NotImplementedError(
            "weights of experts that are stored in 8 bits are sharded over experts only, by dim 0"
        )
    return [x._experts(at, at + size) for at in range(0, max(x.shape[0], 1), max(size, 1))]


def _viewed(x: MatricesShard, size: Any, *others: Any) -> MatricesShard:
    """A view of the same shape. FSDP2 also keeps a flat one, which it reads for plain tensors only."""
    if tuple(size) in (tuple(x.shape), (-1,)):
        return x._with(*x._both())
    raise NotImplementedError(f"a view {tuple(size)} of {x} does not work on a weight that is stored in 8 bits")


def _first(x: MatricesShard, size: Any, *others: Any) -> MatricesShard:
    """The first experts, which FSDP2 cuts out of what it gathered."""
    return x._experts(0, size[0]) if tuple(size[1:]) == tuple(x.shape[1:]) else _viewed(x, size)


def _pinned(x: MatricesShard, *others: Any) -> MatricesShard:
    return x._with(x._qdata.pin_memory(), x._scale.pin_memory())


_SHARD_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten._pin_memory.default: _pinned,
    aten.as_strided.default: _first,
    aten.empty_like.default: lambda x, device=None, **options: x._empty(x.shape[0], device or x.device, x.total),
    aten.is_pinned.default: lambda x, *others: x._qdata.is_pinned(),
    aten.new_empty.default: _new_experts,
    aten.new_zeros.default: _new_experts,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.view.default: _viewed,
}


@dataclass(frozen=True)
class _StoredReader(MatricesReader):
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


READERS.update(dict.fromkeys((StoredMatrices, MatricesShard), _StoredReader()))
