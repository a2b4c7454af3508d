"""The weight that FSDP2 hands to a layer, or to experts, after an 8-bit gather, and how the GEMMs read it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.byte_layout import ByteLayout, GatheredBytes, MatricesLayout
from tritonfp8.distributed.fsdp.orientations import WeightOrientation
from tritonfp8.distributed.selective_checkpointing import hidden_from_selective_checkpointing
from tritonfp8.distributed.torch_private import disable_dynamo
from tritonfp8.layers.stored import CodesTensor, decomposed
from tritonfp8.ops import implement
from tritonfp8.specs import QuantSpec, empty_scale, spec_of

aten = torch.ops.aten


class HighPrecisionValues(Protocol):
    """The values of a weight that FSDP gathered in 8 bits. Each gather is a collective, which all ranks must call."""

    kept_values: Tensor | None

    def values(self) -> Tensor:
        """The values, gathered into new memory."""

    def keep_values(self, dtype: torch.dtype) -> Tensor:
        """The values, gathered once until the next gather of FSDP."""


class _View(NamedTuple):
    """What a tensor shows of the gathered weight.

    Attributes:
        gaps: rows and columns of zeros before a weight of rows, as ``F.pad`` puts them.
        flipped: whether the matrices of experts are transposed.
    """

    gaps: tuple[int, int] = (0, 0)
    flipped: bool = False


_WHOLE = _View()


class GatheredWeight(CodesTensor):
    """A weight ``[N, K]``, or ``[E, N, K]`` of experts, with the 8-bit bytes of all ranks, for the GEMMs of one recipe.

    Its dtype is the one in which FSDP hands it to the layer; its gradient has this dtype, too. It has no values in high
    precision: an op that needs them raises NotImplementedError. It takes one cast: to the dtype that its values were
    rounded to before they were quantized, which is the cast that autocast makes. Experts may be transposed. Of a linear
    layer two kinds of ops gather the values: a copy without a gradient (``p.detach().clone()``, as an EMA makes), and a
    GEMM outside of the layer (``F.linear(x, head.weight)``, as in a loss in chunks).

    With tensor parallelism it is this rank's part of the weight. ``F.pad`` may put zeros before it.
    """

    _codes: Tensor
    _codes_t: Tensor | None
    _scale: Tensor | None
    _scale_t: Tensor | None
    _tag: Tensor | None
    _byte_layout: ByteLayout | MatricesLayout
    _rounded: torch.dtype | None
    _view: _View
    # Set on the weights of linear layers that FSDP gets; weights that a graph makes have None.
    high_precision: HighPrecisionValues | None = None

    @staticmethod
    def __new__(
        cls,
        given: GatheredBytes,
        tag: Tensor | None,
        layout: ByteLayout | MatricesLayout,
        dtype: torch.dtype,
        rounded: torch.dtype | None = None,
        view: _View = _WHOLE,
    ) -> GatheredWeight:
        """A tensor of this type, without data of its own."""
        *experts, rows, cols = layout.shape
        sizes, strides = [view.gaps[0] + rows, view.gaps[1] + cols], [max(view.gaps[1] + cols, 1), 1]
        if view.flipped:
            # As a view has them: of square matrices only the strides say that it is transposed.
            sizes, strides = sizes[::-1], strides[::-1]
        before = [rows * cols] if experts else []
        found: GatheredWeight = Tensor._make_wrapper_subclass(
            cls, (*experts, *sizes), (*before, *strides), dtype=dtype, device=given.codes.device
        )
        found._tag, found._rounded, found._view = tag, rounded, view
        found.refill(given, layout)
        return found

    def refill(self, given: GatheredBytes, layout: ByteLayout | MatricesLayout) -> None:
        """Hold other bytes, which lie as ``layout`` says."""
        self._codes, self._codes_t, self._scale, self._scale_t = given
        self._byte_layout = layout
        if self.high_precision is not None:
            self.high_precision.kept_values = None

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in _INNER if getattr(self, name) is not None]
        return names, (self._byte_layout, self.dtype, self._rounded, self._view)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> GatheredWeight:
        *given, tag = (inner.get(name) for name in _INNER)
        return cls(GatheredBytes(*given), tag, *context)  # type: ignore[arg-type]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        specs = ", ".join(str(orientation.spec) for orientation in self._byte_layout.orientations)
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, {specs})"

    @property
    def spec(self) -> QuantSpec:
        """The format that ranks rounded their shards to, else the spec of the operand of ``output``."""
        first = self._byte_layout.orientations[0]
        return first.weights or first.spec

    def _given(self) -> GatheredBytes:
        return GatheredBytes(self._codes, self._codes_t, self._scale, self._scale_t)

    def _same(self, view: _View | None = None, dtype: torch.dtype | None = None) -> GatheredWeight:
        """A weight of the same bytes, seen otherwise or in another dtype."""
        same = GatheredWeight(
            self._given(), self._tag, self._byte_layout, dtype or self.dtype, self._rounded, view or self._view
        )
        same.high_precision = self.high_precision
        return same

    def _takes_cast(self, kwargs: dict[str, Any]) -> bool:
        """Whether a cast is to the dtype that the values were rounded to before they were quantized."""
        asked = {name for name, value in kwargs.items() if value is not None and value is not False}
        # Bytes that were quantized from the master weight serve layers of any dtype.
        return asked == {"dtype"} and (self._rounded is None or kwargs["dtype"] == self._rounded)

    def _is_view_of_all(self, func: Any, args: Any) -> bool:
        if func not in (aten.view.default, aten.as_strided.default) or tuple(args[1]) != tuple(self.shape):
            return False
        return self.ndim == 2 or func is aten.view.default or tuple(args[2]) == self.stride()

    def operand(
        self, spec: QuantSpec, transposed: bool, in_graph: bool = False, grad_output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of the weight, or of the matrices as they are now, transposed or not.

        Raises:
            ValueError: the weight was gathered for another recipe.
        """
        layout = self._byte_layout
        flipped = transposed != self._view.flipped
        index, orientation = next(
            ((i, o) for i, o in enumerate(layout.orientations) if o.transposed == flipped), (0, layout.orientations[0])
        )
        from_codes = orientation.transposed != flipped and orientation.spec_t is not None
        square = orientation.transposed == flipped or spec.block[0] == spec.block[1]
        if (orientation.spec_t if from_codes else orientation.spec) != spec or not (square or from_codes):
            known, swap = ", ".join(str(each.spec) for each in layout.orientations), "swap recipes between steps"
            raise ValueError(
                f"the experts were gathered as {known}, and their recipe reads {spec}"
                f"{' transposed' if transposed else ''}: {swap}"
                if self.ndim == 3
                else f"the weight was gathered as {orientation.spec}, and its recipe reads {spec}: {swap}, and those "
                "of layers that share a weight together"
            )
        if self._tag is None:
            pair = layout.read(self._given(), index, None)
        elif not in_graph:
            pair = _read_or_gather(self._given(), self._tag, layout, index)
        else:
            pair = self._read_in_graph(index, orientation, grad_output)
        if isinstance(layout, ByteLayout) and (layout.within is not None or any(self._view.gaps)):
            pair = self._with_gaps(*pair, orientation)
        if orientation.transposed == flipped:
            return pair
        if from_codes:
            transpose = WeightOrientation(spec, True)
            if isinstance(layout, ByteLayout) and any(layout.is_split(transpose, dim) for dim in (0, 1)):
                raise ValueError(
                    f"the weight is a part of a larger weight, and blocks of its transpose by {spec} lie on several "
                    "ranks: compute with the DTensor, and not with its to_local()"
                )
            return ops.transpose_codes(*pair, *orientation.spec.args, *spec.args)
        # One orientation of square blocks serves both GEMMs.
        return pair[0].transpose(-2, -1).contiguous(), pair[1].transpose(-2, -1).contiguous()

    def _read_in_graph(
        self, index: int, orientation: WeightOrientation, grad_output: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # Only when the graph runs is it known which orientation the bytes hold: an opaque op reads the tag then.
        layout, spec, flipped = self._byte_layout, orientation.spec, orientation.transposed
        if isinstance(layout, MatricesLayout):
            shape = layout.experts, *orientation.shape(layout.rows, layout.cols)
            qdata, scale = ops.gathered_matrices(
                self._codes, self._scale, self._tag, *shape, *spec.args, index, grad_output
            )
            return qdata, scale
        held, sizes = self._scale_t if flipped else self._scale, (*layout.shape, *layout.lead(orientation))
        qdata, *sent = ops.gathered_operand(self._codes, held, self._tag, *sizes, *spec.args, flipped, grad_output)
        return qdata, sent[0] if held is None else held

    def _with_gaps(self, qdata: Tensor, scale: Tensor, orientation: WeightOrientation) -> tuple[Tensor, Tensor]:
        """The operand after zeros of scale 1, so that blocks start where blocks of the larger weight do."""
        assert isinstance(self._byte_layout, ByteLayout)
        lead, gaps = self._byte_layout.lead(orientation), self._view.gaps
        missing = [gap - at for gap, at in zip(gaps, lead, strict=True)]
        if any(block > 1 and n % block for n, block in zip(missing, orientation.block, strict=True)):
            raise ValueError(
                f"the weight is a part of a larger weight and starts {lead} rows and columns inside a block of "
                f"{orientation.spec}: compute with the DTensor, whose blocks start where they should, and not with its "
                "to_local()"
            )
        if not any(gaps):
            return qdata, scale
        counts = [0 if block == -1 else n // block for n, block in zip(missing, orientation.block, strict=True)]
        if orientation.transposed:
            gaps, counts = gaps[::-1], counts[::-1]
        padded = F.pad(qdata.view(torch.uint8), (gaps[1], 0, gaps[0], 0)).view(qdata.dtype)
        ones = empty_scale(padded.shape, orientation.spec.block, orientation.spec.scale_format, scale.device)
        ones.fill_(1)
        ones[counts[0] :, counts[1] :].copy_(scale)
        return padded, ones

    @disable_dynamo  # type: ignore[untyped-decorator]
    def read_operand(self, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor]:
        """:meth:`operand` of an eager layer."""
        return hidden_from_selective_checkpointing(self.operand, spec, transposed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        weight = next((x for x in args if isinstance(x, GatheredWeight)), None)
        # None for experts, and for a part with zeros before it.
        whole = None if weight is None or any(weight._view.gaps) else weight.high_precision
        if weight is not None and whole is not None and func in _GEMMS:
            values = whole.keep_values(weight.dtype)
            return func(*(values if x is weight else x for x in args), **given)
        if weight is not None and weight is args[0]:
            if func in (aten.detach.default, aten.alias.default) or weight._is_view_of_all(func, args):
                return weight._same()
            if func is aten._to_copy.default and weight._takes_cast(given):
                return weight._same(dtype=given["dtype"])
            needs_grad = weight.requires_grad and torch.is_grad_enabled()
            if func in (aten.clone.default, aten._to_copy.default) and whole is not None and not needs_grad:
                # The values are in new memory: a clone would copy them for nothing.
                values = whole.values()
                return values if func is aten.clone.default else func(values, *args[1:], **given)
            if weight.ndim == 2 and func is aten.constant_pad_nd.default and _is_before(args[1], *args[2:]):
                left, above = args[1][0], args[1][2] if len(args[1]) > 2 else 0
                rows, cols = weight._view.gaps
                return weight._same(_View((rows + above, cols + left)))
            if weight.ndim == 3 and func is aten.transpose.int and {dim % 3 for dim in args[1:]} == {1, 2}:
                return weight._same(_View(flipped=not weight._view.flipped))
            if func in _FACTORIES:
                asked = {k: v for k, v in given.items() if v is not None and k in ("dtype", "device")}
                return _FACTORIES[func](weight.shape, **{"dtype": weight.dtype, "device": weight.device, **asked})
            if func in (ops.weight_operand, ops.matrices_operand):
                return weight.operand(spec_of(args[1]), args[2], True, *args[3:])
        if (found := decomposed(func, args, given)) is not NotImplemented:
            return found
        raise _refused(str(func), weight is not None and weight.ndim == 3)

    def _refusal(self, what: str) -> NotImplementedError:  # type: ignore[override]
        return _refused(what, self.ndim == 3)


def _refused(what: str, of_experts: bool) -> NotImplementedError:
    values, place = ("experts", "Outside of their module") if of_experts else ("a weight", "Outside the layer")
    leave = "" if of_experts else " Or leave the layer out of convert by its filter."
    return NotImplementedError(
        f"{what} needs the values of {values} that FSDP gathered in 8 bits, and only the operands of one recipe's "
        f"GEMMs are there. {place} work on the sharded parameters (model.reshard()). If autocast begins inside the "
        "model's forward, put it around the call of the model, or give fully_shard a policy (MixedPrecisionPolicy) "
        f"whose param_dtype is the dtype of autocast.{leave}"
    )


def _is_before(pad: list[int], value: float = 0) -> bool:
    """Whether a pad puts zeros before rows and columns, and nothing after them."""
    return value == 0 and all(n >= 0 for n in pad) and not any(pad[1::2])


_INNER = ("_codes", "_codes_t", "_scale", "_scale_t", "_tag")
# A GEMM, and the views that it takes of a weight: transposed, or the rows of a chunk of the vocabulary.
_GEMMS = {aten.addmm.default, aten.linear.default, aten.mm.default}
_GEMMS |= {aten.slice.Tensor, aten.t.default, aten.transpose.int}
_FACTORIES: dict[Any, Callable[..., Tensor]] = {
    aten.zeros_like.default: torch.zeros,
    aten.ones_like.default: torch.ones,
    aten.empty_like.default: torch.empty,
}


# A buffer that holds one of two orientations has a tag that says which. The tag is a tensor on the CPU, so that a
# compiled graph can read it: the source's key, the index of the weight, the index of the orientation.
_sources: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register_source(source: Any, key: int = 0) -> int:
    """The key of a :class:`~.all_gather.Float8AllGather` in the tags of its weights.

    It is ``key`` if that is its own, else a new one.
    """
    if _sources.get(key) is not source:
        key = max(_sources, default=0) + 1
        _sources[key] = source
    return key


def _read_or_gather(
    given: GatheredBytes, tag: Tensor, layout: ByteLayout | MatricesLayout, index: int
) -> tuple[Tensor, Tensor]:
    """``(qdata, scale)`` of one orientation: from the bytes if they hold it, else gathered now.

    The other orientation is needed when forward is recomputed in backward, or after ``set_reshard_after_forward``
    changed what FSDP gathers when. All ranks run the same graph, so all of them gather.
    """
    key, weight, content = tag.tolist()
    if content == index:
        return layout.read(given, index, content)
    found: tuple[Tensor, Tensor] = _sources[key].gather_now(weight, index)
    return found


def _read_tagged(given: GatheredBytes, tag: Tensor, index: int | tuple[QuantSpec, bool]) -> tuple[Tensor, Tensor]:
    """As :func:`_read_or_gather` by the layout of now, in memory that no argument of an op has.

    ``index``: of the orientation, or its spec and whether it is transposed.
    """
    key, weight, _ = tag.tolist()
    layout = _sources[key].layout_of(weight)
    place = index if isinstance(index, int) else [(o.spec, o.transposed) for o in layout.orientations].index(index)
    qdata, scale = _read_or_gather(given, tag, layout, place)
    shared = given.codes.untyped_storage().data_ptr()
    qdata, scale = (x.clone() if x.untyped_storage().data_ptr() == shared else x for x in (qdata, scale))
    return qdata, scale


def _gathered_operand(
    buffer: Tensor,
    scale: Tensor | None,
    tag: Tensor,
    rows: int,
    cols: int,
    above: int,
    left: int,
    spec: str,
    transposed: bool,
    grad_output: Tensor | None = None,
) -> list[Tensor]:
    given = GatheredBytes(buffer, None, scale, scale)
    found = _read_tagged(given, tag, (spec_of(spec), transposed))
    return [*found] if scale is None else [found[0]]


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
    return _read_tagged(GatheredBytes(codes, None, scales), tag, index)


implement("gathered_operand", _gathered_operand)
implement("gathered_matrices", _gathered_matrices)
