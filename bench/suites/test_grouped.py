"""GEMMs and casts of the experts of a mixture: GPU time against torch's grouped GEMMs, and against ungrouped casts."""

import pytest
import torch

from bench.contest import gates
from bench.contest.cases import Cast
from bench.contest.compare import Contender, measures
from bench.contest.grouped import CASTS, DISTRIBUTIONS, EMPTY, PEER_RECIPE, PRODUCTS, RECIPES, UNIFORM, group_ends
from bench.shapes import SMOKE, select
from tritonfp8 import ops, reference

BF16, UNGROUPED = "torch bf16", "ungrouped"
# With --quick: fewer rounds; all contenders on the uniform groups of these sets; else these contenders, and of other
# distributions one shape of these sets.
QUICK_ROUNDS = 2
QUICK_SETS = ("deepseek-v3", "qwen3-30b", "decode", SMOKE)
QUICK_CONTENDERS = ("rowwise precise", "blockwise precise", "torch rowwise precise", "torch rowwise fast", BF16)
QUICK_CASTS = (UNIFORM, EMPTY)


def is_first(shape):
    """Whether the shape is the first of its set."""
    return shape == select("grouped", [shape.set])[0]


def is_quick(case, shape):
    """Whether --quick measures the case on the shape."""
    return case.distribution == UNIFORM or (shape.set in QUICK_SETS and is_first(shape))


def is_chosen(contender, case, shape):
    """Whether --quick measures the contender."""
    return contender.name in QUICK_CONTENDERS or (case.distribution == UNIFORM and shape.set in QUICK_SETS)


def contenders_of(problem):
    """The package's GEMM by each recipe, and torch's."""

    def own(recipe, accumulation):
        return Contender(
            f"{recipe} {accumulation}",
            lambda: problem.own(recipe, accumulation),
            gates.close_groups(lambda: problem.parts(recipe), accumulation, problem.zero),
            own=True,
            peer=f"torch {recipe} {accumulation}" if recipe == PEER_RECIPE else BF16,
            fields=problem.work(),
        )

    def fp8(accumulation):
        return Contender(
            f"torch {PEER_RECIPE} {accumulation}",
            lambda: problem.fp8(accumulation),
            gates.close_groups(problem.parts_of_peer, accumulation),
            peer=BF16,
            fields=problem.work(),
        )

    return [
        *(own(recipe, accumulation) for recipe, found in RECIPES.items() for accumulation in found),
        *(fp8(accumulation) for accumulation in RECIPES[PEER_RECIPE]),
        Contender(BF16, problem.bf16, fields=problem.work()),
    ]


@measures("grouped", PRODUCTS)
def test_grouped_matmul(benchmark, contest, case, shape):
    if contest.quick and not is_quick(case, shape):
        pytest.skip("--quick measures distributions that are not uniform on one shape of some sets")
    problem = case.problem(shape, case.distribution, contest.device.device)
    contenders = [c for c in contenders_of(problem) if not contest.quick or is_chosen(c, case, shape)]
    rounds = QUICK_ROUNDS if contest.quick else None
    contest(benchmark, case, shape, contenders, contest.device.settled_seconds, rounds)


@measures("grouped", CASTS)
def test_grouped_casts(benchmark, contest, case, shape):
    if contest.quick and not is_first(shape):
        pytest.skip("--quick measures the casts of one shape of each set")
    rows, groups, _, k = shape.size
    device = contest.device.device
    x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
    spec, spec_t = case.specs
    args = (*spec.args, *spec_t.args)
    # The zeros between groups are not counted.
    moved = {"bytes": Cast(case.name, spec=spec, spec_t=spec_t).moved_bytes((rows, k), x.element_size())}

    def own(distribution):
        offsets = torch.tensor(group_ends(distribution, rows, groups), dtype=torch.int32, device=device)
        return Contender(
            distribution,
            lambda: lambda: ops.quantize_groups_both(x, offsets, *args),
            lambda result: gates.same_bytes(reference.quantize_groups_both(x, offsets, *args))(result),
            own=True,
            peer=UNGROUPED,
            fields=moved,
        )

    ungrouped = Contender(UNGROUPED, lambda: lambda: ops.quantize_both(x, *args), fields=moved)
    found = QUICK_CASTS if contest.quick else DISTRIBUTIONS
    contest(benchmark, case, shape, [*map(own, found), ungrouped])
