"""The decisions of a forward travel to its recompute: activation checkpointing runs a forward again, later.

Between the two, a ``with`` block may have ended, or :func:`tritonfp8.swap_recipe` may have been called. torch's
checkpointing restores its own state (autocast, random numbers) but no other state. So its two entry functions are
wrapped, once in a process. The wrappers note the options at the beginning of a region's forward and the recipe of each
weight in it, and restore both while the region runs again. For models without layers of this package they do nothing
else.

Checkpointing by other libraries (Megatron, DeepSpeed) is not wrapped: with it, keep blocks open until backward has
ended, and change recipes between steps.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from tritonfp8.layers import extensions
from tritonfp8.recipes import Recipe

_ENTRY = "CheckpointFunction"
# The first one that exists is wrapped: since torch 2.14 it is called by the other.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
# This module imports the generator by name, perhaps before it is wrapped.
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"


_regions: weakref.WeakSet[Region] = weakref.WeakSet()


class _ThreadRegions(threading.local):
    def __init__(self) -> None:
        self.noted_by: tuple[Region, ...] = ()
        self.replayed: Region | None = None
        self.active = False

    def set(self, noted_by: tuple[Region, ...], replayed: Region | None) -> None:
        self.noted_by, self.replayed = noted_by, replayed
        self.active = bool(noted_by) or replayed is not None


_thread = _ThreadRegions()


# The recipe of a module before each swap, since the oldest region began. Nothing is noted in compiled layers, but they
# are guarded on their recipe: with the recipe of the forward they run the graph of the forward.
_swaps: list[tuple[weakref.ref[Any], Recipe]] = []


def swapping(module: Any) -> None:
    """Note the recipe of ``module``, which is about to change."""
    if not _regions:
        _swaps.clear()
        return
    _swaps.append((weakref.ref(module), module.recipe))


class Region:
    """One forward of a checkpointed region, and the decisions of its layers."""

    def __init__(self) -> None:
        # A region inside a recompute begins at the swap at which the outer region began.
        outer = _thread.replayed
        self._first_swap: int = len(_swaps) if outer is None else outer._first_swap
        _regions.add(self)
        self._recipes: dict[int, tuple[weakref.ref[Tensor], Recipe]] = {}
        record = extensions.filled()
        self._options = contextlib.nullcontext() if record is None else record.carried()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The forward runs."""
        _thread.set((*_thread.noted_by, self), _thread.replayed)
        try:
            yield
        finally:
            # By identity and not by position: a generator that is not exhausted may be closed late.
            others = tuple(region for region in _thread.noted_by if region is not self)
            _thread.set(others, _thread.replayed)

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """The forward runs again."""
        before = _thread.replayed
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._options)
            stack.enter_context(self._recipes_of_forward())
            _thread.set(_thread.noted_by, self)
            try:
                yield
            finally:
                _thread.set(_thread.noted_by, before)

    @contextlib.contextmanager
    def _recipes_of_forward(self) -> Iterator[None]:
        """Give modules whose recipe was swapped since the forward their recipe of that time."""
        now: dict[Any, Recipe] = {}
        for reference, before in _swaps[self._first_swap :]:
            module = reference()
            if module is not None and module not in now:
                now[module] = module.recipe
                module.recipe = before
        try:
            yield
        finally:
            for module, recipe in now.items():
                module.recipe = recipe

    def note(self, weight: Tensor, recipe: Recipe) -> None:
        """The layer of this weight follows this recipe in the forward."""
        self._recipes[id(weight)] = weakref.ref(weight), recipe

    def noted(self, weight: Tensor) -> Recipe | None:
        """The recipe that :meth:`note` got for this weight, or None."""
        found = self._recipes.get(id(weight))
        return None if found is None or found[0]() is not weight else found[1]


def decided(weight: Tensor, recipe: Recipe) -> Recipe:
    """The recipe that the layer of ``weight`` follows: in a recompute the forward's recipe, else ``recipe``."""
    if torch.compiler.is_dynamo_compiling() or not _thread.active:
        return recipe
    if _thread.replayed is not None:
        recipe = _thread.replayed.noted(weight) or recipe
    for region in _thread.noted_by:
        region.note(weight, recipe)
    return recipe


class _Remembering:
    """The function of a reentrant region: called in forward, then once in each backward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._region: Region | None = None

    def __call__(self, *args: Any) -> Any:
        if self._region is None:
            self._region = Region()
            with self._region.forward():
                return self._function(*args)
        with self._region.recompute():
            return self._function(*args)


def _wrapped_entry(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def remembering_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _Remembering(run_function), *args)

    return remembering_forward


def _wrapped_generator(generator: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generator)
    def remembering_generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        region = Region()

        def again(*args: Any, **kwargs: Any) -> Any:
            with region.recompute():
                return fn(*args, **kwargs)

        steps = generator(again, *args, **kwargs)
        next(steps)
        try:
            # The forward runs here.
            with region.forward():
                yield
        except BaseException as error:
            with contextlib.suppress(StopIteration):
                steps.throw(error)
            return
        yield from steps

    return remembering_generator


def _install() -> None:
    entry = getattr(checkpoint, _ENTRY, None)
    name = next((name for name in _GENERATORS if hasattr(checkpoint, name)), None)
    if entry is None or not hasattr(entry, "forward") or name is None:
        raise ImportError(
            f"tritonfp8 needs torch.utils.checkpoint.{_ENTRY} and one of {', '.join(_GENERATORS)}, so that a recompute "
            f"repeats the decisions of its forward; torch {torch.__version__} lacks them. Install a torch that "
            "tritonfp8 was tested with."
        )
    entry.forward = staticmethod(_wrapped_entry(entry.forward))
    generator: Callable[..., Any] = getattr(checkpoint, name)
    for module in (checkpoint, sys.modules.get(_COMPOSABLE)):
        if getattr(module, name, None) is generator:
            setattr(module, name, _wrapped_generator(generator))


_install()
