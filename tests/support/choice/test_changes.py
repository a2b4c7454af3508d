"""Files that a commit may have broken are found: by their subject, by what they import, and since when."""

import re
import subprocess

import changes
import pytest

STORED = "tests/layers/stored/test_stored.py"
AFFECTED = {
    "itself": (STORED, STORED),
    "its subject": ("tritonfp8/layers/stored/base.py", STORED),
    "the room of its subject": ("tritonfp8/layers/changes.py", STORED),
    "a folder below its subject": ("tritonfp8/layers/stored/base.py", "tests/layers/test_codes.py"),
    "a kernel": ("kernels/cast/quantize.py", "tests/kernels/test_quantize.py"),
    "a launcher of kernels": ("tritonfp8/launch/casts/dense.py", "tests/kernels/test_quantize.py"),
    "the pages": ("docs/convert.md", "tests/docs/test_docs.py"),
    "README": ("README.md", "tests/docs/test_snippets.py"),
    "an example": ("examples/peft_lora.py", "tests/clients/test_examples.py"),
    "a helper": ("tests/support/models.py", None),
    "every test": ("constraints.txt", "tests/specs/test_formats.py"),
}
OTHERS = [
    ("tritonfp8/layers/linear/direct.py", STORED),
    ("tritonfp8/export/reading.py", STORED),
    ("README.md", STORED),
    ("kernels/cast/quantize.py", "tests/cli/test_app.py"),
]


def importers(stem):
    """Test files that import the helper, as text."""
    files = sorted((changes.ROOT / "tests").rglob("test_*.py"))
    line = re.compile(rf"^(import|from) {stem}\b", re.MULTILINE)
    return [path.relative_to(changes.ROOT).as_posix() for path in files if line.search(path.read_text())]


@pytest.mark.parametrize("case", AFFECTED)
def test_a_change_affects(case):
    changed, file = AFFECTED[case]
    assert (changes.ROOT / changed).parent.is_dir()
    files = [file] if file else importers("models")
    assert files
    assert all(changes.is_affected(each, [changed]) for each in files)


@pytest.mark.parametrize(("changed", "file"), OTHERS)
def test_other_changes_do_not(changed, file):
    assert not changes.is_affected(file, [changed])
    assert not changes.is_affected(file, [])


def test_modules_named_in_imports_count(tmp_path):
    tests = tmp_path / "tests"
    (tests / "support").mkdir(parents=True)
    (tests / "support" / "one.py").write_text("import other\n")
    (tests / "support" / "other.py").write_text("from tritonfp8.export import (\n    reading,\n    report,\n)\n")
    (tests / "test_a.py").write_text("from one import x\nfrom tritonfp8.kernels.cast import quantize\n")
    for changed in ("tests/support/other.py", "tritonfp8/export/report.py", "kernels/cast/quantize.py"):
        assert changes.is_affected("tests/test_a.py", [changed], tmp_path), changed
    assert not changes.is_affected("tests/test_a.py", ["tritonfp8/export/choice.py"], tmp_path)


def test_every_folder_of_tests_has_a_subject():
    for path in (changes.ROOT / "tests").rglob("test_*.py"):
        found = changes.subjects(path.relative_to(changes.ROOT).as_posix())
        assert all((changes.ROOT / subject).exists() for subject in found), path
        # The folder of all rooms would make each change of the package affect the file.
        assert "tritonfp8" not in found or path.parent.name == "architecture", f"{path}: add its folder to SUBJECTS"


def test_the_base_is_older_than_the_window_and_depends_on_the_commit(tmp_path, monkeypatch):
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "a")
        monkeypatch.setenv(f"{name}_EMAIL", "a@b.c")

    def commit(hours, name):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2024-01-01T{hours:02}:00:00+00:00")
        (tmp_path / name).write_text(name)
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        subprocess.run(["git", "commit", "-q", "-m", name], cwd=tmp_path, check=True)
        return changes.git("rev-parse", "HEAD", root=tmp_path)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    first = commit(1, "a.py")
    second = commit(8, "b.py")
    third = commit(10, "c.py")
    assert changes.base_of(first, tmp_path) is None
    assert changes.base_of(second, tmp_path) == changes.base_of(third, tmp_path) == first
    (tmp_path / "new.py").write_text("not committed")
    assert changes.changed_files(first, tmp_path) == ["b.py", "c.py", "new.py"]


def test_without_a_repository_nothing_is_known(tmp_path):
    assert changes.git("rev-parse", "HEAD", root=tmp_path) is None
    assert changes.base_of("HEAD", tmp_path) is None
