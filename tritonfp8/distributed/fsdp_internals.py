"""What FSDP2 does not tell in public: which parameter group manages a weight, and what it is doing.

Its private names: :mod:`tritonfp8.distributed.private_names`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard


class Managed(NamedTuple):
    """A parameter that FSDP manages."""

    group: Any
    param: Any

    @property
    def process_group(self) -> torch.distributed.ProcessGroup:
        """Over which the parameter is sharded (with HSDP, not those over which it is replicated)."""
        return self.group.mesh_info.shard_process_group

    @property
    def rank(self) -> int:
        """Which shard lies here."""
        return int(self.group.mesh_info.shard_mesh_rank)

    @property
    def shards(self) -> int:
        """How many there are."""
        return int(self.group.mesh_info.shard_mesh_size)

    @property
    def shard_dim(self) -> int:
        """The dim along which the parameter is sharded."""
        placement = self.param.fsdp_placement
        return placement.dim if isinstance(placement, Shard) else 0

    @property
    def size(self) -> tuple[int, int]:
        """Of the matrix that is gathered: with tensor parallelism, the part of it that lies here."""
        rows, cols = self.param._orig_size
        return rows, cols

    @property
    def tensor_parallel(self) -> Any:
        """The DTensorSpec that the parameter had before ``fully_shard``, or None if it was a plain tensor."""
        if not self.param.is_dtensor:
            return None
        # Its name since torch 2.12, and before.
        found = getattr(self.param, "_unsharded_dtensor_spec", None)
        return self.param._tp_spec if found is None else found

    @property
    def device(self) -> torch.device:
        """Where it is computed with."""
        return self.group.device

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype in which the layer computes, or None for the parameter's own."""
        return self.group.mp_policy.param_dtype

    @property
    def local(self) -> torch.Tensor:
        """The shard."""
        return self.param.sharded_param._local_tensor

    @property
    def in_backward(self) -> bool:
        """Whether what is gathered now is for backward."""
        return self.group._training_state.name == "PRE_BACKWARD"

    @property
    def is_resharded_to_fewer(self) -> bool:
        """Whether the gathered bytes are sharded over a part of the ranks (``reshard_after_forward`` an int)."""
        return self.param.sharded_state.name == "SHARDED_POST_FORWARD"

    @property
    def is_sharded(self) -> bool:
        """Whether nothing is gathered at the moment."""
        return bool(self.group.is_sharded)

    @property
    def gathers_again(self) -> bool:
        """Whether backward gathers from the shards again, or uses what forward gathered."""
        post_forward = self.group.post_forward_mesh_info
        return post_forward is not None and post_forward == self.group.mesh_info

    def forget_gathered(self) -> None:
        """Make FSDP take new memory for the next gather, whose size or type is another. Gradients stay."""
        self.group._to_sharded()
        self.param.all_gather_outputs = []
        gathered = self.param.__dict__.pop("_unsharded_param", None)
        if gathered is not None and gathered.grad is not None:
            if self.param.unsharded_accumulated_grad is None:
                self.param.unsharded_accumulated_grad = gathered.grad
            else:
                self.param.unsharded_accumulated_grad += gathered.grad

    @property
    def reshards_to_fewer(self) -> bool:
        """Whether FSDP shards what it gathered over a part of the ranks (``reshard_after_forward`` an int)."""
        post_forward = self.group.post_forward_mesh_info
        return post_forward is not None and post_forward != self.group.mesh_info

    def keep_bytes(self) -> None:
        """Have FSDP shard what it gathered over fewer ranks: bytes, which it takes for values of the parameter.

        It would cast them to the dtype that the layer computes in, and requires that values of a parameter with a
        gradient are floats.
        """
        self.param.param_dtype = None
        self.param.all_gather_outputs = [x.view(torch.float8_e4m3fn) for x in self.param.all_gather_outputs]

    def send_bytes(self) -> None:
        """Have FSDP gather from fewer ranks: bytes again, as not all backends send 8-bit floats."""
        self.param._sharded_post_forward_param_data = self.param._sharded_post_forward_param_data.view(torch.uint8)


def managed_parameters(model: nn.Module) -> dict[tuple[nn.Module, str], Managed]:
    """Every parameter that FSDP manages in ``model``, by the module that owns it and its name there."""
    found: dict[tuple[nn.Module, str], Managed] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            for group in groups:
                for param in group.fsdp_params:
                    info = param._module_info
                    owners = zip(
                        (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
                    )
                    found.update(dict.fromkeys(owners, Managed(group, param)))
    return found
