"""The names of a model's tensors in its checkpoints, by the table of conversions that transformers loads and saves by.

An entry of the table renames tensors of a checkpoint, or makes a tensor of the model from several by operations.
Entries and operations are known in transformers 5.17. They are told apart by the names of their classes, so that a
version that lacks one, or has others, is no error: a name that is not understood is that in the model.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

# What makes a weight [E, N, K] from matrices of each expert: stacked, and below each other if they are several.
_STACKED = (("MergeModulelist", 0),)
_BELOW = (*_STACKED, ("Concatenate", 1))
_WEIGHT = ".weight"


class CheckpointNames:
    """What the tensors of a model are called in its checkpoints.

    A name is only given if the table, read as a loader reads it, leads from it to the tensor. So transformers loads a
    checkpoint with these names. Models that are not in the table have the same names in their checkpoints.
    """

    def __init__(self, model: nn.Module) -> None:
        table = _table(model)
        try:
            # From the model to the checkpoint the last entry comes first, as when transformers saves.
            back = [(each, each.reverse_transform()) for each in reversed(table)]
        except NotImplementedError:
            # transformers cannot save such a model, either.
            table, back = [], []
        self._prefix = getattr(model, "base_model_prefix", "")
        self._renamings = [each for each in table if not _has_operations(each)]
        self._converters = [each for each in table if _has_operations(each)]
        self._back = [reverse for each, reverse in back if not _has_operations(each)]
        self._splits = [(each, reverse) for each, reverse in back if _has_operations(each)]

    def of(self, name: str) -> str:
        """The name of a tensor, which a loader takes as it is."""
        if any(split.rename_source_key(name)[1] is not None for _, split in self._splits):
            return name
        written = self._renamed_back(name)
        # A scale beside a weight must follow it.
        ends = ("", "_scale") if name.endswith(_WEIGHT) else ("",)
        return written if all(self._loaded(written + end) == (name + end, None) for end in ends) else name

    def in_model(self, name: str) -> tuple[str, str]:
        """The name that a loader gives a tensor of a checkpoint, and that name with the prefix of the base model."""
        found, pattern = self._loaded(name)
        found = name if pattern is not None else found
        return found, f"{self._prefix}.{found}"

    def matrices(self, name: str) -> tuple[str, ...]:
        """The names of the matrices that lie below each other in a weight of experts, with ``*`` for the expert.

        Returns:
            Empty if the weight is made otherwise, or not from matrices.
        """
        for converter, split in self._splits:
            key, found = split.rename_source_key(name)
            if found is None:
                continue
            sources = split.target_patterns
            start, _, end = key.rpartition(sources[0])
            if end or not _only_stacks(converter) or not all(_is_of_each_expert(source) for source in sources):
                return ()
            written = tuple(self._renamed_back(start + source) for source in sources)
            # The pattern of each says where in the concatenation it lies.
            loaded = [self._loaded(each.replace("*", "0")) for each in written]
            return written if loaded == [(name, pattern) for pattern in converter.source_patterns] else ()
        return ()

    def _renamed_back(self, name: str) -> str:
        for each in self._back:
            name, _ = each.rename_source_key(name)
        return name

    def _loaded(self, name: str) -> tuple[str, str | None]:
        """The tensor that a loader makes from this one of a checkpoint, and the pattern of the converter it takes."""
        for each in self._renamings:
            name, _ = each.rename_source_key(name)
        for each in self._converters:
            name, pattern = each.rename_source_key(name)
            if pattern is not None:
                return name, pattern
        return name, None


def _table(model: nn.Module) -> list[Any]:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind is None or "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping

    if isinstance(model, PreTrainedModel):
        table = get_model_conversion_mapping(without_fsdp(model), add_legacy=False)
    else:
        table = get_checkpoint_conversion_mapping(kind) or []
    # Whether a checkpoint has such a prefix is known only of one that was loaded, so transformers saves without it.
    return [each for each in table if type(each).__name__ != "PrefixChange"]


def without_fsdp(module: nn.Module, made: dict[nn.Module, Any] | None = None) -> Any:
    """A stand-in with the base classes from which ``fully_shard`` derived classes.

    It has the tree of modules, and shares all else. ``made`` takes the stand-in of each module.
    """
    made = {} if made is None else made
    if module in made:
        return made[module]
    classes = type(module).__mro__
    at = next((at for at, cls in enumerate(classes) if cls.__name__ == "FSDPModule"), -1)
    # Without __init__, which would make parameters.
    found: Any = object.__new__(classes[at + 1])
    made[module] = found
    children = {name: None if c is None else without_fsdp(c, made) for name, c in module._modules.items()}
    found.__dict__.update(module.__dict__, _modules=children)
    return found


def _has_operations(entry: Any) -> bool:
    return hasattr(entry, "operations")


def _only_stacks(converter: Any) -> bool:
    operations = tuple((type(each).__name__, getattr(each, "dim", None)) for each in converter.operations)
    is_fixed = all(getattr(each, "num_shards_attribute", None) is None for each in converter.operations)
    return is_fixed and operations == (_STACKED if len(converter.source_patterns) == 1 else _BELOW)


def _is_of_each_expert(source: str) -> bool:
    return source.count("*") == 1 and source.endswith(_WEIGHT)
