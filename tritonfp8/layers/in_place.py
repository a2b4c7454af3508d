"""Change the class of modules in place: also under classes that others derived, and all of a model or nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType

from torch import nn

# accelerate wraps a forward and keeps the original under the second name.
FORWARDS = ("forward", "_old_forward")
_NOT_COPIED = {"__dict__", "__weakref__"}
_rebased: weakref.WeakKeyDictionary[type, dict[tuple[type, type], type]] = weakref.WeakKeyDictionary()


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Restore the class and the attributes of every module of ``model`` if the block raises anything."""
    before = [(module, type(module), dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes in before:
            if type(module) is not cls:
                module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
        raise


def _closes_over_its_class(cls: type) -> bool:
    functions = (getattr(value, "__func__", value) for value in cls.__dict__.values())
    return any(isinstance(f, FunctionType) and "__class__" in f.__code__.co_freevars for f in functions)


def rebase(cls: type, old: type, new: type) -> type:
    """``cls`` with ``new`` in place of ``old`` among its bases; the same class each time.

    ``fully_shard`` and ``register_parametrization`` give a module a class that they derive from its own. This turns
    ``FSDPFloat8Linear`` into ``FSDPLinear``, for example.

    Raises:
        TypeError: a class whose methods call ``super()``, because its author wrote it for ``old``.
    """
    if cls is old:
        return new
    if not issubclass(cls, old):
        return cls
    if _closes_over_its_class(cls):
        raise TypeError(
            f"{cls.__name__} derives from {old.__name__} and calls super(), so it cannot be rewritten for "
            f"{new.__name__}: replace this module by one of another class yourself"
        )
    known = _rebased.setdefault(cls, {})
    if (old, new) not in known:
        name = cls.__name__.replace(old.__name__, new.__name__)
        bases = tuple(rebase(base, old, new) for base in cls.__bases__)
        members = {key: value for key, value in cls.__dict__.items() if key not in _NOT_COPIED}
        known[old, new] = type(name, bases, members | {"__qualname__": name})
    return known[old, new]


def is_own_forward(module: nn.Module) -> bool:
    """Whether ``module(...)`` runs the forward of its class: directly, or inside accelerate's hooks."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, functools.partial) and forward.func.__module__ == "accelerate.hooks":
        forward = module.__dict__.get("_old_forward")
    return forward is None or is_bound(forward, module)


def is_bound(forward: object, module: nn.Module) -> bool:
    """Whether ``forward`` is the forward of the module's class, bound to the module."""
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is getattr(type(module), "forward", None)
    )


def change_class(module: nn.Module, cls: type) -> None:
    """Give ``module`` this class, and this class's forward where it had bound the old one."""
    bound = [name for name in FORWARDS if is_bound(module.__dict__.get(name), module)]
    module.__class__ = cls
    for name in bound:
        module.__dict__[name] = MethodType(cls.forward, module)  # type: ignore[attr-defined]
