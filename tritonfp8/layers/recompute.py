"""What a forward decided travels to its recompute: activation checkpointing runs a forward again, later.

Between the two, a ``with`` block may have ended and :func:`tritonfp8.swap_recipe` may have been called. Torch's
checkpointing restores its own state (autocast, random numbers) and has no place for that of others. So its two entries
are wrapped, once for the process: they note what is in force when a region's forward begins and which recipe each
weight met in it, and put both back while the region is run again. For models without layers of this package they do
nothing else.

Checkpointing that others wrote (Megatron, DeepSpeed) is not seen: there, keep blocks open until backward has ended, and
change recipes between steps.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from tritonfp8.recipes import Recipe

Capture = Callable[[], AbstractContextManager[object]]
_captures: list[Capture] = []
_ENTRY = "CheckpointFunction"
# The first that there is: since torch 2.14 the other calls it.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
# It imports the generator by name, perhaps before this.
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"


def carry(capture: Capture) -> None:
    """Let ``capture()``, called when a forward begins, return a context manager that puts its state back.

    It is entered and left again in each recompute, on whichever thread that runs.
    """
    _captures.append(capture)


_regions: weakref.WeakSet[Region] = weakref.WeakSet()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.noted_by: tuple[Region, ...] = ()
        self.replayed: Region | None = None
        self.active = False

    def set(self, noted_by: tuple[Region, ...], replayed: Region | None) -> None:
        self.noted_by, self.replayed = noted_by, replayed
        self.active = bool(noted_by) or replayed is not None


_thread = _Thread()


# What a module followed before each swap since the oldest region began. A compiled layer, in which nothing is noted, is
# guarded on its recipe: with the one of the forward it takes the forward's graph.
_swaps: list[tuple[weakref.ref[Any], Recipe]] = []


def swapping(module: Any) -> None:
    """The recipe of ``module`` is about to be changed."""
    if not _regions:
        _swaps.clear()
        return
    _swaps.append((weakref.ref(module), module.recipe))


class Region:
    """One forward of a checkpointed region, and what its layers decided."""

    def __init__(self) -> None:
        # A region inside one that runs again begins where that one did.
        outer = _thread.replayed
        self._first_swap: int = len(_swaps) if outer is None else outer._first_swap
        _regions.add(self)
        self._recipes: dict[int, tuple[weakref.ref[Tensor], Recipe]] = {}
        self._restore = [capture() for capture in _captures]

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """The forward runs."""
        _thread.set((*_thread.noted_by, self), _thread.replayed)
        try:
            yield
        finally:
            # By identity: a generator that is not exhausted may be closed late.
            others = tuple(region for region in _thread.noted_by if region is not self)
            _thread.set(others, _thread.replayed)

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """The forward runs again."""
        before = _thread.replayed
        with contextlib.ExitStack() as stack:
            for restore in self._restore:
                stack.enter_context(restore)
            stack.enter_context(self._recipes_of_forward())
            _thread.set(_thread.noted_by, self)
            try:
                yield
            finally:
                _thread.set(_thread.noted_by, before)

    @contextlib.contextmanager
    def _recipes_of_forward(self) -> Iterator[None]:
        """Modules whose recipe was swapped since the forward follow the one that they had then."""
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
        """What :meth:`note` was told of this weight."""
        found = self._recipes.get(id(weight))
        return None if found is None or found[0]() is not weight else found[1]


def decided(weight: Tensor, recipe: Recipe) -> Recipe:
    """The recipe that the layer of ``weight`` follows: in a recompute the one of the forward, else ``recipe``."""
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
            f"follows what its forward decided; torch {torch.__version__} lacks them. Install a torch that tritonfp8 "
            "was tried with."
        )
    entry.forward = staticmethod(_wrapped_entry(entry.forward))
    generator: Callable[..., Any] = getattr(checkpoint, name)
    for module in (checkpoint, sys.modules.get(_COMPOSABLE)):
        if getattr(module, name, None) is generator:
            setattr(module, name, _wrapped_generator(generator))


_install()
