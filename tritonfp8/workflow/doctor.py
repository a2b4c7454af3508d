"""``tritonfp8 doctor``: versions and abilities of this machine, how each recipe runs, self-tests, accumulation."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from packaging.requirements import Requirement
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

import tritonfp8
from tritonfp8 import recipes, reference
from tritonfp8.compat import hardware, machine
from tritonfp8.compat.counting import KINDS, count_gemms
from tritonfp8.compat.hardware import Abilities, machine_key
from tritonfp8.compat.machine import MISSING
from tritonfp8.specs import ACCUMULATIONS, BLOCKS, SPECS, QuantSpec
from tritonfp8.specs.formats import BYTE_FORMATS
from tritonfp8.specs.quantized import Quantized
from tritonfp8.specs.testing import assert_bitwise_equal, assert_matmul_close, canonical_nan, sqnr
from tritonfp8.tuning import store
from tritonfp8.workflow import op_tests

SELF_TEST_SHAPE = (200, 334)
SELF_TEST_MNK = (200, 177, 333)
Tensors = tuple[torch.Tensor, ...]
# At the begin of what a self-test of a GEMM found.
_FIGURE = re.compile(r"([\d.]+) dB ")
ACCUMULATION_KS = (1024, 4096, 16384)


@dataclass(frozen=True)
class Check:
    """One self-test: its name, whether it passed, and its figure or error."""

    name: str
    ok: bool
    detail: str


def requirements() -> dict[str, Requirement]:
    """Requirements of the installed package, extras included, by package name; empty if it is not installed."""
    try:
        lines = importlib.metadata.requires("tritonfp8") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def recipe_kinds(name: str, device: torch.device) -> dict[str, int]:
    """Kinds of the three GEMMs of a layer with their counts, found by training one layer for one step on ``device``."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256, device=device, dtype=torch.bfloat16))
    x = torch.randn(128, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    if name != "bf16":
        tritonfp8.convert(model, name)
    with count_gemms() as counts:
        model(x).sum().backward()
    return dict(counts.calls)


def self_tests(device: torch.device) -> Iterator[Check]:
    """Compare every kernel on ``device`` with the reference on the CPU, with tails of blocks and special values."""
    x = torch.randn(SELF_TEST_SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    # A row of zeros and one with a subnormal amax. The second tensor has a NaN, which must not leave its block.
    x[0], x[1] = 0, 1e-39
    with_nan = x.clone()
    with_nan[-1, -1] = torch.nan
    xs = (x, with_nan)
    for shape, block in BLOCKS.items():
        specs = [spec for spec in SPECS.values() if spec.block == shape]
        for name, test in _CASTS.items():
            # Every op makes codes of 8 bits, and few make others.
            served = [spec for spec in specs if test is not _quantize_both or spec.format in BYTE_FORMATS]
            yield _check(name.format(block.name), _cast_agrees, test, xs, served, device)
    for a, b in itertools.product(BLOCKS, BLOCKS):
        if BLOCKS[a].family == BLOCKS[b].family:
            name = f"scaled_matmul {BLOCKS[a].name} x {BLOCKS[b].name}"
            yield _check(name, _matmul_agrees, _operand_spec(a), _operand_spec(b), device)
    for name, calls in itertools.groupby(op_tests.calls(), lambda call: call.name):
        yield _check(name, op_tests.agrees, calls, device)


def _check(name: str, test: Callable[..., str], *args: object) -> Check:
    try:
        return Check(name, True, test(*args))
    except Exception as error:
        # A kernel that does not compile or launch is reported as failed, and the other tests still run.
        return Check(name, False, f"{type(error).__name__}: {error}")


def _quantize(x: torch.Tensor, spec: QuantSpec, device: torch.device, transpose: bool) -> tuple[Any, Any]:
    found = tritonfp8.quantize(x.to(device), spec, transpose=transpose)
    return (found.qdata.cpu(), found.scale.cpu()), reference.quantize(x, *spec.args, transpose=transpose)


def _quantize_both(x: torch.Tensor, spec: QuantSpec, device: torch.device) -> tuple[Any, Any]:
    found = tritonfp8.quantize_both(x.to(device), spec, spec)
    expected = [reference.quantize(x, *spec.args, transpose=transpose) for transpose in (False, True)]
    return [(q.qdata.cpu(), q.scale.cpu()) for q in found], expected


def _dequantize(x: torch.Tensor, spec: QuantSpec, device: torch.device) -> tuple[Any, Any]:
    qdata, scale = reference.quantize(x, *spec.args)
    found = tritonfp8.dequantize(Quantized(qdata.to(device), scale.to(device), spec), dtype=torch.float32)
    return canonical_nan(found.cpu()), canonical_nan(reference.dequantize(qdata, scale, *spec.args, torch.float32))


# Each returns the result on a device, and the result of the reference.
_CASTS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "quantize {}": partial(_quantize, transpose=False),
    "quantize {}, transposed": partial(_quantize, transpose=True),
    "quantize_both {}": _quantize_both,
    "dequantize {}": _dequantize,
}


def _cast_agrees(test: Callable[..., tuple[Any, Any]], xs: Tensors, specs: list[QuantSpec], device: Any) -> str:
    for x, spec in itertools.product(xs, specs):
        assert_bitwise_equal(*test(x, spec, device))
    return f"bitwise equal to the reference in {len(specs)} specs"


def _operand_spec(block: tuple[int, int]) -> QuantSpec:
    return QuantSpec("e4m3", block, BLOCKS[block].scale_formats[0], "pow2")


def _matmul_agrees(a: QuantSpec, b: QuantSpec, device: torch.device) -> str:
    figures = []
    for positive in (False, True):
        found, exact = _random_gemm(a, b, SELF_TEST_MNK, positive, "precise", device)
        assert_matmul_close(found, exact, torch.float32)
        figures.append(sqnr(found, exact))
    return f"{min(figures):.1f} dB SQNR or more"


def _random_gemm(
    a: QuantSpec, b: QuantSpec, mnk: tuple[int, int, int], positive: bool, accumulation: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 GEMM of random quantized operands, and the float64 GEMM of the same operands dequantized.

    ``positive``: data uniform in [0, 1), in place of standard normal.
    """
    m, n, k = mnk
    generator = torch.Generator(device).manual_seed(0)
    draw = torch.rand if positive else torch.randn
    lhs, rhs = (
        tritonfp8.quantize(draw(rows, k, generator=generator, device=device), spec) for rows, spec in ((m, a), (n, b))
    )
    out = tritonfp8.scaled_matmul(lhs, rhs, out_dtype=torch.float32, accumulation=accumulation)
    exact = [tritonfp8.dequantize(operand, dtype=torch.float32).double() for operand in (lhs, rhs)]
    return out, exact[0] @ exact[1].T


def accumulation_figures(device: torch.device) -> Iterator[tuple[int, str, dict[str, float]]]:
    """SQNR in dB of both accumulations, for each K and both kinds of data: rows of (K, data, {accumulation: dB})."""
    spec = _operand_spec((1, -1))
    for k, positive in itertools.product(ACCUMULATION_KS, (False, True)):
        figures = {
            accumulation: sqnr(*_random_gemm(spec, spec, (512, 512, k), positive, accumulation, device))
            for accumulation in ACCUMULATIONS
        }
        yield k, "uniform [0, 1)" if positive else "standard normal", figures


def tuned_gemms(abilities: Abilities) -> str:
    """How many configurations of GEMMs were measured on such a GPU, in words."""
    machine = machine_key(abilities)
    shipped, own = len(store.read_shipped(machine)), len(store.read_user(machine))
    found = f"{shipped} ship, and {own} are yours" if shipped or own else "none"
    return (
        f"Configurations of GEMMs that were measured on {abilities.name}: {found}. A cost model chooses where none is "
        "near; `tritonfp8 warmup --tune` measures yours."
    )


def diagnose(console: Console) -> bool:
    """Print all checks of this machine; returns whether all recipes ran and all self-tests passed."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        # A warning would repeat the table of abilities below.
        warnings.simplefilter("ignore")
        abilities = hardware.abilities(device)
    facts = Table.grid(padding=(0, 1))
    facts.add_row(
        Group(_facts_table("machine", machine.machine(device)), _versions_table()),
        _facts_table("abilities", asdict(abilities)),
    )
    console.print(facts)
    if not abilities.has_fp8_mma:
        gpu = "no CUDA GPU" if device.type == "cpu" else f"{abilities.name}, a GPU without FP8 tensor cores"
        console.print(f"This machine has {gpu}: the ops run the reference, and no kernel is tested here.")
    else:
        console.print(tuned_gemms(abilities))
    recipes_ok = _print_recipes(console, device)
    tests_ok = _print_self_tests(console, device)
    if abilities.has_fp8_mma:
        _print_accumulation(console, device)
    else:
        console.print("Fast and precise accumulation are compared on a GPU with FP8 tensor cores only.")
    return recipes_ok and tests_ok


def _table(*columns: str, **options: Any) -> Table:
    return Table(*columns, title_justify="left", **options)


def _facts_table(title: str, facts: dict[str, Any]) -> Table:
    table = _table("", "", title=title, show_header=False)
    for name, value in facts.items():
        table.add_row(name, MISSING if value is None else str(value))
    return table


def _versions_table() -> Table:
    table = _table("package", "version", "required", "", title="versions")
    required = requirements()
    for package, version in machine.versions().items():
        requirement = required.get(package)
        verdict = ""
        if requirement is not None and version is None:
            verdict = "[red]missing" if requirement.marker is None else f"missing, needed with {requirement.marker}"
        elif requirement is not None and not requirement.specifier.contains(version or "", prereleases=True):
            verdict = "[red]not supported"
        table.add_row(package, version or MISSING, str(requirement.specifier) if requirement else "", verdict)
    return table


def _print_recipes(console: Console, device: torch.device) -> bool:
    table = _table("recipe", "its three GEMMs here", title="recipes")
    good = True
    for name in recipes.names():
        try:
            kinds = recipe_kinds(name, device)
            how = ", ".join(f"{count} by {KINDS[kind]}" for kind, count in kinds.items())
        except Exception as error:
            good, how = False, f"[red]FAILED: {type(error).__name__}: {escape(str(error))}"
        table.add_row(name, how or "3 in the model's own dtype: nothing is converted")
    console.print(table)
    return good


def _print_self_tests(console: Console, device: torch.device) -> bool:
    checks = []
    with console.status("self-tests") as status:
        for check in self_tests(device):
            checks.append(check)
            # The first run compiles the kernels, which takes minutes.
            status.update(f"self-tests, after {escape(check.name)}")
    failed = [check for check in checks if not check.ok]
    title = f"self-tests on {device.type}: {len(checks) - len(failed)} passed, {len(failed)} failed"
    table = _table("", "figure", "self-tests", title=title)
    for check in failed:
        table.add_row("[red]FAILED", escape(check.detail), check.name)
    for found, names in _summed_up(check for check in checks if check.ok):
        table.add_row("[green]ok", found, ", ".join(names))
    console.print(table)
    return not failed


def _summed_up(checks: Iterable[Check]) -> Iterator[tuple[str, list[str]]]:
    """What self-tests that passed found, with the names of their ops; of figures in dB the lowest."""
    groups: dict[str, list[tuple[str, Check]]] = {}
    for check in checks:
        found = check.detail.partition(" in ")[0]
        groups.setdefault(_FIGURE.sub("", found), []).append((found, check))
    for its in groups.values():
        lowest = min((found for found, _ in its), key=_decibels)
        yield lowest, [*dict.fromkeys(check.name.split()[0] for _, check in its)]


def _decibels(found: str) -> float:
    figure = _FIGURE.match(found)
    return float(figure[1]) if figure else 0.0


def _print_accumulation(console: Console, device: torch.device) -> None:
    table = _table("K", "data", *ACCUMULATIONS)
    table.title = "accumulation: SQNR in dB of rowwise e4m3 GEMMs, 512 x 512 x K"
    with console.status("accumulation"):
        for k, data, figures in accumulation_figures(device):
            table.add_row(str(k), data, *(f"{figures[name]:.1f}" for name in ACCUMULATIONS))
    console.print(table)
