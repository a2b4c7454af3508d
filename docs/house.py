"""The map of the package, made from its imports: the table and the figure of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Mapping
from typing import Any

from tests.architecture import LAYERS, ROOT, imported_modules, package

# Not part of the map: the entry point of `python -m`.
LEFT_OUT = {"__main__"}


def purposes() -> dict[str, str]:
    """The purpose of each room: the first sentence of its docstring."""
    found = {}
    for module in package():
        if module.room not in LEFT_OUT and (module.name in (f"tritonfp8.{module.room}", module.room)):
            text = " ".join((ast.get_docstring(module.tree) or "").split("\n\n")[0].split())
            sentence = text.partition(". ")[0].rstrip(".")
            # Turn roles and literals of reStructuredText into Markdown.
            found[module.room] = re.sub(r"(?::\w+:)?`+~?([^`]+)`+", r"`\1`", sentence)
    return found


def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    by_name = {module.name: module for module in package()}
    found: dict[str, set[str]] = {}
    for module in by_name.values():
        rooms = {by_name[name].room for name in imported_modules(module, by_name)} - {module.room}
        found.setdefault(module.room, set()).update(rooms)
    return {room: rooms - LEFT_OUT for room, rooms in found.items() if room not in LEFT_OUT}


def direct(found: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that no chain of other arrows implies."""
    below: dict[str, set[str]] = {}
    for room in graphlib.TopologicalSorter(found).static_order():
        below[room] = set().union(*({each} | below[each] for each in found.get(room, ())))
    return {
        room: {each for each in rooms if not any(each in below[other] for other in rooms - {each})}
        for room, rooms in found.items()
    }


def floors(found: Mapping[str, set[str]]) -> int:
    """The rooms on the longest way down: one floor each."""
    height: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(found).static_order():
        height[room] = 1 + max((height[each] for each in found.get(room, ())), default=0)
    return max(height.values())


def outdated() -> list[str]:
    """The rooms whose row in CONTRIBUTING.md is missing or has other imports than the code."""
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    wanted = {room: ", ".join(f"`{each}`" for each in sorted(imported)) for room, imported in arrows().items()}
    return [
        f"CONTRIBUTING.md: {room} imports {imported or 'nothing'}; run python -m docs.build"
        for room, imported in wanted.items()
        if not any(line.startswith(f"| `{room}` |") and line.endswith(f"| {imported} |") for line in lines)
    ]


def rooms_table() -> str:
    """Table of the rooms from the top down: purpose and imports."""
    from bench.tables import table

    found, what = arrows(), purposes()
    rooms = [room for layer in reversed(LAYERS) for room in sorted(layer) if room in what]
    lines = [(f"`{room}`", what[room], ", ".join(f"`{each}`" for each in sorted(found[room]))) for room in rooms]
    return table(("room", "what it is for", "imports"), lines)


def figure() -> Any:
    """The rooms, one floor for each layer, with the arrows that no others imply."""
    from matplotlib.figure import Figure

    what, found = purposes(), direct(arrows())
    floors = [sorted(room for room in layer if room in what) for layer in LAYERS]
    floors = [floor for floor in floors if floor]
    # A single room on a floor is drawn left or right in turns, so that arrows pass beside it.
    places = {
        room: ((i + 0.5) / len(floor) if len(floor) > 1 else 0.4 + 0.2 * (y % 2), y)
        for y, floor in enumerate(floors)
        for i, room in enumerate(floor)
    }
    drawn = Figure(figsize=(9, 0.5 * len(floors)), layout="constrained")
    axes = drawn.subplots()
    for room, below in sorted(found.items()):
        for each in sorted(below):
            (x, y), (to_x, to_y) = places[room], places[each]
            axes.annotate(
                "", (to_x, to_y + 0.24), (x, y - 0.24), arrowprops={"arrowstyle": "->", "color": "0.6", "lw": 0.8}
            )
    for room, (x, y) in places.items():
        box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "tab:blue"}
        axes.text(x, y, room, ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, len(floors) - 0.5)
    axes.set_axis_off()
    return drawn
