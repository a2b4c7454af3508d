"""A weight that is kept as 8-bit codes and scales, and how the GEMMs of a layer read it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import torch_private
from tritonfp8.layers import refuse_codes
from tritonfp8.layers.stored.base import DTYPES, CodesTensor, StoredTensor
from tritonfp8.layers.stored.direct import OVERWRITES, STORED, TRAINED, counted, on_values, refuse_merging
from tritonfp8.layers.stored.rows import rows_of
from tritonfp8.layers.stored.views import view_of
from tritonfp8.specs import EXPANDED, QuantSpec, expands_to, spec_of
from tritonfp8.specs.checks import require
from tritonfp8.specs.quantized import Quantized

aten = torch.ops.aten
_ROW_SCALE = "_row_scale"


class StoredWeight(StoredTensor):
    """A weight ``[N, K]`` that has codes and scales, and no copy in high precision.

    Its dtype is the one that the layer computes in. Its values are ``code * scale``: scales are powers of two, so the
    values are exact in bfloat16 and float32. One copy serves all: ``output`` reads the codes as they are. For
    ``grad_input`` the transposed operand is quantized from the values, in the pass that reads it.

    Operations that read it use its values, in a tensor that is freed afterwards, and carry gradients to it. ``clone``,
    ``detach`` and ``to`` give another stored weight; views such as ``view(-1)`` read and write through. A write that
    replaces values (a copy, ``load_state_dict``, ``fill_``) rounds to nearest. Any other write (``lerp_``, ``mul_``)
    rounds up or down at random, so that the expected change is the exact one, also in the step of an optimizer of
    torch. These raise NotImplementedError: such a write to a frozen weight, and any by which peft merges adapters
    into it, as they would be taken out again with other values; and what would return views of several parts.

    Args:
        qdata: 8-bit ``[N, K]``, or ``[N, K / 2]`` of two codes a byte, contiguous.
        scale: its scales, as :class:`~tritonfp8.Quantized` has them.
        spec: of both; its scales are powers of two.
        dtype: bfloat16 or float32.
        is_transposed: whether this tensor is ``[K, N]``, as the weight of a ``Conv1D``. The codes stay ``[N, K]``.
        row_scale: float32 ``[N, 1]``, the scales that :func:`~tritonfp8.reference.expand_codes` gives rows of codes of
            fewer than 8 bits. Default: they are found. Each write of codes writes them too, in place, so that a CUDA
            graph reads the scales of the codes that it reads.
    """

    inner_names = ("_qdata", "_scale")
    attribute_names = ("spec", "dtype", "is_transposed")
    _scale: Tensor

    @staticmethod
    def __new__(
        cls,
        qdata: Tensor,
        scale: Tensor,
        spec: QuantSpec,
        dtype: torch.dtype,
        is_transposed: bool = False,
        row_scale: Tensor | None = None,
    ) -> StoredWeight:
        """A tensor of this type, without data of its own."""
        shape = spec.shape_of(qdata.shape)
        if is_transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device)

    def __init__(
        self,
        qdata: Tensor,
        scale: Tensor,
        spec: QuantSpec,
        dtype: torch.dtype,
        is_transposed: bool = False,
        row_scale: Tensor | None = None,
    ) -> None:
        self._qdata, self._scale, self.spec, self.is_transposed = qdata, scale, spec, is_transposed
        # The codes of a part are memory that FSDP2 fills again, and nobody is told.
        if row_scale is None and not self.is_part and expands_to(spec, EXPANDED):
            row_scale = ops.measure_rows(qdata, scale, *spec.args)[0]
        self._row_scale = row_scale

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names, context = super().__tensor_flatten__()
        return names if self.is_part or self._row_scale is None else [*names, _ROW_SCALE], context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Self:
        spec, dtype, is_transposed = context
        return cls(inner["_qdata"], inner["_scale"], spec, dtype, is_transposed, inner.get(_ROW_SCALE))

    @property
    def data(self) -> Tensor:
        """The data of any tensor; values that are assigned are rounded."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        # torch would take the memory of the other tensor, which this one does not read.
        if values.shape != self.shape:
            raise ValueError(f"the data of a stored weight {tuple(self.shape)} must keep its shape; got {values.shape}")
        refuse_merging(self)
        with torch.no_grad(), counted(self):
            self._fill(values)

    @property
    def quantized(self) -> Quantized:
        """The codes ``[N, K]`` and scales, not copied."""
        return Quantized(self._qdata, self._scale, self.spec)

    def _plain(self, dtype: torch.dtype) -> Tensor:
        found = self._of_codes(dtype)
        return found.mT if self.is_transposed else found

    def _of_codes(self, dtype: torch.dtype) -> Tensor:
        """The values in the order of the codes."""
        return ops.dequantize(self._qdata, self._scale, *self.spec.args, dtype)

    def of_values(self, values: Tensor) -> Self:
        """See :class:`CodesTensor`."""
        return self.of(values.to(self.dtype), self.spec, self.is_transposed)

    @classmethod
    def of(cls, weight: Tensor, spec: QuantSpec, is_transposed: bool = False) -> Self:
        """See :func:`store`."""
        refuse_codes(STORED, weight)
        require("the dtype of a stored weight", weight.dtype, DTYPES)
        matrix = weight.detach().mT if is_transposed else weight.detach()
        qdata, scale = cls._cast(matrix, *spec.args)
        return cls(qdata, scale, spec, weight.dtype, is_transposed)

    def packed_operand(self) -> list[Tensor]:
        """Codes of fewer than 8 bits, their scales, and the scales of expanded rows; of 8 bits, the codes only."""
        # An exported program that has the op cannot be read again if a list is empty.
        return [self._qdata] if self._row_scale is None else [*self._both(), self._row_scale]

    def _with(self, qdata: Tensor, scales: Tensor, dtype: torch.dtype | None = None, **others: Any) -> Self:
        if self.requires_grad or hasattr(self._qdata, TRAINED):
            for codes in (qdata, self._qdata):
                # copy.deepcopy replaces the attributes of a clone by copies of ours.
                setattr(codes, TRAINED, True)
        return super()._with(qdata, scales, dtype, **others)

    def _as_operand(self) -> tuple[Tensor, Tensor]:
        return self._both()

    def _turned(self) -> Self:
        """``Tensor.mT``: the same codes."""
        return type(self)(*self._both(), self.spec, self.dtype, not self.is_transposed, self._row_scale)

    def _is_turned_by(self, func: Any, dims: Any) -> bool:
        if func is aten.t.default:
            return True
        return func is aten.transpose.int and {d % self.ndim for d in dims} == {self.ndim - 2, self.ndim - 1}

    def _fill(self, source: Any) -> Self:
        """Take the values of ``source``, of this shape or a number: its codes, or the result of quantizing it."""
        if isinstance(source, StoredWeight) and (source.spec, source.is_transposed) == (self.spec, self.is_transposed):
            self._take(source._both())
            return self
        values = source.plain_values() if isinstance(source, StoredWeight) else source
        if not isinstance(values, Tensor):
            values = torch.tensor(values, dtype=self.dtype)
        refuse_codes(STORED, values)
        values = values.to(self.device).expand(self.shape)
        values = values.mT if self.is_transposed else values
        rows = self.spec.block[0]
        # Scales of all rows, and blocks that cross two matrices, are found for each matrix by itself.
        if rows == -1 or (values.ndim == 3 and values.shape[1] % rows):
            self._take(self._cast(values, *self.spec.args))
        else:
            ops.quantize_into(*self._both(), values, *self.spec.args)
            self._find_row_scale()
        return self

    @torch.no_grad()
    def overwrite(self, values: Tensor) -> None:
        """Quantize values of this shape into the codes that there are: a copy of values that no count compares."""
        self._fill(values)

    def _take(self, codes: tuple[Tensor, Tensor]) -> None:
        for target, x in zip(self._both(), codes, strict=True):
            target.copy_(x)
        self._find_row_scale()

    def as_shard(self) -> Tensor:
        """The weight in the form that can be sharded; its codes are not copied.

        Raises:
            NotImplementedError: it is the weight of a ``Conv1D``.
        """
        if self.is_transposed:
            raise NotImplementedError(
                f"the weight {tuple(self.shape)} of a Conv1D cannot be sharded while it is stored in 8 bits: its codes "
                "lie in the order of its columns. Leave the Conv1D layers out of convert by filter="
            )
        found = rows_of(*self._both(), self.spec, self.dtype)
        found._row_scale = self._row_scale
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, StoredWeight):
            same = func in (aten.as_strided.default, aten.view.default) and tuple(args[1]) == tuple(first.shape)
            if same or func in (aten.detach.default, aten.alias.default):
                return first._same()
            if first._is_turned_by(func, args[1:]):
                return first._turned()
            if func is aten.clone.default:
                return first._mapped(torch.clone)
            if func is aten._to_copy.default:
                return first._to(**options)
            if func is aten.copy_.default:
                if not isinstance(args[1], CodesTensor) and torch_private.is_called_by(
                    torch_private.AVERAGES, inspect.currentframe()
                ):
                    raise NotImplementedError(
                        "AveragedModel copies each average into the weight, and rounded to 8 bits most of them are the "
                        "old one: use AveragedModel(tritonfp8.optim.float32_copy(model)), or a multi_avg_fn such as "
                        "get_ema_multi_avg_fn, which writes in place"
                    )
                refuse_merging(first)
                with counted(first):
                    return first._fill(args[1])
            if func is aten.empty_like.default and first.is_meta:
                # Module.to_empty: other callers want memory of their own.
                qdata, scale = (torch.zeros_like(x, device=options.get("device")) for x in first._both())
                return first._with(qdata, scale)
            if func in OVERWRITES:
                values = torch.empty(first.shape, dtype=first.dtype, device=first.device)
                with counted(first):
                    return first._fill(func(values, *args[1:], **options))
            if func in _FACTORIES:
                given = {name: options[name] for name in ("dtype", "device") if options.get(name) is not None}
                return _FACTORIES[func](
                    first.shape, *args[1:], **{"dtype": first.dtype, "device": first.device, **given}
                )
            if func in (ops.weight_operand, ops.matrices_operand):
                return first.read_operand(spec_of(args[1]), args[2])
            if func is ops.packed_operand:
                return first.packed_operand()
            if func in _SHARDING:
                # FSDP2 and DTensor make shards by these.
                return func(first.as_shard(), *args[1:], **options)
            # DistributedDataParallel flattens the weights of rank 0 to send them, and copies them into the others.
            if (view := view_of(first, func, args[1:], options)) is not None:
                return view
        if func is aten.eye.m_out and isinstance(out := options["out"], StoredWeight):
            # torch.nn.init.eye_ writes by out=.
            return out._fill(func(*args, out=torch.empty(out.shape, dtype=out.dtype, device=out.device)))
        return on_values(func, args, options)


_SHARDING = {aten.new_empty.default, aten.new_zeros.default, aten.split.Tensor}
_FACTORIES: dict[Any, Callable[..., Tensor]] = {
    aten.empty_like.default: torch.empty,
    aten.full_like.default: torch.full,
    aten.ones_like.default: torch.ones,
    aten.zeros_like.default: torch.zeros,
}


def store(weight: Tensor, spec: QuantSpec, is_transposed: bool = False) -> StoredWeight:
    """A stored weight of the values of ``weight [N, K]``, or ``[K, N]`` if it is transposed, rounded to ``spec``.

    Raises:
        ValueError: ``weight`` is neither bfloat16 nor float32; it may have codes.
    """
    return StoredWeight.of(weight, spec, is_transposed)
