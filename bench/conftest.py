"""Options and fixtures of the suites.

``pytest bench [--shapes SET] [--quick] [--runs N] [--budget SECONDS] [--rows FILE]``
"""

import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import shapes
from bench.contest import machine
from bench.contest.compare import FULL, QUICK, SMOKE_EFFORT, Contest, Device, Stopwatch
from tritonfp8.compat import hardware

STOPWATCH = Stopwatch()
# Exit code of a run whose budget ended before all tests ran; pytest's own codes end at 5.
CUT_OFF = 6
STARTED = time.monotonic()


def pytest_xdist_auto_num_workers() -> int:
    """No workers: a timed function needs the machine to itself."""
    return 0


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("bench")
    group.addoption(
        "--shapes",
        action="append",
        default=[],
        help=f"sets of shapes: {', '.join(shapes.set_names())}, or {shapes.ALL}; {shapes.SMOKE} without a GPU",
    )
    group.addoption("--quick", action="store_true", help="fewer and shorter rounds; compile peers for few shapes only")
    group.addoption("--runs", type=int, help=f"runs that must give the same bits [{FULL.runs}, quick {QUICK.runs}]")
    group.addoption("--budget", type=float, help="seconds after which no further test starts")
    group.addoption("--rows", type=Path, help="append each measured row to this file, as a line of JSON")


def pytest_configure(config: Any) -> None:
    try:
        shapes.check_sets(config.getoption("shapes"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.option.shapes = machine.chosen_sets(config.getoption("shapes"))


def pytest_report_header(config: Any) -> str | None:
    return "bench: smoke shapes, which show that the suites run, not how fast anything is" if _smoke(config) else None


def _smoke(config: Any) -> bool:
    return config.getoption("shapes") == [shapes.SMOKE]


def pytest_generate_tests(metafunc: Any) -> None:
    """Run a test for each shape of the chosen sets and each of its cases that serves the set, shape by shape."""
    if "shape" not in metafunc.fixturenames:
        return
    kind, cases = metafunc.function.kind, metafunc.function.cases
    chosen = shapes.select(kind, metafunc.config.getoption("shapes"))
    pairs = [(case, shape) for shape in chosen for case in cases if case.serves(shape.set)]
    metafunc.parametrize(("case", "shape"), pairs, ids=str)


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    has_fp8 = torch.cuda.is_available() and hardware.abilities("cuda").has_fp8_mma
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=STOPWATCH.read))
        if not has_fp8 and not _smoke(config):
            reason = f"needs a GPU with FP8 tensor cores; --shapes {shapes.SMOKE} runs the suites on a CPU"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: Any) -> None:
    budget = item.config.getoption("budget")
    if budget is not None and time.monotonic() - STARTED > budget:
        item.session.was_cut_off = True
        pytest.skip(f"the budget of {budget:g} s is used up")


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and getattr(session, "was_cut_off", False):
        session.exitstatus = CUT_OFF


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    # Replaces pytest-benchmark's own, which includes the host name.
    return machine.describe_machine()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_commit_info() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="session")
def device(pytestconfig: Any) -> Device:
    config = pytestconfig
    effort = SMOKE_EFFORT if _smoke(config) else QUICK if config.getoption("quick") else FULL
    effort = dataclasses.replace(effort, runs=config.getoption("runs") or effort.runs)
    torch.manual_seed(0)
    if _smoke(config):
        # Threads wait for each other longer than such small shapes compute.
        torch.set_num_threads(1)
    # The first GEMM of a process allocates cuBLAS's workspace: run one before any contender is timed.
    chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.ones(16, 16, device=chosen, dtype=torch.bfloat16) @ torch.ones(16, 16, device=chosen, dtype=torch.bfloat16)
    # Each contest ends with a collection, which would look at all modules again, also at the compiler's modules.
    torch.compiler.reset()
    gc.collect()
    gc.freeze()
    return Device(chosen, effort)


@pytest.fixture
def contest(request: Any, device: Device) -> Contest:
    config = request.config
    suite = request.path.stem.removeprefix("test_")
    return Contest(
        suite, device, STOPWATCH, config.getoption("rows"), smoke=_smoke(config), quick=config.getoption("quick")
    )
