"""Shard the experts of a converted model over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tritonfp8.distributed.expert_parallel.dispatch import ExpertDispatch
from tritonfp8.distributed.stored_weights import split_experts
from tritonfp8.layers.moe import RoutedExperts
from tritonfp8.layers.stored import StoredMatrices, replacing
from tritonfp8.specs.checks import require, require_flag, require_type

PAYLOADS = ("float8", "high_precision")


def shard_experts(
    model: nn.Module, mesh: DeviceMesh, payload: str = "float8", average_gradients: bool | int = True
) -> list[str]:
    """Give each rank of ``mesh`` a part of the experts of ``model``, in place (expert parallelism).

    Call it after ``convert``, and before ``fully_shard`` (over another dim of the mesh) and the
    optimizer: the parameters of experts become DTensors that are sharded over experts. The tokens of each rank must be
    its own, as in data parallelism: their rows travel to the ranks of their experts and back.

    Args:
        model: a converted model. Every rank must have the same weights, or all must be on the meta device.
        mesh: of one dim. The number of experts need not be a multiple of its size: some ranks then have fewer, or none.
        payload: ``"float8"`` sends tokens to experts, and gradients of the results back, as codes and scales, where
            the recipe quantizes rows by scales of their own that are powers of two (rowwise, blockwise, mxfp8). The
            products that read rows then have the same bits. ``grad_weight`` and the gradient of a bias read the rounded
            values: codes of ``grad_weight`` are the same but for the tiniest, if the recipe has them. A recipe that
            makes transposes from codes reads the codes as they arrive, with the bits of one process.
            ``"high_precision"`` sends all in the dtype of the model.
        average_gradients: divide the gradients of experts by the size of the mesh, as DDP and FSDP2 divide all other
            gradients: an expert gets the gradients of the losses of all ranks. A number divides by that: ranks
            of tensor parallelism hold parts of the same sequences and have one loss, so it is the number of losses.

    Returns:
        The names of the modules whose experts were sharded.

    Raises:
        TypeError: an argument of another type.
        ValueError: a mesh of several dims, an unknown payload, a number below 1, no converted experts, or experts that
            are sharded.
    """
    require_type("model", model, nn.Module, "an nn.Module")
    require_type("mesh", mesh, DeviceMesh, "a DeviceMesh")
    require("payload", payload, PAYLOADS)
    if type(average_gradients) is not int:
        require_flag("average_gradients", average_gradients)
    elif average_gradients < 1:
        raise ValueError(f"average_gradients must be True, False, or at least 1; got {average_gradients}")
    if mesh.ndim != 1:
        raise ValueError(f'mesh must have one dim, such as mesh["ep"]; got {mesh.ndim} dims: {mesh.mesh_dim_names}')
    found = {name: module for name, module in model.named_modules() if isinstance(module, RoutedExperts)}
    if not found:
        raise ValueError(
            "the model has no converted experts that route tokens: use tritonfp8.convert(model, recipe) "
            "first. torchtitan shards its experts itself"
        )
    _check_can_be_sharded(found)
    divisor = mesh.size() if average_gradients is True else max(1, int(average_gradients))
    for module in found.values():
        for key, parameter in list(module.named_parameters(recurse=False)):
            # By assignment: DTensor keeps whether it needs a gradient in the Parameter around it.
            shards = _shards(parameter.detach(), mesh)
            module.register_parameter(key, replacing(parameter, shards, parameter.requires_grad))
        module.dispatch = ExpertDispatch(mesh, payload, divisor)
    return list(found)


def _shards(weight: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(weight, StoredMatrices):
        return split_experts(weight, mesh)
    return distribute_tensor(weight, mesh, [Shard(0)])


def _check_can_be_sharded(found: Mapping[str, RoutedExperts]) -> None:
    for name, module in found.items():
        sharded = [key for key, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)]
        if sharded or module.dispatch is not None:
            raise ValueError(
                f"the experts of {name or 'the model'} are sharded already ({', '.join(sharded)}): call shard_experts "
                "once, and before fully_shard"
            )
