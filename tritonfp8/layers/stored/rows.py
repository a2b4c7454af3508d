"""The part of a stored weight that lies on one rank: each row of codes has the exponents of its own scales."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import torch_private
from tritonfp8.formats import FORMATS
from tritonfp8.layers.stored.base import CodesTensor, Gathered
from tritonfp8.layers.stored.direct import on_values
from tritonfp8.layers.stored.exponents import ONE, exponents_of, scale_of, scales_of
from tritonfp8.specs import QuantSpec, scale_shape, spec_of

aten = torch.ops.aten
_Meta = tuple[QuantSpec, torch.dtype, int, int | None]


class StoredRows(CodesTensor, Gathered):
    """Rows ``[n, K]`` of a weight that is stored in 8 bits: the shard of a rank, or what ranks gathered.

    A scale that serves several rows is repeated for each of them, as its exponent in one byte. So rows can be cut
    anywhere: FSDP2 shards and gathers codes and exponents as bytes, uneven and empty shards too, and no rank needs the
    scales of another one. The GEMMs read scales in the shape of the spec, picked from the exponents.

    It supports what FSDP2, tensor parallelism and checkpoints do with a shard. Other operations read its values. Only
    an optimizer may write to them: it knows which ranks share a scale. Any other write raises NotImplementedError.

    Args:
        qdata: 8-bit floats ``[n, K]``.
        exponents: uint8 ``[n, ceil(K / cols)]``, those of the scales; :data:`ONE` is 1.
        spec: of the whole weight; its scales are powers of two.
        dtype: bfloat16 or float32, in which the layer computes.
        cols: the columns that one exponent serves; -1 for all.
        total: if this is a shard of FSDP2, the number of rows of all shards.
    """

    _qdata: Tensor
    _exponents: Tensor
    spec: QuantSpec
    cols: int
    total: int | None
    is_part = True

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
        return Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)

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

    def __tensor_flatten__(self) -> tuple[list[str], _Meta]:
        return ["_qdata", "_exponents"], (self.spec, self.dtype, self.cols, self.total)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> StoredRows:
        return cls(inner["_qdata"], inner["_exponents"], *context)

    def _stable_hash_for_caching(self) -> str:
        """What a graph on disk depends on; the same in every process."""
        inner = [(x.dtype, tuple(x.shape), x.stride(), x.device) for x in self._both()]
        return repr((self.spec.args, self.dtype, self.cols, self.total, inner))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredRows({tuple(self.shape)}, {self.dtype}, {self.spec})"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and exponents."""
        return int(self._qdata.nbytes + self._exponents.nbytes)

    def data_ptr(self) -> int:
        """Address of the codes; see :class:`~tritonfp8.layers.stored.StoredWeight`."""
        return torch_private.address_of(self._qdata, inspect.currentframe())

    def _plain(self, dtype: torch.dtype) -> Tensor:
        if self.cols == self.spec.block[1]:
            spec = row_spec(self.spec)
            scale = scale_of(self._exponents, self._qdata.shape, spec)
            return ops.dequantize(self._qdata, scale, *spec.args, dtype)
        scale = scales_of(self._exponents).repeat_interleave(self.cols, 1)[:, : self.shape[1]]
        return (self._qdata.float() * scale).to(dtype)

    def _operand(self, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of these rows, or of their transpose, quantized by ``spec``."""
        if spec == self.spec and (spec.block[0] == spec.block[1] or not transposed):
            scale = scale_of(self._grid(), self._qdata.shape, spec)
            return (self._qdata.t().contiguous(), scale.t().contiguous()) if transposed else (self._qdata, scale)
        if not transposed:
            raise_other_spec(self.spec, spec)
        qdata, scale = ops.quantize(self.plain_values(), *spec.args, True)
        return qdata, scale

    def _grid(self) -> Tensor:
        """The exponents of the spec's blocks: of each block those of its first row and column."""
        rows, cols = self.spec.block
        found = self._exponents[:1] if rows == -1 else self._exponents[::rows]
        return found if cols in (-1, self.cols) else found[:, :: cols // self.cols]

    def _both(self) -> tuple[Tensor, Tensor]:
        return self._qdata, self._exponents

    def _with(self, qdata: Tensor, exponents: Tensor, dtype: torch.dtype | None = None) -> StoredRows:
        return StoredRows(qdata, exponents, self.spec, dtype or self.dtype, self.cols, self.total)

    def _like(self, size: Any, device: Any, total: int | None) -> StoredRows:
        """Rows of this size that hold zeros."""
        n, k = size
        shape = n, scale_shape((n, k), (1, self.cols))[1]
        qdata = torch.zeros(n, k, dtype=self._qdata.dtype, device=device)
        exponents = torch.full(shape, ONE, dtype=torch.uint8, device=device)
        return StoredRows(qdata, exponents, self.spec, self.dtype, self.cols, total)

    def _sliced(self, dim: int, start: int, end: int) -> StoredRows:
        """Rows or columns from ``start`` to ``end``."""
        if dim == 0:
            return self._with(self._qdata[start:end], self._exponents[start:end])
        # Copied: this tensor calls itself contiguous, and collectives take its bytes as they lie.
        qdata = self._qdata[:, start:end].contiguous()
        if self.cols == -1:
            return self._with(qdata, self._exponents)
        if start % self.cols:
            return self._finer(math.gcd(self.cols, start))._sliced(dim, start, end)
        return self._with(qdata, self._exponents[:, start // self.cols : -(-end // self.cols)].contiguous())

    def _finer(self, cols: int) -> StoredRows:
        """The same rows with an exponent for every ``cols`` columns."""
        if cols == self.cols:
            return self
        exponents = self._exponents.repeat_interleave(self.cols // cols, 1)[:, : -(-self.shape[1] // cols)]
        return StoredRows(self._qdata, exponents, self.spec, self.dtype, cols, self.total)

    def _split(self, size: int, dim: int = 0) -> list[StoredRows]:
        n, dim = self.shape[dim], dim % 2
        # All parts alike: ranks send them to each other.
        source = self if dim == 0 or self.cols == -1 else self._finer(math.gcd(self.cols, size))
        return [source._sliced(dim, at, min(at + size, n)) for at in range(0, max(n, 1), max(size, 1))]

    def _padded(self, pad: list[int]) -> StoredRows:
        """``F.pad`` by zeros. Those before the first row or column get its scales, so that blocks may begin there."""
        left, right, above, below = [*pad, 0, 0][:4]
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
                "values cannot be copied into a shard of a weight that is stored in 8 bits: its scales are those of "
                "the whole weight. Use load_state_dict of the model, or reset_parameters of the layer"
            )
        assert isinstance(source, StoredRows)
        cols = self.cols if self.cols == source.cols else math.gcd(self.cols, source.cols)
        ours, theirs = self._finer(cols), source._finer(cols)
        if ours is not self:
            self._exponents, self.cols = ours._exponents, cols
        self._qdata.copy_(theirs._qdata)
        self._exponents.copy_(theirs._exponents)
        return self

    def as_bytes(self) -> tuple[Tensor, Tensor]:
        """Codes ``[n, K]`` and exponents as uint8, not copied: what ranks send to each other."""
        return self._qdata.detach().view(torch.uint8), self._exponents.detach()

    def _of_gathered(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> StoredRows:
        qdata = codes.view(-1, self.shape[1]).view(self._qdata.dtype)
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


def raise_other_spec(stored: QuantSpec, wanted: QuantSpec) -> None:
    """Raise ValueError: a recipe reads other codes than the stored ones."""
    raise ValueError(
        f"the weight is stored as {stored}, and its recipe reads {wanted}: swap to a recipe with the same weights, or "
        "convert the model again from high precision"
    )


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


def _viewed(rows: StoredRows, size: Any, *others: Any) -> StoredRows:
    """A view of the same shape. FSDP2 also keeps a flat one, which it reads for plain tensors only."""
    if tuple(size) in (tuple(rows.shape), (-1,)):
        return rows._with(*rows._both())
    raise NotImplementedError(f"a view {tuple(size)} of {rows} does not work on a weight that is stored in 8 bits")


def _strided(rows: StoredRows, size: Any, stride: Any, *others: Any) -> StoredRows:
    """The first rows, which FSDP2 cuts out of what it gathered."""
    if len(size) == 2 and size[1] == rows.shape[1] and size[0] <= rows.shape[0]:
        return rows._sliced(0, 0, size[0])
    return _viewed(rows, size)


def _slice(rows: StoredRows, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, by = slice(start, end, step).indices(rows.shape[dim])
    if by != 1:
        raise NotImplementedError(f"a slice of step {by} does not work on a weight that is stored in 8 bits")
    return rows._sliced(dim % 2, first, max(first, last))


def _new_zeros(rows: StoredRows, size: Any, device: Any = None, **options: Any) -> Any:
    """Memory for a shard, as FSDP2 makes it; for a part without elements, as DTensor does."""
    if len(size) != 2:
        return torch.zeros(size, dtype=rows.dtype, device=device or rows.device)
    total = rows.shape[0] if rows.total is None else rows.total
    return rows._like(size, device or rows.device, total if math.prod(size) else None)


def _to(rows: StoredRows, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> StoredRows:
    """``Tensor.to``: codes move, and are not cast."""
    allowed = {name: options[name] for name in ("non_blocking", "copy") if name in options}
    qdata, exponents = (x.to(device=device, **allowed) for x in rows._both())
    return rows._with(qdata, exponents, dtype)


def _empty_like(rows: StoredRows, device: Any = None, **options: Any) -> StoredRows:
    return rows._like(rows.shape, device or rows.device, rows.total)


def _full_like(rows: StoredRows, value: Any, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
    return torch.full(rows.shape, value, dtype=dtype or rows.dtype, device=device or rows.device)


def _operand(rows: StoredRows, spec: str, transposed: bool, grad_output: Tensor | None = None) -> Any:
    return rows._operand(spec_of(spec), transposed)


def _same(rows: StoredRows) -> StoredRows:
    return rows._with(*rows._both())


_OPERATIONS: dict[Any, Any] = {
    aten._pin_memory.default: lambda rows, *others: rows._with(*(x.pin_memory() for x in rows._both())),
    aten._to_copy.default: _to,
    aten.alias.default: _same,
    aten.as_strided.default: _strided,
    aten.clone.default: lambda rows, **options: rows._with(*(x.clone(**options) for x in rows._both())),
    aten.constant_pad_nd.default: lambda rows, pad, value=0: rows._padded(list(pad)),
    aten.copy_.default: lambda rows, source, *others: rows._fill(source),
    aten.detach.default: _same,
    aten.empty_like.default: _empty_like,
    aten.full_like.default: _full_like,
    aten.is_pinned.default: lambda rows, *others: rows._qdata.is_pinned(),
    aten.new_empty.default: _new_zeros,
    aten.new_zeros.default: _new_zeros,
    aten.ones_like.default: lambda rows, **options: _full_like(rows, 1, **options),
    aten.slice.Tensor: _slice,
    aten.t.default: lambda rows: rows.plain_values().t(),
    aten.transpose.int: lambda rows, *dims: rows.plain_values().transpose(*dims),
    aten.split.Tensor: lambda rows, size, dim=0: rows._split(size, dim),
    aten.view.default: _viewed,
    aten.view_as.default: lambda rows, other: _viewed(rows, other.shape),
    aten.zeros_like.default: lambda rows, **options: _full_like(rows, 0, **options),
    ops.weight_operand: _operand,
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
