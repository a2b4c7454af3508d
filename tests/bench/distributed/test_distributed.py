import json
import math
import runpy
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import bench_distributed_cases
import pytest
import torch.distributed as dist
from bench_distributed_cases import BROKEN, CONFIG, FFN, HIDDEN, LAYERS, VOCABULARY
from process_group import Processes
from rich.console import Console
from typer.testing import CliRunner

from bench.distributed import compare, models
from bench.distributed import run as distributed
from bench.distributed.compare import Measured, Settings
from bench.distributed.ranks import AllFailedError, RankError, Ranks

pytestmark = pytest.mark.one_in(3)

LINEAR = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * FFN) + HIDDEN * VOCABULARY
OTHER = HIDDEN * VOCABULARY + (2 * LAYERS + 1) * HIDDEN
STEPS, WORLD = 2, 2


# A run on two processes.


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    processes = Processes(WORLD)
    try:
        rows = processes.run(
            WORLD, bench_distributed_cases.run_on_mesh, timeout=200, folder=str(folder), model=str(config),
            recipes=("tensorwise", "rowwise"), steps=STEPS, batch_size=1, seq_len=16, dp=WORLD, data=__file__, rounds=2,
            moments=("fp8",),
        )  # fmt: skip
    finally:
        processes.stop()
    data = json.loads((folder / distributed.FILE).read_text())
    assert [row["contender"] for row in rows[1]] == [row["contender"] for row in data["rows"]]
    return data, {row["contender"]: row for row in data["rows"]}


def test_the_faster_round_counts_and_a_failed_one_is_not_hidden():
    rows = [{"seconds": x, "peak_bytes": i} for i, x in enumerate((3.0, 2.0, 4.0))]
    found = None
    for row in rows:
        found = compare.faster(*([] if found is None else [found]), row)
    assert found == {"seconds": 2.0, "peak_bytes": 1, "round_seconds": [3.0, 2.0, 4.0]}
    failed = compare.faster(found, {"seconds": None, "reason": "not measured: of memory"})
    assert (failed["reason"], failed["round_seconds"]) == ("not measured: of memory", [3.0, 2.0, 4.0, None])
    assert compare.faster(failed, rows[1])["reason"] == failed["reason"]


on_ranks = pytest.mark.xdist_group("ranks")


@on_ranks
def test_json_says_what_ran_and_where(measured):
    data, rows = measured
    assert data["command"].startswith(f"torchrun --nproc-per-node {WORLD} ")
    assert data["machine"]["gpu"] == "cpu"
    assert data["settings"]["seq_len"] == 16
    assert data["order"] == compare.ORDER
    assert data["not_measured_yet"] == []
    ours = [
        f"{name}{how}"
        for name in ("tensorwise", "rowwise")
        for how in ("", ", FP8 all-gather", ", stored in 8 bits, fp8 moments")
    ]
    assert list(rows) == ["bf16", *ours, models.TORCHAO_GATHER, "torchao rowwise", BROKEN]
    for name in ("bf16", *ours):
        row = rows[name]
        assert len(row["round_seconds"]) == 2
        assert row["seconds"] == min(row["round_seconds"])
        assert row["tokens_per_second"] == pytest.approx(WORLD * 16 / row["seconds"], rel=1e-3)
        assert [len(losses) for losses in row["losses"]] == [STEPS] * WORLD
        assert all(3 < loss < 9 for losses in row["losses"] for loss in losses)
        # Each rank has its own part of the batch.
        assert row["losses"][0] != row["losses"][1]


@on_ranks
def test_bytes_are_those_of_the_parameters(measured):
    _, rows = measured
    # Forward and backward gather every parameter; gradients are float32.
    assert rows["bf16"]["bytes"]["all_gather"] == 2 * 2 * (LINEAR + OTHER)
    assert rows["bf16"]["bytes"]["reduce_scatter"] == 4 * (LINEAR + OTHER)
    for name in ("tensorwise", "rowwise"):
        assert rows[name]["bytes"]["all_gather"] == rows["bf16"]["bytes"]["all_gather"]
        gathered = rows[f"{name}, FP8 all-gather"]["bytes"]
        assert gathered["all_gather"] == 2 * (LINEAR + 2 * OTHER)
        assert gathered["all_gather"] <= 0.52 * rows["bf16"]["bytes"]["all_gather"]
        # The amaxes, beside what clips the gradients.
        assert gathered["all_reduce"] > rows["bf16"]["bytes"]["all_reduce"] > 0
        # Of weights and optimizer state.
        assert rows[f"{name}, FP8 all-gather"]["bytes_a_linear_parameter"] == pytest.approx(12, rel=1e-3)
        stored = f"{name}, stored in 8 bits, fp8 moments"
        # Code and two moments, with their scales.
        assert 3 < rows[stored]["bytes_a_linear_parameter"] < 3.3
        assert rows[stored]["bytes"]["all_gather"] <= 0.53 * rows["bf16"]["bytes"]["all_gather"]


def test_the_module_is_a_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.distributed", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("bench.distributed", run_name="__main__")
    assert ended.value.code == 0
    assert "--model" in capsys.readouterr().out


@on_ranks
def test_losses_are_compared_to_the_bit(measured):
    data, rows = measured
    bars = {bar["what"]: bar for bar in data["bars"]}
    for name in ("tensorwise", "rowwise"):
        gather = f"{name}, FP8 all-gather"
        assert rows[gather]["losses_equal_without"] is True
        assert rows[gather]["losses"] == rows[name]["losses"]
        assert bars[f"{gather}: losses that differ from those without it"] == {
            "what": f"{gather}: losses that differ from those without it", "bar": 0, "holds": True, "measured": 0,
        }  # fmt: skip
        assert bars[f"{gather}: bytes of all-gathers over bf16's"]["holds"] is True
    assert rows["tensorwise"]["losses"] != rows["bf16"]["losses"] != rows["rowwise"]["losses"]


@on_ranks
def test_who_could_not_be_measured_says_why_and_the_rest_goes_on(measured):
    data, rows = measured
    for name in (models.TORCHAO_GATHER, models.TORCHAO_ROWWISE):
        assert rows[name]["reason"] == "not measured: torchao is not installed"
        assert rows[name]["seconds"] is None
    assert rows[BROKEN]["reason"] == "not measured: ZeroDivisionError: nothing to convert"
    console = Console(width=250)
    with console.capture() as shown:
        console.print(distributed.results_table(data["rows"], "title", True))
    assert shown.get().count("not measured: torchao is not installed") == 2
    assert "losses bitwise those without the FP8 gather" in shown.get()


def in_threads(*functions, grace=0.2, patience=20):
    """``function(ranks)`` of each rank; what each returned or raised."""
    store = dist.HashStore()

    def work(rank):
        try:
            return functions[rank](Ranks(rank, len(functions), store, patience, grace))
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(work, range(len(functions))))


def fail(ranks):
    return ranks.together(lambda: 1 / 0)


def work(ranks):
    return ranks.together(lambda: ranks.rank)


def test_together_returns_what_each_rank_made():
    assert in_threads(work, work, work) == [0, 1, 2]
    assert in_threads(lambda r: r.exchange([r.rank]), lambda r: r.exchange([r.rank])) == [[[0], [1]]] * 2


def test_a_failure_on_all_ranks_lets_them_go_on():
    def twice(ranks):
        with pytest.raises(AllFailedError, match="ZeroDivisionError: division by zero"):
            fail(ranks)
        return work(ranks)

    assert in_threads(twice, twice) == [0, 1]


def test_a_failure_on_one_rank_is_an_error_on_all():
    for error in in_threads(work, fail, work):
        assert isinstance(error, RankError)
        assert "rank 1 failed and the others did not; rank 1: ZeroDivisionError" in str(error)


def test_a_rank_that_failed_does_not_wait_for_those_in_a_collective():
    begin = time.monotonic()
    stuck, error = in_threads(lambda ranks: time.sleep(1), fail)
    assert stuck is None
    assert isinstance(error, RankError)
    assert all(text in str(error) for text in ("rank 1 failed: ZeroDivisionError", "in vain for rank 0"))
    assert time.monotonic() - begin < 10


# The command line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "3,1"], "dp x tp = 2"),
        (["--mesh", "2"], "dp x tp = 2"),
        (["--processes", "3"], "the launcher started 2"),
        (["--recipes", "bf16"], "give recipes that quantize"),
        (["--recipes", "rowwize"], "did you mean 'rowwise'"),
        (["--device", "tpu"], "must be cpu or cuda"),
        (["--mesh", "1,2", "--seq-len", "7"], "multiple of tp"),
    ],
)
def test_wrong_options_end_with_what_is_needed(arguments, message):
    result = CliRunner().invoke(distributed.app, ["--model", "tiny", *arguments], env={"WORLD_SIZE": "2"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("losses", [False, True])
def test_speeds_are_not_noted_where_losses_are_compared(losses):
    settings = Settings("tiny", ("rowwise",), 3, 1, 16, dp=1, tp=1, losses=losses)
    entry = Measured(settings.contestants()[0], losses=[3.0, 2.0, 1.0], seconds=[9.0, 9.0, 2.0])
    (noted,) = in_threads(lambda ranks: compare.row(settings, entry, ranks))
    assert noted["losses"] == [entry.losses]
    assert noted["seconds"] == (None if losses else 2.0)
    assert noted["step_seconds"] == ([] if losses else entry.seconds)
    assert ("tokens_per_second" in noted) is not losses


def test_contestants_of_tensor_parallelism():
    settings = Settings("tiny", ("rowwise",), 2, 1, 16, dp=1, tp=2, losses=True)
    assert [c.name for c in settings.contestants()] == [
        "bf16, TP", "rowwise, TP", "rowwise, TP, DTensors between layers", "rowwise, TP, FP8 styles",
        "bf16, one process", f"bf16, {models.REORDERED}", "rowwise, one process", f"rowwise, {models.REORDERED}",
    ]  # fmt: skip


@pytest.mark.parametrize(("given", "name"), [
    ({}, "distributed-160m-x2-losses-eager"),
    ({"compile": True}, "distributed-160m-x2-losses"),
    ({"compile": True, "losses": False, "dp": 1, "tp": 2}, "distributed-160m-tp2-dp1"),
    ({"compile": True, "lr": 3e-5}, "distributed-160m-x2-losses-lr3e-05"),
])  # fmt: skip
def test_runs_of_other_settings_have_other_folders(given, name):
    settings = Settings(**{"model": "160m", "recipes": ("rowwise",), "steps": 3, "batch_size": 1, "seq_len": 16,
                           "dp": 2, "losses": True, **given})  # fmt: skip
    with mock.patch.object(distributed, "results_folder", return_value=Path("results")):
        assert distributed.default_folder(settings, "cuda") == Path("results") / name


@pytest.mark.parametrize(("given", "message"), [
    ({"losses": True, "rounds": 2}, "losses are the same in each; got 2 rounds"),
    *(({"lr": lr}, f"lr must be positive and finite; got {lr}") for lr in (0.0, -1e-4, math.inf, math.nan)),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Settings("tiny", ("rowwise",), 3, 1, 16, dp=1, **given)
