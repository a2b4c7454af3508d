"""Tables of the tested features of each recipe, made from the collected tests (:mod:`docs.collected`).

docs/distributed.md has one of the parallelism modes, where every cell must have a test. docs/compatibility.md has one
of every feature (:mod:`docs.compatibility`), where a cell without a test says so.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from docs.collected import Collected, collect
from tritonfp8 import recipes

__all__ = ["COLUMNS", "Collected", "Column", "cell", "collect", "matrix", "table", "tests_of"]

YES = "yes"
UNTESTED = "untested"


class Column(NamedTuple):
    """One feature, such as a parallelism mode: a column of one table, a row of the other.

    Attributes:
        name: heading.
        tests: ids of test functions, each parametrized by recipe.
        keyword: limits the tests of these functions to ids that contain it; empty for all of them.
        otherwise: for recipes that do not use this feature, the text of their cell and the test that proves it.
        fixed: for recipes that a test names in its code, and not by a parameter, the id of that test. It may have
            parameters: ``file.py::function[parameter]``.
        always: ids of tests of what does not depend on the recipe, such as an error before one is looked at.
        answer: text of the cells with a test.
        known: what is known about cells without a test, and other notes. Without it such a cell is an error.
        gpu: the tests need a GPU.
    """

    name: str
    tests: tuple[str, ...] = ()
    keyword: str = ""
    otherwise: Mapping[str, tuple[str, str]] = MappingProxyType({})
    fixed: Mapping[str, str] = MappingProxyType({})
    always: tuple[str, ...] = ()
    answer: str = YES
    known: str = ""
    gpu: bool = False

    @property
    def functions(self) -> list[str]:
        """Ids of all tests and test functions of the feature, each once."""
        ids = [*self.tests, *(test for _, test in self.otherwise.values()), *self.fixed.values(), *self.always]
        return list(dict.fromkeys(ids))

    @property
    def commands(self) -> list[str]:
        """Commands that run the tests of the feature: a keyword selects among tests that are parametrized by recipe."""
        limited = list(self.tests) if self.keyword else []
        others = [test for test in self.functions if test not in limited]
        keyword = ["-k", self.keyword]
        return [shlex.join(["pytest", *ids, *rest]) for ids, rest in ((limited, keyword), (others, [])) if ids]

    @property
    def command(self) -> str:
        """The commands in one line."""
        return "; ".join(self.commands)


_LLAMA = (
    "tests/distributed/tensor_parallel/test_tensor_parallel.py::test_losses_do_not_go_nan_and_are_those_of_one_process"
)
_CONTEXT = "tests/distributed/test_context_parallel.py"
# Weights that no GEMM reads in 8 bits: enable_float8_all_gather reports them, and FSDP2 gathers them in bf16.
_REPORTED = {"bf16": ("in bf16", "tests/distributed/fsdp/test_prepare.py::test_report_names_every_converted_layer")}
_BF16 = {"bf16": ("in bf16", "tests/distributed/fsdp/test_fsdp.py::test_weights_that_no_gemm_reads_in_8_bits")}

_EP = "tests/distributed/expert_parallel"
_EXPERTS = "tests/distributed/fsdp/test_experts_gather.py"
_EXPERTS_REPORTED = {"bf16": ("in bf16", f"{_EXPERTS}::test_the_report_names_experts_in_high_precision")}

COLUMNS = (
    Column("TP colwise", ("tests/distributed/test_parallelism.py::test_colwise",)),
    Column("TP rowwise", ("tests/distributed/test_parallelism.py::test_rowwise",)),
    Column("SP", (_LLAMA,)),
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
    Column("EP", (f"{_EP}/test_experts.py::test_the_bits_of_one_process",)),
    Column("EP x TP", (f"{_EP}/test_tensor_parallel.py::test_losses",)),
    Column("EP x FSDP2", (f"{_EP}/test_experts.py::test_with_fsdp2",)),
    Column(
        "EP x FSDP2, FP8 all-gather",
        (f"{_EP}/test_experts.py::test_the_8_bit_gather_of_fsdp2_changes_no_bit",),
        otherwise=_EXPERTS_REPORTED,
    ),
    Column(
        "FSDP2, FP8 all-gather of experts",
        (f"{_EXPERTS}::test_losses_and_weights_have_the_same_bits", f"{_EXPERTS}::test_compiled_blocks"),
        otherwise=_EXPERTS_REPORTED,
    ),
)


def tests_of(column: Column, recipe: str, collected: Iterable[Collected]) -> list[str]:
    """Ids of the tests of one cell: they run this recipe by a parameter, or name it in their code if they are fixed."""
    by_parameter = [column.otherwise[recipe][1]] if recipe in column.otherwise else column.tests
    found = []
    for test in collected:
        function = test.id.partition("[")[0]
        here = (test.id, function)
        if test.gpu != column.gpu:
            continue
        if (
            (function in by_parameter and recipe in test.recipes and column.keyword in test.id)
            or (column.fixed.get(recipe) in here and recipe in test.recipes | test.words)
            or any(id in column.always for id in here)
        ):
            found.append(test.id)
    return found


def cell(column: Column, recipe: str, collected: Sequence[Collected]) -> str:
    """The text of a cell.

    Raises:
        ValueError: it has no test, and the feature states nothing about such cells; or a test that the feature names
            for this recipe is not one of this recipe.
    """
    if tests_of(column, recipe, collected):
        return column.otherwise[recipe][0] if recipe in column.otherwise else column.answer
    if column.known and recipe not in column.fixed and recipe not in column.otherwise:
        return UNTESTED
    raise ValueError(f"no test of {recipe!r} with {column.name!r} in: {column.command}")


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table(columns: Sequence[Column], collected: Sequence[Collected]) -> str:
    """Markdown tables: recipes by parallelism mode, and the test command of each column.

    Raises:
        ValueError: a cell without a test.
    """
    rows = [["recipe", *(column.name for column in columns)], ["---"] * (1 + len(columns))]
    rows += [[recipe, *(cell(column, recipe, collected) for column in columns)] for recipe in recipes.names()]
    commands = [["column", "tested by"], ["---", "---"], *([c.name, f"`{c.command}`"] for c in columns)]
    return "\n\n".join(map(_markdown, (rows, commands)))


def matrix(columns: Sequence[Column], collected: Sequence[Collected], first: int = 1) -> str:
    """Markdown tables: features by recipe, and the tests and notes of each feature, numbered from ``first``.

    Raises:
        ValueError: a cell without a test, and without a word about it.
    """
    rows = [["", "feature", *recipes.names()], ["---"] * (2 + len(recipes.names()))]
    notes = [["", "tested by", "note"], ["---"] * 3]
    for i, column in enumerate(columns, first):
        rows.append([str(i), column.name, *(cell(column, recipe, collected) for recipe in recipes.names())])
        notes.append([str(i), "<br>".join(f"`{command}`" for command in column.commands), column.known])
    return "\n\n".join(map(_markdown, (rows, notes)))
