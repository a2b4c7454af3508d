"""The search spaces, and what the cost model chooses from them for the shapes that it was made for."""

import dataclasses
import itertools

import pytest
import tuned

from tritonfp8.tuning import chooser
from tritonfp8.tuning.matmul_space import COPY_BANDWIDTH, LOAD_LATENCY, SMALL_M, SPACES, MatmulConfig, predicted_time

H200 = dataclasses.replace(tuned.H200, name="an H200 without tuned configurations")
FAMILIES = ("epilogue", "blockwise")
# N and K of weights whose bytes decide how long a product of few rows takes.
WEIGHTS = [(4096, 7168), (14336, 4096), (4096, 4096), (7168, 16384), (2112, 7168)]


def chosen(family, m, n, k, copy_engine=True):
    return chooser.choose(family, "precise", (1, 128), m, n, k, 2, True, copy_engine, H200)


def pieces(config, m, n):
    return -(-m // config.block_m) * -(-n // config.block_n) * config.split_k


@pytest.mark.parametrize("family", FAMILIES)
def test_many_rows_are_neither_swapped_nor_split(family):
    for m, (n, k) in itertools.product((SMALL_M + 1, 1000, 4096, 16384), [*WEIGHTS, (16, 16), (128, 16384)]):
        config = chosen(family, m, n, k)
        assert not config.swap
        assert config.split_k == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("m", [1, 8, 16, 32, 64])
def test_few_rows_keep_most_of_the_device_reading(family, m):
    """Tokens are the columns of the instruction, so no padding is multiplied, and what all programs
    ask for at once makes up for the memory's latency."""
    for n, k in WEIGHTS:
        config = chosen(family, m, n, k)
        assert config.specialized
        assert config.swap
        assert config.block_m <= max(16, m)
        stages = config.num_stages * (config.block_m + config.block_n) * config.block_k
        assert min(pieces(config, m, n), H200.num_sms) * stages >= LOAD_LATENCY * COPY_BANDWIDTH


@pytest.mark.parametrize("family", FAMILIES)
def test_few_rows_without_the_copy_engine_are_swapped_too(family):
    for n, k in WEIGHTS:
        config = chosen(family, 16, n, k, copy_engine=False)
        assert config.swap
        assert not config.specialized


def test_no_configuration_for_few_rows_serves_many():
    for spaces in SPACES.values():
        for config in itertools.chain(*spaces.values()):
            assert (config.max_m == SMALL_M) == (config.swap or config.split_k > 1)


def test_parts_cost_what_they_save_nothing_of():
    """Of a small K there is nothing to share out; of a large one there is."""
    whole, parts = (MatmulConfig(16, 128, 128, 4, 8, 0.3, swap=True, split_k=split) for split in (1, 4))

    def faster(k):
        return predicted_time(parts, 16, 2048, k, 2, 132) < predicted_time(whole, 16, 2048, k, 2, 132)

    assert not faster(512)
    assert faster(16384)


def test_few_rows_take_the_time_of_a_copy_of_the_weight():
    """A weight of 29 MB at the speed of a copy."""
    config = chosen("blockwise", 16, 4096, 7168)
    assert 4096 * 7168 / 4.27e12 < predicted_time(config, 16, 4096, 7168, 2, 132) < 2 * 4096 * 7168 / 4.27e12
