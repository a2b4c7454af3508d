"""A model, the names of its modules, and its weights, without what torch wraps around them or gathers."""

from __future__ import annotations

from torch import nn

# What torch.compile and checkpointing put into the names of modules. A state_dict of theirs has it, a checkpoint not.
_INSERTED = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(name: str) -> str:
    """A name as it is without ``torch.compile`` and checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _INSERTED)


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
        # By name: torch's FSDP need not be imported.
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.reshard()  # type: ignore[operator]
