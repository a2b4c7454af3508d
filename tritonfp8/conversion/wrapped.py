"""A model and its weights, without what torch wraps around them or gathers."""

from __future__ import annotations

from torch import nn


def bare(model: nn.Module) -> nn.Module:
    """The model inside of ``torch.compile`` and ``DistributedDataParallel``, which has its config and its names."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def reshard(model: nn.Module) -> None:
    """Let FSDP2 drop what it gathered: a gathered weight is rounded or in 8 bits, and the root would keep it."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # type: ignore[operator]


def is_fsdp(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module."""
    # By name: torch's FSDP need not be imported.
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)
