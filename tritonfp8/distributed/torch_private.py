"""The private names of torch that ``tritonfp8.distributed`` uses: each with its purpose and the versions that have it.

torch promises nothing about private names. A name that a torch lacks is therefore an error when the user begins, which
says what is missing, and not an AttributeError in a forward pass.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from packaging.version import Version

from tritonfp8.compat import TRITON_OF_TORCH

OLDEST, NEWEST = (*TRITON_OF_TORCH,)[:: len(TRITON_OF_TORCH) - 1]
TESTED = f"{OLDEST} to {NEWEST}"
"""The torch versions in which these names are known to mean what they are used for."""


class PrivateName(NamedTuple):
    """One private name.

    Attributes:
        owner: ``"module:path"`` of the module, class or object that has it.
        name: as Python spells it. Of several with a bar between, one is enough: no version is known to lack all.
        purpose: what it is used for.
        first, last: the oldest and the newest torch that are known to have it.
        of_instances: whether only instances of ``owner`` have it; then it is checked on the first instance.
    """

    owner: str
    name: str
    purpose: str
    first: str = OLDEST
    last: str = NEWEST
    of_instances: bool = False

    @property
    def is_expected(self) -> bool:
        """Whether the installed torch should have it; a newer torch than all known ones as the newest of them."""
        installed = min(_release(torch.__version__), _release(NEWEST))
        return _release(self.first) <= installed <= _release(self.last)

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.').strip('.')}.{self.name.replace('|', ' or ')}"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


_DTENSOR, _PARALLEL = "torch.distributed.tensor:DTensor", "torch.distributed.tensor.parallel"
_FUNCTIONAL = "torch:ops._c10d_functional"
BASE = (
    PrivateName("torch:", "_disable_dynamo", "keeps hooks out of graphs; torch.compiler.disable imports the compiler"),
    PrivateName("torch:", "_foreach_norm", "amaxes of many shards in one kernel"),
    PrivateName("torch:", "_foreach_copy_", "writes those amaxes in one kernel"),
    PrivateName("torch:", "_foreach_add_", "joins the gradients of two units"),
    PrivateName("torch:", "_foreach_mul_", "clips gradients"),
    PrivateName("torch:_C", "_disabled_torch_function_impl", "a gathered weight dispatches below torch functions"),
    PrivateName("torch.distributed:distributed_c10d", "_get_default_store", "the words of ranks that disagree"),
    PrivateName("torch.utils._python_dispatch:", "TorchDispatchMode", "counts the bytes of collectives"),
    PrivateName("torch.utils._pytree:", "tree_leaves", "finds the tensors of a collective"),
    PrivateName("torch.distributed:_functional_collectives", "wait_tensor", "its import registers the ops below"),
    PrivateName(_FUNCTIONAL, "all_gather_into_tensor", "gathers rows and bytes, in eager code and in graphs"),
    PrivateName(_FUNCTIONAL, "all_reduce", "reduces amaxes over ranks"),
    PrivateName(_FUNCTIONAL, "reduce_scatter_tensor", "sums the gradients of gathered rows"),
    PrivateName(_FUNCTIONAL, "wait_tensor", "waits for each of the three"),
    PrivateName(_DTENSOR, "_local_tensor", "the local tensor without the autograd node of to_local()"),
    PrivateName(_DTENSOR, "_op_dispatcher", "leads to the sharding propagator"),
    PrivateName(f"{_DTENSOR}._op_dispatcher", "sharding_propagator", "leads to the schemas of ops"),
    PrivateName(
        f"{_DTENSOR}._op_dispatcher.sharding_propagator", "op_to_schema_info",
        "makes DTensor tell calls apart by specs and blocks, too",
    ),
    PrivateName(f"{_PARALLEL}:ColwiseParallel", "_apply", "checks the module that a style is applied to"),
    PrivateName(f"{_PARALLEL}:ColwiseParallel", "_prepare_input_fn", "hands on an input that is not gathered"),
    PrivateName(f"{_PARALLEL}:RowwiseParallel", "_apply", "checks the module that a style is applied to"),
    PrivateName(f"{_PARALLEL}:RowwiseParallel", "_prepare_input_fn", "hands on an input that is not redistributed"),
    PrivateName(f"{_PARALLEL}:PrepareModuleInput", "_apply", "checks the module that a style is applied to"),
    PrivateName(f"{_PARALLEL}:PrepareModuleInput", "_prepare_input_arg", "hands on an input that is not gathered"),
)  # fmt: skip
"""Needed to import :mod:`tritonfp8.distributed`."""

_FSDP = "torch.distributed.fsdp._fully_shard"
STATE, MESH_INFO = f"{_FSDP}._fsdp_state:FSDPState", f"{_FSDP}._fsdp_common:FSDPMeshInfo"
PARAM, GROUP = f"{_FSDP}._fsdp_param:FSDPParam", f"{_FSDP}._fsdp_param_group:FSDPParamGroup"
_INFO = f"{_FSDP}._fsdp_param:ParamModuleInfo"
FSDP = (
    PrivateName("torch:Tensor", "_version", "notices writes to a shard"),
    PrivateName("torch.nn:Module", "_forward_pre_hooks", "the model's hook must run before FSDP's hook"),
    PrivateName("torch.utils.checkpoint:", "_CachingTorchDispatchMode", "selective checkpointing of a forward"),
    PrivateName("torch.utils.checkpoint:", "_CachedTorchDispatchMode", "selective checkpointing of its recompute"),
    PrivateName("torch.utils._python_dispatch:", "_get_current_dispatch_mode_stack", "finds these two"),
    PrivateName("torch.utils._python_dispatch:", "_pop_mode", "hides reads of gathered weights from them"),
    PrivateName("torch.utils._python_dispatch:", "_push_mode", "restores them"),
    PrivateName("torch.nn:Module", "_parameters", "finds the owners of each parameter, tied ones too"),
    PrivateName("torch.distributed._composable_state:", "_module_state_mapping", "finds fully_shard above the model"),
    PrivateName("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state", "leads to the parameter groups"),
    PrivateName(STATE, "_fsdp_param_groups|_fsdp_param_group", "the parameter groups of a module", of_instances=True),
    PrivateName(f"{_FSDP}._fsdp_common:TrainingState", "PRE_BACKWARD", "tells a gather of backward from forward's"),
    PrivateName(f"{_FSDP}._fsdp_param:ShardedState", "SHARDED_POST_FORWARD", "tells a gather from fewer ranks"),
    PrivateName(MESH_INFO, "shard_mesh_rank", "which shard lies here", of_instances=True),
    PrivateName(MESH_INFO, "shard_mesh_size", "how many shards there are", of_instances=True),
    PrivateName(MESH_INFO, "shard_process_group", "the ranks that share a weight", of_instances=True),
    PrivateName(_INFO, "module", "the module that owns a parameter"),
    PrivateName(_INFO, "param_name", "its name there"),
    PrivateName(_INFO, "shared_modules", "the other modules that own it"),
    PrivateName(_INFO, "shared_param_names", "its names there"),
    PrivateName(PARAM, "_init_extensions", "has FSDP look for the hooks of a shard again"),
    PrivateName(PARAM, "_module_info", "the owners of a parameter", of_instances=True),
    PrivateName(PARAM, "_orig_size", "the shape of the gathered parameter"),
    PrivateName(PARAM, "_param_fqn", "its name, for messages", of_instances=True),
    PrivateName(PARAM, "_sharded_local_tensor", "overridden: where FSDP looks for the hooks"),
    PrivateName(PARAM, "_sharded_post_forward_param_data", "what is gathered from fewer ranks"),
    PrivateName(PARAM, "_sharded_param_data", "the shard that FSDP keeps beside the DTensor, for a stored weight"),
    PrivateName(PARAM, "_unsharded_dtensor_spec", "the placements of tensor parallelism", first="2.12"),
    PrivateName(PARAM, "_tp_spec", "the placements of tensor parallelism", last="2.11"),
    PrivateName(PARAM, "_unsharded_param", "the gathered parameter, dropped when its size or type changes"),
    PrivateName(PARAM, "all_gather_outputs", "the gathered bytes"),
    PrivateName(PARAM, "fsdp_placement", "the dim that is sharded", of_instances=True),
    PrivateName(PARAM, "is_dtensor", "whether tensor parallelism shards the parameter, too", of_instances=True),
    PrivateName(PARAM, "mp_policy", "the dtype that layers compute in", first="2.15", of_instances=True),
    PrivateName(PARAM, "param_dtype", "the dtype that FSDP casts gathered values to"),
    PrivateName(PARAM, "reset_sharded_param", "puts a stored weight in the place of a shard"),
    PrivateName(PARAM, "sharded_param", "the DTensor of the shard"),
    PrivateName(PARAM, "sharded_state", "whether gathered bytes are sharded over fewer ranks", of_instances=True),
    PrivateName(PARAM, "unsharded_accumulated_grad", "keeps a gradient when the gathered parameter is dropped"),
    PrivateName(GROUP, "_to_sharded", "drops what was gathered"),
    PrivateName(GROUP, "_training_state", "tells a gather of backward from forward's", of_instances=True),
    PrivateName(GROUP, "device", "where the group computes", of_instances=True),
    PrivateName(GROUP, "fsdp_params", "the parameters that are gathered together", of_instances=True),
    PrivateName(GROUP, "is_sharded", "whether nothing is gathered now"),
    PrivateName(GROUP, "reshard", "drops what was gathered"),
    PrivateName(GROUP, "lazy_init", "lets a group be gathered before the first forward"),
    PrivateName(GROUP, "mesh_info", "the ranks that share the parameters", of_instances=True),
    PrivateName(GROUP, "mp_policy", "the dtype that layers compute in", last="2.14", of_instances=True),
    PrivateName(GROUP, "post_forward_mesh_info", "whether backward gathers again, from which ranks", of_instances=True),
    PrivateName(GROUP, "unshard", "gathers a group again"),
    PrivateName(GROUP, "wait_for_unshard", "waits for a gather that was started ahead"),
)
"""Needed by :func:`~tritonfp8.distributed.enable_float8_all_gather` besides."""

default_store: Any = dist.distributed_c10d._get_default_store
"""The store through which the ranks of the default group met."""
disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]
"""A decorator: the function runs as it is while a graph is traced."""


def disable_dynamo_of_torch_before(version: str) -> Any:
    """:data:`disable_dynamo` in torch before ``version``; a decorator that does nothing since."""
    return disable_dynamo if Version(torch.__version__) < Version(version) else lambda function: function


all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""``all_gather_single(out, x, group=...)``: public, by its name since torch 2.13 or by the older one."""


def _found(owner: Any, name: str) -> bool:
    """Whether an object has a name; a class also has the annotated names of its instances."""
    declared = inspect.isclass(owner) and any(name in inspect.get_annotations(base) for base in owner.__mro__)
    return declared or hasattr(owner, name)


def _is_missing(wanted: PrivateName, owner: Any) -> bool:
    return not any(_found(owner, name) for name in wanted.name.split("|"))


def _owner(wanted: PrivateName) -> Any:
    """The object with the name, or None where torch lacks the object, too."""
    module, _, path = wanted.owner.partition(":")
    try:
        found: Any = importlib.import_module(f".{module.partition('.')[2]}", "torch")
        for part in filter(None, path.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _require(needed_by: str, missing: list[str]) -> None:
    if missing:
        raise RuntimeError(
            f"{needed_by} uses private names of torch, and torch {torch.__version__} lacks these: "
            f"{', '.join(missing)}. torch {TESTED} were tested: install one of these."
        )


def require_names(needed_by: str, names: Iterable[PrivateName]) -> None:
    """Check that torch has these names. :func:`require_of_instance` checks names that only instances have.

    Args:
        needed_by: the public function or module that needs them, for the message.
        names: :data:`BASE` or :data:`FSDP`.

    Raises:
        RuntimeError: names are missing. The message has them, this torch, and the versions that have them.
    """
    wanted = [name for name in names if name.is_expected and not name.of_instances]
    _require(needed_by, [str(name) for name in wanted if _is_missing(name, _owner(name))])


def require_of_instance(needed_by: str, owner: str, instance: object) -> None:
    """Check that an object has the names of :data:`FSDP` that only instances of ``owner`` have.

    Raises:
        RuntimeError: as :func:`require_names`.
    """
    wanted = [name for name in FSDP if name.owner == owner and name.is_expected and name.of_instances]
    _require(needed_by, [str(name) for name in wanted if _is_missing(name, instance)])


require_names("tritonfp8.distributed", BASE)
