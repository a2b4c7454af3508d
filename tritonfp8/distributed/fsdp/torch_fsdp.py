"""The parameters that FSDP2 manages, and their state: FSDP2 has no public interface for this.

Its private names are listed in :mod:`tritonfp8.distributed.torch_private`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.multiprocessing.reductions import StorageWeakRef

from tritonfp8.distributed.torch_private import GROUP, MESH_INFO, PARAM, STATE, require_of_instance
from tritonfp8.layers import stamp
from tritonfp8.specs.naming import listed

_USER = "enable_float8_all_gather"


class _GathersByHooks:
    """Mixin for FSDP's parameter class: FSDP finds all-gather hooks, though the shard is a plain tensor.

    FSDP looks for the hooks on the local shard, which would have to be a tensor subclass for that. Optimizers,
    checkpoints and code that replaces ``param.data`` or compares ``data_ptr()`` would then meet the subclass, too.
    """

    # FSDP reads this several times at each gather; a getter of C costs the host less than a method.
    _sharded_local_tensor = property(operator.attrgetter("gather_hooks"))


@functools.cache
def _by_hooks(owner: Any) -> type:
    return type(owner.__name__, (_GathersByHooks, owner), {})


class Managed(NamedTuple):
    """A parameter that FSDP manages."""

    group: Any
    param: Any

    @property
    def name(self) -> str:
        """Its name below the outermost ``fully_shard``, or in its module before the first forward."""
        return self.param._param_fqn or self.param._module_info.param_name

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """The modules that own it, and its names there."""
        info = self.param._module_info
        return list(zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True))

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all of it, by torch's ``replicate``: nothing is gathered then."""
        info = self.group.mesh_info
        return hasattr(info, "replicate_mesh_size") and not hasattr(info, "shard_mesh_size")

    @property
    def copies(self) -> int:
        """The number of ranks that have the same shard, as in HSDP."""
        return int(getattr(self.group.mesh_info, "replicate_mesh_size", 1))

    def require_mesh(self) -> None:
        """Raise RuntimeError unless this torch says how the parameter is sharded."""
        require_of_instance(_USER, MESH_INFO, self.group.mesh_info)

    @property
    def process_group(self) -> torch.distributed.ProcessGroup:
        """The ranks over which the parameter is sharded; with HSDP, without those over which it is replicated."""
        return self.group.mesh_info.shard_process_group

    @property
    def rank(self) -> int:
        """The index of this rank's shard."""
        return int(self.group.mesh_info.shard_mesh_rank)

    @property
    def shards(self) -> int:
        """The number of shards."""
        return int(self.group.mesh_info.shard_mesh_size)

    @property
    def shard_dim(self) -> int:
        """The dim along which the parameter is sharded."""
        placement = self.param.fsdp_placement
        return placement.dim if isinstance(placement, Shard) else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gathered parameter; with tensor or expert parallelism, of this rank's part."""
        return tuple(self.param._orig_size)

    @property
    def tensor_parallel(self) -> Any:
        """The DTensorSpec that the parameter had before ``fully_shard``, or None if it was a plain tensor."""
        if not self.param.is_dtensor:
            return None
        # The first name exists since torch 2.12.
        found = getattr(self.param, "_unsharded_dtensor_spec", None)
        return self.param._tp_spec if found is None else found

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.group.device

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype in which the layer computes, or None for the parameter's own."""
        return self._policy.param_dtype

    @property
    def _policy(self) -> Any:
        # Since torch 2.15 each parameter has a policy; before, its group has one.
        policy = getattr(self.param, "mp_policy", None)
        return self.group.mp_policy if policy is None else policy

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which its gradient is reduced over the ranks."""
        return self._policy.reduce_dtype or self.param_dtype or self.local.dtype

    @property
    def local(self) -> torch.Tensor:
        """The local shard; the codes of a weight that is stored in 8 bits."""
        local: torch.Tensor = self.param.sharded_param._local_tensor
        return getattr(local, "_qdata", local)

    @property
    def in_backward(self) -> bool:
        """Whether backward reads the gather that runs now."""
        return self.group._training_state.name == "PRE_BACKWARD"

    @property
    def is_sharded(self) -> bool:
        """Whether nothing is gathered now."""
        return bool(self.group.is_sharded)

    @property
    def stamp(self) -> tuple[object, ...]:
        """Changes with every write to the shard that torch counts, on the DTensor or on its local tensor."""
        return stamp(self.param.sharded_param)

    @property
    def holder(self) -> StorageWeakRef | None:
        """The memory of the sharded DTensor itself, which holds no values; ``param.data = other`` replaces it."""
        try:
            return StorageWeakRef(self.param.sharded_param.untyped_storage())
        except (NotImplementedError, RuntimeError):
            return None

    @property
    def gathers_by_hooks(self) -> bool:
        """Whether FSDP asks our hooks for what to gather."""
        return isinstance(self.param, _GathersByHooks)

    def gather_by_hooks(self, hooks: Any) -> bool:
        """Make FSDP find the hooks of its all-gather extension on ``hooks``, in the place of the local shard.

        Returns:
            Whether the values were gathered already. The caller must then gather them again by :meth:`gather_now`.
        """
        # A gather that was started ahead (prefetched) must end before it is dropped.
        self.group.wait_for_unshard()
        gathered = not self.is_sharded
        self.forget_gathered()
        self.param.gather_hooks = hooks
        owner: Any = type(self.param)
        self.param.__class__ = _by_hooks(owner)
        self.param._init_extensions()
        return gathered

    def gather_values(self) -> None:
        """Undo :meth:`gather_by_hooks`."""
        self.forget_gathered()
        if self.gathers_by_hooks:
            self.param.__class__ = type(self.param).__mro__[2]
            del self.param.gather_hooks

    def gather_now(self) -> None:
        """Gather the whole group, also outside of forward and before its first one."""
        self.group.lazy_init()
        self.group.unshard()
        self.group.wait_for_unshard()

    def shard_again(self) -> None:
        """Undo :meth:`gather_now`."""
        self.group.reshard()

    def forget_gathered(self) -> None:
        """Drop the gathered memory, because the next gather has another size or type. Gradients stay."""
        self.group._to_sharded()
        self.param.all_gather_outputs = []
        gathered = self.param.__dict__.pop("_unsharded_param", None)
        if gathered is not None and gathered.grad is not None:
            if self.param.unsharded_accumulated_grad is None:
                self.param.unsharded_accumulated_grad = gathered.grad
            else:
                self.param.unsharded_accumulated_grad += gathered.grad

    def replace(self, parameter: nn.Parameter) -> None:
        """Shard another DTensor of the same shape and placements in the place of this parameter, in all its modules."""
        self.forget_gathered()
        local = parameter._local_tensor  # type: ignore[attr-defined]
        if type(local) is not torch.Tensor:
            # FSDP would compare its memory with the memory of the shard before, and such a tensor has none.
            self.param._sharded_param_data = local
        for module, name in self.owners:
            module._parameters[name] = parameter
        self.param.reset_sharded_param()
        self.param._init_extensions()

    @property
    def reshards_to_fewer(self) -> bool:
        """Whether FSDP shards what it gathered over a part of the ranks (``reshard_after_forward`` an int)."""
        post_forward = self.group.post_forward_mesh_info
        return post_forward is not None and post_forward != self.group.mesh_info

    def keep_bytes(self) -> None:
        """Let FSDP shard gathered bytes over fewer ranks. It takes them for values of the parameter.

        Without this it would cast them to the compute dtype. It also requires values of a parameter with a gradient to
        be floats, so they are viewed as 8-bit floats.
        """
        self.param.param_dtype = None
        self.param.all_gather_outputs = [x.view(torch.float8_e4m3fn) for x in self.param.all_gather_outputs]

    def send_bytes(self) -> None:
        """Let FSDP gather from fewer ranks, as bytes again: not all backends send 8-bit floats."""
        self.param._sharded_post_forward_param_data = self.param._sharded_post_forward_param_data.view(torch.uint8)


def _groups(state: Any) -> list[Any]:
    require_of_instance(_USER, STATE, state)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def _owners(group: Any) -> Iterator[tuple[tuple[nn.Module, str], Managed]]:
    require_of_instance(_USER, GROUP, group)
    for param in group.fsdp_params:
        require_of_instance(_USER, PARAM, param)
        managed = Managed(group, param)
        for owner in managed.owners:
            yield owner, managed


def managed_parameters(modules: Iterable[nn.Module] | None = None) -> dict[tuple[nn.Module, str], Managed]:
    """Every parameter that FSDP manages by one of these modules, by the module that owns it and its name there.

    By default, every parameter that FSDP manages in this process.
    """
    found: dict[tuple[nn.Module, str], Managed] = {}
    for module in list(_module_state_mapping) if modules is None else modules:
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                found.update(_owners(group))
    return found


def managed_of(modules: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], Managed]:
    """The parameters of these modules themselves that FSDP manages, from whichever module, by owner and name."""
    wanted = set(modules)
    return {owner: managed for owner, managed in managed_parameters().items() if owner[0] in wanted}


def by_group(parameters: Iterable[Managed]) -> list[list[Managed]]:
    """Parameters by the group that FSDP gathers together; each once."""
    found: dict[int, dict[int, Managed]] = {}
    for managed in parameters:
        found.setdefault(id(managed.group), {})[id(managed.param)] = managed
    return [list(members.values()) for members in found.values()]


def require_none_above(layers: Mapping[str, nn.Module]) -> None:
    """Raise RuntimeError if FSDP shards some of these layers, by name, from a module above their model."""
    managed = managed_of(layers.values()) if layers else {}
    found = {owner for (owner, _), each in managed.items() if not each.is_replicated}
    if names := [f"{name}.weight" for name, layer in layers.items() if layer in found]:
        raise RuntimeError(
            f"{listed(names)} is sharded by a fully_shard above the model that enable_float8_all_gather was given: "
            "give it the outermost module that fully_shard is applied to"
        )


def forget_inference_memory(model: nn.Module) -> None:
    """Drop memory that FSDP allocated in inference mode: training must not write to such tensors.

    FSDP keeps the memory of the first forward. Without this, a model whose first forward is an evaluation in
    ``torch.inference_mode()`` could not be trained.
    """
    for managed in managed_parameters(model.modules()).values():
        if any(x.is_inference() for x in managed.param.all_gather_outputs):
            managed.forget_gathered()
