"""Which torch and triton the package imports with. Other versions are simulated, in processes of their own."""

import importlib
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import triton
from packaging.requirements import Requirement
from packaging.version import Version

from tritonfp8.compat import versions
from tritonfp8.compat.versions import TRITON_OF_TORCH, check

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("torch", "triton"), TRITON_OF_TORCH.items())
@pytest.mark.parametrize("form", ["{}.0", "{}.1+cu130", "{}.0a0+git1234", "{}"])
def test_pairs_of_the_table_pass_in_silence(torch, triton, form):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(form.format(torch), form.format(triton))


@pytest.mark.parametrize(
    ("torch", "triton", "found"),
    [
        ("2.10.0", "3.6.0", "torch 2.10.0, which is older"),
        ("2.9.1+cpu", "3.6.0", "torch 2.9.1+cpu, which is older"),
        ("2.16.0", "3.9.0", "torch 2.16.0, which is newer"),
        ("2.16.0.dev20270101+cu132", "3.9.0", "torch 2.16.0.dev20270101+cu132, which is newer"),
        ("3.0.0", "3.9.0", "torch 3.0.0, which is newer"),
        ("2.13.0", "3.5.1", "triton 3.5.1, which is older"),
        ("2.15.0", "3.10.0", "triton 3.10.0, which is newer"),
    ],
)
def test_versions_that_were_never_tried_are_an_error(torch, triton, found):
    with pytest.raises(ImportError, match=re.escape(found)) as error:
        check(torch, triton)
    name = found.split()[0]
    assert versions.supported() in str(error.value)
    assert f"pip install '{name}>=" in str(error.value)


def test_a_missing_triton_is_an_error_and_one_that_torch_was_not_built_for_a_warning():
    with pytest.raises(ImportError, match=re.escape("pip install 'triton==3.8.*'")):
        check("2.14.1+cpu", None)
    with pytest.warns(UserWarning, match=r"2.13.0 was built for triton 3.7; found triton 3.9.0.*'triton==3.7.\*'"):
        check("2.13.0", "3.9.0")


def test_bounds_of_the_requirements_are_those_of_the_table():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = {requirement.name: requirement.specifier for requirement in map(Requirement, wanted)}
    for name, known in (("torch", list(TRITON_OF_TORCH)), ("triton", list(TRITON_OF_TORCH.values()))):
        assert known == sorted(known, key=Version)
        major, last = known[-1].split(".")
        assert all(found[name].contains(f"{version}.0") for version in known)
        assert not found[name].contains(f"{major}.{int(last) + 1}.0")
        major, first = known[0].split(".")
        assert not found[name].contains(f"{major}.{int(first) - 1}.9")


@pytest.fixture
def installed(monkeypatch):
    """Has the package look at these versions as it does when it is imported."""

    def look(torch_version=torch.__version__, triton_version=triton.__version__):
        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(triton, "__version__", triton_version)
        importlib.reload(versions)

    yield look
    monkeypatch.undo()
    importlib.reload(versions)


def test_the_import_looks_at_what_is_installed(installed, monkeypatch):
    with pytest.raises(ImportError, match=r"torch 2.16.0, which is newer"):
        installed(torch_version="2.16.0")
    with pytest.raises(ImportError, match=r"triton 3.10.0, which is newer"):
        installed("2.15.0", triton_version="3.10.0")
    with pytest.warns(UserWarning, match="was built for triton 3.6; found triton 3.9.0"):
        installed("2.11.0", "3.9.0")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="tritonfp8 needs triton"):
        installed()


def test_the_import_looks_first():
    """A torch that is too old lacks what the package's other modules name."""
    program = "import torch; torch.__version__ = '2.8.0'; del torch.float8_e8m0fnu\nimport tritonfp8"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: tritonfp8 works with" in done.stderr.strip().splitlines()[-1]
