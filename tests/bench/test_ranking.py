"""The data of the cost model's ranking: what is measured, and what it says of GEMMs that no table has."""

import pytest
import torch

from bench.contest import ranking
from tritonfp8 import recipes


def test_the_forward_gemm_is_found():
    given = ranking.forward_call((512, 256, 384), recipes.get("rowwise")).named()
    assert (given["a"].shape, given["b"].shape) == ((512, 384), (256, 384))


@pytest.mark.parametrize("fastest", [0, 2])
def test_times_are_compared_with_the_fastest(fastest):
    def timer(functions):
        return [1.0 if i == fastest else 1.5 + i for i, _ in enumerate(functions)]

    row = ranking.measured(ranking.forward_call((512, 256, 384), recipes.get("rowwise")), torch.device("cpu"), timer)
    names = list(row["seconds"])
    assert len(names) >= 3
    assert row["seconds"][names[fastest]] == 1.0
    assert row["model_over_best"] == row["choice_over_best"] == (1.0 if fastest == 0 else 1.5)
