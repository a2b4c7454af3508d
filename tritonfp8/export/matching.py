"""Which tensor of a checkpoint goes where in a model; headers are checked, and data is not read yet.

Every tensor of the checkpoint and of the model has a partner, is named by a pattern, or is named in an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import compress
from typing import NamedTuple

import torch
from torch import nn

from tritonfp8.export.checkpoint_formats import CHECKPOINT_FORMATS, READ_FORMATS, READ_SCALES, CheckpointFormat
from tritonfp8.export.configs import FormatGroup, row_of
from tritonfp8.export.experts import Part, all_parts
from tritonfp8.export.files import Stored
from tritonfp8.export.places import Owner, Place
from tritonfp8.specs import block_of
from tritonfp8.specs.checks import require_type
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES
from tritonfp8.specs.naming import listed

# What a scale of codes is called begins so. Other scales beside a weight are of activations and caches.
_OF_WEIGHTS = ("weight", "scale", "qscale_weight")
_EVERY = (*CHECKPOINT_FORMATS.values(), *READ_FORMATS.values())
# The ends of names of codes, where a byte holds several.
_PACKED = tuple(row.codes_end for row in _EVERY if row.codes_end != "weight")
CODES = frozenset(row.dtype for row in CHECKPOINT_FORMATS.values() if row.codes_end == "weight")


class Placed(NamedTuple):
    """A tensor of the checkpoint and its place in the model.

    Attributes:
        name: in the checkpoint.
        stored: its header.
        place: the tensor of the model that it becomes, or becomes a part of.
        scale: with codes, the name of their scale.
        row: with codes, their format.
        part: of a weight of experts, the part that it becomes; else None.
        whole: the name of the scale of the whole tensor, if the format has one.
    """

    name: str
    stored: Stored
    place: Place
    scale: str | None = None
    row: CheckpointFormat | None = None
    part: Part | None = None
    whole: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its name in the checkpoint, and the names of its scales."""
        return tuple(name for name in (self.name, self.scale, self.whole) if name is not None)

    @property
    def owner(self) -> nn.Module:
        """The module that has the tensor by this name."""
        return self._owner.module

    @property
    def name_in_model(self) -> str:
        """The name of the tensor in the model; of a part the name in the checkpoint."""
        return self.name if self.part else self._owner.name

    @property
    def _owner(self) -> Owner:
        owners = self.place.owners
        names = self.name, name_of_weight(self.name)
        named = [owner for owner in owners if owner.written in names]
        named += [owner for owner in owners if owner.name in names]
        return owners[0] if self.part or not named else named[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its values; of codes in their order."""
        if self.part:
            return self.part.shape
        shape = tuple(self.place.tensor.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.row is not None and self.is_transposed else shape

    @property
    def is_transposed(self) -> bool:
        """Whether the place is a weight of experts that lies transposed, so that codes have another order."""
        return self.place.tensor.ndim == 3 and bool(getattr(self.owner, "is_transposed", False))

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes by which a config may name the layer."""
        return ("Linear",) if self.part else tuple(cls.__name__ for cls in type(self.owner).__mro__)

    @property
    def layer(self) -> str:
        """The name of the layer in the model; of a part the name in the checkpoint."""
        return _without_weight(self.name_in_model)


class Match(NamedTuple):
    """What is read, and the names on either side that have no partner and are allowed to.

    Attributes:
        jobs: what is read.
        ignored: tensors of the checkpoint that a pattern leaves out.
        left: tensors of the model that a pattern leaves as they are.
        of_activations: static scales of activations, which are not used.
    """

    jobs: list[Placed]
    ignored: tuple[str, ...]
    left: tuple[str, ...]
    of_activations: tuple[str, ...]


def match(
    stored: Mapping[str, Stored],
    model_places: Iterable[Place],
    found: list[FormatGroup],
    patterns: Collection[str],
    static: Collection[str] = (),
    extra: Collection[str] = (),
    in_model: Callable[[str], tuple[str, ...]] = lambda name: (name,),
) -> Match:
    """Find a partner for every tensor. Raises ValueError as :func:`tritonfp8.export.load` does.

    ``static`` are the names of static scales of activations, which lie beside codes and need no partner. ``extra`` are
    regular expressions of tensors that the class of the model leaves out, such as layers that predict further tokens.
    ``in_model`` gives the names in the model of a tensor of a checkpoint whose name is not the one that is written.
    """
    found_places = list(model_places)
    of_name = _by_name(found_places, stored)
    found_parts = all_parts(
        place
        for place in found_places
        if not any(_stored_name(name, stored) for owner in place.owners for name in (owner.name, owner.written))
    )
    parts = {_stored_name(name, stored) or name: part for name, part in found_parts.items()}
    _add_other_names(stored, found_places, of_name, parts, in_model)
    jobs, unused = _jobs(stored, of_name, parts, found)
    ignored = [name for name in unused if matches(name, patterns) or any(re.search(each, name) for each in extra)]
    _check_ignored(ignored, jobs)
    of_codes = {_beside(job.name, "") for job in jobs if job.row is not None}
    of_activations = [
        name for name in unused if name not in ignored and _split(name)[1] in static and _split(name)[0] in of_codes
    ]
    loaded, names = {id(job.place) for job in jobs}, {job.name for job in jobs}
    absent = [place for place in found_places if id(place) not in loaded]
    # A pattern may be of either name.
    is_left = [matches(place.name, patterns) or matches(place.written_name, patterns) for place in absent]
    left = list(compress(absent, is_left))
    missing = {place.written_name for place, each in zip(absent, is_left, strict=True) if not each}
    missing |= {name for name, part in parts.items() if id(part.place) in loaded and name not in names}
    check_names(set(unused) - {*ignored, *of_activations}, missing)
    check_patterns(patterns, [*ignored, *(name for place in left for name in (place.name, place.written_name))])
    _check_left(left)
    for job in jobs:
        _check_job(job, stored)
    return Match(jobs, tuple(ignored), tuple(place.name for place in left), tuple(of_activations))


def _by_name(model_places: Iterable[Place], stored: Mapping[str, Stored]) -> dict[str, Place]:
    """The places by their names in the checkpoint, which may be the model's names: transformers reads these, too."""
    return {
        _stored_name(owner.written, stored) or _stored_name(owner.name, stored) or owner.written: place
        for place in model_places
        for owner in place.owners
    }


def _stored_name(name: str, stored: Collection[str]) -> str | None:
    """The name that a checkpoint has for a tensor, which is another one where a byte holds several codes, or None."""
    names = [name, *(_beside(name, end) if end.startswith("weight") else name + end for end in _PACKED)]
    return next((each for each in names if each in stored), None)


def name_of_weight(name: str) -> str:
    """The inverse of :func:`_stored_name`: the name of a weight, by the name of its codes."""
    end = next((end for end in _PACKED if name.endswith(end)), None)
    if end is None:
        return name
    return name.removesuffix(end) + ("weight" if end.startswith("weight") else "")


def _add_other_names(
    stored: Mapping[str, Stored],
    model_places: Iterable[Place],
    of_name: dict[str, Place],
    parts: dict[str, Part],
    in_model: Callable[[str], tuple[str, ...]],
) -> None:
    """Add names to ``of_name`` and ``parts`` that a loader renames, and saving does not give back: DeepSeek-V4's."""
    named = {id(place) for name, place in of_name.items() if name in stored}
    named |= {id(part.place) for name, part in parts.items() if name in stored}
    left = {owner.name: place for place in model_places if id(place) not in named for owner in place.owners}
    for name in stored if left else ():
        if name in of_name or name in parts:
            continue
        for other in in_model(name):
            if other in left:
                of_name[name] = left[other]
            elif other in parts and id(parts[other].place) not in named:
                parts[name] = parts.pop(other)


def patterns_of(ignore: object) -> tuple[str, ...]:
    """The argument ``ignore``, checked. Raises TypeError."""
    if isinstance(ignore, str) or not isinstance(ignore, Collection):
        raise TypeError(f"ignore must be a list of patterns; got {type(ignore).__name__}")
    for pattern in ignore:
        require_type("a pattern of ignore", pattern, str, "a str")
    return tuple(ignore)


def _without_weight(name: str) -> str:
    return name_of_weight(name).removesuffix("weight").removesuffix(".")


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is of one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _beside(weight: str, key: str) -> str:
    """The name of a tensor beside a weight."""
    return name_of_weight(weight).removesuffix("weight") + key


def _split(name: str) -> tuple[str, str]:
    """The beginning of a name, with its dot, and the last part."""
    parent, dot, last = name.rpartition(".")
    return parent + dot, last


def _scale_of(weight: str, row: CheckpointFormat, others: Collection[str]) -> str:
    """The name of the scale of codes; ``others`` are the tensors of the checkpoint that the model has no place for.

    Raises:
        ValueError: they have none, or several.
    """
    names = [_beside(weight, key) for key in READ_SCALES[row.method]] if weight.endswith(row.codes_end) else []
    found = [name for name in names if name in others]
    if len(found) == 1:
        return found[0]
    what = f"{weight} has codes and needs one scale, {' or '.join(names) or 'beside a weight'}"
    if found:
        raise ValueError(f"{what}; got {listed(found)}. The checkpoint mixes layouts")
    if beside := [name for name in others if _split(name)[0] == _beside(weight, "") and "scale" in name]:
        raise ValueError(f"{what}; got {listed(beside)}. The checkpoint is of another layout than its config says")
    raise ValueError(f"{what}; got no scale. The checkpoint is incomplete")


def _whole_of(weight: str, row: CheckpointFormat, others: Collection[str]) -> str | None:
    """The name of the scale of the whole tensor, if the format has one. Raises ValueError if there is none."""
    if row.global_scale is None:
        return None
    name = _beside(weight, row.global_scale.name)
    if name not in others:
        raise ValueError(f"{weight} has codes of {row.name!r} and needs {name}; got none. The checkpoint is incomplete")
    return name


def _check_ignored(ignored: Iterable[str], jobs: Iterable[Placed]) -> None:
    """Raise ValueError for a scale of codes that a pattern leaves out: the values would be others."""
    weights = {_beside(job.name, ""): job for job in jobs if job.row is not None}
    for name in ignored:
        parent, last = _split(name)
        if parent in weights and "scale" in last and last.startswith(_OF_WEIGHTS):
            job = weights[parent]
            raise ValueError(
                f"{name} may scale the codes of {job.name}, beside {job.scale}: no pattern of ignore may leave it out. "
                "The checkpoint is of another layout than its config says"
            )


def _jobs(
    stored: Mapping[str, Stored], of_name: Mapping[str, Place], parts: Mapping[str, Part], found: list[FormatGroup]
) -> tuple[list[Placed], list[str]]:
    """What is read where, and the names of the tensors that nothing reads."""
    jobs, used = [], set()
    others = stored.keys() - of_name.keys() - parts.keys()
    # Whether bytes under the name of a weight are codes.
    has_bytes = any((group.row.dtype, group.row.codes_end) == (torch.uint8, "weight") for group in found)
    for name, header in stored.items():
        part = parts.get(name)
        place = of_name.get(name) if part is None else part.place
        if place is None:
            continue
        used.add(name)
        job = Placed(name, header, place, part=part)
        is_packed = header.dtype is torch.uint8 and (name_of_weight(name) != name or has_bytes)
        if header.dtype not in CODES and not is_packed:
            jobs.append(job)
            continue
        row = row_of(found, (_without_weight(name), job.layer), job.classes)
        if row is None:
            raise ValueError(
                f"{name} has {header.dtype} codes, and no group of the config names its layer: the config is of "
                "another checkpoint"
            )
        jobs.append(job._replace(row=row, scale=_scale_of(name, row, others), whole=_whole_of(name, row, others)))
        used.update(jobs[-1].names)
    return jobs, [name for name in stored if name not in used]


def check_names(unused: set[str], missing: set[str], source: str = "checkpoint", target: str = "model") -> None:
    """Raise ValueError for tensors of a source or a target that have no partner."""
    parts = []
    if unused:
        parts.append(f"the {target} has no place for these tensors of the {source}: {listed(sorted(unused))}")
    if missing:
        parts.append(f"the {source} does not have these tensors of the {target}: {listed(sorted(missing))}")
    if parts:
        raise ValueError(
            f"the {source} must fit the {target}; {'; '.join(parts)}. Build the {target} of the {source}'s config, or "
            "name tensors that need no partner by patterns in ignore="
        )


def check_patterns(patterns: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError for a pattern that matches none of the names."""
    if unused := [pattern for pattern in patterns if not any(matches(name, (pattern,)) for name in names)]:
        raise ValueError(
            f"the patterns {', '.join(map(repr, unused))} of ignore match no tensor without a partner: leave them out"
        )


def _check_left(left: Iterable[Place]) -> None:
    if on_meta := [place.name for place in left if place.tensor.device.type == "meta"]:
        raise ValueError(f"{listed(on_meta)} must have values, as the checkpoint has none: they are on the meta device")


def _check_job(job: Placed, stored: Mapping[str, Stored]) -> None:
    target, header = job.place.tensor, job.stored
    if job.row is not None and header.dtype != job.row.dtype:
        raise ValueError(
            f"{job.name} must have {job.row.dtype} codes, as the config says; got {header.dtype}. The config and the "
            "tensors are of different checkpoints"
        )
    expected = job.shape if job.row is None else job.row.codes_shape(job.shape)
    if expected != header.shape:
        raise ValueError(f"{job.name} must have shape {expected}, as in the model; got {header.shape}")
    if job.row is None:
        same_kind = target.dtype.is_floating_point and header.dtype in (*HIGH_PRECISION_DTYPES, torch.float64)
        if header.dtype != target.dtype and not same_kind:
            raise ValueError(f"{job.name} must be of {target.dtype} or a dtype of its kind; got {header.dtype}")
        return
    if target.dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"{job.name} is dequantized into bfloat16, float16 or float32; the model has {target.dtype}")
    is_experts = job.row.is_blocked and len(job.shape) == 3
    if job.part is None and not is_experts and not isinstance(job.owner, nn.Linear | nn.Embedding):
        raise ValueError(
            f"{job.name} has {header.dtype} codes, which are read for nn.Linear and nn.Embedding; the model has a "
            f"{type(job.owner).__name__}"
        )
    if len(job.shape) != 2 and not is_experts:
        raise ValueError(f"{job.name} has {header.dtype} codes and must be a matrix [N, K]; got {header.shape}")
    _check_scale(job.name, str(job.scale), job.shape, stored[str(job.scale)], job.row)
    if job.whole is not None and (header := stored[job.whole])[1:] not in ((torch.float32, ()), (torch.float32, (1,))):
        raise ValueError(f"{job.whole} must be one value in torch.float32; got {header.shape} in {header.dtype}")


def _check_scale(name: str, scale: str, shape: tuple[int, ...], header: Stored, row: CheckpointFormat) -> None:
    if header.dtype not in row.scale_dtypes:
        raise ValueError(f"{scale} must be {' or '.join(map(str, row.scale_dtypes))}; got {header.dtype}")
    expected = row.scale_shape(shape)
    whole = row.spec.scale_shape(shape)
    # One scale, or one a row, comes also without the dims of size 1.
    flat = tuple(size for size in whole if size != 1)
    if header.shape not in (expected, whole) and not (len(header.shape) < 2 and header.shape in (flat, (*flat, 1)[:1])):
        raise ValueError(
            f"{scale} must have shape {expected}, for blocks of {block_of(row.spec.block).name} of {name} {shape}; got "
            f"{header.shape}. The config and the tensors are of different checkpoints, or the config is wrong"
        )
