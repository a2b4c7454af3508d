"""The comparison of what travels to experts."""

import dataclasses

import pytest
import torch
from cast_counts import Memory

from bench.distributed import experts
from bench.shapes import SHAPES, SMOKE

pytestmark = pytest.mark.xdist_group("ranks")


def rows_of_each(mesh):
    (shape,) = (each for each in SHAPES["experts"] if each.set == SMOKE)
    device = torch.device(mesh.device_type)
    return [experts.measure(each, shape, device, 1) for each in experts.contestants(("rowwise",))]


def test_codes_take_half_of_the_way_there(two_ranks):
    base, exact, sent, read = two_ranks.run(2, rows_of_each)[0]
    assert base["contestant"] == experts.BASELINE
    assert exact["all_to_all_bytes"] == base["all_to_all_bytes"]
    # Of two ways one is in 8 bits.
    assert sent["all_to_all_bytes"] == read["all_to_all_bytes"] <= 0.78 * base["all_to_all_bytes"]
    assert all(row["seconds"] > 0 for row in (base, exact, sent, read))


def peaks_of_each(mesh):
    (shape,) = (each for each in SHAPES["experts"] if each.set == SMOKE)
    shape = dataclasses.replace(shape, size=(512, 8, 32, 896, 256))
    found = []
    for each in experts.contestants(("rowwise",)):
        step = experts.step_of(each, shape, torch.device(mesh.device_type))
        step()
        with Memory() as memory:
            step()
        found.append(memory.peak)
    return found


def test_codes_that_are_read_on_arrival_take_no_more_memory_than_bf16(two_ranks):
    """Backward frees what arrived, and what it sends, before it makes the largest gradient."""
    for base, _, _, read in two_ranks.run(2, peaks_of_each):
        assert read < base


def test_names_say_what_travels():
    assert [each.name for each in experts.contestants(("blockwise",))] == [
        "bf16",
        "blockwise from values, sends high precision",
        "blockwise from values, sends codes",
        "blockwise from codes, sends codes",
    ]
