"""The table of recipes by parallelism mode in docs/distributed.md, made from the collected tests.

A cell without a test is an error, so the table cannot claim more than the tests show.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tritonfp8 import recipes


class Column(NamedTuple):
    """One parallelism mode: a column of the table.

    Attributes:
        name: heading of the column.
        tests: ids of test functions, each parametrized by recipe.
        keyword: limits the tests of these functions to ids that contain it; empty for all of them.
        otherwise: for recipes that do not use this mode, the text of their cell and the test function that proves it.
    """

    name: str
    tests: tuple[str, ...]
    keyword: str = ""
    otherwise: Mapping[str, tuple[str, str]] = MappingProxyType({})

    @property
    def functions(self) -> list[str]:
        """Ids of all test functions of the column."""
        return [*self.tests, *(test for _, test in self.otherwise.values())]

    @property
    def command(self) -> str:
        """Command that runs the tests of the column."""
        return " ".join(["pytest", *self.functions, *(["-k", self.keyword] if self.keyword else [])])


class Collected(NamedTuple):
    """A collected test: its id and its parameters."""

    id: str
    arguments: tuple[Any, ...]


YES = "yes"
_LLAMA = (
    "tests/distributed/tensor_parallel/test_tensor_parallel.py::test_losses_do_not_go_nan_and_are_those_of_one_process"
)
_CONTEXT = "tests/distributed/test_context_parallel.py"
# Weights that no GEMM reads in 8 bits: enable_float8_all_gather reports them, and FSDP2 gathers them in bf16.
_REPORTED = {"bf16": ("in bf16", "tests/distributed/fsdp/test_prepare.py::test_report_names_every_converted_layer")}
_BF16 = {"bf16": ("in bf16", "tests/distributed/fsdp/test_fsdp.py::test_weights_that_no_gemm_reads_in_8_bits")}

COLUMNS = (
    Column("TP colwise", ("tests/distributed/test_parallelism.py::test_colwise",)),
    Column("TP rowwise", ("tests/distributed/test_parallelism.py::test_rowwise",)),
    Column("SP", (_LLAMA,), "sequence"),
    Column(
        "FSDP2, FP8 all-gather",
        ("tests/distributed/fsdp/test_fsdp.py::test_losses_with_fp8_all_gather_equal_those_without",),
        otherwise=_BF16,
    ),
    Column("HSDP, FP8 all-gather", ("tests/distributed/test_parallelism.py::test_hsdp",), otherwise=_BF16),
    Column("TP x FSDP2", ("tests/distributed/fsdp/test_fsdp_tp.py::test_tp_by_fsdp2",), otherwise=_REPORTED),
    Column("HSDP x TP", ("tests/distributed/fsdp/test_fsdp_tp.py::test_tp_by_hsdp",), otherwise=_REPORTED),
    Column("Pipeline", ("tests/distributed/test_pipeline.py::test_two_stages",)),
    Column(
        "Context parallel",
        (f"{_CONTEXT}::test_context_parallel_of_torch", f"{_CONTEXT}::test_causal_attention_on_gathered_keys"),
    ),
    Column("DCP", ("tests/distributed/test_parallelism.py::test_checkpoint_loads_at_another_world_size",)),
)


class _Plugin:
    def __init__(self) -> None:
        self.found: list[Collected] = []

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            if item.get_closest_marker("skip"):
                continue
            call = getattr(item, "callspec", None)
            self.found.append(Collected(item.nodeid, tuple(call.params.values()) if call else ()))


def collect(ids: Iterable[str]) -> list[Collected]:
    """Collect the tests of these ids (files or functions) that run on this machine, from the root of the checkout.

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


def tests_of(column: Column, recipe: str, collected: Iterable[Collected]) -> list[str]:
    """Ids of the tests of one cell."""
    functions = [column.otherwise[recipe][1]] if recipe in column.otherwise else column.tests
    return [
        id
        for id, arguments in collected
        if id.partition("[")[0] in functions and recipe in arguments and column.keyword in id
    ]


def table(columns: Sequence[Column], collected: Sequence[Collected]) -> str:
    """Markdown tables: recipes by parallelism mode, and the test command of each column.

    Raises:
        ValueError: a cell without a test.
    """
    rows = [["recipe", *(column.name for column in columns)], ["---"] * (1 + len(columns))]
    for recipe in recipes.names():
        row = [recipe]
        for column in columns:
            if not tests_of(column, recipe, collected):
                raise ValueError(f"no test of {recipe!r} with {column.name!r} among those of: {column.command}")
            row.append(column.otherwise[recipe][0] if recipe in column.otherwise else YES)
        rows.append(row)
    commands = [["column", "tested by"], ["---", "---"], *([c.name, f"`{c.command}`"] for c in columns)]
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in part) for part in (rows, commands))
