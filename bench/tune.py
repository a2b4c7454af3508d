"""Tune the GEMMs of sets of shapes for this user, precise and fast: ``python -m bench.tune decode``.

``tritonfp8 warmup --tune`` tunes the GEMMs of training with the built-in recipes, which are all precise. This command
tunes the other configurations that ship with the package: the forward GEMMs for small M and for fast accumulation. With
``--backward`` it tunes the GEMMs of backward, too, and with ``--grouped`` all GEMMs of experts.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.progress import Progress

from bench.contest.cases import recipe_variants
from bench.shapes import SHAPES, select
from tritonfp8 import Recipe
from tritonfp8.warmup import GROUPED_MATMUL, MATMUL, Call, record_grouped_linear, record_linear, tune

VARIANTS = recipe_variants(("rowwise", "blockwise"))
# Parts of the tokens of a set: a tuned configuration serves four times as few and as many.
PARTS = (1, 4, 16)

app = typer.Typer(add_completion=False)


def calls_of(names: Sequence[str], variants: Mapping[str, Recipe], backward: bool) -> list[Call]:
    """The distinct GEMMs of bf16 layers of the named sets, for each recipe; with the GEMMs of backward or not."""
    found: dict[Call, None] = {}
    for shape in select("gemm", names):
        for recipe in variants.values():
            calls = [call for call in record_linear(shape.size, recipe, "bfloat16") if call.op == MATMUL]
            found |= dict.fromkeys(call for call in calls if backward or _sizes(call) == shape.size)
    return list(found)


def grouped_calls_of(names: Sequence[str], variants: Mapping[str, Recipe]) -> list[Call]:
    """The distinct GEMMs of bf16 experts of the named sets, for each recipe, and numbers of tokens."""
    found: dict[Call, None] = {}
    for shape in select("grouped", names):
        tokens, *others = shape.size
        for part in PARTS:
            for recipe in variants.values():
                calls = record_grouped_linear((max(1, tokens // part), *others), recipe, "bfloat16")
                found |= dict.fromkeys(call for call in calls if call.op == GROUPED_MATMUL)
    return list(found)


def _sizes(call: Call) -> tuple[int, ...]:
    a, b = (call.named()[name].shape for name in "ab")
    return (a[0], b[0], a[1])


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(help="Sets of shapes.")] = None,
    grouped: Annotated[bool, typer.Option(help="Tune the GEMMs of experts.")] = False,
    backward: Annotated[bool, typer.Option(help="Tune the GEMMs of backward, too.")] = False,
    only: Annotated[list[str], typer.Option(help=f"Of: {', '.join(VARIANTS)}. [default: all]")] = [],  # noqa: B006
) -> None:
    """Tune, and print the chosen configurations and the failures."""
    kind = "grouped" if grouped else "gemm"
    if unknown := sorted(set(only) - set(VARIANTS)):
        sys.exit(f"--only must name {', '.join(VARIANTS)}; got {', '.join(unknown)}")
    variants = {name: recipe for name, recipe in VARIANTS.items() if not only or name in only}
    try:
        calls = []
        if names:
            calls = grouped_calls_of(names, variants) if grouped else calls_of(names, variants, backward)
    except ValueError as error:
        sys.exit(str(error))
    if not calls:
        sets = dict.fromkeys(shape.set for shape in SHAPES[kind])
        sys.exit(f"name sets that have GEMMs: {', '.join(sets)}; got {' '.join(names or []) or 'none'}")
    with Progress() as bars:
        task = bars.add_task("tune")
        tuned = tune(calls, force=True, progress=lambda done, total: bars.update(task, completed=done, total=total))
    for key, entry in tuned.entries.items():
        of = f" {key.kind.groups} of {key.experts} experts" if key.experts else ""
        sizes = f"up to {key.m} x {key.n} x {key.k}"
        print(f"{key.kind.family} {key.kind.accumulation}{of} {sizes}: {entry.config}, {entry.microseconds} us")
    for line in tuned.failed:
        print(line, file=sys.stderr)
    sys.exit(bool(tuned.failed))


if __name__ == "__main__":
    app()
