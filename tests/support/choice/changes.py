"""Which test files a commit may have broken: every case of them runs, whatever the share of CI is.

A test file is affected by a change of

- itself, a helper in ``tests/support`` that it imports (also through another helper), or ``tests/conftest.py``;
- a module that it imports by name;
- its subject: files in the folder that has the name of its own folder, below it, and above it up to the room.
  ``tests/layers/stored/test_rows.py`` is about ``tritonfp8/layers/stored/`` and the files of ``tritonfp8/layers/``.
"""

import functools
import re
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# Commits of the hours before a commit are part of its change: they came with it, and no other run has seen them.
WINDOW = timedelta(hours=4)
# Folders of tests whose subject has another name. Others are about the folder of ``tritonfp8`` of their own name.
SUBJECTS = {
    "tests/architecture": ("tritonfp8", "kernels"),
    "tests/bench": ("bench",),
    "tests/clients": ("tritonfp8/integrations", "examples"),
    "tests/compile_only": ("kernels", "tritonfp8/launch", "tritonfp8/tuning"),
    "tests/docs": ("docs", "README.md", "CONTRIBUTING.md"),
    "tests/kernels": ("kernels", "tritonfp8/launch", "tritonfp8/reference"),
    "tests/notebooks": ("notebooks",),
    "tests/support": ("tests/support",),
}
# Files that every test depends on.
OF_ALL = ("pyproject.toml", "constraints.txt", "tests/conftest.py", "tritonfp8/__init__.py")
_IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)(?:\s+import\s+(\([^)]*\)|.*))?", re.MULTILINE)


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """What git prints, or None where it fails: without git, or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def base_of(commit: str, root: Path = ROOT) -> str | None:
    """The newest ancestor of ``commit``, by first parents, that is older than ``WINDOW``; None if history has none.

    It depends on ``commit`` and its history, not on the time of the run.
    """
    date = git("show", "-s", "--format=%cI", commit, root=root)
    if not date:
        return None
    before = (datetime.fromisoformat(date) - WINDOW).isoformat()
    return git("rev-list", "-1", "--first-parent", f"--before={before}", commit, root=root) or None


def changed_files(base: str, root: Path = ROOT) -> list[str]:
    """Files that differ between ``base`` and the working tree, and files that git does not know yet."""
    differ = git("diff", "--name-only", "--no-renames", base, root=root) or ""
    new = git("ls-files", "--others", "--exclude-standard", root=root) or ""
    return sorted({*differ.splitlines(), *new.splitlines()})


@functools.cache
def _helpers(root: Path) -> dict[str, str]:
    """The modules that tests import by their last name."""
    folders = (root / "tests" / name for name in ("support", "compile_only"))
    return {path.stem: path.relative_to(root).as_posix() for folder in folders for path in folder.rglob("*.py")}


@functools.cache
def _imports(root: Path, file: str) -> frozenset[str]:
    """Files of the project that a file of tests imports, by itself or through helpers."""
    found, todo = set(), [file]
    while todo:
        for name in _named(root, todo.pop()):
            helper = _helpers(root).get(name)
            if helper and helper not in found:
                found.add(helper)
                todo.append(helper)
            path = name.replace(".", "/").replace("tritonfp8/kernels", "kernels")
            found |= {f"{path}.py", f"{path}/__init__.py"}
    return frozenset(found)


@functools.cache
def _named(root: Path, file: str) -> frozenset[str]:
    """The modules that a file names in imports; ``from a import b`` may name the module ``a.b``."""
    names = set()
    for module, imported in _IMPORT.findall((root / file).read_text()):
        names.add(module)
        names |= {f"{module}.{each}" for each in re.findall(r"\w+", imported)}
    return frozenset(names)


def subjects(file: str, root: Path = ROOT) -> tuple[str, ...]:
    """The folders that a test file is about."""
    folder = file.rpartition("/")[0]
    for ours, theirs in SUBJECTS.items():
        if folder == ours or folder.startswith(f"{ours}/"):
            return theirs
    subject = folder.replace("tests", "tritonfp8", 1)
    while not (root / subject).is_dir():
        # A folder of tests by device or by program has the subject of the folder that it lies in.
        subject = subject.rpartition("/")[0]
    return (subject,) if folder != "tests" else ()


def is_affected(file: str, changed: list[str], root: Path = ROOT) -> bool:
    """Whether ``file``, a test file from the root, may be broken by a change of the files ``changed``."""
    about = subjects(file, root)
    imported = {file, *OF_ALL, *_imports(root, file)}
    return any(each in imported or any(_in_line(each, subject) for subject in about) for each in changed)


def _in_line(changed: str, subject: str) -> bool:
    """Whether a file is the subject, or lies in its folder, below it, or above it up to the room."""
    folder = changed.rpartition("/")[0] + "/"
    # "tritonfp8/" is the folder of all rooms.
    is_in_room = folder.count("/") > 1
    return changed == subject or folder.startswith(f"{subject}/") or (is_in_room and f"{subject}/".startswith(folder))
