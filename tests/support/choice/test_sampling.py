"""A commit chooses the same cases always, commits choose different ones, and without CI all run."""

import os
import subprocess
import sys
from types import SimpleNamespace

import changes
import pytest
import sampling

COMMITS = [f"{number:040x}" for number in range(60)]


@pytest.fixture(autouse=True)
def nothing_changed(monkeypatch):
    monkeypatch.setattr(sampling, "_changed", lambda base: [])


def items(name, cases, mark=3, node=None):
    marks = [(node, SimpleNamespace(args=(mark,)))] if mark else []
    ids = [f"tests/specs/test_formats.py::{name}" + (f"[{i}]" if cases > 1 else "") for i in range(cases)]
    return [SimpleNamespace(nodeid=i, iter_markers_with_node=lambda name: marks) for i in ids]


def run_at(commit, given, monkeypatch):
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv(sampling.COMMIT, commit)
    monkeypatch.setenv(sampling.BASE, "base")
    others = sampling.left_out(given)
    return [item.nodeid for item in given if item not in others]


@pytest.mark.parametrize("cases", [1, 2, 3, 7, 100])
def test_each_commit_has_its_cases_and_each_case_its_commits(monkeypatch, cases):
    given = items("test_a", cases)
    runs = [run_at(commit, given, monkeypatch) for commit in COMMITS]
    assert {name for run in runs for name in run} == {item.nodeid for item in given}
    assert all(max(cases // 3, 1) <= len(run) <= cases // 3 + 1 for run in runs)
    assert runs == [run_at(commit, given, monkeypatch) for commit in COMMITS]


def test_other_tests_and_other_functions_do_not_matter(monkeypatch):
    by_itself = run_at(COMMITS[7], items("test_a", 5), monkeypatch)
    others = items("test_b", 4, mark=None) + items("test_c", 8)
    together = run_at(COMMITS[7], others[:4] + items("test_a", 5) + others[4:], monkeypatch)
    assert [name for name in together if "test_a" in name] == by_itself
    assert sum("test_b" in name for name in together) == 4


def test_the_cases_of_a_marked_file_are_chosen_together(monkeypatch, request):
    module = request.node.getparent(pytest.Module)
    given = [item for name in "abcdef" for item in items(f"test_{name}", 1, node=module)]
    runs = [run_at(commit, given, monkeypatch) for commit in COMMITS]
    assert {name for run in runs for name in run} == {item.nodeid for item in given}
    assert {len(run) for run in runs} == {2}


def test_two_options_meet_in_all_pairs(monkeypatch):
    """In the order of the product each second case has one value of the last option."""
    given = items("test_a", 40, mark=2)
    parities = {int(name.partition("[")[2][:-1]) % 2 for name in run_at(COMMITS[0], given, monkeypatch)}
    assert parities == {0, 1}


def test_every_case_of_an_affected_file_runs(monkeypatch):
    given = items("test_a", 9)
    assert len(run_at(COMMITS[1], given, monkeypatch)) == 3
    monkeypatch.setattr(sampling, "_changed", lambda base: ["tritonfp8/specs/formats.py"])
    assert len(run_at(COMMITS[1], given, monkeypatch)) == 9


@pytest.mark.parametrize("unset", ["CI", sampling.COMMIT, sampling.BASE])
def test_all_run_without_ci_and_where_git_knows_no_history(monkeypatch, unset):
    assert len(run_at(COMMITS[1], items("test_a", 9), monkeypatch)) == 3
    monkeypatch.delenv(unset)
    assert sampling.left_out(items("test_a", 9)) == []
    assert sampling.header() is None


def test_what_is_left_out_is_counted(tmp_path):
    """By this project's own conftest.py, in workers."""
    file = tmp_path / "test_cases.py"
    marks = "@pytest.mark.one_in(3)\n@pytest.mark.parametrize('i', range(9))"
    file.write_text(f"import pytest\n\n\n{marks}\ndef test_i(i):\n    pass\n")
    root = str(changes.ROOT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"CI": "1", "PYTHONPATH": f"{root}/tests:{root}/tests/support"}
    # No file differs from the base, which is not HEAD's: what is not committed must not count as changed.
    environment |= {sampling.COMMIT: COMMITS[1], sampling.BASE: COMMITS[2]}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-n2", "--dist=load", "-c"]
    done = subprocess.run(
        [*command, f"{root}/pyproject.toml", "--rootdir", root, str(file)],
        cwd=root, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert f"cases: by commit {COMMITS[1][:12]}, and every case of what changed since {COMMITS[2][:12]}" in done.stdout
    assert "not run: 6 marked 'one_in' (other commits choose them, and make nightly runs all" in done.stdout
