"""The tensors of a model: in which modules each lies, which names share one tensor, and its names in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tritonfp8.compat import CheckpointNames
from tritonfp8.layers.linear import is_distributed
from tritonfp8.layers.stored import StoredWeight, whole_weight

# What torch.compile and checkpointing put into the names of modules. A state_dict of theirs has it, a checkpoint not.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


class Owner(NamedTuple):
    """A module that has a tensor, and the tensor's name in it."""

    module: nn.Module
    key: str
    is_parameter: bool


class Place(NamedTuple):
    """A tensor of a model.

    Attributes:
        names: its names in the model; several if it is tied.
        tensor: the parameter or buffer.
        owners: the modules that have it, one for each name.
        written: its names in a checkpoint, one for each name.
        matrices: of a weight of experts, the names in a checkpoint of the matrices that lie below each other in it,
            with ``*`` for the expert. Empty if transformers has none for the model.
    """

    names: list[str]
    tensor: Tensor
    owners: list[Owner]
    written: list[str]
    matrices: tuple[str, ...] = ()

    @property
    def _first(self) -> int:
        at = (at for at, owner in enumerate(self.owners) if isinstance(owner.module, nn.Embedding))
        return next(at, 0)

    @property
    def name(self) -> str:
        """The name by which it is known: that of an embedding where it has one, else the first."""
        return self.names[self._first]

    @property
    def written_name(self) -> str:
        """The name under which it is written."""
        return self.written[self._first]


def bare(model: nn.Module) -> nn.Module:
    """The model inside of ``torch.compile`` and ``DistributedDataParallel``, which has its config and its names."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def unwrapped(name: str) -> str:
    """A name as it is without ``torch.compile`` and checkpointing."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


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
    for name, owner, tensor in _tensors(model):
        if is_lazy(tensor):
            raise ValueError(f"{name} is lazy and has no shape yet: run the model once")
        key = _identity(tensor)
        if key not in found:
            found[key] = Place([], tensor, [], [], checkpoint.matrices(name) if tensor.ndim == 3 else ())
        place = found[key]
        place.names.append(name)
        place.owners.append(owner)
        place.written.append(checkpoint.of(name))
    return list(found.values())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Owner, Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = unwrapped(path)
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield joined(prefix, key), Owner(module, key, True), parameter
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield joined(prefix, key), Owner(module, key, False), buffer


def check_whole(found: Iterable[Place], what: str) -> None:
    """Raise ValueError for a sharded tensor (a DTensor), which ``what`` does not take."""
    for place in found:
        if is_distributed(place.tensor):
            raise ValueError(
                f"{place.name} is sharded (a {type(place.tensor).__name__}): {what} needs whole tensors. Gather the "
                "weights into a model that is not sharded, by torch.distributed.checkpoint.state_dict."
                "get_model_state_dict with full_state_dict=True"
            )


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


def reshard(model: nn.Module) -> None:
    """Let FSDP2 drop what it gathered, as it does for a state_dict: a gathered weight is rounded or in 8 bits."""
    for module in model.modules():
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def _identity(tensor: Tensor) -> object:
    # A stored weight has no memory of its own, only that of its codes.
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
