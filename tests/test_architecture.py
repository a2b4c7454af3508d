"""The rules of the layout, and that each of them is known to be able to fail."""

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from architecture import (
    FORMAT_NAMES,
    ROOT,
    RULES,
    Module,
    class_name_violations,
    device_violations,
    environment_violations,
    export_violations,
    folder_violations,
    format_violations,
    frozen_violations,
    hidden_violations,
    import_violations,
    inverse_scale_violations,
    kernel_violations,
    modules_below,
    package,
    pickle_violations,
    private_violations,
    room_violations,
    schema_violations,
    size_violations,
    stride_violations,
    string_violations,
    total_violations,
    violations,
)
from packaging.requirements import Requirement

import tritonfp8
from docs import house
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS

OTHERS = [module for folder in ("tests", "bench", "docs") for module in modules_below(folder, (folder,))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__.removesuffix("_violations"))
def test_the_package_keeps_the_rule(rule):
    assert len(package()) > 200, "the source was not found"
    assert len(OTHERS) > 200, "the source was not found"
    found = violations(rule, OTHERS)
    assert not found, "\n".join(found)


def test_every_export_of_a_folder_is_read_outside():
    found = export_violations(package(), [*package(), *OTHERS])
    assert not found, "\n".join(found)
    init = Module("tritonfp8.ops", "from tritonfp8.ops.registry import used, unused", True)
    reader = Module("tritonfp8.functional", "from tritonfp8 import ops\nops.used()")
    inside = Module("tritonfp8.ops.direct", "from tritonfp8.ops import unused")
    found = export_violations([init], [init, reader, inside])
    assert found == ["tritonfp8.ops exports unused, which nothing outside reads"]


def test_the_formats_are_those_of_the_tables():
    assert {*FORMATS, *SCALE_FORMATS} == FORMAT_NAMES


def test_registered_schemas_take_plain_types():
    importlib.import_module("tritonfp8.ops")
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tritonfp8::")]
    assert {"tritonfp8::quantize", "tritonfp8::dequantize", "tritonfp8::scaled_matmul"} <= set(names)
    assert not schema_violations([torch._C._get_schema(*name.partition(".")[::2]) for name in names])


def test_the_map_in_contributing_is_true(monkeypatch):
    """Every room with its imports; the page is made by `python -m docs.build`."""
    assert not house.outdated()
    monkeypatch.setattr(house, "arrows", lambda: {"specs": {"ops"}})
    assert house.outdated() == ["CONTRIBUTING.md: specs imports `ops`; run python -m docs.build"]


def test_the_house_does_not_grow():
    rooms = house.arrows()
    assert house.floors(rooms) <= 11
    assert len(rooms) <= 22
    assert house.floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3


def test_rooms_and_tests_keep_to_their_lines():
    assert room_violations(package()) + total_violations(modules_below("tests", ("tests",))) == []
    assert total_violations([sample(source="\n" * 11)], 10) == ["tests have 11 lines, and TEST_LINES allows 10"]


@pytest.mark.parametrize(("lines", "limit"), [(301, 300), (269, 300), (899, 1000), (10, None), (0, 100)])
def test_a_room_that_grows_or_leaves_its_limit_behind_fails(lines, limit):
    limits = {} if limit is None else {"launch": limit}
    found = room_violations([sample(source="\n" * lines)] if lines else [], limits)
    assert found == [f"launch has {lines} lines, and ROOM_LINES allows {limit or 0}"]
    assert not room_violations([sample(source="\n" * lines)], {"launch": lines + 9})


def test_the_hook_runs_all_rules_without_torch():
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tests.architecture"], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout
    loaded = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
    assert {"tests.architecture", "docs.house"} <= loaded
    assert not {"torch", "numpy", "pytest", "tritonfp8"} & loaded


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_packages_are_those_of_the_tree():
    packages = pyproject()["tool"]["setuptools"]["packages"]
    tree = [path.parent.relative_to(ROOT) for path in (ROOT / "tritonfp8").rglob("__init__.py")]
    tree += ["tritonfp8" / path.parent.relative_to(ROOT) for path in (ROOT / "kernels").rglob("__init__.py")]
    assert sorted(packages) == sorted(".".join(path.parts) for path in tree)
    folders = {path.parent for top in ("tritonfp8", "kernels") for path in (ROOT / top).rglob("*.py")}
    assert len(folders) == len(tree) + 1, "a folder of modules has no __init__.py"
    assert not (ROOT / "kernels" / "__init__.py").exists(), "kernels/ is mounted, not a package of its own"


def test_kernels_are_those_of_the_checkout():
    kernels = importlib.import_module("tritonfp8.kernels.numerics")
    assert Path(kernels.__file__).resolve() == ROOT / "kernels" / "numerics.py"


def test_package_data_is_all_that_is_no_code():
    patterns = pyproject()["tool"]["setuptools"]["package-data"]["tritonfp8"]
    packaged = {path for pattern in patterns for path in (ROOT / "tritonfp8").glob(pattern)}
    others = {path for path in (ROOT / "tritonfp8").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others == packaged
    assert ROOT / "tritonfp8" / "py.typed" in packaged


def test_version_and_command():
    module, function = pyproject()["project"]["scripts"]["tritonfp8"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    try:
        installed = importlib.metadata.version("tritonfp8")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is imported from the checkout, not installed")
    assert installed == tritonfp8.__version__


def test_every_requirement_is_pinned_to_what_it_asks_for():
    project = pyproject()["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if line and line[0] != "#")
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, wanted):
        if requirement.name != "tritonfp8":
            pin = pins.get(requirement.name.lower().replace("_", "-"))
            assert pin is not None, f"{requirement.name} is not in constraints.txt"
            assert requirement.specifier.contains(pin), f"{requirement} is not met by {pin}"


def sample(name="tritonfp8.launch", source=""):
    return Module(name, source)


def device(source, decorator="triton.jit"):
    return sample("tritonfp8.kernels.numerics", f"@{decorator}\n{source}")


def folder(name):
    return Module(name, "", is_package=True)


OPS, LINEAR_MODULE = folder("tritonfp8.ops"), sample("tritonfp8.layers.linear.module")


CUT = "from tritonfp8.cut.slice import slice, sliced\nfrom tritonfp8.cut import whole"
BAD_SAMPLES = [
    (
        hidden_violations,
        [Module("tritonfp8.cut", CUT, True), Module("tritonfp8.cut.slice", ""), Module("tritonfp8.cut.whole", "")],
        "tritonfp8.cut exports slice of tritonfp8.cut.slice, which hides the file of this name: rename the file",
    ),
    (import_violations, [sample("tritonfp8.specs", "from tritonfp8 import ops"), OPS], "above it"),
    (import_violations, [sample("tritonfp8.specs", "import tritonfp8.ops"), OPS], "above it"),
    (import_violations, [sample("tritonfp8.specs", "from .ops import x"), OPS], "above it"),
    (import_violations, [sample("tritonfp8.specs", "def f():\n    from tritonfp8.ops import x"), OPS], "above it"),
    (import_violations, [sample("tritonfp8.ops.fakes", "import tritonfp8"), folder("tritonfp8")], "above it"),
    (
        import_violations,
        [sample("tritonfp8.ops.fakes", "from tritonfp8 import __version__"), folder("tritonfp8")],
        "above it",
    ),
    (
        import_violations,
        [
            sample("tritonfp8.layers.in_place", "from tritonfp8.layers.linear import x"),
            folder("tritonfp8.layers.linear"),
        ],
        "above it",
    ),
    (
        import_violations,
        [
            sample("tritonfp8.layers.linear.module", "from tritonfp8.layers.moe import x"),
            folder("tritonfp8.layers.moe"),
        ],
        "above it",
    ),
    (
        import_violations,
        [sample("tritonfp8.reference.casts", "from tritonfp8 import recipes"), sample("tritonfp8.recipes")],
        "beside it",
    ),
    (
        import_violations,
        [sample("tritonfp8.ops.a", "from tritonfp8.ops import b"), sample("tritonfp8.ops.b", "import tritonfp8.ops.a")],
        "in a circle",
    ),
    (
        import_violations,
        [
            sample("tritonfp8.ops.a", "from tritonfp8.ops import b"),
            sample("tritonfp8.ops.b", "def f():\n    import_module('tritonfp8.ops.a')"),
        ],
        "in a circle",
    ),
    *(
        (string_violations, [sample(source=f"import importlib\n{call}")], f"launch:2 imports {name} by a string")
        for call, name in (
            ("importlib.import_module('tritonfp8.distributed')", "tritonfp8.distributed"),
            ("import_module(f'tritonfp8.{name}')", "tritonfp8."),
            ("import_module(f'triton{name}')", "triton"),
            ("import_module(f'{name}.ops')", "what nobody can read"),
            ("importlib.import_module(name)", "what nobody can read"),
            ("importlib.import_module(name=module)", "what nobody can read"),
            ("__import__('tritonfp8').distributed", "tritonfp8"),
            ("import_module('.ops', 'tritonfp8')", "tritonfp8.ops"),
            ("import_module('.ops', package)", "what nobody can read"),
            ("import_module('..ops', 'tritonfp8.a.b')", "what nobody can read"),
            ("pkgutil.resolve_name('tritonfp8:ops')", "tritonfp8:ops"),
        )
    ),
    (string_violations, [sample(source="from importlib import import_module as f\nf(name)")], "launch:2 imports"),
    (
        import_violations,
        [sample("tritonfp8.cli.app", "import tritonfp8.distributed"), folder("tritonfp8.distributed")],
        "only distributed, workflow, integrations may",
    ),
    (
        import_violations,
        [sample("tritonfp8.functional", "from tritonfp8 import launch"), folder("tritonfp8.launch")],
        "past the ops",
    ),
    *(
        (
            import_violations,
            [sample("tritonfp8.distributed.traffic", f"from tritonfp8 import {room}"), folder(f"tritonfp8.{room}")],
            "past the ops",
        )
        for room in ("launch", "kernels", "reference")
    ),
    (
        import_violations,
        [sample("tritonfp8.functional", "from tritonfp8.layers.linear.module import x"), LINEAR_MODULE],
        "a file of another folder",
    ),
    (import_violations, [sample("tritonfp8.misc")], "LAYERS"),
    (folder_violations, [sample(f"tritonfp8.ops.file{i}") for i in range(13)], "13 files"),
    (folder_violations, [folder("tritonfp8.ops")], "no docstring"),
    (kernel_violations, [sample("tritonfp8.kernels.numerics", "import torch")], "imports torch"),
    (kernel_violations, [sample("tritonfp8.kernels.numerics", "from math import log2")], "imports math"),
    (kernel_violations, [sample("tritonfp8.kernels.gemm.tiles", "from collections import deque")], "imports coll"),
    (
        kernel_violations,
        [sample("tritonfp8.kernels.gemm.sizes", "import tritonfp8.specs")],
        "imports tritonfp8.specs",
    ),
    (kernel_violations, [sample("tritonfp8.kernels.numerics", "from ..specs import x")], "imports tritonfp8.specs"),
    (kernel_violations, [sample("tritonfp8.kernels.numerics", "def f(x):\n    assert x")], "static_assert"),
    (
        stride_violations,
        [sample("tritonfp8.kernels.gemm.tiles", "def f(x, row, stride_m):\n    x + row.to(tl.int32) * stride_m")],
        "tiles:2",
    ),
    (
        stride_violations,
        [sample("tritonfp8.kernels.gemm.tiles", "def f(x, row, stride):\n    x += stride * row")],
        "tiles:2",
    ),
    (
        stride_violations,
        [sample("tritonfp8.kernels.gemm.tiles", "def f(x, row, side):\n    x += row * side.stride_m")],
        "tiles:2",
    ),
    (device_violations, [device("def f(a, b, c, d, e, f, g, h, i, j, k, l, M: tl.constexpr):\n    pass")], "13 param"),
    (device_violations, [device("def f(a, b, c, d, e, f, g, h, i, j, k, l, *, m):\n    pass")], "13 parameters"),
    (device_violations, [device("def f(shared, x):\n    x = shared[5]")], "shared[5]"),
    (device_violations, [device("def a_kernel(x):\n    return find(x)[-1]")], "find(x)[-1]"),
    (device_violations, [device("def f(x):\n    return x[0][None, :]", "gluon.jit(do_not_specialize=['x'])")], "x[0]"),
    (format_violations, [sample(source="if format == 'e4m3': pass")], "launch:1"),
    (format_violations, [sample(source="x = spec.format in ('e5m2', 'e4m3')")], "launch:1"),
    (format_violations, [sample(source="x = 'e8m0' != scale_format")], "launch:1"),
    (format_violations, [sample(source="x = q.dtype is torch.float8_e4m3fn")], "launch:1"),
    (format_violations, [sample(source="MAX = {'e4m3': 448}")], "launch:1"),
    (format_violations, [sample(source="match format:\n    case 'e4m3': pass")], "launch:2"),
    (format_violations, [sample("tritonfp8.kernels.numerics", "if FORMAT == 'e4m3': pass")], "numerics:1"),
    (inverse_scale_violations, [sample(source="def f(inv_scale): pass")], "names inv_scale"),
    (inverse_scale_violations, [sample(source="x = weight.scale_inv")], "names scale_inv"),
    (inverse_scale_violations, [sample(source="f(inv_scale=1)")], "names inv_scale"),
    (environment_violations, [sample(source="import os\nx = os.environ['X']")], "uses os.environ"),
    (environment_violations, [sample(source="import os\nx = os.getenv('X')")], "uses os.getenv"),
    (environment_violations, [sample(source="from os import environ")], "imports os.environ"),
    (pickle_violations, [sample(source="import pickle")], "imports pickle"),
    (pickle_violations, [sample(source="def f():\n    from pickle import load")], "imports pickle"),
    (pickle_violations, [sample(source="torch.load(path)")], "pickles"),
    (pickle_violations, [sample(source="torch.load(path, weights_only=False)")], "pickles"),
    (pickle_violations, [sample(source="torch.save(x, path)")], "pickles"),
    (private_violations, [sample(source="import torch\nx = torch._C._is_tracing()")], "uses torch._C._is_tracing"),
    (private_violations, [sample(source="from torch._dynamo import guards")], "uses torch._dynamo.guards"),
    (private_violations, [sample(source="import triton\nd = triton.runtime.driver")], "uses triton.runtime.driver"),
    (private_violations, [sample(source="from triton.backends.nvidia import driver")], "triton.backends.nvidia.driver"),
    (private_violations, [sample(source="x = kernel.packed_metadata")], "launch:1 uses packed_metadata"),
    (frozen_violations, [sample(source="@dataclass\nclass A: pass")], "A is not frozen"),
    (frozen_violations, [sample(source="@dataclass(frozen=False)\nclass A: pass")], "A is not frozen"),
    (frozen_violations, [sample(source="@dataclasses.dataclass(eq=False)\nclass A: pass")], "A is not frozen"),
    (frozen_violations, [sample(source="def f(r):\n    object.__setattr__(r, 'a', 1)")], "f writes"),
    (
        class_name_violations,
        [sample("tritonfp8.ops.a", "class Call: pass"), sample("tritonfp8.ops.b", "class Call: pass")],
        "Call is a class in tritonfp8.ops.a, tritonfp8.ops.b",
    ),
    (class_name_violations, [sample(source="class A:\n    class B: pass\n    class B: pass")], "A.B is a class in"),
    (size_violations, [sample(source="\n" * 401)], "401 lines"),
    (size_violations, [sample(source="class A:\n    def f():\n" + "        x\n" * 59)], "f has 60 lines"),
]


@pytest.mark.parametrize(("rule", "modules", "violation"), BAD_SAMPLES)
def test_the_rule_can_fail(rule, modules, violation):
    found = rule(modules)
    assert len(found) == 1
    assert violation in found[0]


def test_every_rule_has_a_bad_sample():
    assert {rule for rule, _, _ in BAD_SAMPLES} == set(RULES)


GOOD = """
from dataclasses import dataclass
from tritonfp8.specs import formats
from tritonfp8.specs.formats import FORMATS
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

@dataclass(frozen=True)
class A:
    x: int

    class Config:
        pass

class B:
    class Config:
        pass

    def __post_init__(self):
        object.__setattr__(self, "x", 1)

def f(spec, dtype):
    importlib.import_module("torch.nn")
    importlib.import_module(f"torch.{spec}")
    importlib.import_module(f".{spec}", "triton")
    row = FORMATS[spec.format]
    weights = torch.load("x", weights_only=True)
    return spec.format == other.format and dtype == torch.bfloat16
"""


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_can_pass(rule):
    formats = sample("tritonfp8.specs.formats", "x = format == 'e4m3'")
    specs = Module("tritonfp8.specs", '"""Specs."""\nfrom tritonfp8.specs import formats', is_package=True)
    assert rule([sample("tritonfp8.launch", GOOD), formats, specs]) == []


@pytest.mark.parametrize(
    "argument",
    ["Any x", "Dict(str, int) x", "str[] x", "Scalar x", "int? x", "Tensor?[] x", "Device x", "Tensor inv_scale"],
)
def test_a_schema_of_other_types_fails(argument):
    assert len(schema_violations([torch._C.parse_schema(f"tritonfp8::f(Tensor y, {argument}) -> Tensor")])) == 1


def test_a_schema_of_plain_types_passes():
    arguments = "Tensor(a!) a, Tensor? b, str c, str? d, int e, SymInt f, int[] g, bool h, float i, ScalarType j"
    assert not schema_violations([torch._C.parse_schema(f"tritonfp8::f({arguments}) -> (Tensor, Tensor)")])
