"""Which modules may import which, by statements and by strings."""

import graphlib
import re

from .modules import INSIDE, LAYERS, RANKS, imported_modules, imports, is_within, string_imports

# What lies above the ops reaches kernels through the dispatcher only.
ABOVE_OPS = set().union(*LAYERS[RANKS["ops"] + 1 : RANKS["tritonfp8"]], {"distributed"})
BEHIND_OPS = {"kernels", "launch", "reference"}
MAY_IMPORT_DISTRIBUTED = ("distributed", "workflow", "integrations")
# The package by itself, and the one door from layers to distributed, import parts of the package when they are needed.
DOORS = ("tritonfp8", "tritonfp8.layers.extensions")


def _is_exported(module, by_name):
    """Whether the `__init__` of its folder imports something of its name: the module, or a function."""
    name = module.name.rpartition(".")[2]
    return module.folder in by_name and name in {imported for _, imported in imports(by_name[module.folder])}


def _rank_inside(module):
    """The place of a module's folder among the folders of its room; 0 where the room has no order."""
    folders = INSIDE.get(module.room, ())
    within = [i for i, folder in enumerate(folders) if is_within(module.name, f"tritonfp8.{folder}")]
    return max(within, default=0)


def _named(module, names):
    """The modules that this one imports by a string, unless it is a door."""
    found = {name for _, name in string_imports(module)} & set(names)
    return set() if module.name in DOORS else found - {module.name}


def import_violations(modules):
    by_name = {module.name: module for module in modules}
    graph = {module.name: imported_modules(module, by_name) for module in modules}
    violations = []
    for name, names in graph.items():
        module = by_name[name]
        if module.room not in RANKS:
            violations.append(f"{name}: give {module.room!r} its place in LAYERS")
            continue
        for imported in sorted(names):
            other = by_name[imported]
            if RANKS.get(other.room, -1) > RANKS[module.room]:
                violations.append(f"{name} imports {imported}, which lies above it")
            elif other.room != module.room and RANKS.get(other.room, -1) == RANKS[module.room]:
                violations.append(f"{name} imports {imported}, which lies beside it")
            elif other.room == "distributed" and module.room not in MAY_IMPORT_DISTRIBUTED:
                violations.append(f"{name} imports {imported}: only {', '.join(MAY_IMPORT_DISTRIBUTED)} may")
            elif other.room == module.room and _rank_inside(other) > _rank_inside(module):
                violations.append(f"{name} imports {imported}, which lies above it")
            elif module.room in ABOVE_OPS and other.room in BEHIND_OPS:
                violations.append(f"{name} imports {imported} past the ops")
            elif not (
                other.is_package or other.is_kernel or is_within(name, other.folder) or _is_exported(other, by_name)
            ):
                violations.append(f"{name} imports {imported}, a file of another folder: import {other.folder}")
    try:
        graphlib.TopologicalSorter({name: graph[name] | _named(by_name[name], graph) for name in graph}).prepare()
    except graphlib.CycleError as error:
        violations.append("imports in a circle: " + " -> ".join(error.args[1]))
    return violations


def string_violations(modules):
    """Imports by a string that is a name of this package, or may become one, anywhere but in the doors."""
    return [
        f"{module.name}:{line} imports {name or 'what nobody can read'} by a string: import it by a statement, or ask "
        f"{DOORS[1]}"
        for module in modules
        if module.name not in DOORS
        for line, name in string_imports(module)
        if re.match(r"tritonfp8\b", name) or "tritonfp8".startswith(name)
    ]


def hidden_violations(modules):
    """What the `__init__` of a folder exports under the name of one of its files, which it hides."""
    names = {module.name for module in modules}
    return [
        f"{folder.name} exports {name} of {base}, which hides the file of this name: rename the file"
        for folder in modules
        for base, name in imports(folder)
        if folder.is_package and is_within(base, folder.name) and base != folder.name
        if f"{folder.name}.{name}" in names
    ]


def _read_names(module):
    """Every name that a module imports or looks up."""
    yield from (attribute for _, attribute in imports(module))
    for node in module.nodes:
        yield getattr(node, "attr", None) or getattr(node, "id", None)


def export_violations(modules, readers):
    """What the `__init__` of a folder imports of its files, and no module outside of it, or in a folder below, reads.

    A folder with `__all__` is public.
    """
    read = [(module.folder, set(_read_names(module))) for module in readers]
    violations = []
    for folder in filter(lambda module: module.is_package and "__all__ = " not in module.source, modules):
        outside = set().union(*(names for reader, names in read if reader != folder.name))
        for base, name in imports(folder):
            if is_within(base, folder.name) and base != folder.name and name not in outside:
                violations.append(f"{folder.name} exports {name}, which nothing outside reads")
    return violations
