"""Functions of each rank in the tests of DTensor rules: ops on DTensors against ops on whole tensors."""

import itertools

import torch
import torch.distributed as dist
from cases import SPEC_OF_BLOCK, banded, normal
from op_samples import MATMUL_PAIRS, ROW, matmul_args
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tp_cases import mesh_of

import tritonfp8.distributed  # noqa: F401  registers the rules
from tritonfp8 import ops, reference
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

_library = None


def carry_fp8():
    """Let gloo gather 1-byte floats, as NCCL does: DTensor sends operands without a cast."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("_c10d_functional", "IMPL")

    def group_of(group):
        return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group

    def bits(x):
        return x.contiguous().view(torch.uint8) if x.dtype.itemsize == 1 else x.contiguous()

    def all_gather(x, size, group):
        out = x.new_empty((x.shape[0] * size, *x.shape[1:]))
        dist.all_gather_into_tensor(bits(out), bits(x), group=group_of(group))
        return out

    def all_to_all(x, out_sizes, in_sizes, group):
        out = x.new_empty((sum(out_sizes), *x.shape[1:]))
        dist.all_to_all_single(bits(out), bits(x), list(out_sizes), list(in_sizes), group=group_of(group))
        return out

    _library.impl("all_gather_into_tensor", all_gather, "CPU")
    _library.impl("all_to_all_single", all_to_all, "CPU")


def samples():
    x, deep = banded(12, 40), banded(4, 2, 40)
    for spec in SPEC_OF_BLOCK:
        amax, amax_t = reference.amax(x, spec.block), reference.amax(x.t(), spec.block)
        yield ops.amax, (x, list(spec.block))
        yield ops.amax, (deep, list(spec.block))
        yield ops.quantize, (x, *spec.args)
        yield ops.quantize, (x, *spec.args, True)
        yield ops.quantize, (deep, *spec.args)
        yield ops.quantize, (x, *spec.args, False, amax)
        yield ops.quantize, (x, *spec.args, True, amax_t)
        yield ops.quantize_both, (x, *spec.args, *ROW.args)
        yield ops.quantize_both, (x, *spec.args, *spec.args)
        yield ops.dequantize, (*reference.quantize(x, *spec.args), *spec.args, torch.float32)
    yield ops.transpose, (x.to(torch.float8_e4m3fn),)
    for pair in MATMUL_PAIRS:
        yield ops.scaled_matmul, matmul_args(pair, "cpu", out_dtype=torch.float32)
    yield ops.scaled_matmul, matmul_args((ROW, ROW), "cpu", True, True, "relu", torch.float32)
    yield ops.matmul, (normal(33, 24), normal(16, 24, seed=1))
    yield ops.matmul, (normal(33, 24), normal(16, 24, seed=1), normal(16, seed=2))


def tuples(out):
    return out if isinstance(out, tuple) else (out,)


def check(func, args, placements, mesh, whole):
    """Assert that an op on DTensors equals the op on whole tensors; ``placements`` has a tuple per tensor argument."""
    placements = iter(placements)
    given = [
        distribute_tensor(a, mesh, next(placements), src_data_rank=None) if isinstance(a, torch.Tensor) else a
        for a in args
    ]
    for out, expected in zip(tuples(func(*given)), whole, strict=True):
        assert isinstance(out, DTensor)
        assert out.shape == expected.shape
        assert out.dtype == expected.dtype
        full = out.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        if "matmul" in str(func):
            assert sqnr(full, expected) > 100
        else:
            assert_bitwise_equal([full.contiguous()], [expected.contiguous()])


def choices(x):
    return [Replicate(), *(Shard(d) for d in range(x.ndim))]


def torch_can_move(x, placements, mesh):
    """Whether torch can redistribute ``x``. It pads uneven shards with zeros, and e8m0 has no zero."""
    if x.dtype != torch.float8_e8m0fnu:
        return True
    parts = [1] * x.ndim
    for size, p in zip(mesh.shape, placements, strict=True):
        if p.is_shard():
            parts[p.dim] *= size
    return all(n % part == 0 for n, part in zip(x.shape, parts, strict=True))


def check_all(mesh_sizes, most):
    """Check combinations of placements on this mesh, about ``most`` evenly spaced ones per op. Returns the count."""
    carry_fp8()
    mesh, count = mesh_of(mesh_sizes), 0
    for func, args in samples():
        whole = tuples(func(*args))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        per_tensor = [list(itertools.product(choices(t), repeat=mesh.ndim)) for t in tensors]
        combinations = list(itertools.product(*per_tensor))
        for combination in combinations[:: max(1, len(combinations) // most)]:
            if not all(map(torch_can_move, tensors, combination, itertools.repeat(mesh))):
                continue
            try:
                check(func, args, combination, mesh, whole)
            except Exception as error:
                raise AssertionError(f"{func} with {combination} on {mesh_sizes}") from error
            count += 1
    return count


def placements_of(names):
    """Placements of the results of ops on sharded operands; DTensor chooses the collectives."""
    carry_fp8()
    mesh = mesh_of([2])
    x = distribute_tensor(banded(12, 40), mesh, [Shard(0)], src_data_rank=None)
    y = distribute_tensor(normal(16, 24), mesh, [Shard(1)], src_data_rank=None)
    amax = ops.amax(x, [-1, -1])
    quantized = ops.quantize(x, *ROW.args)
    return {
        "amax": str(amax.placements),
        "quantize": [str(t.placements) for t in quantized],
        "matmul": str(ops.matmul(y, y).placements),
    }
