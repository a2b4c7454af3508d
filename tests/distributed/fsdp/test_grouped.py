"""Many shards cast in one launch: the bits of each cast by itself."""

from types import SimpleNamespace

import covering
import pytest
import torch
from cases import each_device
from torch.utils._python_dispatch import TorchDispatchMode

from tritonfp8 import QuantSpec, launch, ops, recipes
from tritonfp8.distributed.fsdp import grouped
from tritonfp8.distributed.fsdp.byte_layout import ByteLayout
from tritonfp8.distributed.fsdp.gather_plan import Batch, Reduction, RowsPlan
from tritonfp8.distributed.fsdp.orientations import weight_orientations
from tritonfp8.distributed.fsdp.shard_casts import one_nan
from tritonfp8.distributed.shard_layout import DimLayout, Interval
from tritonfp8.launch import shards as launch_shards
from tritonfp8.recipes import Gemm, Recipe

GROUPED = {name: recipes.get(name) for name in ("tensorwise", "rowwise", "blockwise")}
EXACT = QuantSpec("e5m2", (1, -1), "fp32", "none")
GROUPED["exact e5m2"] = Recipe("exact e5m2", Gemm(EXACT, EXACT), Gemm(EXACT, EXACT))
SHAPES = [(256, 256), (131, 42), (5, 300), (3, 16), (384, 130)]


@pytest.fixture(autouse=True, params=["dispatcher", "kernels"])
def _grouped_anywhere(request, monkeypatch):
    """On CPU tensors the dispatcher runs the reference; launched directly, the kernels run in the interpreter."""
    monkeypatch.setattr(grouped, "runs_kernels", lambda shard: shard.is_contiguous())
    if request.param == "kernels":
        monkeypatch.setattr(ops, "amax_of_shards", launch.shards.amax_of_shards)
        monkeypatch.setattr(ops, "quantize_shards", launch.shards.quantize_shards)


def weight(rows, cols, seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 30, (rows, 1), generator=generator)
    return (torch.randn(rows, cols, generator=generator) * 2.0**exponents).to(device, dtype)


def batch_of(recipe, rank, shards, device, dtype, together=False, within=None, shapes=SHAPES):
    """The shards of one rank, in two groups."""
    plans = {}
    for i, shape in enumerate(shapes):
        layout = ByteLayout(*shape, shards, weight_orientations(recipe), together, within)
        start, count = layout.shard(rank)
        local = weight(*shape, i, dtype, device)[start : start + count].contiguous()
        managed = SimpleNamespace(local=local, rank=rank, device=local.device, group=("first", "second")[i % 2])
        plans[f"{i}"] = RowsPlan(managed, layout, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    return Batch(plans)


def amaxes_of(batch, fill):
    amaxes = torch.zeros(sum(batch.sizes), device=next(iter(batch.plans.values())).managed.device)
    fill(amaxes)
    return one_nan(amaxes)


def shards_of(batch):
    return {name: plan.managed.local for name, plan in batch.plans.items()}


def both_amaxes(batch):
    one_by_one = amaxes_of(batch, lambda out: grouped.fill_one_by_one(batch, shards_of(batch), out))
    return amaxes_of(batch, lambda out: grouped.fill_amaxes(batch, out)), one_by_one


def check_segments(batch, amaxes):
    rounded = one_nan(amaxes.bfloat16().float())
    reduced = batch.split(rounded)
    sent = {}
    for group in batch.groups.values():
        reduction = {name: Reduction(batch, (), rounded, tuple(reduced[name]), ()) for name in group.plans}
        layouts = [plan.layout for plan in group.plans.values()]
        every = tuple(range(len(layouts[0].orientations)))
        for wanted in [every] if layouts[0].together else [(i,) for i in every]:
            found = grouped.segments_to_send(group, reduction[next(iter(group.plans))], wanted)
            assert set(found) == (set(group.plans) if group.is_groupable else set())
            if not found:
                continue
            for name, plan in group.plans.items():
                [alone] = plan.layout.pack(plan.shard(), wanted, plan.rank, reduction[name].reduced)
                assert torch.equal(found[name], alone), f"{name}, orientations {wanted}"
                sent[name, wanted] = found[name]
    return sent


@each_device
@pytest.mark.parametrize(
    ("recipe", "dtype", "together"), covering.pairs(list(GROUPED), [torch.float32, torch.bfloat16], [False, True])
)
def test_the_bits_of_each_shard_by_itself(device, recipe, dtype, together):
    for rank, shards in ((0, 1), (1, 2), (2, 4)):
        batch = batch_of(GROUPED[recipe], rank, shards, device, dtype, together)
        amaxes, one_by_one = both_amaxes(batch)
        assert torch.equal(amaxes.view(torch.int32), one_by_one.view(torch.int32))
        sent = check_segments(batch, amaxes)
        # Only where blocks of several rows begin where a shard does.
        assert len(sent) == 0 if recipe == "blockwise" and rank else {name for name, _ in sent} == set(batch.plans)


def tables_of(batch):
    """The tables that were launched, by what they are for; none where the reference ran."""
    return {
        p: launch_shards._tables[places] for p, (_, places) in batch.places.items() if places in launch_shards._tables
    }


@each_device
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_aligned_shards(device, recipe):
    """Rows, columns and places that a thread reads and writes 16 bytes at a time; blocks that begin where a shard does.

    The second rank's shard begins inside the grid of amaxes.
    """
    batch = batch_of(recipes.get(recipe), 1, 2, device, torch.float32, shapes=[(256, 256), (512, 128)])
    amaxes, one_by_one = both_amaxes(batch)
    assert torch.equal(amaxes, one_by_one)
    sent = check_segments(batch, amaxes)
    assert {name for name, _ in sent} == set(batch.plans)
    assert all(table.aligned for _, table in tables_of(batch).values())


@each_device
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_what_is_not_a_number_reaches_its_blocks_alone(device, value):
    batch = batch_of(recipes.get("rowwise"), 0, 2, device, torch.float32)
    batch.plans["1"].managed.local[7, 11] = value
    amaxes, one_by_one = both_amaxes(batch)
    assert torch.equal(amaxes.view(torch.int32), one_by_one.view(torch.int32))
    assert (~amaxes.isfinite()).sum() == 2
    check_segments(batch, amaxes)


@each_device
def test_scales_of_zero(device):
    batch = batch_of(recipes.get("rowwise"), 0, 2, device, torch.float32)
    for plan in batch.plans.values():
        plan.managed.local[1:].zero_()
    check_segments(batch, both_amaxes(batch)[0])


def test_a_shard_that_moved_is_found_where_it_is():
    batch = batch_of(recipes.get("rowwise"), 0, 2, "cpu", torch.float32)
    before = both_amaxes(batch)[0]
    local = batch.plans["2"].managed.local
    batch.plans["2"].managed.local = local.clone().mul_(2)
    local.fill_(torch.nan)
    amaxes, one_by_one = both_amaxes(batch)
    assert torch.equal(amaxes, one_by_one)
    assert not torch.equal(amaxes, before)


def test_one_table_serves_every_step():
    batch = batch_of(recipes.get("rowwise"), 0, 2, "cpu", torch.float32)
    tables = []
    for _ in range(2):
        check_segments(batch, both_amaxes(batch)[0])
        tables.append({purpose: table for purpose, (_, table) in tables_of(batch).items()})
        for plan in batch.plans.values():
            plan.managed.local.mul_(3)
    assert tables[0].keys() == tables[1].keys()
    assert all(tables[0][purpose] is tables[1][purpose] for purpose in tables[0])
    # The amaxes, and the two orientations of each of two groups.
    assert len(batch.places) == 5
    assert len(tables[0]) == (5 if ops.quantize_shards is launch.shards.quantize_shards else 0)


class Counter(TorchDispatchMode):
    """How often each op of the package is called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tritonfp8":
            self.calls.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("_grouped_anywhere", ["dispatcher"], indirect=True)
def test_one_call_of_an_op_for_all_shards():
    batch = batch_of(recipes.get("rowwise"), 0, 2, "cpu", torch.float32)
    with Counter() as counter:
        amaxes = amaxes_of(batch, lambda out: grouped.fill_amaxes(batch, out))
    assert counter.calls == ["amax_of_shards"]
    group = next(iter(batch.groups.values()))
    assert len(group.plans) == 3
    with Counter() as counter:
        grouped.segments_to_send(group, Reduction(batch, (), amaxes.bfloat16().float(), (), ()), (0,))
    assert counter.calls == ["quantize_shards"]


INSIDE_A_BLOCK = DimLayout(320, (Interval(64, 200),), cuts=(64,)), DimLayout(300, (Interval(0, 300),))


@pytest.mark.parametrize(("recipe", "within"), [("mxfp8", None), ("blockwise", INSIDE_A_BLOCK)])
def test_what_the_kernels_do_not_serve_is_cast_shard_by_shard(recipe, within):
    batch = batch_of(recipes.get(recipe), 0, 2, "cpu", torch.float32, shapes=[(200, 300)], within=within)
    amaxes, one_by_one = both_amaxes(batch)
    assert torch.equal(amaxes, one_by_one)
    assert batch.places == {}
    reduction = Reduction(batch, (), amaxes, (), ())
    assert [grouped.segments_to_send(group, reduction, (0,)) for group in batch.groups.values()] == [{}]
