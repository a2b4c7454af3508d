"""The results of an export and of a load; ``str`` of each is a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tritonfp8.export.checkpoint_formats import CheckpointFormat
from tritonfp8.functional import dequantize, quantize
from tritonfp8.layers.linear import is_converted
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.layers.stored import DTYPES, StoredMatrices, StoredWeight
from tritonfp8.specs import EXPANDED, block_of
from tritonfp8.specs.naming import columns, repeated
from tritonfp8.specs.quantized import Quantized
from tritonfp8.specs.testing import sqnr

SAME_CODES = "codes kept"
SAME_VALUES = "values kept"
ROUNDED = "rounded again"


@dataclass(frozen=True)
class ExportedLayer:
    """A linear layer, or a module of experts, in an export.

    Attributes:
        exported_as: the spec of its codes as text; None if it stays in high precision.
        reason: why it stays in high precision; None if it is exported in 8 bits.
        bytes_before: of its weights in the model.
        bytes_after: of its weights in the export, with their scales; 0 for a tied weight that another name has.
        same_codes: whether these are the codes that the layer's GEMM ``output`` reads in training, with weights of the
            same dtype; None if the layer is not converted or stays in high precision.
    """

    exported_as: str | None
    reason: str | None
    bytes_before: int
    bytes_after: int
    same_codes: bool | None = None

    def __str__(self) -> str:
        if self.exported_as is None:
            return f"high precision: {self.reason}"
        same = {None: "", True: ", the codes of its recipe", False: ", not the codes of its recipe"}[self.same_codes]
        return f"{self.exported_as}, {shown_bytes(self.bytes_before)} -> {shown_bytes(self.bytes_after)}{same}"


@dataclass(frozen=True)
class ExportReport:
    """What an export has; ``str(report)`` is a table.

    Attributes:
        format: the name of the checkpoint format.
        layers: every linear layer, and every module of experts, by fully qualified name in the model.
        others: bytes of every other tensor of the export, by its name there.
        tied: for each name that is not written, the name of the tensor that it shares.
        quantization_config: the entry of ``config.json`` that tells an engine how to read the tensors.
        bytes_before: of all tensors in the model.
        bytes_after: of all tensors in the export.
        notes: what an engine may refuse.
        files: the files that ``save`` wrote, by name with their bytes; empty without a file.
    """

    format: str
    layers: dict[str, ExportedLayer]
    others: dict[str, int]
    tied: dict[str, str]
    quantization_config: dict[str, Any]
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...] = ()
    files: dict[str, int] = field(default_factory=dict)

    @property
    def exported(self) -> list[str]:
        """The names of the layers in 8 bits."""
        return [name for name, layer in self.layers.items() if layer.exported_as is not None]

    def __str__(self) -> str:
        verdicts = [(n, dataclasses.replace(layer, bytes_before=0, bytes_after=0)) for n, layer in self.layers.items()]
        rows = []
        for each in repeated(verdicts):
            of = [self.layers[name] for name in each.names]
            before, after = sum(layer.bytes_before for layer in of), sum(layer.bytes_after for layer in of)
            rows.append((each.label, str(dataclasses.replace(each.verdict, bytes_before=before, bytes_after=after))))
        rows += [(each.label, f"tied: written as {each.verdict}") for each in repeated(self.tied.items())]
        count = len(self.exported)
        total = (
            f"{count} layers in 8 bits as {self.format!r}, {len(self.layers) - count} in high precision, "
            f"{len(self.others)} other tensors; {shown_bytes(self.bytes_before)} -> {shown_bytes(self.bytes_after)}"
        )
        return "\n".join([total, *columns(rows), *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True)
class LoadedLayer:
    """A linear layer, or a weight of experts, that came in 8 bits.

    Attributes:
        loaded_as: the checkpoint format, and the blocks of its scales, as text.
        again: what quantizing the weight by the layer's recipe gives: ``"codes kept"`` (the codes and scales of the
            checkpoint, to the bit), ``"values kept"`` (other codes that stand for the same values), or
            ``"rounded again"``. None if the layer is not converted, or its recipe keeps ``output`` in high precision.
        sqnr_db: if they are rounded again, the signal-to-quantization-noise ratio of the new values to the values of
            the checkpoint, in dB; else None.
        rows_rounded: of codes of fewer than 8 bits that are kept, the rows whose values e4m3 does not hold by a scale a
            row, as the recipe reads them.
    """

    loaded_as: str
    again: str | None
    sqnr_db: float | None = None
    rows_rounded: int = 0

    def __str__(self) -> str:
        if self.again is None:
            return self.loaded_as
        cost = "" if self.sqnr_db is None else f" ({self.sqnr_db:.1f} dB)"
        if self.rows_rounded:
            cost += f"; a scale a row rounds {self.rows_rounded} rows of them, and the recipe 'mxfp8' none"
        return f"{self.loaded_as}; by its recipe: {self.again}{cost}"


def _loaded_layer(
    loaded_as: str, again: Quantized | StoredMatrices, read: Any, values: Tensor, exact: bool
) -> LoadedLayer:
    """A layer with a recipe.

    Args:
        loaded_as: as text.
        again: what the recipe makes of its new weight.
        read: codes that were read, of the kind of ``again``; None if no weight has them together.
        values: what the codes that were read stand for.
        exact: whether ``values`` are that to the bit.
    """
    if read is not None and again.spec.block == read.spec.block and _are_equal(_both(again), _both(read)):
        return LoadedLayer(loaded_as, SAME_CODES)
    new = again.dequantize() if isinstance(again, StoredMatrices) else dequantize(again, values.dtype)
    if exact and torch.equal(new, values):
        return LoadedLayer(loaded_as, SAME_VALUES)
    return LoadedLayer(loaded_as, ROUNDED, sqnr(new, values))


def shown_format(row: CheckpointFormat) -> str:
    """The format of a weight as a report names it."""
    return f"{row.name} {block_of(row.spec.block).name}"


def loaded(owner: Any, shown: str, weight: Tensor, read: Quantized) -> LoadedLayer:
    """What the recipe of a layer makes of its new weight."""
    spec = owner.recipe.storage if is_converted(owner) else None
    if spec is None:
        return LoadedLayer(shown, None)
    again = weight.quantized if isinstance(weight, StoredWeight) else quantize(weight, spec)
    found = _loaded_layer(shown, again, read, dequantize(read, torch.float32), True)
    return _with_rounded(found, owner, weight)


def loaded_experts(
    owner: Any,
    shown: str,
    weight: Tensor,
    read: StoredMatrices | Quantized | str | None,
    values: Tensor,
    is_exact: bool,
) -> LoadedLayer:
    """As :func:`loaded`; ``values`` were read, in the dtype of the parameter."""
    spec = owner.recipe.storage if is_converted_experts(owner) else None
    if spec is None or weight.dtype not in DTYPES:
        return LoadedLayer(shown, None)
    again = weight if isinstance(weight, StoredMatrices) else StoredMatrices.of(weight, spec, owner.is_transposed)
    return _with_rounded(_loaded_layer(shown, again, read, values, is_exact), owner, weight)


def _with_rounded(found: LoadedLayer, owner: Any, weight: Tensor) -> LoadedLayer:
    """With the rows that a recipe with a scale a row rounds when it reads codes of fewer bits."""
    if not isinstance(weight, StoredWeight) or owner.recipe.output.rhs != EXPANDED:
        return found
    return dataclasses.replace(found, rows_rounded=weight.rows_rounded())


def _both(x: Quantized | StoredMatrices) -> tuple[Tensor, Tensor]:
    return (x.qdata, x.scale) if isinstance(x, Quantized) else x._both()


def _are_equal(codes: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> bool:
    """Whether codes and scales of one spec are equal to the bit; scales may have several dtypes."""
    (qdata, scale), (other_qdata, other_scale) = codes, others
    is_same_scale = torch.equal(scale.float(), other_scale.float())
    return is_same_scale and torch.equal(qdata.view(torch.uint8), other_qdata.view(torch.uint8))


@dataclass(frozen=True)
class LoadReport:
    """What was read into a model; ``str(report)`` is a table.

    Attributes:
        layers: the layers whose weight came in 8 bits, by fully qualified name in the model; and the weights of experts
            that did.
        copied: every other tensor that was read, by its name in the model, with a note on its dtype.
        ignored: the tensors of the checkpoint that a pattern of ``ignore`` left out.
        left: the tensors of the model that the checkpoint does not have and a pattern of ``ignore`` allows.
        on_meta: buffers that are on the meta device still, because checkpoints do not have them.
        of_activations: static scales of activations, which nothing here uses: a recipe scales activations by their
            values.
    """

    layers: dict[str, LoadedLayer]
    copied: dict[str, str]
    ignored: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    on_meta: tuple[str, ...] = ()
    of_activations: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [(name, str(layer)) for name, layer in self.layers.items()]
        rows += [(name, note) for name, note in self.copied.items()]
        rows += [(name, "ignored: not read") for name in self.ignored]
        rows += [(name, "not in the checkpoint: left as it was") for name in self.left]
        rows += [(name, "on the meta device: checkpoints do not have it") for name in self.on_meta]
        total = f"{len(self.layers)} layers from 8 bits, {len(self.copied)} other tensors"
        kept = [layer.again for layer in self.layers.values()]
        total += "".join(
            f", {kept.count(again)} {again}" for again in (SAME_CODES, SAME_VALUES, ROUNDED) if again in kept
        )
        if costs := [layer.sqnr_db for layer in self.layers.values() if layer.sqnr_db is not None]:
            total += f" (from {min(costs):.1f} dB)"
        if self.ignored:
            total += f", {len(self.ignored)} ignored"
        notes = []
        if count := len(self.of_activations):
            which = f"{count} static scales of activations, such as {self.of_activations[0]}"
            notes.append(f"note: {which}, are not used: activations are scaled by their values")
        return "\n".join([total, *columns([(each.label, each.verdict) for each in repeated(rows)]), *notes])


def shown_bytes(count: int) -> str:
    """A number of bytes, as text: 512 B, 1.5 kB, 16.1 GB."""
    value, units = float(count), ("B", "kB", "MB", "GB")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
