import dataclasses
import importlib.metadata
import re

import pytest
import torch
from packaging.requirements import Requirement
from torch.utils._pytree import tree_leaves
from tuned import H200, entry, key
from typer.testing import CliRunner

import tritonfp8
from tritonfp8 import launch, ops, recipes
from tritonfp8.cli import app
from tritonfp8.compat import hardware, machine
from tritonfp8.specs import BLOCKS
from tritonfp8.specs.quantized import Quantized
from tritonfp8.tuning import store
from tritonfp8.workflow import doctor, op_tests

CPU = torch.device("cpu")


def run_doctor():
    return CliRunner().invoke(app.app, ["doctor"])


def test_doctor_finds_this_machine_well_and_shows_every_ability_and_recipe():
    examined = run_doctor()
    assert examined.exit_code == 0, examined.output
    assert "FAILED" not in examined.output
    # A package may be without the local part (+cu130) that the module has.
    shown = [tritonfp8.__version__, torch.__version__.partition("+")[0], *recipes.names()]
    if not torch.cuda.is_available():
        shown += ["This machine has no CUDA GPU: the ops run the reference", "are compared on a GPU"]
    for text in (*shown, *(each.name for each in dataclasses.fields(hardware.Abilities))):
        assert text in examined.output


@pytest.mark.parametrize(("gpu", "shipped"), [("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", True), ("other", False)])
def test_doctor_counts_the_tuned_gemms_of_a_gpu(monkeypatch, gpu, shipped, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    abilities = dataclasses.replace(H200, name=gpu)
    entries = len(store.read_shipped(hardware.machine_key(abilities)))
    assert (entries > 0) == shipped
    monkeypatch.setattr(hardware, "abilities", lambda device: abilities)
    for name in ("_print_recipes", "_print_self_tests", "_print_accumulation"):
        monkeypatch.setattr(doctor, name, lambda *args: True)
    found = f"{entries} ship, and 0 are yours" if shipped else "none"
    assert f"measured on {gpu}: {found}. A cost model" in " ".join(run_doctor().output.split())
    store.save({key(): entry()}, hardware.machine_key(abilities))
    assert f"{entries} ship, and 1 are yours." in " ".join(run_doctor().output.split())


def test_self_tests_cover_every_op_block_and_orientation_and_pass():
    checks = list(doctor.self_tests(CPU))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]
    names = {check.name for check in checks}
    assert len(names) == len(checks)
    texts = "quantize {0}", "quantize {0}, transposed", "quantize_both {0}", "dequantize {0}", "scaled_matmul {0} x {0}"
    assert {text.format(block.name) for block in BLOCKS.values() for text in texts} <= names
    launching = {name for name, op in ops.OPS.items() if op.launch is not None}
    assert launching <= {name.split(" ")[0] for name in names}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", sorted({call.name for call in op_tests.calls()}))
def test_a_wrong_element_fails_the_self_test_of_its_op(monkeypatch, name):
    right = getattr(ops, name)

    def wrong(*args):
        found = right(*args)
        # What the op returns, or else the first argument, which it writes to.
        spoiled = next(leaf for leaf in tree_leaves((found, args)) if isinstance(leaf, torch.Tensor))
        # The exponent of the last element.
        spoiled.view(torch.uint8).flatten()[-1] ^= 0x40
        return found

    monkeypatch.setattr(ops, name, wrong)
    assert [check.name for check in doctor.self_tests(CPU) if not check.ok] == [name]


@pytest.mark.one_in(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="launches kernels on the CPU, in the interpreter")
@pytest.mark.parametrize("name", sorted({call.name for call in op_tests.calls()}))
def test_interpreted_kernels_pass_the_self_test_of_their_op(monkeypatch, name):
    """On a CPU the ops run the reference, so nothing else here would notice a call that no kernel passes."""
    calls = [call for call in op_tests.calls() if call.name == name]
    monkeypatch.setattr(ops, name, launch.LAUNCHES[name])
    assert f"the reference in {len(calls)} calls" in op_tests.agrees(calls, CPU)


def wrong_byte(q):
    qdata = q.qdata.clone()
    qdata.view(torch.uint8)[5, 7] ^= 1
    return Quantized(qdata, q.scale, q.spec)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("quantize", wrong_byte),
        ("quantize_both", lambda pair: (pair[0], wrong_byte(pair[1]))),
        ("dequantize", lambda x: x + 1),
        ("scaled_matmul", lambda out: out.index_fill(0, torch.tensor([3]), 0)),
    ],
)
def test_wrong_op_fails_its_self_test_and_the_command(monkeypatch, name, spoil):
    right = getattr(tritonfp8, name)
    monkeypatch.setattr(tritonfp8, name, lambda *args, **kwargs: spoil(right(*args, **kwargs)))
    failed = [check.name for check in doctor.self_tests(CPU) if not check.ok]
    assert {f"{name} {block.name}" for block in BLOCKS.values()} <= {each.split(" x ")[0] for each in failed}
    done = run_doctor()
    assert done.exit_code == 1
    assert "FAILED" in done.output


def test_crash_of_an_op_is_a_finding(monkeypatch):
    def crash(*args, **kwargs):
        raise RuntimeError("no such [kernel]")

    monkeypatch.setattr(tritonfp8, "dequantize", crash)
    details = {check.name: check.detail for check in doctor.self_tests(CPU) if not check.ok}
    assert details["dequantize rowwise"] == "RuntimeError: no such [kernel]"
    assert "no such [kernel]" in run_doctor().output


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_are_seen_to_run_as_they_state(name):
    kinds = doctor.recipe_kinds(name, CPU)
    quantized = round(3 * recipes.get(name).quantized_share)
    expected = {"reference": quantized, "high_precision": 3 - quantized} if quantized else {}
    assert kinds == {kind: count for kind, count in expected.items() if count}


def test_versions_are_those_installed():
    found = machine.versions()
    assert found["tritonfp8"] == tritonfp8.__version__
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["python"].count(".") == 2


def test_package_that_is_too_old_or_missing_is_flagged(monkeypatch):
    required = ["torch>=99", "triton>=1", "matplotlib; extra == 'train'", "numpy"]
    monkeypatch.setattr(doctor, "requirements", lambda: {r.name: r for r in map(Requirement, required)})
    found = {"torch": "2.11.0+cu130", "triton": "3.6.0", "matplotlib": None, "numpy": None}
    monkeypatch.setattr(machine, "versions", lambda: found)
    lines = {row.split()[1]: row for row in run_doctor().output.splitlines() if re.match(r"│ \w+ +│ [\d-]", row)}
    assert "not supported" in lines["torch"]
    assert "not supported" not in lines["triton"]
    assert 'missing, needed with extra == "train"' in lines["matplotlib"]
    assert "missing" in lines["numpy"]


def test_requirements_are_those_of_the_installed_package_or_none(monkeypatch):
    lines = {"tritonfp8": ["torch>=2.11", 'transformers>=5; extra == "train"']}
    monkeypatch.setattr(importlib.metadata, "requires", lines.__getitem__)
    required = doctor.requirements()
    assert required["torch"].specifier.contains("2.11")
    assert not required["torch"].specifier.contains("2.10")
    assert required["transformers"].marker is not None

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert doctor.requirements() == {}


@pytest.mark.gpu
def test_kernels_pass_and_accumulation_differs_on_the_gpu():
    cuda = torch.device("cuda")
    checks = list(doctor.self_tests(cuda))
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]
    figures = {(k, data): each for k, data, each in doctor.accumulation_figures(cuda)}
    assert len(figures) == 2 * len(doctor.ACCUMULATION_KS)
    assert all(each["precise"] >= 60 for each in figures.values())
    assert all(each["fast"] < each["precise"] for each in figures.values())
