"""Which linear layers an export quantizes, and why not the others."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from tritonfp8.conversion.selection import Filter, Roles, Selection, linears, sizes_of, why_unfit
from tritonfp8.export.checkpoint_formats import CheckpointFormat
from tritonfp8.export.experts import why_named_otherwise, why_not_split
from tritonfp8.export.places import Place, joined
from tritonfp8.layers.linear import Float8Conv1D, is_conv1d, is_converted
from tritonfp8.layers.moe import class_of_experts, is_converted_experts
from tritonfp8.specs import naming
from tritonfp8.specs.naming import unwrapped

# Layers that vLLM and SGLang fuse into one, which has one format.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
TRANSPOSED = "a Conv1D, whose weight is transposed: engines read codes of nn.Linear only"


def choose(
    model: nn.Module, row: CheckpointFormat, filter: Filter | None, found: Iterable[Place]
) -> dict[str, str | None]:
    """For each linear layer, and each module of experts, the reason why it stays in high precision; None: exported.

    Args:
        model: the model.
        row: the checkpoint format.
        filter: see :func:`tritonfp8.export.plan`.
        found: the tensors of the model.

    Raises:
        ValueError: a pattern of ``filter`` matches no layer, no layer is exported, or one has no weight of its own.
        TypeError: ``filter`` is of another type.
    """
    if isinstance(filter, str):
        raise ValueError(f"filter must be patterns or a function for an export; got {filter!r}, a choice for training")
    layers = {unwrapped(name): module for name, module in linears(model)}
    selection, roles = Selection(model, filter, 1), Roles(model)
    experts = {name: module for name, module in model.named_modules() if class_of_experts(module) is not None}
    any_converted = any(map(is_converted, layers.values())) or any(map(is_converted_experts, experts.values()))
    chosen_by = selection if filter is not None or not any_converted else None
    tied = {name: place for place in found if len(place.owners) > 1 for name in place.names}
    reasons: dict[str, str | None] = {}
    for path, module in linears(model):
        name = unwrapped(path)
        _check_has_weight(name, module)
        is_transposed = is_conv1d(module) or isinstance(module, Float8Conv1D)
        if is_transposed or not is_converted(module):
            unfit = TRANSPOSED if is_transposed else why_unfit(module)
            if unfit is not None:
                selection.matching(path)
                reasons[name] = unfit
                continue
        reasons[name] = _why_not(path, module, chosen_by, roles) or _why_tied(name, tied) or _why_ragged(module, row)
    for path, module in experts.items():
        reasons[unwrapped(path)] = _why_not_experts(path, module, chosen_by, filter is None) or (
            why_not_split(module) or why_named_otherwise(model, module, found) or _why_ragged_experts(module, row)
        )
    selection.check_all_used()
    reasons = _listed_apart(reasons, row, found)
    if not any(reason is None for reason in reasons.values()):
        left = ((name, reason) for name, reason in reasons.items() if reason is not None)
        lines = "\n".join(naming.reasons(left)) or "the model has no nn.Linear"
        raise ValueError(f"no layer is exported in 8 bits as {row.name!r}:\n{lines}")
    return reasons


def _check_has_weight(name: str, module: nn.Module) -> None:
    if module._parameters.get("weight") is None:
        raise ValueError(
            f"the weight of {name or 'the model'} is no parameter of the layer ({type(module).__name__}), so other "
            "code computes it: an export writes what torch's parametrizations, weight_norm, spectral_norm and pruning "
            "compute. Make any other weight a parameter first"
        )


def _why_not(path: str, module: Any, selection: Selection | None, roles: Roles) -> str | None:
    sizes = sizes_of(module)
    if selection is not None:
        reason = selection.reason(path, module, sizes, None)
    else:
        reason = _why_not_by_recipe(module, is_converted(module), "its")
    role = roles.of(path, module, *sizes)
    # After the filter, which counts a pattern that only matches the head as used.
    return reason if role is None or not role.is_head else f"{role.what}: engines read heads in high precision"


def _why_not_experts(path: str, module: Any, selection: Selection | None, is_default: bool) -> str | None:
    if selection is None:
        return _why_not_by_recipe(module, is_converted_experts(module), "their")
    if is_default:
        return "experts, in high precision unless they are converted, or a filter names them"
    return selection.left_out(path, module)


def _why_not_by_recipe(module: Any, converted: bool, whose: str) -> str | None:
    if not converted:
        return "not converted"
    if module.recipe.output.quantized:
        return None
    return f"{whose} recipe, {module.recipe.name!r}, keeps output in high precision"


def is_exported(name: str, place: Place, reasons: Mapping[str, str | None]) -> bool:
    """Whether a tensor of this name is the weight of a layer, or of experts, that is exported in 8 bits."""
    return place.tensor.ndim >= 2 and reasons.get(name.rpartition(".")[0], "") is None


def _why_tied(name: str, tied: Mapping[str, Place]) -> str | None:
    place = tied.get(joined(name, "weight"))
    if place is None:
        return None
    others = [other for other in place.names if other != joined(name, "weight")]
    return f"its weight is also {', '.join(others)}: loaders tie weights, and not their scales"


def _why_ragged(module: Any, row: CheckpointFormat) -> str | None:
    k, n = sizes_of(module)
    return _ragged({"out_features": n, "in_features": k}, row.multiples, row)


def _why_ragged_experts(module: nn.Module, row: CheckpointFormat) -> str | None:
    hidden, inside = module.down_proj.shape[1:]  # type: ignore[index]
    # Each is N of one projection and K of another.
    multiple = math.lcm(*row.multiples)
    return _ragged({"hidden_size": hidden, "intermediate_size": inside}, (multiple, multiple), row)


def _ragged(sizes: Mapping[str, int], multiples: tuple[int, int], row: CheckpointFormat) -> str | None:
    each = zip(sizes.items(), multiples, strict=True)
    ragged = [f"{name}={size} is no multiple of {multiple}" for (name, size), multiple in each if size % multiple]
    return f"{' and '.join(ragged)}: {row.why}" if ragged else None


def ignored(reasons: Mapping[str, str | None], found: Iterable[Place]) -> list[str]:
    """The modules in high precision that an engine could take for layers: linear layers, routers and experts.

    Each has its name in the model, which transformers matches, and beside it the name in a checkpoint if that is
    another one: engines match that.
    """
    names = dict.fromkeys(name for name, reason in reasons.items() if reason is not None)
    for place in found:
        for owner in place.owners:
            is_layer = _is_matrix(place) and not isinstance(owner.module, nn.Embedding)
            if is_layer and not is_exported(owner.name, place, reasons):
                names.setdefault(owner.name.rpartition(".")[0])
    written = _written_modules(found)
    return list(dict.fromkeys(each for name in names if name for each in (name, *written.get(name, ()))))


def _is_matrix(place: Place) -> bool:
    return place.owners[0].is_parameter and place.tensor.ndim >= 2


def _written_modules(found: Iterable[Place]) -> dict[str, list[str]]:
    """The names in a checkpoint of the modules that have matrices, by their names in the model.

    A vector may lie in another module there: a bias of a router lies beside the router, in its parent.
    """
    modules: dict[str, list[str]] = {}
    for place in filter(_is_matrix, found):
        for owner in place.owners:
            modules.setdefault(owner.name.rpartition(".")[0], []).append(owner.written.rpartition(".")[0])
    return modules


def _listed_apart(
    reasons: dict[str, str | None], row: CheckpointFormat, found: Iterable[Place]
) -> dict[str, str | None]:
    """Keep in high precision what an engine would take for a listed module, because it matches beginnings and ends."""
    written = _written_modules(found)
    while row.matches_parts:
        names = ignored(reasons, found)
        starts, ends = re.compile("|".join(map(re.escape, names)) or "(?!)"), tuple(names)
        taken = {
            name: each
            for name, reason in reasons.items()
            for each in (*written.get(name, ()), name)
            if reason is None and (starts.match(each) or each.endswith(ends))
        }
        if not taken:
            return reasons
        for name, by in taken.items():
            other = next(each for each in names if by.startswith(each) or by.endswith(each))
            reasons[name] = f"its name begins or ends with {other}, which is in high precision: engines match by that"
    return reasons


def notes(reasons: Mapping[str, str | None], found: Iterable[Place], row: CheckpointFormat) -> tuple[str, ...]:
    """What an engine may refuse, though the tensors are right."""
    stacked = [place for place in found if place.tensor.ndim == 3]
    exported = [is_exported(place.name, place, reasons) for place in stacked]
    whole = [
        place.written_name
        for place, in_8_bits in zip(stacked, exported, strict=True)
        if place.owners[0].is_parameter and not in_8_bits
    ]
    lines = _split_groups(reasons)
    if any(exported) and row.note_on_experts:
        lines.append(row.note_on_experts)
    if whole:
        lines.append(
            f"{len(whole)} parameters have 3 dims, like experts, such as {whole[0]}: they are in high precision and "
            "stay whole. transformers reads them; engines that expect a layer for each expert do not"
        )
    return tuple(lines)


def _split_groups(reasons: Mapping[str, str | None]) -> list[str]:
    """A note for each group of layers that engines fuse, if only a part of the group is exported."""
    split: dict[tuple[str, ...], list[str]] = {}
    for name in reasons:
        parent, _, last = name.rpartition(".")
        for group in FUSED:
            members = [reasons[f"{parent}.{each}"] for each in group if f"{parent}.{each}" in reasons]
            if last == group[0] and len({reason is None for reason in members}) > 1:
                split.setdefault(group, []).append(parent)
    return [
        f"vLLM and SGLang fuse {', '.join(group)} and refuse a mix of formats: {len(parents)} modules have one, such "
        f"as {parents[0]}. Leave them all out by filter, or take a format without blocks"
        for group, parents in split.items()
    ]
