"""The ranking of configurations by the cost model: its rows, and its choices for GEMMs that no table has."""

import json
import statistics

import pytest
import torch
from tuned import H200

from bench.contest import ranking
from bench.contest.machine import RESULTS
from bench.shapes import select
from tritonfp8 import recipes, tuning


@pytest.mark.parametrize("fastest", [0, 2])
def test_times_of_the_forward_gemm_are_compared_with_the_fastest(fastest):
    def timer(functions):
        return [1.0 if i == fastest else 1.5 + i for i, _ in enumerate(functions)]

    call = ranking.forward_call((512, 256, 384), recipes.get("rowwise"))
    assert (call.named()["a"].shape, call.named()["b"].shape) == ((512, 384), (256, 384))
    row = ranking.measured(call, torch.device("cpu"), timer)
    names = list(row["seconds"])
    assert len(names) >= 3
    assert row["seconds"][names[fastest]] == 1.0
    assert row["model_over_best"] == row["choice_over_best"] == (1.0 if fastest == 0 else 1.5)


def test_the_cost_model_finds_what_is_nearly_the_fastest_of_gemms_that_no_table_has():
    """By the times of every candidate: the model's choice now, not the one when they were measured."""
    data = json.loads((RESULTS / "nvidia-h200" / "ranking.json").read_text())
    held = {shape.size for shape in select("gemm", ["untuned"])}
    of_variants = {}
    for row in data["rows"]:
        assert tuple(row["shape"]) in held
        call = ranking.forward_call(row["shape"], ranking.VARIANTS[row["variant"]])
        accumulation = call.named()["accumulation"]
        kind = tuning.kind(
            "blockwise" if "blockwise" in row["variant"] else "epilogue", accumulation, (1, 128), 2, True, True
        )
        first = tuning.candidates(kind, *row["shape"], H200)[0].name
        of_variants.setdefault(row["variant"], []).append(row["seconds"][first] / min(row["seconds"].values()))
    assert of_variants.keys() == ranking.VARIANTS.keys()
    for found in of_variants.values():
        assert statistics.geometric_mean(found) < 1.02
        assert max(found) < 1.05
