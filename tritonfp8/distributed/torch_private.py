"""The private names of torch that this subpackage uses, all of them, and the check that torch has them.

torch promises nothing about them. A name that a later torch lacks is an error where a user begins, which says so, and
not an AttributeError in a forward pass.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tritonfp8.compat import TRITON_OF_TORCH

TESTED = " to ".join((*TRITON_OF_TORCH,)[:: len(TRITON_OF_TORCH) - 1])
"""The torch versions in which these names are known to mean what they are used for."""

_FSDP = "torch.distributed.fsdp._fully_shard"
# By where they are, "module:path in it". Of several names with a bar between, one is enough; one that is elsewhere is
# written with its place.
TENSOR_PARALLEL: Mapping[str, tuple[str, ...]] = {
    "torch:": ("_disable_dynamo", "_foreach_copy_", "_foreach_norm"),
    "torch:_C": ("_disabled_torch_function_impl",),
    "torch:ops._c10d_functional": (
        "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "wait_tensor"
    ),
    "torch.distributed.tensor:DTensor": ("_local_tensor", "_op_dispatcher"),
    "torch.distributed.tensor:DTensor._op_dispatcher": ("sharding_propagator",),
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator": ("op_to_schema_info",),
    "torch.distributed.tensor.parallel:ColwiseParallel": ("_apply", "_prepare_input_fn"),
    "torch.distributed.tensor.parallel:RowwiseParallel": ("_apply", "_prepare_input_fn", "_prepare_output_fn"),
    "torch.distributed.tensor.parallel:PrepareModuleInput": ("_apply", "_prepare_input_arg"),
}  # fmt: skip
"""What :mod:`tritonfp8.distributed` needs to be imported."""

FSDP: Mapping[str, tuple[str, ...]] = {
    "torch.nn:Module": ("_forward_pre_hooks", "_parameters"),
    "torch.distributed._composable_state:": ("_module_state_mapping",),
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    f"{_FSDP}._fsdp_state:FSDPState": ("_fsdp_param_groups|_fsdp_param_group",),
    f"{_FSDP}._fsdp_common:TrainingState": ("PRE_BACKWARD",),
    f"{_FSDP}._fsdp_common:FSDPMeshInfo": ("shard_mesh_rank", "shard_mesh_size", "shard_process_group"),
    f"{_FSDP}._fsdp_param:ShardedState": ("SHARDED_POST_FORWARD",),
    f"{_FSDP}._fsdp_param:ParamModuleInfo": ("module", "param_name", "shared_modules", "shared_param_names"),
    f"{_FSDP}._fsdp_param:FSDPParam": (
        "_init_extensions", "_module_info", "_orig_size", "_sharded_local_tensor", "_sharded_post_forward_param_data",
        "_unsharded_dtensor_spec|_tp_spec", "_unsharded_param", "all_gather_outputs", "fsdp_placement", "is_dtensor",
        f"mp_policy|{_FSDP}._fsdp_param_group:FSDPParamGroup.mp_policy",
        "param_dtype", "sharded_param", "sharded_state", "unsharded_accumulated_grad",
    ),
    f"{_FSDP}._fsdp_param_group:FSDPParamGroup": (
        "_all_gather_result", "_to_sharded", "_training_state", "device", "fsdp_params", "is_sharded", "mesh_info",
        "post_forward_mesh_info", "unshard", "wait_for_unshard",
    ),
}  # fmt: skip
"""What :func:`~tritonfp8.distributed.enable_float8_all_gather` needs besides."""


def _of_instances(owner: type) -> set[str]:
    """The attributes that annotations of a class name, and those that its methods set."""
    found: set[str] = set()
    for base in owner.__mro__:
        found.update(inspect.get_annotations(base))
        methods = (inspect.unwrap(f) for f in vars(base).values() if inspect.isfunction(f))
        for method in filter(inspect.isfunction, methods):
            found.update(i.argval for i in dis.get_instructions(method) if i.opname == "STORE_ATTR")
    return found


def _has(owner: Any, name: str) -> bool:
    if ":" in name:
        place, _, attribute = name.rpartition(".")
        return not any(_missing({place: (attribute,)}))
    return hasattr(owner, name) or (inspect.isclass(owner) and name in _of_instances(owner))


def _missing(names: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for place, wanted in names.items():
        module, _, path = place.partition(":")
        where = place.replace(":", ".").strip(".")
        try:
            owner: Any = importlib.import_module(module)
            for part in filter(None, path.split(".")):
                owner = getattr(owner, part)
        except (ImportError, AttributeError):
            yield where
            continue
        yield from (
            f"{where}.{name.replace('|', ' or ').replace(':', '.')}"
            for name in wanted
            if not any(_has(owner, alternative) for alternative in name.split("|"))
        )


def require_names(needed_by: str, names: Mapping[str, tuple[str, ...]]) -> None:
    """Check that torch has these names.

    Args:
        needed_by: what needs them, for the message.
        names: :data:`TENSOR_PARALLEL` or :data:`FSDP`.

    Raises:
        RuntimeError: it lacks some. The message names them, this torch, and the versions that have them.
    """
    if missing := list(_missing(names)):
        raise RuntimeError(
            f"{needed_by} uses private names of torch, of which torch {torch.__version__} lacks: {', '.join(missing)}. "
            f"Tested are torch {TESTED}: install one of these."
        )


require_names("tritonfp8.distributed", TENSOR_PARALLEL)
