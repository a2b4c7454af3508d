"""docs/environment.md names the variables that the code reads, and the warnings and log levels that it uses."""

import ast
import functools
import inspect
import re

import pytest
import torch._environment
from torch._inductor import config as inductor_config
from torch._inductor.runtime import cache_dir_utils, triton_heuristics
from triton import knobs
from triton.runtime import build as triton_build

from docs import build

PAGE = (build.DOCS / "environment.md").read_text()
FOLDERS = ("tritonfp8", "kernels", "examples")
# `rendezvous("env://")` reads these, besides what `torchrun` sets for each process.
OF_RENDEZVOUS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"}
OF_KNOBS = {"interpret": "TRITON_INTERPRET"}
LEVELS = ("info", "warning")
READERS = ("os.environ.get", "os.environ.pop", "os.environ.setdefault", "os.getenv", "getenv")


def rows(heading):
    """The cells of the tables below a heading, without their heads."""
    text = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    tables = re.findall(r"^\|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()]


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


@functools.cache
def trees(words):
    """The code that runs for users and has any of the words, by dotted name."""
    paths = [path for folder in FOLDERS for path in sorted((build.ROOT / folder).rglob("*.py"))]
    sources = {path: path.read_text() for path in [*paths, build.ROOT / "tritonfp8_command.py"]}
    return {
        ".".join(path.relative_to(build.ROOT).with_suffix("").parts): ast.parse(source)
        for path, source in sources.items()
        if re.search(words, source)
    }


def dotted(node):
    """``a.b.c`` of a name with attributes, "" of another expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(tree):
    """``(function, call)`` of every call."""
    return [(dotted(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def texts(nodes):
    return [node.value for node in nodes if isinstance(node, ast.Constant)]


def reads(tree):
    """The names of variables that a module reads, also through a function that is given the name."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    through = {f.name for f in functions for name, call in calls(f) if name in READERS and not texts(call.args)}
    names = set()
    for name, call in calls(tree):
        first = texts(call.args[:1])
        if name in READERS or name in through:
            names.update(first)
        elif name == "rendezvous" and first == ["env://"]:
            names |= OF_RENDEZVOUS
        elif name == "getattr" and dotted(call.args[0]) == "_runtime":
            names.add(OF_KNOBS[call.args[1].value])
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and dotted(node.value) == "os.environ":
            assert isinstance(node.ctx, ast.Load), "the page says that the package sets no variable"
            names.update(texts([node.slice]))
    return names


def test_variables_are_what_the_code_reads():
    found = {name for tree in trees("environ|getenv|rendezvous|_runtime").values() for name in reads(tree)}
    assert found == {name for cells in rows("Variables that the package reads") for name in quoted(cells[0])}
    for name, key in OF_KNOBS.items():
        assert vars(knobs.runtime_knobs)[name].key == key


@pytest.mark.parametrize(
    "line",
    [
        "os.environ.get('A')", "os.environ['A']", "os.getenv('A', 1)", "x = os.environ.pop('A')",
        "def f(name): return os.environ.get(name)\nf('A')",
    ],
)  # fmt: skip
def test_every_way_to_read_a_variable_is_found(line):
    assert reads(ast.parse(line)) == {"A"}


def test_variables_of_torch_and_triton_are_read_by_them():
    sources = {
        "Triton": (knobs, triton_build),
        "torch": (inductor_config, cache_dir_utils, torch.compiler.config),
    }
    sources = {name: "".join(map(inspect.getsource, modules)) for name, modules in sources.items()}
    found = rows("Variables of Triton and torch that matter here")
    assert len(found) > 5
    for variable, reader, _ in found:
        assert f'"{variable.strip("`")}"' in sources[reader], variable
    # What the page says of the folder of compiled kernels.
    assert 'os.environ["TRITON_CACHE_DIR"] = triton_cache_dir(' in inspect.getsource(triton_heuristics)


def test_warnings_are_what_the_code_warns_of():
    found = [cells for cells in rows("Warnings and the log") if cells[0] not in LEVELS]
    modules = trees(r"warnings\.")
    warning = {name for name, tree in modules.items() if "warnings.warn" in dict(calls(tree))}
    assert {name for cells in found for name in quoted(cells[1])} == warning
    for cells in found:
        [module] = quoted(cells[1])
        strings = [str(text) for text in texts(ast.walk(modules[module]))]
        for words in quoted(cells[0]):
            assert 'on_failure="' in words or any(words in text for text in strings), words


def test_levels_of_the_log_are_what_the_code_uses():
    by_level = {level: set() for level in LEVELS}
    for name, tree in trees("logging").items():
        for function, call in calls(tree):
            owner, _, method = function.rpartition(".")
            if owner in ("log", "_logger"):
                levels = LEVELS if method == "log" else [method]
                for level in levels:
                    by_level[level].add(".".join(name.split(".")[:2]))
            # The other one silences what transformers' imports log.
            if function == "logging.getLogger" and name != "tritonfp8.training.models":
                assert texts(call.args) == ["tritonfp8"]
    found = {cells[0]: {*quoted(cells[2])} for cells in rows("Warnings and the log") if cells[0] in LEVELS}
    assert found == by_level
