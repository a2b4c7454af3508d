"""The tensors of a model: in which modules each lies, which names share one tensor, and its names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tritonfp8.compat import CheckpointNames
from tritonfp8.layers.linear import is_distributed
from tritonfp8.layers.stored import StoredWeight, whole_weight
from tritonfp8.specs.naming import unwrapped


class Owner(NamedTuple):
    """A module that has a tensor, with the names of the tensor: in the model, in a checkpoint, and in the module."""

    name: str
    written: str
    module: nn.Module
    key: str
    is_parameter: bool


class Place(NamedTuple):
    """A tensor of a model.

    Attributes:
        tensor: the parameter or buffer.
        owners: the modules that have it; several if it is tied.
        matrices: of a weight of experts, the names in a checkpoint of the matrices that lie below each other in it,
            with ``*`` for the expert. Empty if transformers has none for the model.
    """

    tensor: Tensor
    owners: list[Owner]
    matrices: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Its names in the model."""
        return [owner.name for owner in self.owners]

    @property
    def _known_by(self) -> Owner:
        """The embedding that has it, else the first owner."""
        return next((owner for owner in self.owners if isinstance(owner.module, nn.Embedding)), self.owners[0])

    @property
    def name(self) -> str:
        """The name by which it is known."""
        return self._known_by.name

    @property
    def written_name(self) -> str:
        """The name under which it is written."""
        return self._known_by.written


def joined(module: str, key: str) -> str:
    """The name of ``key`` in ``module``; the root has no name."""
    return f"{module}.{key}" if module else key


def places(model: nn.Module) -> list[Place]:
    """The parameters and persistent buffers of a model, in the order of its modules; tied tensors once.

    Raises:
        ValueError: a lazy parameter.
    """
    found: dict[object, Place] = {}
    checkpoint = CheckpointNames(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or key in module._non_persistent_buffers_set:
                continue
            name = joined(unwrapped(path), key)
            if is_lazy(tensor):
                raise ValueError(f"{name} is lazy and has no shape yet: run the model once")
            matrices = checkpoint.matrices(name) if tensor.ndim == 3 else ()
            place = found.setdefault(_identity(tensor), Place(tensor, [], matrices))
            place.owners.append(Owner(name, checkpoint.of(name), module, key, key in module._parameters))
    return list(found.values())


def check_has_memory(found: Iterable[Place]) -> None:
    """Raise ValueError for a sharded tensor on the meta device, which a whole one cannot replace."""
    for place in found:
        if is_distributed(place.tensor) and place.tensor.device.type == "meta":
            raise ValueError(
                f"{place.name} is sharded and on the meta device: give it memory first, by model.to_empty(device=...)"
            )


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, without gradients. A sharded one is gathered, so that all ranks must call this."""
    tensor = whole_weight(tensor)
    gather = getattr(tensor, "full_tensor", None) if is_distributed(tensor) else None
    return (tensor if gather is None else gather()).detach()


def _identity(tensor: Tensor) -> object:
    # A stored weight has no memory of its own, only its codes' memory.
    if is_distributed(tensor) or isinstance(tensor, StoredWeight) or tensor.device.type == "meta" or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def buffers_on_meta(model: nn.Module) -> list[str]:
    """The buffers on the meta device that no checkpoint has."""
    return [
        unwrapped(joined(path, key))
        for path, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set and buffer.device == torch.device("meta")
    ]
