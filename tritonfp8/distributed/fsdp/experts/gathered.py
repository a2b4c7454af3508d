"""The weights of experts that FSDP2 hands to their module after an 8-bit gather, and how the GEMMs read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.byte_layout import WeightOrientation
from tritonfp8.distributed.fsdp.experts.layout import MatricesLayout
from tritonfp8.distributed.fsdp.gathered_weight import source_of
from tritonfp8.distributed.selective_checkpointing import hidden_from_selective_checkpointing
from tritonfp8.distributed.torch_private import disable_dynamo
from tritonfp8.layers.stored import CodesTensor
from tritonfp8.ops import implement
from tritonfp8.specs import QuantSpec, spec_of

aten = torch.ops.aten


class GatheredExperts(CodesTensor):
    """A weight ``[E, N, K]`` that holds the 8-bit bytes of all ranks, for the GEMMs of one recipe.

    Its dtype is the one in which FSDP hands it to the module, and so is that of its gradient. It has no values in high
    precision: an op that needs them raises NotImplementedError. It may be transposed, and takes the cast that autocast
    makes: to the dtype that its values were rounded to before they were quantized.
    """

    _codes: Tensor
    _codes_t: Tensor | None
    _scales: Tensor
    _tag: Tensor | None

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        codes_t: Tensor | None,
        scales: Tensor,
        tag: Tensor | None,
        layout: MatricesLayout,
        dtype: torch.dtype,
        rounded: torch.dtype | None = None,
        flipped: bool = False,
    ) -> GatheredExperts:
        """A tensor of this type, without data of its own."""
        # Strides are those of a view: of square matrices only they say that it is transposed.
        sizes, strides = [layout.rows, layout.cols], [layout.cols, 1]
        order = slice(None, None, -1) if flipped else slice(None)
        return Tensor._make_wrapper_subclass(
            cls, (layout.experts, *sizes[order]), (layout.rows * layout.cols, *strides[order]), dtype=dtype,
            device=codes.device,
        )  # fmt: skip

    def __init__(
        self,
        codes: Tensor,
        codes_t: Tensor | None,
        scales: Tensor,
        tag: Tensor | None,
        layout: MatricesLayout,
        dtype: torch.dtype,
        rounded: torch.dtype | None = None,
        flipped: bool = False,
    ) -> None:
        self._tag, self._layout, self._rounded, self._flipped = tag, layout, rounded, flipped
        self.refill((codes, scales) if codes_t is None else (codes, codes_t, scales))

    def refill(self, gathered: Sequence[Tensor]) -> None:
        """Hold other bytes: codes of one orientation or of both, and scales; uint8, flat, of all ranks."""
        *codes, self._scales = gathered
        self._codes, self._codes_t = codes[0], codes[1] if len(codes) > 1 else None

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in _INNER if getattr(self, name) is not None]
        return names, (self._layout, self.dtype, self._rounded, self._flipped)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> GatheredExperts:
        return cls(*(inner.get(name) for name in _INNER), *context)  # type: ignore[arg-type]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        specs = ", ".join(str(orientation.spec) for orientation in self._layout.orientations)
        return f"GatheredExperts({tuple(self.shape)}, {self.dtype}, {specs})"

    def _same(self, dtype: torch.dtype | None = None, flipped: bool | None = None) -> GatheredExperts:
        """A weight of the same bytes, in another dtype or transposed."""
        return GatheredExperts(
            self._codes, self._codes_t, self._scales, self._tag, self._layout, dtype or self.dtype, self._rounded,
            self._flipped if flipped is None else flipped,
        )  # fmt: skip

    def operand(
        self, spec: QuantSpec, transposed: bool, in_graph: bool = False, grad_output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of the matrices as they are now, transposed or not.

        Raises:
            ValueError: the weight was gathered for another recipe.
        """
        orientation = WeightOrientation(spec, transposed != self._flipped)
        twin = WeightOrientation(spec, not orientation.transposed)
        known = self._layout.orientations
        if orientation in known:
            return self._read(orientation, in_graph, grad_output)
        if twin in known and spec.block[0] == spec.block[1]:
            # One orientation of square blocks serves both GEMMs.
            qdata, scale = self._read(twin, in_graph, grad_output)
            return qdata.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
        raise ValueError(
            f"the experts were gathered as {', '.join(str(each.spec) for each in known)}, and their recipe reads "
            f"{spec}{' transposed' if transposed else ''}: swap recipes between steps"
        )

    def _read(
        self, orientation: WeightOrientation, in_graph: bool, grad_output: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        layout, spec = self._layout, orientation.spec
        index = layout.orientations.index(orientation)
        if self._tag is None:
            codes = self._codes_t if index and layout.together else self._codes
            assert codes is not None
            return layout.read(codes, self._scales, index, None)
        if not in_graph:
            return read_or_gather(self._codes, self._scales, self._tag, layout, index)
        # Only when the graph runs is it known which orientation the bytes hold: an opaque op reads the tag then.
        qdata, scale = ops.gathered_matrices(
            self._codes, self._scales, self._tag, layout.experts, *layout.shape(orientation), *spec.args, index,
            grad_output,
        )  # fmt: skip
        return qdata, scale

    @disable_dynamo  # type: ignore[untyped-decorator]
    def read_operand(self, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor]:
        """:meth:`operand` of an eager layer."""
        with hidden_from_selective_checkpointing():
            return self.operand(spec, transposed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0] if args and isinstance(args[0], GatheredExperts) else None
        if weight is not None:
            if func in (aten.detach.default, aten.alias.default) or weight._is_view_of_all(func, args):
                return weight._same()
            if func is aten.transpose.int and {dim % 3 for dim in args[1:]} == {1, 2}:
                return weight._same(flipped=not weight._flipped)
            if func is aten._to_copy.default and weight._takes_cast(kwargs or {}):
                return weight._same(dtype=kwargs["dtype"])
            if func in _FACTORIES:
                given = {k: v for k, v in (kwargs or {}).items() if v is not None and k in ("dtype", "device")}
                return _FACTORIES[func](weight.shape, **{"dtype": weight.dtype, "device": weight.device, **given})
            if func is ops.matrices_operand:
                return weight.operand(spec_of(args[1]), args[2], True, *args[3:])
        raise cls._refusal(str(func))

    @classmethod
    def _refusal(cls, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{what} needs the values of experts that FSDP gathered in 8 bits, and only the operands of one recipe's "
            "GEMMs are there. Outside of their module work on the sharded parameters (model.reshard()). If autocast "
            "begins inside the model's forward, put it around the call of the model, or give fully_shard a policy "
            "(MixedPrecisionPolicy) whose param_dtype is the dtype of autocast."
        )

    def _is_view_of_all(self, func: Any, args: Any) -> bool:
        if func is aten.view.default:
            return tuple(args[1]) == tuple(self.shape)
        return func is aten.as_strided.default and (tuple(args[1]), tuple(args[2])) == (
            tuple(self.shape),
            self.stride(),
        )

    def _takes_cast(self, kwargs: dict[str, Any]) -> bool:
        asked = {name for name, value in kwargs.items() if value is not None and value is not False}
        return asked == {"dtype"} and (self._rounded is None or kwargs["dtype"] == self._rounded)


_INNER = ("_codes", "_codes_t", "_scales", "_tag")
_FACTORIES: dict[Any, Any] = {
    aten.zeros_like.default: torch.zeros,
    aten.ones_like.default: torch.ones,
    aten.empty_like.default: torch.empty,
}


class ExpertsSource(Protocol):
    """Gathers weights of experts at run time: :class:`~.all_gather.ExpertsAllGather`."""

    def layout_of(self, index: int) -> MatricesLayout:
        """The layout of the weight with this index."""

    def gather_now(self, index: int, orientation: int) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of one orientation of the weight with this index, gathered by this call."""


def read_or_gather(
    codes: Tensor, scales: Tensor, tag: Tensor, layout: MatricesLayout, index: int
) -> tuple[Tensor, Tensor]:
    """``(qdata, scale)`` of one orientation: from the bytes if they hold it, else gathered now.

    The other orientation is needed when forward is recomputed in backward. All ranks run the same code, so all gather.
    """
    key, weight, content = tag.tolist()
    if content == index:
        return layout.read(codes, scales, index, content)
    source: ExpertsSource = source_of(key)
    return source.gather_now(weight, index)


def _gathered_matrices(
    codes: Tensor,
    scales: Tensor,
    tag: Tensor,
    experts: int,
    rows: int,
    cols: int,
    spec: str,
    index: int,
    grad_output: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    key, weight, _ = tag.tolist()
    qdata, scale = read_or_gather(codes, scales, tag, source_of(key).layout_of(weight), index)
    # The results of an op must not share memory with its arguments.
    shared = qdata.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
    return qdata.clone() if shared else qdata, scale


implement("gathered_matrices", _gathered_matrices)
