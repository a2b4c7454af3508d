"""Committed reports are read for unchanged kernels, and are checked a part at a time."""

import hashlib
import json

import compile_store
import pytest
import sampling

KEY = "a kernel"
REPORT = {"registers": 40}
REPORTED = "{} reports; kernels of another source than before: {}; with other registers, spills or instructions: {}"
# The number of a commit after one at which the kernel is in the sample.
COMMIT = 1 - int(hashlib.sha256(KEY.encode()).hexdigest(), 16) % compile_store.SAMPLE


@pytest.fixture(autouse=True)
def committed(tmp_path, monkeypatch):
    """A file with the report of one kernel, which is not in the sample of the commit."""
    run, path = tmp_path / "run", tmp_path / "reports.json.xz"
    monkeypatch.setenv(compile_store.FOLDER, str(run))
    monkeypatch.delenv(compile_store.FRESH, raising=False)
    monkeypatch.setattr(compile_store, "REPORTS", path)
    monkeypatch.setattr(sampling, "number", lambda: COMMIT)
    compile_store.committed.cache_clear()
    assert compile_store.stored(KEY, lambda: REPORT) == REPORT
    assert compile_store.write(run, path) == REPORTED.format(1, 1, 1)
    for each in run.iterdir():
        each.unlink()
    compile_store.committed.cache_clear()
    yield
    compile_store.committed.cache_clear()


def test_every_kernel_is_in_the_sample_of_some_commit(monkeypatch):
    sampled = []
    for number in range(compile_store.SAMPLE):
        monkeypatch.setattr(sampling, "number", lambda number=number: number)
        sampled += [digest for digest in ("0f", "3a", "ff") if compile_store.is_sampled(digest)]
    assert sorted(sampled) == ["0f", "3a", "ff"]


def test_kernels_of_another_source_and_of_other_instructions_are_counted(tmp_path):
    for key, registers in (("another comment", 40), ("another order", 41)):
        compile_store.stored(key, lambda registers=registers: {"registers": registers})
    found = compile_store.write(tmp_path / "run", compile_store.REPORTS)
    assert found == REPORTED.format(2, 2, 1)


def never():
    raise LookupError


def test_a_known_kernel_is_not_compiled():
    assert compile_store.stored(KEY, never) == REPORT


def test_a_changed_kernel_is_compiled():
    assert compile_store.stored("another", lambda: {"registers": 41}) == {"registers": 41}
    assert compile_store.stored("another", never) == {"registers": 41}


def test_every_kernel_is_compiled_on_demand(monkeypatch):
    monkeypatch.setenv(compile_store.FRESH, "1")
    compile_store.committed.cache_clear()
    with pytest.raises(LookupError):
        compile_store.stored(KEY, never)


def test_a_wrong_report_in_the_sample_is_an_error(monkeypatch):
    monkeypatch.setattr(sampling, "number", lambda: COMMIT - 1)
    with pytest.raises(AssertionError, match="make reports"):
        compile_store.stored(KEY, lambda: {"registers": 41})
    assert compile_store.stored(KEY, lambda: json.loads(json.dumps(REPORT))) == REPORT
