"""Make the tables and figures of the pages from code and data: ``python -m docs.build``, in the root of a checkout.

The text between ``<!-- begin NAME ... -->`` and ``<!-- end NAME -->`` is generated: results from the data in
bench/results (:mod:`docs.measured`), the map of the package from its imports (:mod:`docs.house`), each recipe's tested
features from the collected tests (:mod:`docs.coverage`, :mod:`docs.compatibility`), the list of notebooks from their
folder. The figure of collectives comes from a training step (:mod:`docs.traffic`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from docs import compatibility, coverage, house, measured, traffic

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
BLOCK = re.compile(
    r"(<!-- begin (?P<name>[\w ]+): python -m docs\.build -->\n\n).*?(\n*<!-- end (?P=name) -->)", re.DOTALL
)

# By the dtype of a collective. Amaxes are sent as int32, which has the order of non-negative floats.
COLORS = {
    torch.uint8: ("8 bits: codes and scales", "tab:green"),
    torch.bfloat16: ("bf16", "tab:orange"),
    torch.float32: ("float32", "tab:red"),
}


def size(n: int) -> str:
    """Bytes with a unit: MiB, KiB or B."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if n >= factor:
            return f"{n / factor:.3g} {unit}"
    return f"{n} B"


@functools.cache
def collected() -> list[coverage.Collected]:
    """The tests that exist now and that a table names."""
    return compatibility.current()


def tests_of_recipes() -> str:
    """The table of recipes by parallelism mode."""
    return coverage.table(coverage.COLUMNS, collected())


def tests_of_features(group: str) -> str:
    """The tables of a group of features by recipe."""
    return compatibility.table(group, collected())


def notebooks() -> str:
    """A link to each notebook, by the heading of its first cell."""
    links = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        first = "".join(json.loads(path.read_text())["cells"][0]["source"])
        links.append(f"- [{first.splitlines()[0].lstrip('# ')}](../notebooks/{path.name})")
    return "\n".join(links) or "This version has no notebooks."


BLOCKS: Mapping[str, Callable[[], str]] = {
    "coverage": tests_of_recipes,
    "house": house.rooms_table,
    "notebooks": notebooks,
    **{f"compatibility {group}": functools.partial(tests_of_features, group) for group in compatibility.GROUPS},
    **measured.TABLES,
}
"""The function that makes each block, by the block's name."""


def blocks(page: str) -> dict[str, str]:
    """The current blocks of a page, by name."""
    return {found["name"]: found[0] for found in BLOCK.finditer(page)}


def made(page: str) -> str:
    """The page with all blocks made again."""
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found['name']]().strip()}\n\n{found[3].strip()}", page)


def _bars(axes: Any, by_recipe: dict[str, traffic.Parts], most: int) -> None:
    for row, parts in enumerate(by_recipe.values()):
        left, notes = 0, []
        for (_, dtype), n in parts.items():
            if dtype == torch.int32:
                notes.append(f"+ {size(n)} of amaxes")
                continue
            axes.barh(row, n, left=left, color=COLORS[dtype][1], edgecolor="white")
            axes.text(left + n / 2, row, size(n), ha="center", va="center", fontsize=7, color="white")
            left += n
        note = "; ".join(notes) or ("" if left else "nothing")
        axes.text(left + (most or 1) / 50, row, note, va="center", fontsize=7)
    axes.set_ylim(len(by_recipe) - 0.5, -0.5)
    # A row with amaxes only has no bar, but needs some width.
    axes.set_xlim(0, 1.3 * most or 1)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def figure(found: dict[str, dict[str, dict[str, traffic.Parts]]], sizes: traffic.Sizes) -> Any:
    """A row for each parallelism mode, a column for each pass, a bar for each recipe."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = Figure(figsize=(11, 1.9 * len(found) + 1), layout="constrained")
    grid = drawn.subplots(len(found), len(traffic.PASSES), squeeze=False)
    for way, axes_of_way in zip(traffic.WAYS, grid, strict=True):
        by_recipe = found[way.name]
        data = [n for of_recipe in by_recipe.values() for parts in of_recipe.values()
                for n in [sum(size for (_, dtype), size in parts.items() if dtype != torch.int32)]]  # fmt: skip
        for axes, name, what in zip(axes_of_way, traffic.PASSES, way[1:], strict=False):
            _bars(axes, {recipe: of_recipe[name] for recipe, of_recipe in by_recipe.items()}, max(data))
            axes.set_title(f"{way.name}, {name}: {what}", fontsize=8, loc="left")
        axes_of_way[0].set_yticks(range(len(by_recipe)), by_recipe, fontsize=8)
        axes_of_way[1].set_yticks([])
    patches = [Patch(color=color, label=label) for label, color in COLORS.values()]
    drawn.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    drawn.suptitle(
        f"Bytes that each of {traffic.RANKS} ranks gathers and reduces in a step of one layer: "
        f"weight {sizes.n} x {sizes.k}, {sizes.tokens} tokens",
        fontsize=10,
    )
    return drawn


FIGURES: Mapping[str, Callable[[], Any]] = {
    "distributed.svg": lambda: figure(traffic.measured(), traffic.LAYER),
    "house.svg": house.figure,
    "scaling.svg": measured.scaling_figure,
    "speed_ups.svg": measured.picture,
}
"""The function that draws each file in docs/, by file name."""


def main() -> None:
    """Write the blocks of all pages, and the figures."""
    import matplotlib

    for page in PAGES:
        page.write_text(made(page.read_text()))
    # A fixed salt gives the same file for the same content; "none" keeps text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "tritonfp8", "svg.fonttype": "none"})
    for name, draw in FIGURES.items():
        draw().savefig(DOCS / name, metadata={"Date": None})


if __name__ == "__main__":
    main()
