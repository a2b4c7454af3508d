"""Tune the forward GEMMs of sets of shapes, precise and fast, for this user: ``python -m bench.tune decode``.

``tritonfp8 warmup --tune`` tunes the GEMMs of training with the built-in recipes, which are all precise. This command
tunes the configurations for small M and for fast accumulation that ship with the package.
"""

import sys

from rich.progress import Progress

from bench.contest.cases import recipe_variants
from bench.shapes import SHAPES, select
from tritonfp8.warmup import MATMUL, Call, record_linear, tune

RECIPES = ("rowwise", "blockwise")


def calls_of(names: list[str]) -> list[Call]:
    """The distinct forward GEMMs of bf16 layers of the named sets, for each recipe and accumulation."""
    found: dict[Call, None] = {}
    for shape in select("gemm", names):
        for recipe in recipe_variants(RECIPES).values():
            calls = record_linear(shape.size, recipe, "bfloat16")
            found |= dict.fromkeys(call for call in calls if call.op == MATMUL and _sizes(call) == shape.size)
    return list(found)


def _sizes(call: Call) -> tuple[int, ...]:
    a, b = (call.named()[name].shape for name in "ab")
    return (a[0], b[0], a[1])


def main() -> None:
    """Tune, and print the chosen configurations and the failures."""
    names = sys.argv[1:]
    try:
        calls = calls_of(names) if names else []
    except ValueError as error:
        sys.exit(str(error))
    if not calls:
        sets = dict.fromkeys(shape.set for shape in SHAPES["gemm"])
        sys.exit(f"name sets that have GEMMs: {', '.join(sets)}; got {' '.join(names) or 'none'}")
    with Progress() as bars:
        task = bars.add_task("tune")
        tuned = tune(
            calls,
            force=True,
            progress=lambda done, total: bars.update(task, completed=done, total=total),
        )
    for key, entry in tuned.entries.items():
        sizes = f"up to {key.m} x {key.n} x {key.k}"
        print(f"{key.kind.family} {key.kind.accumulation} {sizes}: {entry.config}, {entry.microseconds} us")
    for line in tuned.failed:
        print(line, file=sys.stderr)
    sys.exit(bool(tuned.failed))


if __name__ == "__main__":
    main()
