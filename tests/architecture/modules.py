"""The modules of the package as the rules see them: source, tree, room, imports. None of them is run."""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Rooms, lowest first: a folder of the package, or a module that lies in no folder. Rooms of a layer do not import each
# other; `tritonfp8` is the package's own namespace.
LAYERS = (
    {"kernels"},
    {"compat", "specs"},
    {"recipes", "reference"},
    {"tuning"},
    {"launch"},
    {"ops"},
    {"layers"},
    {"functional", "optim"},
    {"conversion"},
    {"export"},
    {"tritonfp8"},
    {"distributed"},
    {"workflow"},
    {"rollout"},
    {"training"},
    {"warmup"},
    {"advice"},
    {"integrations"},
    {"cli"},
    {"__main__"},
)
# Folders of one room from the bottom up: a file imports its own folder and the ones before it.
INSIDE = {"layers": ("layers", "layers.linear", "layers.moe", "layers.stored")}
RANKS = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
IMPORTERS = {"import_module", "__import__", "resolve_name"}


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    is_package: bool = False

    @functools.cached_property
    def tree(self):
        return ast.parse(self.source)

    @functools.cached_property
    def nodes(self):
        """All nodes of the tree: each rule reads them."""
        return tuple(ast.walk(self.tree))

    @property
    def folder(self):
        """The package that this is, or lies in."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def room(self):
        """The key of LAYERS: the longest that the name begins with."""
        name = self.name.partition(".")[2] or self.name
        parts = name.split(".")
        return next((room for n in (2, 1) if (room := ".".join(parts[:n])) in RANKS), name)

    @property
    def is_kernel(self):
        return self.room == "kernels" and not self.is_package


def read_module(path, root, package):
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return Module(".".join((*package, *parts[: -1 if is_package else None])), path.read_text(), is_package)


def imports(module):
    """Each import, wherever in the module: ``(a, None)`` for ``import a``, ``(a, b)`` for ``from a import b``."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                package = module.name.split(".")[: None if module.is_package else -1]
                base = package[: len(package) - node.level + 1] + base
            yield from ((".".join(base), alias.name) for alias in node.names)


def string_imports(module):
    """Each import by a string: its line, and what the name begins with, such as ``"a.b"`` of ``f"a.b{c}"``."""
    importers = IMPORTERS | {
        alias.asname
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.module in ("importlib", "pkgutil")
        for alias in node.names
        if alias.name in IMPORTERS and alias.asname
    }
    for node in module.nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in importers:
            name, package = [*node.args, *(keyword.value for keyword in node.keywords), None][:2]
            first = name.values[0] if isinstance(name, ast.JoinedStr) else name
            found = first.value if isinstance(first, ast.Constant) else ""
            if found.startswith("."):
                is_read = isinstance(package, ast.Constant) and not found.startswith("..")
                found = package.value + found if is_read else ""
            yield node.lineno, found


def imported_modules(module, names):
    """The modules of ``names`` that it imports: ``from a import b`` is ``a.b`` where that is a module, else ``a``."""
    found = (
        base if f"{base}.{attribute}" not in names else f"{base}.{attribute}" for base, attribute in imports(module)
    )
    return {name for name in found if name in names} - {module.name}


def modules_below(folder, package):
    return [read_module(path, ROOT / folder, package) for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def package():
    """All modules of the package; the files of kernels/ are in tritonfp8.kernels."""
    return modules_below("tritonfp8", ("tritonfp8",)) + modules_below("kernels", ("tritonfp8", "kernels"))


def is_within(name, folder):
    return f"{name}.".startswith(f"{folder}.")
