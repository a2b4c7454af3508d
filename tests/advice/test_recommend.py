"""The recommendation: the fastest, bf16 where nothing gains, and the batch from which it pays."""

import pytest

from tritonfp8.advice import contenders, recommend, result
from tritonfp8.advice.blocks import LayerGroup

OF = {"bf16": contenders.PLAIN, "rowwise": contenders.contender("rowwise"), "mxfp8": contenders.contender("mxfp8")}


@pytest.fixture
def steps(timing):
    def made(**seconds):
        rows = [(*key.split("_"), value) for key, value in seconds.items()]
        plain = {mode: value for name, mode, value in rows if name == "bf16"}
        return [
            result.StepTime(name, mode, timing(value, gpu=value), plain[mode] / value if mode in plain else None)
            for name, mode, value in rows
        ]

    return made


def test_the_fastest_of_all_modes_wins(steps):
    found = recommend.recommend(
        steps(bf16_block=1.0, rowwise_block=0.8, bf16_graph=0.9, rowwise_graph=0.7, mxfp8_graph=0.75), OF, 64, 0.0
    )
    assert (found.contender, found.mode) == ("rowwise", "graph")
    assert found.speed_up == pytest.approx(0.9 / 0.7)
    assert list(found.layers) == ["*"]


def test_bf16_in_a_faster_mode_beats_a_recipe(steps):
    found = recommend.recommend(steps(bf16_none=1.0, rowwise_none=0.8, bf16_graph=0.7), OF, 64, 0.0)
    assert (found.contender, found.mode, found.layers) == ("bf16", "graph", None)


def test_less_than_two_percent_is_no_gain(steps):
    assert recommend.recommend(steps(bf16_block=1.0, rowwise_block=0.99), OF, 64, 0.0).contender == "bf16"
    assert recommend.recommend(steps(bf16_block=1.0, rowwise_block=0.97), OF, 64, 0.0).contender == "rowwise"


def test_without_a_pair_there_is_none(steps):
    assert recommend.recommend(steps(bf16_block=1.0), OF, 64, 0.0) is None
    assert recommend.recommend(steps(rowwise_block=1.0), OF, 64, 0.0) is None


def test_tokens_from_which_it_pays(timing):
    def pair(**fields):
        return [
            result.StepTime("bf16", "none", timing(1.0, host=0.1, gpu=1.0), 1.0),
            result.StepTime("rowwise", "none", timing(0.8, gpu=0.8, **fields), 1.25),
        ]

    # The host needs 0.3, which is less than bf16's GPU time from 0.306 of the batch on.
    by_host = recommend.recommend(pair(host=0.3), OF, 1024, 0.0)
    assert 0.306 * 1024 <= by_host.from_tokens <= 0.306 * 1024 * 2**0.5
    # Casts of weights take 0.1 whatever the batch: 0.1 + 0.7 b < b / 1.02 from 0.36 on.
    by_weights = recommend.recommend(pair(host=0.0), OF, 1024, 0.1)
    assert 0.356 * 1024 <= by_weights.from_tokens <= 0.356 * 1024 * 2**0.5


def group(name, count=1):
    return LayerGroup(name, name, name, count, (64, 64), 0, 128)


def test_slow_layers_are_left_out_where_that_gains():
    fast, slow = group("blocks.*.up", 4), group("blocks.*.up.gate", 4)
    plain = {fast: 1.0, slow: 1.0}
    found = contenders.without_slower(OF["rowwise"], {fast: 0.5, slow: 1.5}, plain)
    assert list(found.layers) == ["blocks.*.up"]
    assert found.name == "rowwise without 1"
    assert contenders.without_slower(OF["rowwise"], {fast: 0.5, slow: 0.9}, plain) is None
    assert contenders.without_slower(OF["rowwise"], {fast: 1.5, slow: 1.5}, plain) is None
    assert contenders.without_slower(OF["rowwise"], {fast: 0.9, slow: 1.0001}, plain) is None


def test_the_longer_pattern_comes_first():
    fast, longer, slow = group("b.*"), group("b.*.x"), group("c")
    found = contenders.without_slower(
        OF["rowwise"], {fast: 0.5, longer: 0.5, slow: 9.0}, dict.fromkeys((fast, longer, slow), 1.0)
    )
    assert list(found.layers) == ["b.*.x", "b.*"]
