import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import triton
from bench_rows import LLAMA, SQUARE, UP, gemm_rows, synthetic_rows
from typer.testing import CliRunner

from bench import first_step, report, shapes, tables
from bench.contest import cases, grouped
from bench.contest.bars import BARS
from bench.contest.judge import judge
from bench.plots import PLOTS, layer_breakdown

pytestmark = pytest.mark.one_in(6)

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "bench" / "results" / "nvidia-h200"
PNG = b"\x89PNG\r\n\x1a\n"


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    for suite in report.SUITES:
        if found := [r for r in rows if r["suite"] == suite]:
            (folder / f"{suite}.json").write_text(json.dumps({"rows": found}))


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")
    write(folder, synthetic_rows())
    return folder, report.render(folder)


def markdown(path):
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_whole_run_is_shown_in_tables_and_plots(rendered):
    folder, written = rendered
    assert {path.name for path in written} == {"tables.md", "bars.md", *PLOTS}
    for name in PLOTS:
        content = (folder / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 10_000


def test_the_rest_of_a_layer_is_time_without_a_kernel():
    figure = layer_breakdown(synthetic_rows())
    products, others, none = figure.axes[0].containers
    for parts, milliseconds in ((products, 1250), (others, 250), (none, 500)):
        assert parts[-1].get_width() == pytest.approx(milliseconds)


def test_every_row_is_in_the_tables(rendered):
    folder, _ = rendered
    rows = synthetic_rows()
    cells = [line for line in markdown(folder / "tables.md") if len(line) == 8 and line[0] not in ("case", "---")]
    assert len(cells) == len(rows)
    times = [tables.seconds_text(r["seconds"]) for suite in by_suite(rows).values() for r in suite]
    assert [cell[3] for cell in cells] == times


def test_ratios_to_peers_and_their_means(rendered):
    folder, _ = rendered
    means = [line for line in markdown(folder / "tables.md") if len(line) == 9]
    by_key = {tuple(line[:4]): line for line in means}
    assert by_key["scaled_matmul", "rowwise", "llama-8b", "tritonfp8 precise"][4:] == [
        "torch precise", "1.500", "1.500", "1.500", "8",
    ]  # fmt: skip
    # Half the bytes of a copy in two thirds of its time.
    assert by_key["quantize", "1x128", "large", "tritonfp8"][5] == "0.750"
    assert by_key["linear", "layer", "layers", "rowwise fast"][5] == "1.500"
    rows = [line for line in markdown(folder / "tables.md") if len(line) == 8 and line[0] == "model"]
    assert {line[6] for line in rows if line[2] in cases.MODEL_VARIANTS} == {"1 GiB, 1.000 x"}
    assert {line[6] for line in rows if line[2] == "bf16"} == {"1 GiB"}


def test_every_bar_of_a_whole_run_has_a_verdict(rendered):
    folder, _ = rendered
    lines = markdown(folder / "bars.md")
    assert lines[0] == ["what", "bar", "measured", "holds"]
    assert len(lines) == 2 + len(BARS)
    cells = {line[0]: line[1:] for line in lines[2:]}
    assert len(cells) == len(BARS)
    assert {holds for _, _, holds in cells.values()} == {"yes", "**no**"}
    assert cells["rowwise GEMM, precise, over torch._scaled_mm, large shapes"][2] == "yes"
    assert cells["cast 1x128, each tensor of 64 MB or more: share of copy speed"][2] == "**no**"
    assert cells["llama 8b layers, forward + backward, rowwise precise, over bf16: peak memory"][2] == "**no**"
    assert cells["first step, cold: seconds beyond bf16's"] == ["<= 10", "11.000", "**no**"]
    assert cells["first step, warm: seconds beyond bf16's"] == ["<= 2", "1.000", "yes"]
    assert cells["first step, cold: launches beyond the second's"] == ["<= 0", "0.000", "yes"]


def test_committed_data_is_shown(tmp_path):
    for path in COMMITTED.glob("*.json"):
        shutil.copy(path, tmp_path)
    written = {path.name for path in report.render(tmp_path)}
    assert written >= {"tables.md", "bars.md", "products.png", "product_speed_ups.png"}
    rows = report.read_rows(tmp_path)["scaled_matmul"]
    assert {tuple(r["shape"]) for r in rows} >= {SQUARE, UP}
    assert any(r["own"] and r["case"] == "blockwise grad_weight" for r in rows)
    verdict = judge(rows, [b for b in BARS if b.what.startswith("rowwise GEMM, precise, over torch")])[0]
    assert 0.5 < verdict.measured < 2


def test_nothing_committed_names_a_host_or_a_place():
    for path in COMMITTED.rglob("*"):
        if path.suffix in (".json", ".md"):
            text = path.read_text()
            # Within a longer word, such as the name of a function, a short name is no host's.
            host = rf"(?<![A-Za-z]){re.escape(platform.node())}(?![A-Za-z])"
            assert not re.search(host, text), path
            assert str(ROOT) not in text, path


def test_a_run_that_was_cut_off_is_shown_as_far_as_it_came(tmp_path):
    first, second = gemm_rows(LLAMA[0], 1.0, 2.0)
    write(tmp_path, gemm_rows(LLAMA[1], 1.0, 9.0))
    report.rows_path(tmp_path, "scaled_matmul").write_text(f"{json.dumps(first)}\n{json.dumps(second)[:20]}")
    assert report.read_rows(tmp_path) == {"scaled_matmul": [first]}


def command(*arguments):
    return CliRunner().invoke(report.app, arguments)


def test_render_alone(tmp_path):
    write(tmp_path, gemm_rows(LLAMA[0], 2.0, 3.0))
    result = command("--render", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "rowwise GEMM, precise" in result.output
    assert (tmp_path / "product_speed_ups.png").exists()
    assert not (tmp_path / "casts.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "gemms"), "no suite is named gemms"),
        (("--shapes", "huge"), "no set of shapes is named huge"),
        (("--render", "."), "holds no data of a suite"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_without_pytest_benchmark_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = command("--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "tritonfp8[bench]" in result.output
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_there_are_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write(tmp_path, gemm_rows(LLAMA[0], 2.0, 3.0))
    assert [path.name for path in report.render(tmp_path)] == ["tables.md", "bars.md"]
    assert "matplotlib is missing" in capsys.readouterr().out


def environment():
    # The suites are tried as a user runs them: without Triton's interpreter, and by no worker of this run.
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}
    # Threads that share ops of microseconds wait for each other as soon as the machine has anything else to do.
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def bench(*arguments):
    line = [sys.executable, "-m", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280)


def by_suite(rows):
    return {suite: [r for r in rows if r["suite"] == suite] for suite in report.SUITES}


@pytest.mark.slow
def test_every_suite_runs_on_a_cpu(tmp_path):
    noted, benchmarks = tmp_path / "rows.jsonl", tmp_path / "benchmark.json"
    arguments = ("--shapes", "smoke", "--runs", "3", "--rows", str(noted), f"--benchmark-json={benchmarks}")
    done = bench("pytest", "bench", *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    rows = by_suite([json.loads(line) for line in noted.read_text().splitlines()])
    untimed = {r["case"] for suite in rows.values() for r in suite if r["own"] and r["seconds"] is None}
    of_kernels = {cases.LAYER_KERNELS.name, cases.MODEL_KERNELS.name, grouped.EXPERTS_KERNELS.name}
    assert untimed == (of_kernels if not torch.cuda.is_available() else set())
    assert {r["case"] for r in rows["quantize"]} == {case.name for case in cases.CASTS}
    assert {r["case"] for r in rows["scaled_matmul"]} == {case.name for case in (*cases.GEMM_CASES, cases.EPILOGUE)}
    others = {cases.FIRST_STEP.name, cases.IN_GRAPH.name}
    assert {r["case"] for r in rows["launch"]} == {*(case.name for case in cases.CALLS), *others}
    assert {r["contender"] for r in rows["linear"]} >= {*cases.recipe_variants(cases.LAYER_RECIPES), "bf16"}
    assert {r["contender"] for r in rows["model"]} >= {*cases.MODEL_VARIANTS, "bf16"}
    assert {r["case"] for r in rows["grouped"]} == {case.name for case in (*grouped.PRODUCTS, *grouped.CASTS)}
    assert {r["contender"] for r in rows["experts"]} == {*cases.LAYER_RECIPES, "bf16", "torch bf16"}
    # Of every op, that is; a whole model holds attention, and the first step is a time.
    repeated = {suite: {r.get("same_bits_runs") for r in found if r["own"]} for suite, found in rows.items()}
    ops = {suite: {3} for suite in ("quantize", "scaled_matmul", "linear", "grouped", "experts")}
    assert repeated == {**ops, "model": {None}, "launch": {3, None}}
    assert {r["case"] for r in rows["launch"] if r["own"] and "same_bits_runs" not in r} == {"first step"}

    # pytest-benchmark's own file: our own figure is its figure, and the host has no name.
    text = benchmarks.read_text()
    assert platform.node() not in text
    assert json.loads(text)["machine_info"]["torch"] == torch.__version__
    for figure in json.loads(text)["benchmarks"]:
        own = next(r for r in figure["extra_info"]["rows"] if r["own"])
        assert figure["stats"]["median"] == pytest.approx(own["seconds"], rel=1e-3)


def test_the_first_step_of_the_model_that_is_not_converted(monkeypatch, capsys):
    """In this process: the suite above times a converted model's first step in one of its own."""
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", triton.knobs.HookChain())
    first_step.main("tiny", "bf16", batch=1, sequence=16, device="cpu", eager=True)
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] > 0
    assert found["extra_launches"] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_other_suites_are_skipped_visibly():
    done = bench("pytest", "bench/suites/test_model.py", "--shapes", "models")
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{3 * len(shapes.select('model', ['models']))} skipped" in done.stdout
    assert "needs a GPU with FP8 tensor cores; --shapes smoke runs the suites on a CPU" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_and_a_set_the_smoke_shapes_run():
    done = bench("pytest", "bench", "--collect-only", "-v")
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("bench: smoke shapes") == 1
    every = {shape for kind in shapes.SHAPES for shape in map(str, shapes.select(kind, ["smoke"]))}
    assert set(re.findall(r"-(\w+:[\dx]+)\]", done.stdout)) == every


def test_a_budget_ends_a_suite_between_two_tests(tmp_path):
    path = tmp_path / "rows.jsonl"
    arguments = ("--shapes", "smoke", "--budget", "0", "--rows", str(path))
    done = bench("pytest", "bench/suites/test_scaled_matmul.py", *arguments)
    assert report.OUTCOMES[done.returncode] == "cut off", done.stdout[-4000:]
    assert "the budget of 0 s is used up" in done.stdout
    assert not path.exists()


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    """Of the suite before, of the interrupted one as far as it came, and nothing of the next."""
    suites = ("scaled_matmul", "quantize", "model")
    given = [*(f"--only={suite}" for suite in suites), "--shapes", "smoke"]
    line = [sys.executable, "-m", "bench.report", *given]
    process = subprocess.Popen(
        [*line, "--out", str(tmp_path)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    noted = report.rows_path(tmp_path, "quantize")
    deadline = time.monotonic() + 120
    while not (noted.exists() and noted.read_text().count("\n")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "scaled_matmul: complete" in output
    assert "quantize: interrupted" in output
    assert "model:" not in output
    before, data = (json.loads((tmp_path / f"{suite}.json").read_text()) for suite in suites[:2])
    assert (before["outcome"], data["outcome"]) == ("complete", "interrupted")
    assert data["rows"]
    assert before["command"] == f"python -m bench.report {' '.join(given)}"
    assert str(tmp_path) not in json.dumps(before)
    assert {r["case"] for r in before["rows"]} == {case.name for case in (*cases.GEMM_CASES, cases.EPILOGUE)}
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"tables.md", "bars.md", "products.png", "product_speed_ups.png"}
    assert not any(name.startswith("model") or name.endswith(".jsonl") for name in names)
