"""The weight that FSDP2 hands to a layer after an 8-bit gather, and how the GEMMs read it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.byte_layout import ByteLayout, WeightOrientation, read_rank_segments
from tritonfp8.distributed.selective_checkpointing import hidden_from_selective_checkpointing
from tritonfp8.layers.stored import CodesTensor
from tritonfp8.ops import implement
from tritonfp8.specs import QuantSpec, empty_scale, spec_of

aten = torch.ops.aten
log = logging.getLogger("tritonfp8")


class GatheredSource(Protocol):
    """Reads gathered weights of one model at run time: :class:`~.all_gather.Float8AllGather`."""

    def byte_layout(self, index: int) -> ByteLayout:
        """The layout of the gathered bytes of the weight with this index."""

    def gather_now(self, index: int, orientation: WeightOrientation) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of one orientation of the weight with this index, gathered by this call."""


class HighPrecisionValues:
    """The values of a weight that FSDP gathered in 8 bits. Each gather is a collective, which all ranks must call.

    Args:
        name: of the layer, for messages.
        gather: gathers the values into new memory.
    """

    def __init__(self, name: str, gather: Callable[[], Tensor]) -> None:
        self._name, self.gather = name, gather
        self._kept: Tensor | None = None
        self._told = False

    def keep(self, dtype: torch.dtype) -> Tensor:
        """The values, gathered once: a loss in chunks reads them for each chunk."""
        if self._kept is None or self._kept.dtype != dtype:
            self._kept = self.gather().to(dtype)
            if not self._told:
                log.warning(
                    "code outside of %s multiplies by its weight, which FSDP2 gathers in 8 bits: its values are "
                    "gathered in high precision as well. Leave it out of convert, as is done with an output head that "
                    "no pattern names, and they are gathered once.",
                    self._name,
                )
                self._told = True
        return self._kept

    def drop(self) -> None:
        """Gather again at the next :meth:`keep`."""
        self._kept = None


class GatheredWeight(CodesTensor):
    """A weight ``[N, K]`` that holds the 8-bit bytes of all ranks, for the GEMMs of one recipe.

    Its dtype is the one in which FSDP hands it to the layer, and so is that of its gradient. It has no values in high
    precision: an op that needs them raises NotImplementedError. It takes one cast: to the dtype that its values were
    rounded to before they were quantized, which is the cast that autocast makes. Two kinds of ops gather the values: a
    copy without a gradient (``p.detach().clone()``, as an EMA makes), and a GEMM outside of the layer
    (``F.linear(x, head.weight)``, as in a loss in chunks).

    With tensor parallelism it is this rank's part of the weight. ``F.pad`` may put zeros before it.
    """

    _buffer: Tensor
    _scale: Tensor | None
    _scale_t: Tensor | None
    _tag: Tensor | None
    _byte_layout: ByteLayout
    _gaps: tuple[int, int]
    _rounded: torch.dtype | None
    # Set on the weights that FSDP gets; weights that a graph makes have None.
    high_precision: HighPrecisionValues | None = None

    @staticmethod
    def __new__(
        cls,
        buffer: Tensor,
        scale: Tensor | None,
        scale_t: Tensor | None,
        tag: Tensor | None,
        layout: ByteLayout,
        dtype: torch.dtype,
        gaps: tuple[int, int] = (0, 0),
        rounded: torch.dtype | None = None,
    ) -> GatheredWeight:
        """A tensor of this type, without data of its own."""
        shape = (gaps[0] + layout.rows, gaps[1] + layout.cols)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=buffer.device)

    def __init__(
        self,
        buffer: Tensor,
        scale: Tensor | None,
        scale_t: Tensor | None,
        tag: Tensor | None,
        layout: ByteLayout,
        dtype: torch.dtype,
        gaps: tuple[int, int] = (0, 0),
        rounded: torch.dtype | None = None,
    ) -> None:
        self._tag = tag
        self._gaps = gaps
        self._rounded = rounded
        self.refill(buffer, scale, scale_t, layout)

    def refill(self, buffer: Tensor, scale: Tensor | None, scale_t: Tensor | None, layout: ByteLayout) -> None:
        """Hold other bytes.

        Args:
            buffer: uint8, flat, the rank segments of all ranks.
            scale, scale_t: of the untransposed and the transposed weight, where they do not come with the bytes.
            layout: the layout of the bytes.
        """
        self._buffer, self._scale, self._scale_t, self._byte_layout = buffer, scale, scale_t, layout
        if self.high_precision is not None:
            self.high_precision.drop()

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in _INNER if getattr(self, name) is not None]
        return names, (self._byte_layout, self.dtype, self._gaps, self._rounded)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> GatheredWeight:
        return cls(*(inner.get(name) for name in _INNER), *context)  # type: ignore[arg-type]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        specs = ", ".join(str(orientation.spec) for orientation in self._byte_layout.orientations)
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, {specs})"

    def _same(self, gaps: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> GatheredWeight:
        """A weight of the same bytes, with zeros before it or in another dtype."""
        inner = (self._buffer, self._scale, self._scale_t, self._tag, self._byte_layout)
        same = GatheredWeight(*inner, dtype or self.dtype, gaps or self._gaps, self._rounded)
        same.high_precision = self.high_precision
        return same

    def _takes_cast(self, kwargs: dict[str, Any]) -> bool:
        """Whether a cast is to the dtype that the values were rounded to before they were quantized."""
        asked = {name for name, value in kwargs.items() if value is not None and value is not False}
        # Bytes that were quantized from the master weight serve layers of any dtype.
        return asked == {"dtype"} and (self._rounded is None or kwargs["dtype"] == self._rounded)

    def _can_copy(self) -> bool:
        needs_grad = self.requires_grad and torch.is_grad_enabled()
        return self.high_precision is not None and not needs_grad and not any(self._gaps)

    def _operand(
        self, spec: QuantSpec, transposed: bool, in_graph: bool = False, grad_output: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        layout = self._byte_layout
        orientation = layout.orientations[-1] if transposed else layout.orientations[0]
        if orientation.spec != spec:
            raise ValueError(
                f"the weight was gathered as {orientation.spec}, and its recipe reads {spec}: swap recipes between "
                "steps, and those of layers that share a weight together"
            )
        held = self._scale_t if orientation.transposed else self._scale
        above, left = layout.lead(orientation)
        if self._tag is None:
            qdata, scale = read_operand(self._buffer, held, layout, orientation)
        elif in_graph:
            # Only when the graph runs is it known which orientation the bytes hold: an opaque op reads the tag then.
            qdata, *sent = ops.gathered_operand(
                self._buffer,
                held,
                self._tag,
                layout.rows,
                layout.cols,
                above,
                left,
                *spec.args,
                transposed,
                grad_output,
            )
            scale = sent[0] if held is None else held
        else:
            qdata, scale = read_or_gather(self._buffer, held, self._tag, layout, orientation)
        qdata, scale = self._with_gaps(qdata, scale, orientation)
        if transposed == orientation.transposed:
            return qdata, scale
        return qdata.t().contiguous(), scale.t().contiguous()

    def _with_gaps(self, qdata: Tensor, scale: Tensor, orientation: WeightOrientation) -> tuple[Tensor, Tensor]:
        """The operand after zeros of scale 1, so that blocks start where those of the larger weight do."""
        lead, gaps = self._byte_layout.lead(orientation), self._gaps
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

    def read_operand(self, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of the weight, or of its transpose; bytes that lie in order are not copied.

        Raises:
            ValueError: it was gathered for another recipe.
        """
        with hidden_from_selective_checkpointing():
            return self._operand(spec, transposed)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = next((x for x in args if isinstance(x, GatheredWeight)), None)
        if func in _GEMMS and weight is not None and weight.high_precision is not None and not any(weight._gaps):
            values = weight.high_precision.keep(weight.dtype)
            return func(*(values if x is weight else x for x in args), **(kwargs or {}))
        if weight is not None and weight is args[0]:
            same = func in (aten.as_strided.default, aten.view.default) and tuple(args[1]) == tuple(weight.shape)
            if same or func in (aten.detach.default, aten.alias.default):
                return weight._same()
            if func is aten._to_copy.default and weight._takes_cast(kwargs or {}):
                return weight._same(dtype=kwargs["dtype"])
            if func in (aten.clone.default, aten._to_copy.default) and weight._can_copy():
                assert weight.high_precision is not None
                # The values are in new memory: a clone would copy them for nothing.
                values = weight.high_precision.gather()
                return values if func is aten.clone.default else func(values, *args[1:], **(kwargs or {}))
            if func is aten.constant_pad_nd.default and _is_before(args[1], *args[2:]):
                left, above = args[1][0], args[1][2] if len(args[1]) > 2 else 0
                return weight._same((weight._gaps[0] + above, weight._gaps[1] + left))
            if func in _FACTORIES:
                given = {k: v for k, v in (kwargs or {}).items() if v is not None and k in ("dtype", "device")}
                return _FACTORIES[func](weight.shape, **{"dtype": weight.dtype, "device": weight.device, **given})
            if func is ops.weight_operand:
                return weight._operand(spec_of(args[1]), args[2], True, *args[3:])
        raise cls._refusal(str(func))

    @classmethod
    def _refusal(cls, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{what} needs the values of a weight that FSDP gathered in 8 bits, and only the operands of one recipe's "
            "GEMMs are there. Outside the layer work on the sharded parameters (model.reshard()). If autocast begins "
            "inside the model's forward, put it around the call of the model, or give fully_shard a policy "
            "(MixedPrecisionPolicy) whose param_dtype is the dtype of autocast. Or leave the layer out of "
            "convert by its filter."
        )


def _is_before(pad: list[int], value: float = 0) -> bool:
    """Whether a pad puts zeros before rows and columns, and nothing after them."""
    return value == 0 and all(n >= 0 for n in pad) and not any(pad[1::2])


_INNER = ("_buffer", "_scale", "_scale_t", "_tag")
# A GEMM, and the views that it takes of a weight: transposed, or the rows of a chunk of the vocabulary.
_GEMMS = {
    aten.addmm.default,
    aten.linear.default,
    aten.mm.default,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
}
_FACTORIES: dict[Any, Callable[..., Tensor]] = {
    aten.zeros_like.default: torch.zeros,
    aten.ones_like.default: torch.ones,
    aten.empty_like.default: torch.empty,
}


# A buffer that holds one of two orientations has a tag that says which. The tag is a tensor on the CPU, so that a
# compiled graph can read it: the source's key, the index of the weight, the index of the orientation.
_sources: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def source_of(key: int) -> Any:
    """The source with this key, for linear layers or for experts."""
    return _sources[key]


def register_source(source: Any, key: int = 0) -> int:
    """The key of a source in the tags of its weights: ``key`` if that is its own, else a new one."""
    if _sources.get(key) is not source:
        key = max(_sources, default=0) + 1
        _sources[key] = source
    return key


def read_operand(
    buffer: Tensor, scale: Tensor | None, layout: ByteLayout, orientation: WeightOrientation
) -> tuple[Tensor, Tensor]:
    """``(qdata, scale)`` of one orientation, with the scale in the bytes or else ``scale``."""
    qdata, own = read_rank_segments(buffer, layout, orientation)
    found = scale if own is None else own
    assert found is not None
    return qdata, found


def read_or_gather(
    buffer: Tensor, scale: Tensor | None, tag: Tensor, layout: ByteLayout, orientation: WeightOrientation
) -> tuple[Tensor, Tensor]:
    """``(qdata, scale)`` of one orientation: from the bytes if they hold it, else gathered now.

    The other orientation is needed when forward is recomputed in backward, or after ``set_reshard_after_forward``
    changed what FSDP gathers when. All ranks run the same graph, so all of them gather.
    """
    key, index, content = tag.tolist()
    if layout.orientations[content] == orientation:
        return read_operand(buffer, scale, layout, orientation)
    return _sources[key].gather_now(index, orientation)


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
    key, index, content = tag.tolist()
    layout = _sources[key].byte_layout(index)
    orientation = layout.orientations[content]
    if orientation.transposed != transposed or orientation.spec.args[0] != spec:
        orientation = WeightOrientation(spec_of(spec), transposed)
    found = read_or_gather(buffer, scale, tag, layout, orientation)
    # The results of an op must not share memory with its arguments.
    given = buffer.untyped_storage().data_ptr()
    wanted = found if scale is None else found[:1]
    return [x.clone() if x.untyped_storage().data_ptr() == given else x for x in wanted]


implement("gathered_operand", _gathered_operand)
