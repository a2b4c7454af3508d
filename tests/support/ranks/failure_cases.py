"""Functions of each rank in the tests of failures known from elsewhere. Each returns plain data."""

import torch
from cases import normal
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tp_cases import Recorder, on_mesh
from tp_model_cases import Mlp, mlp_plan

import tritonfp8
from tritonfp8 import distributed
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather
from tritonfp8.functional import linear


def collectives_of_sharded_tokens(mesh, recipe):
    """``(op, elements)`` of forward and backward of a layer whose tokens are sharded and whose weight is not."""
    x, weight = (
        on_mesh(normal(300, 160, seed=1), mesh, [Shard(0)]),
        on_mesh(normal(64, 160, seed=2), mesh, [Replicate()]),
    )
    with Recorder() as seen:
        out = linear(x, weight, None, recipe)
        out.backward(on_mesh(normal(300, 64, seed=3), mesh, [Shard(0)]).detach())
    return [(op, n) for op, _, n in seen.sent]


def collectives_of_tokens(mesh, recipe, counts):
    """``(op, dtype, elements)`` of forward and backward of a layer that gathers these numbers of tokens."""
    rank = mesh.get_local_rank()
    x = normal(sum(counts), 96, seed=1).split(counts)[rank].clone().requires_grad_()
    weight = on_mesh(normal(80, 96, seed=2), mesh, [Shard(0)])
    with distributed.token_counts(counts), Recorder() as seen:
        whole = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=(sum(counts), 96), stride=(96, 1))
        out = linear(whole, weight, None, recipe)
        out.backward(on_mesh(normal(sum(counts), 80, seed=3), mesh, [Shard(1)]).detach())
    return [(op, str(dtype), n) for op, dtype, n in seen.sent]


def casts_of_a_step(mesh, recipe, local):
    """Codes and scales of every cast of an MLP's forward, whose inner activations are plain tensors if ``local``."""
    model = Mlp()
    with torch.no_grad():
        # The features of the two ranks differ in magnitude.
        model.gate.weight[48:] *= 100
    tritonfp8.convert(model, recipe)
    parallelize_module(model, mesh, mlp_plan(ColwiseParallel, RowwiseParallel, use_local_output=local))
    with Recorder() as seen:
        model(normal(40, 64, seed=5))
    return [[t.flatten().clone().view(torch.uint8).tolist() for t in out] for _, out in seen.casts]


def shard_along_columns(mesh):
    """The error of a forward if ``shard_placement_fn`` shards along columns, and its number of collectives."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    tritonfp8.convert(model, "rowwise")
    enable_float8_all_gather(model)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with count_collective_bytes() as counted:
        try:
            model(torch.ones(1, 64))
        except ValueError as error:
            return str(error), sum(counted.calls.values())
    return None


def after_gather(mesh, recipe):
    """For a weight that FSDP gathered: whether views share its bytes, and the error of an unsupported view."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    tritonfp8.convert(model, recipe)
    enable_float8_all_gather(model)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    # The first forward registers the gather hooks with FSDP.
    model(torch.ones(1, 64))
    model.unshard()
    weight, same = model[0].weight.data, []
    for view in (weight.as_strided((32, 64), (64, 1), 0), weight.view(32, 64), weight.detach()):
        same.append(type(view) is type(weight) and view._codes.data_ptr() == weight._codes.data_ptr())
    try:
        weight.as_strided((64, 32), (1, 64), 0)
    except NotImplementedError as error:
        return same, str(error)
    return same, None
