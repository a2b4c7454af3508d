"""What users get: the source distribution is the repository, the package is built from it, and an image runs it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("packaging")
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# What a working directory has beside the repository: .gitignore has a pattern for each.
LEFT_OVERS = (
    "tests/__pycache__/test_import.cpython-311.pyc", "tritonfp8/cli/__pycache__/app.cpython-311.pyc",
    "kernels/cast/quantize.pyo", "bench/runs/8b/report.json", "docs/build/site/index.html", "docs/api/old.md",
    "examples/dist/a.tar.gz",
    "tests/.hypothesis/examples/1", "bench/.benchmarks/1.json", "tests/.pytest_cache/README.md", "docs/.mypy_cache/1",
    "bench/.ruff_cache/1", "notebooks/.ipynb_checkpoints/01.ipynb", "bench/triton-3.8.whl", "runs/report.json",
    "build/lib/tritonfp8/old.py", "dist/tritonfp8-0.0.9.tar.gz", ".venv/bin/python", ".tritons/3.8/triton.py",
)  # fmt: skip
MADE = {"PKG-INFO", "setup.cfg"}


def repository():
    """The files of the repository, also new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    return {line for line in done.stdout.splitlines() if (ROOT / line).is_file()}


def build(what, source, out):
    """Run setuptools' backend in a copy, as pip does, with the packages of this environment."""
    subprocess.run([sys.executable, "-c", BUILD, what, str(out)], cwd=source, check=True, capture_output=True)
    [built] = out.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution of a working directory with left-overs, unpacked."""
    folder = tmp_path_factory.mktemp("packaging")
    for name in sorted(repository()):
        (folder / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "work" / name)
    for name in LEFT_OVERS:
        (folder / "work" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "work" / name).write_text("")
    with tarfile.open(build("build_sdist", folder / "work", folder / "sdist")) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"tritonfp8-{version_of_the_package()}"


def version_of_the_package():
    [version] = re.findall('__version__ = "(.*)"', (ROOT / "tritonfp8" / "__init__.py").read_text())
    return version


def test_the_source_distribution_is_the_repository(unpacked):
    found = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    found = {name for name in found if name not in MADE and not name.startswith("tritonfp8.egg-info/")}
    assert sorted(repository() - found) == []
    assert sorted(found - repository()) == []
    assert os.access(unpacked / ".ci" / "run", os.X_OK)


def test_left_overs_are_what_git_ignores():
    asked = subprocess.run(["git", "check-ignore", *LEFT_OVERS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert repository()
    assert asked.stdout.split() == [*LEFT_OVERS]


def test_the_package_builds_and_imports_from_the_source_distribution(unpacked, tmp_path):
    with zipfile.ZipFile(build("build_wheel", unpacked, tmp_path / "wheel")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licences = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
        wheel.extractall(tmp_path / "site")
    package = {name for name in repository() if name.startswith(("tritonfp8/", "kernels/"))}
    package.remove("tritonfp8/kernels/__init__.py")  # it mounts the kernels of a checkout
    assert names == {re.sub("^kernels/", "tritonfp8/kernels/", name) for name in package} | {"tritonfp8_command.py"}
    assert len(licences) == 1
    program = "import tritonfp8, tritonfp8.kernels.numerics as n; print(tritonfp8.__file__, n.__file__, sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site" / "tritonfp8"
    assert done.stdout.split() == [str(site / "__init__.py"), str(site / "kernels" / "numerics.py")]


def test_classifiers_say_what_is_supported_and_tested():
    classifiers = PROJECT["classifiers"]
    assert classifiers == sorted(set(classifiers))
    kinds = {classifier.partition(" :: ")[0] for classifier in classifiers}
    assert kinds >= {"Development Status", "Environment", "Intended Audience", "Operating System", "Topic", "Typing"}
    # PEP 639: the expression replaces them, and an index refuses both.
    assert "License" not in kinds
    assert PROJECT["license"] == "Apache-2.0"
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    tried_by_ci = re.findall(r"python(3\.\d+)", (ROOT / ".ci" / "run").read_text())
    assert pythons == tried_by_ci


def instructions():
    """``(instruction, argument)`` of each line of the Dockerfile."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and line[0] != "#"]


def test_the_image_has_the_torch_that_is_pinned():
    """Of another version pip would replace it, by a build that may not fit the CUDA of the image."""
    images = [argument for instruction, argument in instructions() if instruction == "FROM"]
    [torch] = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"pytorch/pytorch:{re.escape(torch)}-cuda\d+\.\d+-cudnn\d+-devel AS checkout", images[0])
    assert [image.partition(" ")[0] for image in images[1:]] == ["checkout", "checkout"]


def test_the_image_runs_the_commands_of_the_readme():
    readme = "".join(re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL))
    installs = [argument for instruction, argument in instructions() if instruction == "RUN"]
    runs = [" ".join(json.loads(argument)) for instruction, argument in instructions() if instruction == "CMD"]
    together = [f"{install} && {run}" for install, run in zip(installs, runs, strict=True)]
    assert sorted(together) == sorted(readme.splitlines())
    # The stage that a build without --target makes.
    assert runs[-1] == "tritonfp8 train"
    assert {name for name, _ in instructions()} == {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"}


def test_the_image_gets_no_more_than_the_repository():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert (ROOT / ".dockerignore").read_text().splitlines()[1:] == [".git", *(f"**/{line}" for line in ignored)]
