"""DTensor's rules for the ops: one for each, of the right arity, and right for every placement."""

import pytest
import sharding_cases
import torch
from op_samples import SAMPLES
from process_group import Ranks

from tritonfp8 import ops
from tritonfp8.distributed.dtensor_rules import RULES, letters, placements_where_sharded

pytestmark = pytest.mark.xdist_group("ranks")


def named(func, args):
    return dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))


LOCAL = {
    "adamw", "adamw_amax", "operand_figures", "quantize_both_sum", "quantize_groups", "quantize_groups_both",
    "quantize_matrices", "quantize_matrices_with_amax", "quantize_with_amax",
    "scaled_grouped_matmul", "grouped_matmul", "grouped_sum", "swiglu",
    "swiglu_backward", "swiglu_backward_amax", "sum_of_rows", "dots_of_rows",
}  # fmt: skip
"""Callers give them the shards of DTensors, and reduce the results where that is needed."""


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
    name, given = func.name().split("::")[1], named(func, args)
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
    assert allowed or name in ("quantize", "quantize_both", "amax", "dequantize")


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def test_every_placement_on_a_line(two):
    assert two.run(sharding_cases.check_all, [2], 10**6)[0] > 300


def test_placements_on_a_square():
    with Ranks(4) as ranks:
        # DTensor applies a rule to one mesh dim after the other; the line above covers each of them.
        assert ranks.run(sharding_cases.check_all, [2, 2], 4, timeout=120)[0] > 150


def test_shards_stay_shards(two):
    assert two.run(sharding_cases.placements_of, None)[0] == {
        "amax": "(Partial(max),)",
        "quantize": ["(Shard(dim=0),)", "(Shard(dim=0),)"],
        "matmul": "(Partial(sum),)",
    }
