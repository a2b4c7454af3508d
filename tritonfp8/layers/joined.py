"""Classes of converted modules: one that computes by a recipe, joined with the class that the module had."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from tritonfp8.layers.in_place import rebase

_M = TypeVar("_M", bound=nn.Module)
# By a joined class: the class that computes, and the class that the module had.
_parts: dict[type, tuple[type[nn.Module], type[nn.Module]]] = {}


def joined_class(computes: type[_M], before: type[nn.Module], name: str | None = None) -> type[_M]:
    """A subclass of both, the same each time. It has no module in which pickle could look it up."""
    found = next((cls for cls, parts in _parts.items() if parts == (computes, before)), None)
    if found is None:
        members = {"__doc__": computes.__doc__, "__reduce_ex__": _reduce}
        found = type(name or computes.__name__, (computes, before), members)
        _parts[found] = computes, before
    return found


def register_computing(computes: type[nn.Module], before: type[nn.Module]) -> None:
    """Let ``computes``, a subclass of ``before``, be the class of both joined."""
    _parts[computes] = computes, before


def _reduce(module: nn.Module, protocol: Any) -> Any:
    # Classes that others derive from a joined one do as they do.
    if type(module) not in _parts:
        return nn.Module.__reduce_ex__(module, protocol)
    return _empty, (*_parts[type(module)], type(module).__name__), module.__dict__


def _empty(computes: type[nn.Module], before: type[nn.Module], name: str) -> nn.Module:
    found = joined_class(computes, before, name)
    return found.__new__(found)


def joined_of(module: nn.Module) -> type[nn.Module] | None:
    """The joined class that the class of a module is, or derives from; None if it is another class."""
    return next((cls for cls in type(module).__mro__ if cls in _parts), None)


def class_before(module: nn.Module) -> type[nn.Module] | None:
    """The class that a module had before it was given a joined one; None if it has none.

    ``fully_shard`` and others derive classes from the class of a module: the result is derived from the
    class before in the same way.

    Raises:
        TypeError: the class was written as a subclass of one of this package.
    """
    joined = joined_of(module)
    return None if joined is None else rebase(type(module), joined, _parts[joined][1])
