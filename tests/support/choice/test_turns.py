"""Every case has its turn, each day some have, and without CI all run."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import turns


def items(name, cases, mark=3):
    found = SimpleNamespace(args=(mark,)) if mark else None
    ids = [f"{name}[{i}]" for i in range(cases)] if cases > 1 else [name]
    return [SimpleNamespace(nodeid=i, get_closest_marker=lambda name: found) for i in ids]


def run_on(day, given, monkeypatch):
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv(turns.DAY, str(day))
    left_out = turns.waiting(given)
    return [item.nodeid for item in given if item not in left_out]


@pytest.mark.parametrize("cases", [1, 2, 3, 7, 100])
def test_each_case_has_its_turn_and_each_day_some_have(monkeypatch, cases):
    given = items("test_a", cases)
    days = [run_on(day, given, monkeypatch) for day in range(700_000, 700_003)]
    assert {name for day in days for name in day} == {item.nodeid for item in given}
    assert all(cases // 3 <= len(day) <= cases // 3 + 1 for day in days)
    assert min(map(len, days)) >= 1


def test_other_tests_and_other_functions_do_not_matter(monkeypatch):
    alone = run_on(7, items("test_a", 5), monkeypatch)
    together = run_on(7, items("test_b", 4, mark=None) + items("test_a", 5) + items("test_c", 8), monkeypatch)
    assert [name for name in together if "test_a" in name] == alone
    assert sum("test_b" in name for name in together) == 4


def test_two_options_meet_in_all_pairs(monkeypatch):
    """In the order of the product each second case has one value of the last option."""
    given = items("test_a", 40, mark=2)
    parities = {int(name[7:-1]) % 2 for name in run_on(0, given, monkeypatch)}
    assert parities == {0, 1}


def test_without_ci_all_run(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    assert turns.waiting(items("test_a", 5)) == []


def test_what_waits_is_counted(tmp_path):
    """By this project's own conftest.py, in workers."""
    file = tmp_path / "test_cases.py"
    marks = "@pytest.mark.in_turn(3)\n@pytest.mark.parametrize('i', range(9))"
    file.write_text(f"import pytest\n\n\n{marks}\ndef test_i(i):\n    pass\n")
    root = turns.__file__.rpartition("/tests/")[0]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-n2", "--dist=load", "-c"]
    done = subprocess.run(
        [*command, f"{root}/pyproject.toml", "--rootdir", root, str(file)],
        cwd=root, env={**environment, "CI": "1", "PYTHONPATH": f"{root}/tests:{root}/tests/support"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert "not run: 6 marked 'in_turn' (their turn is on another day: tests/support/choice/turns.py)" in done.stdout
