"""plan and tensors: what an export has, and its tensors one layer at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonfp8.conversion import bare, reshard
from tritonfp8.conversion.selection import Filter
from tritonfp8.export.checkpoint_formats import CheckpointFormat, checkpoint_format
from tritonfp8.export.choice import choose, ignored, is_exported, notes
from tritonfp8.export.experts import PROJECTIONS, Part, are_alike, codes_of, parts_of
from tritonfp8.export.files import Stored, given_tensors, headers_of
from tritonfp8.export.permanent import check_adapters, permanent, value_of
from tritonfp8.export.places import Place, joined, places
from tritonfp8.export.report import ExportedLayer, ExportReport
from tritonfp8.functional import quantize
from tritonfp8.layers.linear import is_converted, require_module, rounded
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.layers.stored import StoredWeight, plain_weight
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.checks import check_floating, require
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES
from tritonfp8.specs.quantized import Quantized


class WrittenTensor(NamedTuple):
    """One tensor of a model that is written.

    Attributes:
        name: its name in the export.
        tensor: the tensor of the model, or what stands for one that the model computes.
        row: the checkpoint format of its codes and scale, or None in high precision.
        dtype: the dtype in which it is written in high precision.
        parts: of a weight of experts in 8 bits, the matrices that are written, by name.
        weights: the format that the recipe of its layer rounds it to, and so its codes; None if it does not.
    """

    name: str
    tensor: Tensor
    row: CheckpointFormat | None
    dtype: torch.dtype
    parts: Mapping[str, Part]
    weights: QuantSpec | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the export, with scales."""
        return sum(header.nbytes for header in self.headers().values())

    def headers(self) -> dict[str, Stored]:
        """The names, dtypes and shapes of :meth:`tensors`, in this order."""
        shape = tuple(self.tensor.shape)
        if self.row is None:
            return {self.name: Stored("", self.dtype, shape)}
        found = {}
        for name, each in {name: part.shape for name, part in self.parts.items()}.items() or [(self.name, shape)]:
            found[self.row.codes_of(name)] = Stored("", self.row.dtype, self.row.codes_shape(each))
            found[self.row.scale_of(name)] = Stored("", self.row.scale_dtype, self.row.scale_shape(each))
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the export: one, or codes and scale; of experts, the tensors of each matrix.

        Raises:
            ValueError: a weight has a NaN or an infinity.
        """
        x = value_of(self.tensor)
        if self.row is not None and self.weights is not None and not isinstance(x, StoredWeight):
            # As training read it. Other scales that hold these values give them the same codes.
            x = rounded(x, self.weights)
        if self.row is None:
            yield self.name, plain_weight(x).to(self.dtype)
        elif self.parts:
            for name, q in codes_of(x, self.parts.items(), self.row.spec):
                yield from _written(name, q, self.row)
        else:
            # The codes of a stored weight as they are, if it has these.
            if isinstance(x, StoredWeight) and are_alike(x.spec, self.row.spec):
                q = x.quantized
            else:
                q = quantize(plain_weight(x), self.row.spec)
            yield from _written(self.name, q, self.row)


def _written(name: str, q: Quantized, row: CheckpointFormat) -> Iterator[tuple[str, Tensor]]:
    if not bool(q.scale.float().isfinite().all()):
        raise ValueError(f"{name} has a NaN or an infinity: an engine would compute with it. Check the training")
    yield row.codes_of(name), q.qdata
    scale = q.scale.contiguous().view(row.scale_dtype).reshape(row.scale_shape(q.shape))
    yield row.scale_of(name), scale


class TensorStream:
    """An iterator over the names and tensors of an export; ``headers`` has their names, dtypes and shapes, in order."""

    def __init__(self, headers: dict[str, Stored], tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.headers = headers
        self._tensors = iter(tensors)

    def __iter__(self) -> TensorStream:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._tensors)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> TensorStream:
        """A stream, or one of tensors that are all taken first. Raises as :func:`given_tensors`."""
        if isinstance(tensors, cls):
            return tensors
        given = given_tensors(tensors)
        return cls(headers_of(given), given.items())

    def checked(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, as the headers announce them. Raises ValueError for another one, and at an early end."""
        for (name, header), (found, x) in zip_longest(self.headers.items(), self, fillvalue=("", None)):
            if not isinstance(x, Tensor) or found != name or Stored("", x.dtype, tuple(x.shape)) != header:
                shown = f"{name or 'its end'}, as announced; got {found or 'its end'}"
                raise ValueError(f"the stream must go on with {shown}: give one export, from its beginning")
            yield found, x


class StreamPlan(NamedTuple):
    """What an export writes, its report, and the model that has these tensors under their plain names."""

    entries: list[WrittenTensor]
    report: ExportReport
    model: nn.Module


def plan(
    model: nn.Module,
    format: str,
    *,
    filter: Filter | None = None,
    scale_rounding: str = "pow2",
    scale_fmt: str | None = None,
    dtype: torch.dtype | None = None,
    adapters: str | None = None,
) -> ExportReport:
    """What :func:`tensors` and :func:`save` write, without quantizing anything.

    Args:
        model: converted or not, with weights in high precision or stored by ``mode="inference"``, whose codes are
            written as they are if the format has them. It may be compiled. Weights may be sharded by FSDP2 or tensor
            parallelism. Weights that torch computes (parametrizations, weight and spectral norm, pruning) are written
            under their plain names, as the model computes them in eval mode.
        format: the name of a checkpoint format; ``X`` is a linear layer of weight ``[N, K]``. The codes ``X.weight
            [N, K]`` are float8_e4m3fn, and the scale multiplies to dequantize.

            ``"fine_grained"``: ``X.weight_scale_inv [ceil(N/128), ceil(K/128)]`` float32 (DeepSeek-V3, transformers).
            ``"compressed_channel"``: ``X.weight_scale [N, 1]`` float32 (compressed-tensors, as the next ones).
            ``"compressed_tensor"``: ``X.weight_scale [1]`` float32.
            ``"compressed_block"``: ``X.weight_scale [ceil(N/128), K/128]`` float32.
            ``"compressed_mxfp8"``: ``X.weight_scale [N, K/32]`` uint8, an exponent biased by 127.
            ``"compressed_mxfp4"``: the same beside ``X.weight_packed [N, K/2]`` uint8, two e2m1 codes a byte.
        filter: which layers are quantized: a list of patterns or names, or a function ``filter(module, fqn) -> bool``.
            Without one these are the converted layers whose recipe quantizes ``output``, and in a model without
            converted layers the choice of :func:`tritonfp8.convert`. Output heads, tied weights and ``Conv1D``
            always stay in high precision, as do layers whose size the format's readers misread.
        scale_rounding: of :class:`~tritonfp8.QuantSpec`. ``"pow2"``: powers of two, which a cast to bfloat16 keeps.
            ``"none"`` (float32 scales) is finer by up to one bit; loaders that cast scales to bfloat16 round it.
            ``"floor"`` (``"compressed_mxfp8"`` and ``"compressed_mxfp4"``) is the OCP rule, which may saturate.
        scale_fmt: ``"ue8m0"`` (``"fine_grained"``) is written into the config: it says that scales are powers of two,
            so that engines use kernels for those and quantize activations alike.
        dtype: bfloat16, float16 or float32, to which other floating tensors are cast; None leaves them as they are.
        adapters: of a model with adapters of peft, ``"merged"``: the tensors that ``merge_and_unload()`` would leave,
            of the active adapters. Each layer is merged in a copy, in the values of stored weights if it has these.

    Returns:
        An :class:`ExportReport` with the ``quantization_config``.

    Raises:
        ValueError: an unknown format or option, no layer to quantize, a pattern that matches no layer, or a weight that
            is lazy, on the meta device, in 8 bits already, or computed by other code; or adapters without the argument.
        TypeError: an argument of another type.
    """
    return planned(model, format, filter, scale_rounding, scale_fmt, dtype, adapters).report


def tensors(
    model: nn.Module,
    format: str,
    *,
    filter: Filter | None = None,
    scale_rounding: str = "pow2",
    scale_fmt: str | None = None,
    dtype: torch.dtype | None = None,
    adapters: str | None = None,
) -> TensorStream:
    """The tensors of an export one layer at a time, for an engine that is running.

    Arguments are checked by the call. A layer is quantized when its codes are asked for, from the values that its
    weight has then. No layer before it is kept, so memory grows by one layer's codes and scales. Sharded weights are
    gathered one at a time: every rank must take every tensor, and gets all of them.

    Args:
        model, format, filter, scale_rounding, scale_fmt, dtype, adapters: as for :func:`plan`.

    Returns:
        An iterator over ``(name, tensor)`` in the order of the modules, on the device of the model. Codes are followed
        by their scale. Its ``headers`` tell names, dtypes and shapes before a layer is quantized. Tensors in high
        precision share the memory of the model, unless ``dtype`` casts them. Tied tensors come once.

    Raises:
        ValueError, TypeError: as :func:`plan`; and, when its layer is reached, a weight with a NaN or an infinity, or
            adapters that peft does not merge.
    """
    entries = planned(model, format, filter, scale_rounding, scale_fmt, dtype, adapters).entries
    headers = {name: header for entry in entries for name, header in entry.headers().items()}
    return TensorStream(headers, chain.from_iterable(entry.tensors() for entry in entries))


def planned(
    model: nn.Module,
    format: str,
    filter: Filter | None,
    scale_rounding: str,
    scale_fmt: str | None,
    dtype: torch.dtype | None,
    adapters: str | None,
) -> StreamPlan:
    """The entries and the report of an export; see :func:`plan`."""
    require_module(model)
    model = bare(model)
    require("dtype", dtype, (None, *HIGH_PRECISION_DTYPES))
    row = checkpoint_format(format, scale_rounding, scale_fmt)
    check_adapters(model, adapters)
    reshard(model)
    model = permanent(model)
    found = places(model)
    for place in found:
        _check_written(place)
    reasons = choose(model, row, filter, found)
    entries = []
    for place in found:
        chosen = is_exported(place.name, place, reasons)
        if chosen:
            check_floating(place.name, place.tensor)
        to = dtype if dtype is not None and place.tensor.dtype.is_floating_point else place.tensor.dtype
        parts = parts_of(place) if chosen else {}
        weights = rounding_of(place)
        entries.append(WrittenTensor(place.written_name, place.tensor, row if chosen else None, to, parts, weights))
    return StreamPlan(entries, _report(row, reasons, found, entries, scale_fmt), model)


def rounding_of(place: Place) -> QuantSpec | None:
    """The format that the recipe of a layer rounds its weight to; None if it does not, or there is no recipe."""
    modules: Iterable[Any] = (owner.module for owner in place.owners if _has_recipe(owner.module))
    return next((module.recipe.weights for module in modules), None)


def _has_recipe(module: Any) -> bool:
    return is_converted(module) or is_converted_experts(module)


def _check_written(place: Place) -> None:
    tensor = place.tensor
    if tensor.device.type == "meta":
        raise ValueError(f"{place.name} is on the meta device: load its values before the export")
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        raise ValueError(
            f"{place.name} is {tensor.dtype}: an export needs weights in high precision. Load the model dequantized"
        )


def _report(
    row: CheckpointFormat,
    reasons: dict[str, str | None],
    found: list[Place],
    entries: list[WrittenTensor],
    scale_fmt: str | None,
) -> ExportReport:
    modules = {owner.name: owner.module for place in found for owner in place.owners}
    tensors_of = {name: place.tensor for place in found for name in place.names}
    after = {place.name: entry.nbytes for place, entry in zip(found, entries, strict=True)}
    layers, weights = {}, set[str]()
    for name, reason in reasons.items():
        keys = [key for key in (joined(name, last) for last in ("weight", *PROJECTIONS)) if key in tensors_of]
        before, now = sum(tensors_of[key].nbytes for key in keys), sum(after.get(key, 0) for key in keys)
        exported_as = str(row.spec) if reason is None else None
        same = _same_codes(modules[keys[0]], row) if reason is None else None
        layers[name] = ExportedLayer(exported_as, reason, before, now, same)
        weights.update(keys)
    return ExportReport(
        row.name,
        layers,
        {place.written_name: after[place.name] for place in found if place.name not in weights},
        {
            owner.written: place.written_name
            for place in found
            for owner in place.owners
            if owner.written != place.written_name
        },
        row.config(ignored(reasons, found), scale_fmt),
        sum(place.tensor.nbytes for place in found),
        sum(after.values()),
        notes(reasons, found, row),
    )


def _same_codes(module: Any, row: CheckpointFormat) -> bool | None:
    if not _has_recipe(module):
        return None
    recipe: Recipe = module.recipe
    rounds = recipe.weights is not None and are_alike(row.spec, recipe.weights)
    return rounds or recipe.output.rhs == row.spec
