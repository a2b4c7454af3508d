"""Weights of experts as checkpoints have them: a matrix for each expert and projection, which a model stacks.

Sources of the names: transformers for its models, and the checkpoints of DeepSeek-V3 and Qwen3-MoE for all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from tritonfp8.export.places import Place
from tritonfp8.functional import quantize
from tritonfp8.layers.moe import RoutedExperts, class_of_experts
from tritonfp8.layers.stored import StoredMatrices, plain_weight
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.formats import SCALE_FORMATS
from tritonfp8.specs.quantized import Quantized

# The projections that lie below each other in a parameter [E, N, K], each with as many rows.
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


class Part(NamedTuple):
    """The matrix of one expert and projection: rows ``start`` to ``stop`` of matrix ``expert`` of a parameter."""

    place: Place
    expert: int
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return self.stop - self.start, self.place.tensor.shape[2]


def why_named_otherwise(model: nn.Module, experts: nn.Module, found: Iterable[Place]) -> str | None:
    """The reason why a model of transformers keeps its experts in one tensor: their matrices have no names."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None:
        return None
    weights = [
        (place, owner.key)
        for place in found
        for owner in place.owners
        if owner.module is experts and owner.key in PROJECTIONS
    ]
    if all(len(place.matrices) == len(PROJECTIONS[key]) for place, key in weights):
        return None
    return f"transformers stacks no matrices of each expert from checkpoints of {kind}: they have no names"


def why_not_split(module: nn.Module) -> str | None:
    """The reason why checkpoints do not have these experts as a matrix for each; None if they do."""
    experts = class_of_experts(module)
    if experts is None or not issubclass(experts, RoutedExperts):
        return "no experts of transformers"
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        return "their weights lie transposed, or the rows of gate and up alternate: no engine reads codes of these"
    if any(name.endswith("_bias") for name, parameter in module.named_parameters(recurse=False)):
        return "they have biases: no engine reads codes of these"
    return None


def parts_of(place: Place) -> dict[str, Part]:
    """The parts of a weight of experts by their names in a checkpoint; empty for any other tensor."""
    module, key = place.owners[0].module, place.owners[0].key
    if key not in PROJECTIONS or place.tensor.ndim != 3 or why_not_split(module) is not None:
        return {}
    experts, rows, _ = place.tensor.shape
    names = place.matrices
    if len(names) != len(PROJECTIONS[key]):
        names = tuple(f"{place.name.removesuffix(key)}*.{name}.weight" for name in PROJECTIONS[key])
    rows //= len(names)
    return {
        name.replace("*", str(expert)): Part(place, expert, at * rows, (at + 1) * rows)
        for expert in range(experts)
        for at, name in enumerate(names)
    }


def all_parts(found: Iterable[Place]) -> dict[str, Part]:
    """The parts of all weights of experts."""
    return {name: part for place in found for name, part in parts_of(place).items()}


def rows_of_block(spec: QuantSpec, part: Part) -> int | None:
    """Rows of a block of ``spec`` in the whole weight; None if a block has rows of this part and of another."""
    total = part.place.tensor.shape[1]
    rows = total if spec.block[0] == -1 else spec.block[0]
    return None if part.start % rows or (part.stop % rows and part.stop != total) else rows


def are_alike(spec: QuantSpec, other: QuantSpec) -> bool:
    """Whether codes by one spec are codes by the other: scales that are exponents are valid by any rounding of them."""
    are_exponents = SCALE_FORMATS[spec.scale_format].exponent_only
    return spec == other or (are_exponents and replace(spec, scale_rounding=other.scale_rounding) == other)


def codes_of(weight: Tensor, parts: Iterable[tuple[str, Part]], spec: QuantSpec) -> Iterator[tuple[str, Quantized]]:
    """The codes of each part of a weight ``[E, N, K]``, by name: the stored codes if the weight is stored by ``spec``.

    Args:
        weight: whole, stored or not.
        parts: names and parts.
        spec: of the codes.
    """
    values = None
    for name, part in parts:
        if isinstance(weight, StoredMatrices) and are_alike(weight.spec, spec) and (rows := rows_of_block(spec, part)):
            scale = weight._scale[part.expert, part.start // rows : -(-part.stop // rows)].contiguous()
            yield name, Quantized(weight._qdata[part.expert, part.start : part.stop], scale, spec)
            continue
        values = plain_weight(weight) if values is None else values
        yield name, quantize(values[part.expert, part.start : part.stop], spec)
