"""The weights of experts that are kept as 8-bit codes and scales, and how the grouped GEMMs read them."""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.extensions import SOURCES
from tritonfp8.layers.linear import CodesSource, PackedSource
from tritonfp8.layers.stored.rows import StoredRows, row_spec
from tritonfp8.layers.stored.shard import OF_SHARDS, Shard
from tritonfp8.layers.stored.weight import StoredWeight
from tritonfp8.specs import BLOCKS, SPECS, empty_scale
from tritonfp8.specs.formats import BYTE_FORMATS

aten = torch.ops.aten


class StoredMatrices(StoredWeight):
    """A frozen weight ``[E, N, K]`` of experts that has codes and scales, and no copy in high precision.

    Each matrix has scales of its own. All else: see :class:`StoredWeight`.

    Args:
        qdata: 8-bit ``[E, N, K]``, or ``[E, N, K / 2]`` of two codes a byte, contiguous.
        scale: its scales, as a :class:`~tritonfp8.specs.quantized.QuantizedGroups` in ``"matrices"`` has them.
        spec: of both; its scales are powers of two.
        dtype: bfloat16 or float32.
        is_transposed: whether this tensor is ``[E, K, N]``, as the weights of gpt-oss. The codes stay ``[E, N, K]``.
    """

    @staticmethod
    def _cast(values: Tensor, spec: str, transpose: bool = False) -> tuple[Tensor, Tensor]:
        if SPECS[spec].format in BYTE_FORMATS:
            return ops.quantize_matrices(values, spec, transpose)
        # Blocks of one row: matrices are one tensor of rows.
        return ops.quantize(values, spec)

    def _of_codes(self, dtype: torch.dtype) -> Tensor:
        experts, n, width = self._qdata.shape
        rows, scale, spec = self.spec.block[0], self._scale, row_spec(self.spec)
        # As one matrix, whose rows have the scales of their blocks: one launch in place of one for each expert.
        if rows != 1:
            scale = scale.expand(-1, n, -1) if rows == -1 else scale.repeat_interleave(rows, 1)[:, :n]
        of_rows = scale.reshape(experts * n, scale.shape[2])
        if BLOCKS[spec.block].rows_contiguous:
            of_rows = empty_scale((experts * n, width), spec.block, spec.scale_format, scale.device).copy_(of_rows)
        flat = ops.dequantize(self._qdata.view(experts * n, width), of_rows, *spec.args, dtype)
        return flat.view(experts, n, flat.shape[1])

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
        return MatricesShard(*self._both(), self.spec, self.dtype, self.is_transposed, self._row_scale)


class MatricesShard(Shard, StoredMatrices):
    """Experts of a weight that is stored in 8 bits: the shard of a rank, or what ranks gathered.

    Experts are whole and have scales of their own, so FSDP2 shards and gathers codes and scales as bytes; a rank may
    have no expert.

    Arguments: see :class:`StoredMatrices`, for these experts.
    """

    total: int | None = None

    def _with(self, qdata: Tensor, scales: Tensor, dtype: torch.dtype | None = None, **others: Any) -> Self:
        found = super()._with(qdata, scales, dtype, **others)
        found.total = self.total
        return found

    def _zeros(self, size: Any, device: Any, total: int | None) -> Self:
        codes, scales = (x.new_zeros((size[0], *x.shape[1:]), device=device) for x in self.as_bytes())
        found = self._with(*self.of_bytes(codes, scales))
        found.total = total
        return found

    def _cut(self, dim: int, start: int, end: int, step: int) -> Self:
        if step == 1 and dim == 0:
            return self._between(start, end)
        if step == 1 and end - start == self.shape[dim]:
            return self._same()
        raise NotImplementedError(
            "a weight of experts that is stored in 8 bits and sharded can be cut between experts only"
        )

    def _split(self, size: int, dim: int = 0) -> list[Any]:
        if dim != 0:
            raise NotImplementedError(
                "weights of experts that are stored in 8 bits are sharded over experts only, by dim 0"
            )
        return super()._split(size, dim)

    def _of_gathered(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> MatricesShard:
        return MatricesShard(*self.of_bytes(codes, scales), self.spec, dtype, self.is_transposed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, MatricesShard) and func in OF_SHARDS:
            return OF_SHARDS[func](first, *args[1:], **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


SOURCES.update(dict.fromkeys((StoredRows, MatricesShard), CodesSource()))
SOURCES.update(dict.fromkeys((StoredWeight, StoredMatrices), PackedSource()))
