"""The tests that pytest collects, with the recipes of each: what the tables of :mod:`docs.coverage` are made from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tritonfp8 import recipes

ROOT = Path(__file__).resolve().parents[1]
# Helpers of tests are in these folders.
HELPERS = (ROOT / "tests", ROOT / "bench")
# A test calls a helper, which calls a function of the model and the recipe.
DEPTH = 4


class Collected(NamedTuple):
    """A collected test.

    Attributes:
        id: its pytest id.
        recipes: names of recipes among its parameters, or in what a table of its file gives for a parameter.
        words: names of recipes in its code and in the helpers that it calls.
        gpu: it needs a GPU, so that it may not run on this machine.
    """

    id: str
    recipes: frozenset[str]
    words: frozenset[str] = frozenset()
    gpu: bool = False


def _names(value: Any, depth: int = DEPTH) -> Iterator[str]:
    """Names of recipes in a parameter: a name, a recipe, or an object that holds one."""
    if isinstance(value, str):
        if value in recipes.names():
            yield value
    elif depth:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        elif isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list | tuple | set | frozenset):
            for each in value:
                yield from _names(each, depth - 1)


def _of_parameters(item: Any) -> frozenset[str]:
    call = getattr(item, "callspec", None)
    if call is None:
        return frozenset()
    found = set()
    for value in call.params.values():
        found.update(_names(value))
        if isinstance(value, str):
            # A test may be parametrized by the keys of a table of cases.
            tables = [table for table in vars(item.module).values() if isinstance(table, dict) and value in table]
            found.update(name for table in tables for name in _names(table[value]))
    return frozenset(found)


def _is_helper(function: types.FunctionType) -> bool:
    path = Path(function.__code__.co_filename)
    return any(path.is_relative_to(folder) for folder in HELPERS)


def _code_words(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Names of recipes among the constants of the code, and all names that it reads."""
    words, names = set(), set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _code_words(constant)
            words |= inner[0]
            names |= inner[1]
        else:
            words.update(_names(constant))
    return words, names


@functools.cache
def _words(function: types.FunctionType, depth: int = DEPTH) -> frozenset[str]:
    """Names of recipes in a function, its defaults, and the helpers that it names."""
    words, names = _code_words(function.__code__)
    words.update(_names([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]))
    if depth:
        around = function.__globals__
        modules = [module for module in list(around.values()) if isinstance(module, types.ModuleType)]
        for name in names:
            for value in (around.get(name), *(vars(module).get(name) for module in modules)):
                if isinstance(value, types.FunctionType) and _is_helper(value):
                    words |= _words(value, depth - 1)
                elif isinstance(value, type):
                    words.update(_names(list(vars(value).values())))
                elif name in around and not callable(value):
                    words.update(_names(value))
    return frozenset(words)


class _Plugin:
    def __init__(self) -> None:
        self.found: list[Collected] = []

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            gpu = any(item.get_closest_marker(mark) for mark in ("gpu", "multigpu"))
            if gpu or not item.get_closest_marker("skip"):
                function = getattr(item.function, "__wrapped__", item.function)
                self.found.append(Collected(item.nodeid, _of_parameters(item), _words(function), gpu))


def collect(ids: Iterable[str]) -> list[Collected]:
    """Collect the tests of these ids (files or functions), from the root of the checkout.

    Tests that are skipped on every machine like this one are left out. Tests that need a GPU are not.

    Raises:
        ValueError: an id does not exist.
    """
    import pytest

    plugin, output = _Plugin(), io.StringIO()
    without = ("xdist", "cacheprovider", "faulthandler")
    options = ["--collect-only", *(f"-pno:{name}" for name in without), "-o", "addopts=--import-mode=importlib"]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main([*options, *sorted(set(ids))], plugins=[plugin])
    if status != 0:
        raise ValueError(f"these tests cannot all be collected; pytest says:\n{output.getvalue()}")
    return plugin.found
