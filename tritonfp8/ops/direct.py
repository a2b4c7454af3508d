"""The ops as plain functions, which compiled graphs call without torch's dispatcher.

In the code that Inductor writes, torch's dispatcher takes about half of the host time of a call: 39.6 us with
it and 21.0 without, on the host of an H200 (2026-11). So Inductor is asked to write calls of :data:`CALLS`; and of call
sites, where the layouts of the tensors are fixed (:mod:`tritonfp8.ops.call_site`).

A profiler and a dispatch mode, such as torch's FLOP counter, see ops. While there is one, the functions call their ops.

Torch keeps compiled graphs on disk, with the code that calls these functions. Their keys do not depend on this package,
so :data:`CODE` is added to them: after an update of the package graphs are compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tritonfp8.compat import inductor_private, torch_private
from tritonfp8.launch import Plannable
from tritonfp8.ops import passes
from tritonfp8.ops.call_site import call_site

PACKAGE = Path(__file__).resolve().parents[1]


def digest(files: Iterable[Path]) -> str:
    """A hash of the contents of ``files``."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


CODE = digest(PACKAGE.rglob("*.py"))
"""A hash of every module of the package, in all folders."""

CALLS = SimpleNamespace()
"""The functions by the names of their ops. Compiled graphs on disk import it, so it must keep its place and name."""

_ALIAS = "tritonfp8_calls"
_SITE_ALIAS = "tritonfp8_site"
_IMPORT = f"from {__name__} import CALLS as {_ALIAS}, site as {_SITE_ALIAS}"

_CHAIN = "torch.ops.tritonfp8.chain.default"

_plannable: dict[str, Plannable] = {}
_calls: dict[str, inductor_private.Direct] = {}
_is_offered = False


def site(name: str) -> Callable[..., Any]:
    """The function of an op for one place in a graph, where tensors always have the same layouts.

    Compiled graphs on disk import it, so it must keep its place and name.
    """
    return call_site(_plannable[name], lambda *args: getattr(CALLS, name)(*args))


def add(
    name: str,
    op: Any,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    plannable: Plannable | None = None,
    is_seen: bool = True,
) -> None:
    """Add the function of an op.

    Args:
        name: of the op.
        op: its overload, which goes through the dispatcher.
        cpu: implements it on a CPU.
        cuda: implements it on a GPU.
        plannable: how plans are made of its arguments, if a plan serves all that ``cuda`` does.
        is_seen: whether a mode or a profiler should see the op; else ``cuda`` serves every call.
    """
    setattr(CALLS, name, _without_dispatcher(op, cpu, cuda) if is_seen else cuda)
    maker = None
    if plannable is not None:
        _plannable[name] = plannable
        maker = f"{_SITE_ALIAS}({name!r})"
    _calls[f"torch.ops.{op}"] = inductor_private.Direct(f"{_ALIAS}.{name}", maker)


def _without_dispatcher(op: Any, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> Callable[..., Any]:
    modes, is_profiled = torch_private.dispatch_mode_count, torch_private.is_profiled

    def call(x: Tensor, *args: Any) -> Any:
        if modes() or is_profiled():
            return op(x, *args)
        return cuda(x, *args) if x.is_cuda else cpu(x, *args)

    return call


def add_in_place(name: str, op: Any, cpu: Callable[..., Any], cuda: Callable[..., Any], place: int) -> None:
    """Add a function that writes the first result of an op over an argument, for graphs that need it no longer.

    Args:
        name: of the function.
        op: the overload of the op, whose function was added before.
        cpu: implements the op on a CPU, and writes over nothing.
        cuda: does both on a GPU.
        place: index of that argument, which is a tensor like the result. Those before it are tensors, too.
    """

    def on_cpu(*args: Any) -> Any:
        x, found = args[place], cpu(*args)
        return x.copy_(found) if isinstance(found, Tensor) else (x.copy_(found[0]), *found[1:])

    setattr(CALLS, name, _without_dispatcher(op, on_cpu, cuda))
    key = f"torch.ops.{op}"
    _calls[key] = _calls[key]._replace(in_place=inductor_private.InPlace(f"{_ALIAS}.{name}", place))


def _sign_graphs() -> None:
    """Make :data:`CODE` a part of the keys of graphs on disk. A tag that the user gave them stays."""
    config: Any = torch.compiler.config
    if CODE not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {CODE}".strip()


def rewrite(graph: Any) -> int:
    """The rewrites of :mod:`tritonfp8.ops.passes`, in place; how many places changed."""
    changed = passes.rewrite(graph)
    return changed + passes.join_chains(graph) if inductor_private.is_called_directly(_CHAIN) else changed


def offered(fake: Callable[..., Any]) -> Callable[..., Any]:
    """``fake``, which also signs graphs, and tells Inductor of the functions and of :mod:`tritonfp8.ops.passes`, once.

    A graph with one of our ops is traced through the fake of that op. So this runs before torch looks for the graph on
    disk, and before Inductor writes code for it.
    """

    @functools.wraps(fake)
    def run(*args: Any, **options: Any) -> Any:
        global _is_offered
        _sign_graphs()
        if not _is_offered and inductor_private.is_loaded():
            _is_offered = True
            inductor_private.call_directly(_calls, _IMPORT)
            inductor_private.rewrite_graphs(rewrite)
        return fake(*args, **options)

    return run


@contextlib.contextmanager
def through_the_dispatcher() -> Iterator[None]:
    """Graphs that are compiled in this block call ops: to compare. Graphs on disk may have the functions."""
    global _is_offered
    _is_offered = True
    inductor_private.call_ops(_calls)
    try:
        yield
    finally:
        _is_offered = False
