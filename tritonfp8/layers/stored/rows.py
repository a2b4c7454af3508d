"""The part of a stored weight that lies on one rank: each row of codes has the exponents of its own scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.stored.direct import on_values
from tritonfp8.layers.stored.shard import OF_SHARDS, Shard
from tritonfp8.specs import BLOCKS, QuantSpec, empty_scale, scale_shape, spec_of
from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS, SCALE_FORMATS

aten = torch.ops.aten
ONE, NAN = 127, 255
"""Exponents of the scales 1 and NaN."""


def exponents_of(scale: Tensor) -> Tensor:
    """The exponents of scales that are powers of two, as uint8; :data:`NAN` for NaN."""
    if scale.itemsize == 1:
        return scale.view(torch.uint8)
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def scales_of(exponents: Tensor) -> Tensor:
    """The float32 scales of exponents; the inverse of :func:`exponents_of`."""
    # 2^-127, the smallest of e8m0, is subnormal in float32.
    bits = torch.where(exponents == 0, 1 << 22, exponents.to(torch.int32) << 23)
    return torch.where(exponents == NAN, torch.nan, bits.view(torch.float32))


def scale_of(grid: Tensor, shape: Sequence[int], spec: QuantSpec) -> Tensor:
    """The scales of a tensor of this shape, from their exponents."""
    wanted = scale_shape(shape, spec.block)
    if tuple(grid.shape) != wanted:
        # A part without rows has no exponent, and a tensorwise spec one scale all the same.
        grid = grid.new_full(wanted, ONE)
    if SCALE_FORMATS[spec.scale_format].exponent_only:
        return grid.contiguous().view(SCALE_FORMATS[spec.scale_format].dtype)
    if BLOCKS[spec.block].rows_contiguous:
        return empty_scale(shape, spec.block, spec.scale_format, grid.device).copy_(scales_of(grid))
    return scales_of(grid).contiguous()


class StoredRows(Shard):
    """Rows ``[n, K]`` of a weight that is stored in 8 bits: the shard of a rank, or what ranks gathered.

    A scale that serves several rows is repeated for each of them, as its exponent in one byte. So rows can be cut
    anywhere: FSDP2 shards and gathers codes and exponents as bytes, uneven and empty shards too, and no rank needs the
    scales of another one. The GEMMs read scales in the shape of the spec, picked from the exponents.

    It supports what FSDP2, tensor parallelism and checkpoints do with a shard. Other operations read its values. Only
    an optimizer may write to them: it knows which ranks share a scale. Any other write raises NotImplementedError.

    Args:
        qdata: 8-bit floats ``[n, K]``, or ``[n, K / 2]`` of two codes a byte, which can be cut between rows only.
        exponents: uint8 ``[n, ceil(K / cols)]``, of the scales; :data:`ONE` is 1.
        spec: of the whole weight; its scales are powers of two.
        dtype: bfloat16 or float32, in which the layer computes.
        cols: the columns that one exponent serves; -1 for all.
        total: if this is a shard of FSDP2, the number of rows of all shards.
    """

    inner_names = ("_qdata", "_exponents")
    attribute_names = ("spec", "dtype", "cols", "total")
    _exponents: Tensor
    cols: int

    @staticmethod
    def __new__(
        cls,
        qdata: Tensor,
        exponents: Tensor,
        spec: QuantSpec,
        dtype: torch.dtype,
        cols: int,
        total: int | None = None,
    ) -> StoredRows:
        """A tensor of this type, without data of its own."""
        return Tensor._make_wrapper_subclass(cls, spec.shape_of(qdata.shape), dtype=dtype, device=qdata.device)

    def __init__(
        self,
        qdata: Tensor,
        exponents: Tensor,
        spec: QuantSpec,
        dtype: torch.dtype,
        cols: int,
        total: int | None = None,
    ) -> None:
        self._qdata, self._exponents, self.spec, self.cols, self.total = qdata, exponents, spec, cols, total

    def _plain(self, dtype: torch.dtype) -> Tensor:
        if self.cols == self.spec.block[1]:
            spec = row_spec(self.spec)
            scale = scale_of(self._exponents, self.shape, spec)
            return ops.dequantize(self._qdata, scale, *spec.args, dtype)
        scale = scales_of(self._exponents).repeat_interleave(self.cols, 1)[:, : self.shape[1]]
        return (self._qdata.float() * scale).to(dtype)

    def _grid(self) -> Tensor:
        """The exponents of the spec's blocks, each read at the first row and column of its block."""
        rows, cols = self.spec.block
        found = self._exponents[:1] if rows == -1 else self._exponents[::rows]
        return found if cols in (-1, self.cols) else found[:, :: cols // self.cols]

    def _as_operand(self) -> tuple[Tensor, Tensor]:
        return self._qdata, scale_of(self._grid(), self.shape, self.spec)

    def _zeros(self, size: Any, device: Any, total: int | None) -> StoredRows:
        n, k = size
        shape = n, scale_shape((n, k), (1, self.cols))[1]
        qdata = torch.zeros(self.spec.qdata_shape((n, k)), dtype=self._qdata.dtype, device=device)
        exponents = torch.full(shape, ONE, dtype=torch.uint8, device=device)
        return StoredRows(qdata, exponents, self.spec, self.dtype, self.cols, total)

    def _cut(self, dim: int, start: int, end: int, step: int = 1) -> StoredRows:
        if step != 1:
            raise NotImplementedError(f"a slice of step {step} does not work on a weight that is stored in 8 bits")
        if dim == 0:
            return self._between(start, end)
        self._check_cut()
        # Copied: this tensor calls itself contiguous, and collectives take its bytes as they lie.
        qdata = self._qdata[:, start:end].contiguous()
        if self.cols == -1:
            return self._with(qdata, self._exponents)
        if start % self.cols:
            return self._finer(math.gcd(self.cols, start))._cut(dim, start, end)
        return self._with(qdata, self._exponents[:, start // self.cols : -(-end // self.cols)].contiguous())

    def _check_cut(self) -> None:
        """Raise NotImplementedError where a cut between columns would cut bytes."""
        if self.spec.format not in BYTE_FORMATS:
            raise NotImplementedError(
                f"a weight that is stored as {self.spec} can be cut between rows only, as FSDP2 does by dim 0"
            )

    def _finer(self, cols: int) -> StoredRows:
        """The same rows with an exponent for every ``cols`` columns."""
        if cols == self.cols:
            return self
        exponents = self._exponents.repeat_interleave(self.cols // cols, 1)[:, : -(-self.shape[1] // cols)]
        return StoredRows(self._qdata, exponents, self.spec, self.dtype, cols, self.total)

    def _split(self, size: int, dim: int = 0) -> list[Any]:
        # All parts alike: ranks send them to each other.
        finer = self if dim % 2 == 0 or self.cols == -1 else self._finer(math.gcd(self.cols, size))
        return super()._split(size, dim) if finer is self else finer._split(size, dim)

    def _padded(self, pad: list[int]) -> StoredRows:
        """``F.pad`` by zeros. Those before the first row or column get its scales, so that blocks may begin there."""
        left, right, above, below = [*pad, 0, 0][:4]
        if left or right:
            self._check_cut()
        qdata = F.pad(self._qdata.view(torch.uint8), (left, right, above, below)).view(self._qdata.dtype)
        exponents = self._exponents
        if self.cols != -1:
            source = self._finer(math.gcd(self.cols, left))
            if source is not self:
                return source._padded(pad)
            before, missing = left // self.cols, -(-qdata.shape[1] // self.cols) - left // self.cols
            exponents = torch.cat([exponents[:, :1].expand(-1, before), exponents], 1)
            exponents = F.pad(exponents, (0, missing + before - exponents.shape[1]), value=ONE)
        exponents = torch.cat([exponents[:1].expand(above if len(exponents) else 0, -1), exponents])
        exponents = F.pad(exponents, (0, 0, 0, qdata.shape[0] - exponents.shape[0]), value=ONE)
        return self._with(qdata, exponents)

    def _fill(self, source: Tensor) -> StoredRows:
        alike = isinstance(source, StoredRows) and source.spec == self.spec and source.shape == self.shape
        if not alike:
            raise NotImplementedError(
                "values cannot be copied into a shard of a weight that is stored in 8 bits: its scales depend on "
                "the whole weight. Use load_state_dict of the model, or reset_parameters of the layer"
            )
        assert isinstance(source, StoredRows)
        cols = self.cols if self.cols == source.cols else math.gcd(self.cols, source.cols)
        ours, theirs = self._finer(cols), source._finer(cols)
        if ours is not self:
            self._exponents, self.cols = ours._exponents, cols
        self._qdata.copy_(theirs._qdata)
        self._exponents.copy_(theirs._exponents)
        self._find_row_scale()
        return self

    def as_bytes(self) -> tuple[Tensor, Tensor]:
        """Codes ``[n, K]`` and exponents as uint8, not copied: what ranks send to each other."""
        return self._qdata.detach().view(torch.uint8), self._exponents.detach()

    def _of_gathered(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> StoredRows:
        qdata = codes.view(-1, self._qdata.shape[1]).view(self._qdata.dtype)
        return StoredRows(qdata, scales, self.spec, dtype, self.cols)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        first = args[0] if args else None
        if func in _SENT:
            return _send(func, args, options)
        if isinstance(first, StoredRows) and func in _OPERATIONS:
            return _OPERATIONS[func](first, *args[1:], **options)
        return on_values(func, args, options)


def row_spec(spec: QuantSpec) -> QuantSpec:
    """The spec of rows whose scales are repeated for each row."""
    return QuantSpec(spec.format, (1, spec.block[1]), spec.scale_format, spec.scale_rounding)


def rows_of(qdata: Tensor, scale: Tensor, spec: QuantSpec, dtype: torch.dtype) -> StoredRows:
    """A whole weight ``[N, K]`` as rows, with exponents for each; codes are not copied."""
    exponents, rows = exponents_of(scale), spec.block[0]
    if rows == -1:
        exponents = exponents.expand(qdata.shape[0], -1).contiguous()
    elif rows != 1:
        exponents = exponents.repeat_interleave(rows, 0)[: qdata.shape[0]]
    assert qdata.dtype == FORMATS[spec.format].dtype
    return StoredRows(qdata, exponents, spec, dtype, spec.block[1])


def _full_like(rows: StoredRows, value: Any, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    return torch.full(rows.shape, value, dtype=dtype or rows.dtype, device=device or rows.device)


_OPERATIONS: dict[Any, Any] = {
    **OF_SHARDS,
    aten.constant_pad_nd.default: lambda rows, pad, value=0: rows._padded(list(pad)),
    aten.copy_.default: lambda rows, source, *others: rows._fill(source),
    aten.full_like.default: _full_like,
    aten.ones_like.default: lambda rows, **options: _full_like(rows, 1, **options),
    aten.t.default: lambda rows: rows.plain_values().t(),
    aten.transpose.int: lambda rows, *dims: rows.plain_values().transpose(*dims),
    aten.view_as.default: lambda rows, other: OF_SHARDS[aten.view.default](rows, other.shape),
    aten.zeros_like.default: lambda rows, **options: _full_like(rows, 0, **options),
    ops.weight_operand: lambda rows, spec, transposed, *others: rows.read_operand(spec_of(spec), transposed),
}


def _sent_ops() -> set[Any]:
    c10d = getattr(torch.ops, "c10d", None)
    return {getattr(c10d, name).default for name in ("scatter_", "broadcast_") if hasattr(c10d, name)}


# Rank 0 sends the parts of a weight to the others when a parallel style shards a layer.
_SENT = _sent_ops()


def _bytes_of(x: Any, index: int) -> Any:
    if isinstance(x, list | tuple):
        return [_bytes_of(each, index) for each in x]
    return x._both()[index].view(torch.uint8) if hasattr(x, "_both") else x


def _send(func: Any, args: Any, options: Any) -> Any:
    """A collective on codes, then on scales; the second one's handle stands for both."""
    _, first = func(*(_bytes_of(x, 0) for x in args), **options)
    first.wait()
    _, second = func(*(_bytes_of(x, 1) for x in args), **options)
    return args[0], second
