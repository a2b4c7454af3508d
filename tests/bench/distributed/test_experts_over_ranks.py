"""The comparison of what travels to experts, and of whole decoder layers with experts over ranks."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import expert_layer_cases
import pytest
import torch
import typer
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


# Whole layers.

WORLD = 2
NAMES = {
    (recipe, payload, source): experts.Contestant(recipe, payload, source).name
    for recipe in ("rowwise", "blockwise")
    for payload in ("high_precision", "float8")
    for source in ("values", "codes")
}


@pytest.fixture(scope="module")
def trained(two_ranks, tmp_path_factory):
    """Rows by name, of one layer on two ranks."""
    folder = tmp_path_factory.mktemp("layers")
    contestants = [("bf16", "high_precision"), *NAMES]
    found = two_ranks.run(WORLD, expert_layer_cases.rows_of, timeout=200, folder=str(folder), contestants=contestants)
    rows, failed = found[0]
    assert failed == []
    assert json.loads((folder / "rows.json").read_text())["rows"] == rows
    return {row["contender"]: row for row in rows}


def test_every_parameter_moves_and_each_rank_has_its_own_tokens(trained):
    assert list(trained) == ["bf16", *NAMES.values()]
    for row in trained.values():
        # Bytes of text are below 128: the second rank has rows of the embedding that no token reads.
        assert row["unchanged"] == [[], ["model.embed_tokens.weight"]]
        assert row["losses"][0] != row["losses"][1]
        assert all(4 < loss < 7 for losses in row["losses"] for loss in losses)
        assert row["tokens_per_second_a_rank"] == pytest.approx(2 * 24 / row["seconds"], rel=1e-2)


def test_what_travels_does_not_change_the_first_loss(trained):
    first = {name: tuple(losses[0] for losses in row["losses"]) for name, row in trained.items()}
    for recipe in ("rowwise", "blockwise"):
        found = {first[name] for key, name in NAMES.items() if key[0] == recipe}
        assert len(found | {first["bf16"]}) == 2
        assert first["bf16"] not in found


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_codes_that_are_read_as_they_arrive_change_no_loss(trained, recipe):
    exact, sent = (trained[NAMES[recipe, payload, "codes"]] for payload in ("high_precision", "float8"))
    assert sent["losses"] == exact["losses"]
    assert sent["losses"] != trained["bf16"]["losses"]


def test_bytes_of_whole_layers(trained):
    hidden, vocabulary, experts_of_a_layer, head_dim = 192, 256, 8, 48
    attention = hidden * head_dim * (4 + 2 + 2 + 4) + 2 * head_dim
    # Three norms of the hidden size, one of them after the last layer.
    other = attention + hidden * (experts_of_a_layer + 3 + 2 * vocabulary)
    for row in trained.values():
        # Forward and backward gather what is no expert, in bf16; gradients are float32.
        assert row["bytes"]["all_gather"] == 2 * 2 * other
        assert row["bytes"]["reduce_scatter"] == 4 * other
    for recipe in ("rowwise", "blockwise"):
        for source in ("values", "codes"):
            exact, sent = (trained[NAMES[recipe, payload, source]] for payload in ("high_precision", "float8"))
            # Of two ways one is in 8 bits, with scales.
            assert 0.7 < sent["bytes"]["all_to_all"] / exact["bytes"]["all_to_all"] < 0.8
    # A row of 192 has two scales in place of one.
    rowwise, blockwise = (trained[NAMES[recipe, "float8", "values"]] for recipe in ("rowwise", "blockwise"))
    assert blockwise["bytes"]["all_to_all"] > rowwise["bytes"]["all_to_all"]


def test_routers_and_head_stay_and_experts_are_split(two_ranks):
    for contestant in (("bf16", "high_precision"), ("rowwise", "float8")):
        found = two_ranks.run(WORLD, expert_layer_cases.split_modules, contestant=contestant)
        assert found[0] == found[1]
        (plain, converted, sharded), sizes = found[0]
        assert plain == {"lm_head"}
        assert converted == {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}
        assert sharded == {"model.layers.0.mlp.experts"}
        at = "model.layers.0.mlp.experts"
        assert sizes == {f"{at}.gate_up_proj": (4, 320, 192), f"{at}.down_proj": (4, 192, 160)}


def test_the_norm_that_clips_has_the_gradients_of_all_meshes(two_ranks):
    assert max(two_ranks.run(WORLD, expert_layer_cases.clipped, limit=1.0)) < 1e-5


@pytest.mark.one_in(4)
def test_compiled_layers_keep_the_losses(two_ranks, tmp_path):
    """A layer is compiled around the experts, for any number of rows that arrive."""
    options = {"contestants": [("rowwise", "float8", "codes")], "steps": 3}
    found = []
    for compile in (False, True):
        folder = tmp_path / str(compile)
        folder.mkdir()
        rows = two_ranks.run(
            WORLD, expert_layer_cases.rows_of, timeout=200, folder=str(folder), compile=compile, **options
        )
        assert rows[0][1] == []
        found.append([row["losses"] for row in rows[0][0]])
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def spread(ranks, two_ranks, tmp_path_factory):
    """A function that gives rows by name, of one layer that is spread over ranks in some way."""

    def run(world=4, contestants=(("bf16", "high_precision"), *NAMES), **layout):
        folder = tmp_path_factory.mktemp("spread")
        options = {"folder": str(folder), "contestants": contestants, "steps": 5, **layout}
        processes = two_ranks if world == WORLD else ranks
        found, failed = processes.run(world, expert_layer_cases.rows_of, timeout=100, **options)[0]
        assert failed == []
        return {row["contender"]: row for row in found}

    return run


ROWWISE = [("bf16", "high_precision"), *(key for key in NAMES if key[0] == "rowwise")]


@pytest.mark.one_in(2)
def test_experts_over_some_of_the_ranks_and_fsdp_over_the_others(spread):
    """Where experts are changes no first loss, and neither does the gather of their parts in 8 bits change any."""
    whole, part, gathered = (spread(contestants=ROWWISE, **each) for each in ({}, {"ep": 2}, {"ep": 2, "gather": True}))
    for name, row in part.items():
        assert [losses[0] for losses in row["losses"]] == [losses[0] for losses in whole[name]["losses"]]
        assert row["losses"] != whole[name]["losses"]
        assert gathered[name]["losses"] == row["losses"]
        # Two ranks have the same experts: FSDP2 gathers halves of them.
        assert row["bytes"]["all_gather"] > whole[name]["bytes"]["all_gather"]
        ratio = gathered[name]["bytes"]["all_gather"] / row["bytes"]["all_gather"]
        assert ratio == 1 if name == "bf16" else 0.5 < ratio < 0.65


@pytest.mark.one_in(2)
def test_tensor_parallelism_beside_experts_over_all_ranks(spread):
    """No NaN, and the losses of two ranks that have the same tokens without tensor parallelism."""
    spread_over, alone = spread(tp=2, ep=4), spread(WORLD)
    for name, row in spread_over.items():
        assert row["losses"][0] == row["losses"][1]
        assert row["losses"][2] == row["losses"][3]
        for mine, expected in zip(row["losses"][::2], alone[name]["losses"], strict=True):
            assert mine[0] == pytest.approx(expected[0], rel=1e-3)
            assert mine == pytest.approx(expected, rel=5e-3)
    for recipe in ("rowwise", "blockwise"):
        exact, sent = (spread_over[NAMES[recipe, payload, "codes"]] for payload in ("high_precision", "float8"))
        assert exact["losses"] == sent["losses"]


@pytest.mark.parametrize("layout", [{"ep": 3}, {"tp": 2, "ep": 1}])
def test_experts_that_do_not_fit_the_ranks_are_refused(layout):
    with pytest.raises(ValueError, match="ep must divide the 4 ranks, and be a multiple of tp"):
        expert_layer_cases.settings_of(4, **layout)


def row_of(**changes):
    return {"contender": "rowwise", "losses": [[5.0, 4.5]] * 2, "unchanged": [[], []], **changes}


@pytest.mark.parametrize(("changes", "texts"), [
    ({}, []),
    ({"losses": [[5.0, 4.5], [5.0, "nan"]]}, ["rowwise: losses that are not finite"]),
    ({"losses": [[5.0, math.inf], [5.0, 4.5]]}, ["rowwise: losses that are not finite"]),
    ({"unchanged": [["embed"], []]}, []),
    ({"unchanged": [["norm", "embed"], ["norm"]]}, ["rowwise: no step changed norm"]),
    ({"unchanged": [[], ["mlp.experts.down_proj"]]}, ["rowwise: no step changed mlp.experts.down_proj"]),
    ({"reason": "not measured: of memory", "losses": []}, ["rowwise: not measured: of memory"]),
])  # fmt: skip
def test_failures_of_whole_layers(changes, texts, monkeypatch, capsys):
    row = row_of(**changes)
    assert experts.failures([row]) == texts
    ranks = SimpleNamespace(rank=0, size=WORLD)
    monkeypatch.setattr(experts, "joined", lambda device: contextlib.nullcontext(ranks))
    monkeypatch.setattr(experts, "show_layers", lambda *args: None)
    monkeypatch.setattr(experts, "measure_layers", lambda *args: ([row], experts.failures([row])))
    ended = pytest.raises(typer.Exit) if texts else contextlib.nullcontext()
    with ended as error:
        experts.train_layers(expert_layer_cases.settings_of(WORLD), torch.device("cpu"), Path("unused"))
    assert capsys.readouterr().err == "".join(f"{text}\n" for text in texts)
    assert not texts or error.value.exit_code == 1


def test_models_without_sizes_are_refused():
    with pytest.raises(ValueError, match="model must be one of 'qwen3-30b-a3b', 'tiny'; got '1b'"):
        dataclasses.replace(expert_layer_cases.settings_of(WORLD), model="1b")
