"""DTensor's rules for the ops: one for each, of the right arity, and right for every placement."""

import itertools

import pytest
import torch
import torch.distributed as dist
from cases import SPEC_OF_BLOCK, banded, normal
from op_samples import MATMUL_PAIRS, ROW, SAMPLES, matmul_args
from process_group import made_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tritonfp8 import ops, reference
from tritonfp8.distributed.dtensor_rules import RULES, letters, placements_where_sharded
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(2)]


# Callers give them the shards of DTensors, and reduce the results where that is needed.
LOCAL = {
    "adamw", "adamw_amax", "operand_figures", "quantize_both_sum", "quantize_groups", "quantize_groups_both",
    "quantize_matrices", "quantize_matrices_with_amax", "quantize_with_amax",
    "scaled_grouped_matmul", "grouped_matmul", "grouped_sum", "swiglu",
    "swiglu_backward", "swiglu_backward_amax", "sum_of_rows", "dots_of_rows", "transpose_group_codes",
    "quantize_into", "exact_attention", "exact_attention_backward", "rms_norm", "rms_norm_backward", "row_logsumexp",
    "gated", "gated_backward", "rotary_tables", "routed", "quantize_at_random", "quantize_parts", "sum_in_pairs",
    "expand_codes", "measure_rows", "packed_matmul",
    "packed_grouped_matmul",
}  # fmt: skip


def test_every_op_has_a_rule():
    launched = {name for name, op in ops.OPS.items() if op.reference is not None}
    schemas = {name: getattr(ops, name)._schema for name in launched}
    lists = {
        name for name, schema in schemas.items()
        if any(str(x.type) == "List[Tensor]" for x in (*schema.arguments, *schema.returns))
    }  # fmt: skip
    assert set(RULES) == launched - lists - LOCAL
    assert launched >= LOCAL


@pytest.mark.parametrize("name", RULES)
def test_rule_has_the_arity_of_its_op(name):
    """Rules that drifted from their ops: an argument was added to the op, and its rule not told."""
    schema = getattr(ops, name)._schema
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    assert list(RULES[name].inputs) == tensors
    assert len(RULES[name].outputs) == len(schema.returns)
    names = {a.name for a in schema.arguments}
    scales = {o.scales for o in (*RULES[name].inputs.values(), *RULES[name].outputs) if o.scales}
    assert {*scales, *RULES[name].forbids, *filter(None, [RULES[name].flag, RULES[name].needs])} <= names


RULED = [i for i, (func, _) in enumerate(SAMPLES) if func.name().split("::")[1] in RULES]


@pytest.mark.parametrize("sample", RULED, ids=lambda i: f"{i}-{SAMPLES[i][0].name()}")
def test_rule_places_every_tensor(sample):
    func, args = SAMPLES[sample]
    name = func.name().split("::")[1]
    given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))
    allowed = 0
    for letter in letters(name, given):
        found = placements_where_sharded(name, letter, given)
        if found is None:
            continue
        allowed += 1
        outputs, inputs = found
        assert len(inputs) == len(args)
        assert [p is not None for p in inputs] == [isinstance(a, torch.Tensor) for a in args]
        for p, a in zip(inputs, args, strict=True):
            assert p is None or not p.is_shard() or p.dim < a.ndim
        assert len(outputs) == len(func._schema.returns)
    assert allowed or name in ("quantize", "quantize_both", "amax", "dequantize", "transpose_codes")


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


def check(func, args, placements, mesh, expected):
    """Assert that an op on DTensors equals the op on whole tensors; ``placements`` has a tuple per tensor argument."""
    placements = iter(placements)
    given = [
        distribute_tensor(a, mesh, next(placements), src_data_rank=None) if isinstance(a, torch.Tensor) else a
        for a in args
    ]
    for out, wanted in zip(tuples(func(*given)), expected, strict=True):
        assert isinstance(out, DTensor)
        assert out.shape == wanted.shape
        assert out.dtype == wanted.dtype
        full = out.full_tensor()
        if "matmul" in str(func):
            assert sqnr(full, wanted) > 100
        else:
            assert_bitwise_equal([full.contiguous()], [wanted.contiguous()])


def torch_can_move(x, placements, mesh):
    """Whether torch can redistribute ``x``. It pads uneven shards with zeros, and e8m0 has no zero."""
    if x.dtype != torch.float8_e8m0fnu:
        return True
    parts = [1] * x.ndim
    for size, p in zip(mesh.shape, placements, strict=True):
        if p.is_shard():
            parts[p.dim] *= size
    return all(n % part == 0 for n, part in zip(x.shape, parts, strict=True))


def check_all(mesh, most, grid=None):
    """Check combinations of placements, about ``most`` evenly spaced ones per op. Returns the count."""
    carry_fp8()
    mesh, count = mesh if grid is None else made_mesh("cpu", grid, ("dp", "tp")), 0
    for func, args in samples():
        expected = tuples(func(*args))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        choices = [[Replicate(), *map(Shard, range(t.ndim))] for t in tensors]
        combinations = list(itertools.product(*(itertools.product(each, repeat=mesh.ndim) for each in choices)))
        for combination in combinations[:: max(1, len(combinations) // most)]:
            if not all(map(torch_can_move, tensors, combination, itertools.repeat(mesh))):
                continue
            try:
                check(func, args, combination, mesh, expected)
            except Exception as error:
                raise AssertionError(f"{func} with {combination} on {mesh}") from error
            count += 1
    return count


def test_every_placement_on_a_line(ranks):
    assert ranks.run(2, check_all, 10**6)[0] > 300


def test_placements_on_a_square(ranks):
    # DTensor applies a rule to one mesh dim after the other; the line above covers each of them.
    assert ranks.run(4, check_all, 4, (2, 2), timeout=120)[0] > 150


def placements_of_results(mesh):
    """Placements of the results of ops on sharded operands; DTensor chooses the collectives."""
    carry_fp8()
    x = distribute_tensor(banded(12, 40), mesh, [Shard(0)], src_data_rank=None)
    y = distribute_tensor(normal(16, 24), mesh, [Shard(1)], src_data_rank=None)
    outs = ops.amax(x, [-1, -1]), *ops.quantize(x, *ROW.args), ops.matmul(y, y)
    return [str(out.placements) for out in outs]


def test_shards_stay_shards(ranks):
    of_rows = "(Shard(dim=0),)"
    assert ranks.run(2, placements_of_results)[0] == ["(Partial(max),)", of_rows, of_rows, "(Partial(sum),)"]
