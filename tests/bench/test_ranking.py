"""The ranking of configurations by the cost model: its rows, and its choices for GEMMs that were measured."""

import json
import statistics

import pytest
import torch
from tuned import H200

from bench.contest import ranking
from bench.contest.machine import RESULTS
from bench.shapes import select
from tritonfp8 import recipes, tuning
from tritonfp8.tuning.kinds import find


@pytest.mark.parametrize("fastest", [0, 2])
def test_times_of_the_forward_gemm_are_compared_with_the_fastest(fastest):
    def timer(functions):
        return [1.0 if i == fastest else 1.5 + i for i, _ in enumerate(functions)]

    call = ranking.forward_call((512, 256, 384), recipes.get("rowwise"))
    assert (call.named()["a"].shape, call.named()["b"].shape) == ((512, 384), (256, 384))
    row = ranking.measured("rowwise precise", call, torch.device("cpu"), timer)
    names = list(row["seconds"])
    assert len(names) >= 3
    assert row["seconds"][names[fastest]] == 1.0
    assert row["choice"] == names[0]
    assert row["model_over_best"] == row["choice_over_best"] == (1.0 if fastest == 0 else 1.5)


@pytest.mark.parametrize("fails", [False, True])
def test_the_choice_is_compared_with_torch_on_the_same_operands(monkeypatch, fails):
    seen = []

    def peer(a, b, accumulation):
        seen.append((a.qdata, b.scale, accumulation))
        if fails:
            raise RuntimeError("no kernel for these sizes")
        return lambda: None

    monkeypatch.setitem(ranking.PEERS, "rowwise", peer)
    call = ranking.forward_call((512, 256, 384), ranking.VARIANTS["rowwise fast"])
    row = ranking.measured("rowwise fast", call, torch.device("cpu"), lambda f: [2.0 + i for i, _ in enumerate(f)], 2)
    assert len(row["seconds"]) == 2
    assert (row["torch"], row["over_torch"]) == ((None, None) if fails else (4.0, 2.0))
    (codes, scale, accumulation), *others = seen
    assert (codes.shape, scale.shape, accumulation, others) == ((512, 384), (256, 1), "fast", [])


def test_a_summary_tells_sets_and_variants_apart():
    rows = [
        {"set": of, "variant": "v", **ranking.ratios({"a": 2.0, "b": seconds}, "a", "b", peer)}
        for of, seconds, peer in (("x", 1.0, 3.0), ("x", 4.0, None), ("y", 2.0, 1.0))
    ]
    found = ranking.summary(rows)
    assert found["x, v"]["model_over_best"] == {"mean": pytest.approx(2**0.5), "least": 1.0, "largest": 2.0}
    assert found["x, v"]["choice_over_best"]["largest"] == 2.0
    assert found["x, v"]["over_torch"]["least"] == found["x, v"]["over_torch"]["largest"] == 3.0
    assert found["y, v"]["over_torch"]["mean"] == pytest.approx(0.5)


def firsts():
    """Each row of the data, how much longer the model's first takes than the fastest, and the model's first of all.

    By the times of the configurations that exist, and by the model now, not when they were measured.
    """
    for row in json.loads((RESULTS / "nvidia-h200" / "ranking.json").read_text())["rows"]:
        family = "blockwise" if "blockwise" in row["variant"] else "epilogue"
        accumulation = row["variant"].split()[1]
        kind = tuning.kind(family, accumulation, (1, 128), 2, True, True)
        seconds = {config: s for config, s in row["seconds"].items() if find(kind, config)}
        names = [config.name for config in tuning.candidates(kind, *row["shape"], H200)]
        first = next(name for name in names if name in seconds)
        yield row, seconds[first] / min(seconds.values()), names[0]


def test_the_cost_model_finds_what_is_nearly_the_fastest_of_gemms_that_no_table_has():
    of_variants = {}
    for row, over_best, _ in firsts():
        of_variants.setdefault(row["variant"], []).append(over_best)
    assert of_variants.keys() == ranking.VARIANTS.keys()
    for found in of_variants.values():
        assert statistics.geometric_mean(found) < 1.02
        assert max(found) < 1.05


def test_fast_gemms_are_no_slower_than_precise_ones():
    """In what the cost model chooses for GEMMs that no table has; a choice that was not measured fails."""
    seconds = {}
    for row, _, choice in firsts():
        seconds.setdefault(row["variant"], {})[tuple(row["shape"])] = row["seconds"][choice]
    sizes = {shape.size for shape in select("gemm", ["untuned", "drawn"])}
    assert seconds["rowwise fast"].keys() == seconds["rowwise precise"].keys() == sizes
    for size, precise in seconds["rowwise precise"].items():
        assert seconds["rowwise fast"][size] <= precise
