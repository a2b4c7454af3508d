"""Set-up of every test process, before torch, numpy or triton is imported."""

import gc
import os
import signal
from collections import Counter

# One thread in each worker: BLAS adds in another order on more, so that bits would depend on the number of workers.
THREADS = 1
os.environ["OMP_NUM_THREADS"] = str(THREADS)

import collector  # noqa: F401  before what imports many modules
import hypothesis
import pytest
import sampling
import torch
from scheduling import order, pytest_xdist_make_scheduler  # noqa: F401  a hook

torch.set_num_threads(THREADS)
sampling.note_commit()

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Every worker would start processes that import torch, to compile on cores that are busy.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Inductor's C++ without vector types: g++ takes a third less, and compiles no program for each instruction set.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    # Read when a kernel is decorated, so also by triton's own library on import. TRITON_INTERPRET=0 from outside keeps
    # the compiler: so do the tests in tests/compile_only, which need it and no GPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETING:
    import interpreter

    interpreter.repair()
else:
    import compile_store

    # Workers are started later, so they share the folder.
    compiled_kernels = compile_store.share()

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "0" else ["compile_only"]

hypothesis.settings.register_profile(
    "tritonfp8",
    # The first call of a kernel or of a compiled function takes seconds.
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tritonfp8")

NEEDS = {
    "gpu": (HAS_CUDA, "needs a CUDA GPU"),
    "multigpu": (torch.cuda.device_count() >= 2, "needs two CUDA GPUs or more"),
}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    # Before any fixture. Without it a test's data would depend on the tests that its worker ran before, and a bound on
    # random data would fail once in a hundred runs.
    torch.manual_seed(0)


@pytest.fixture
def poisoned_outputs():
    """``torch.empty`` gives NaN (the largest value in integers) for the duration of a test."""
    from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in BYTE_FORMATS:
        assert torch.empty(3, dtype=FORMATS[name].dtype).float().isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache home of the test's own, and nothing tuned that was read before."""
    from tritonfp8.tuning import chooser, store

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(store, "_warned", set())
    chooser.reload()
    yield tmp_path
    chooser.reload()


@pytest.fixture(scope="module")
def ranks(request):
    """Processes on gloo, ended with each file: four, or as many as a file says by ``PROCESSES``.

    Torch names groups by their number, so a function that makes a mesh must run on all of them.
    """
    from process_group import Processes

    processes = Processes(getattr(request.module, "PROCESSES", 4))
    yield processes
    processes.stop()


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal: programs that a shell runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def two_ranks():
    """As ``ranks``, of two processes: torch makes a mesh of two dims over all of them."""
    from process_group import Processes

    processes = Processes(2)
    yield processes
    processes.stop()


def pytest_report_header():
    return sampling.header()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


def unmet(item):
    """The mark of what a test needs and this machine lacks, or None."""
    return next((mark for mark, (met, _) in NEEDS.items() if not met and item.get_closest_marker(mark)), None)


def pytest_collection_modifyitems(config, items):
    items.sort(key=order)
    runnable = [item for item in items if unmet(item) is None]
    # A list of the tests, as the tables of the docs are made from, has them all.
    others = [] if config.getoption("collectonly") else sampling.left_out(runnable)
    left_out = Counter({"one_in": len(others)})
    if hasattr(config, "workeroutput"):
        # A worker sets up and reports each test that it skips: of three thousand that takes ten seconds.
        left_out.update(mark for mark in map(unmet, items) if mark)
        config.workeroutput["not_run"] = dict(left_out)
        items[:] = runnable
    else:
        not_run.update(left_out)
        for item in items:
            if mark := unmet(item):
                item.add_marker(pytest.mark.skip(reason=NEEDS[mark][1]))
    out = set(others)
    items[:] = [item for item in items if item not in out]


# How many tests were left out, by mark: all workers collect the same ones.
not_run = {}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    # A worker that died has no output.
    not_run.update(getattr(node, "workeroutput", {}).get("not_run", {}))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    for mark, (met, reason) in NEEDS.items():
        # A module that is skipped as a whole has no keywords.
        count = not_run.get(mark, 0) + sum(mark in getattr(report, "keywords", ()) for report in skipped)
        if count and not met:
            terminalreporter.write_line(f"not run: {count} marked {mark!r} ({reason})", yellow=True)
    if count := not_run.get("one_in", 0):
        reason = "other commits choose them, and make nightly runs all: tests/support/choice/sampling.py"
        terminalreporter.write_line(f"not run: {count} marked 'one_in' ({reason})", yellow=True)


@pytest.fixture(scope="session")
def gpus():
    """The same on NCCL, with a GPU each."""
    from process_group import Processes

    processes = Processes(min(torch.cuda.device_count(), 4), "cuda")
    yield processes
    processes.stop()
