"""The private names of Inductor, torch's compiler: for rewrites of graphs, and for direct calls in the code it writes.

They are known in torch 2.11 to 2.15, the table of passes in 2.11 to 2.14. If one is missing, graphs stay as they are,
and the code calls our ops through torch's dispatcher: the results are the same, with more launches, and each call takes
more host time.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_COMPILER = "torch._inductor.compile_fx"
SITE = "tritonfp8_site_"
"""Begins the names of functions for one place in the code; the number of the place follows."""


def is_loaded() -> bool:
    """Whether Inductor is imported; importing it takes seconds, so nothing but a compilation should."""
    return _COMPILER in sys.modules


class InPlace(NamedTuple):
    """A function that writes the first result of an op over one of its arguments, and returns the same results.

    Attributes:
        function: its name in the code.
        place: of the argument, among the tensors of a call.
    """

    function: str
    place: int


class Direct(NamedTuple):
    """What stands in the place of an op.

    Attributes:
        function: its name in the code. It is called by position, with the arguments of the op.
        site: a Python expression that makes a function for one place in the code, where tensors always have the same
            layouts; None if ``function`` serves there, too.
        in_place: what serves where the code does not need that argument afterwards; None if nothing does.
    """

    function: str
    site: str | None = None
    in_place: InPlace | None = None


def call_directly(calls: Mapping[str, Direct], import_line: str) -> bool:
    """Let the Python code that Inductor writes call other functions in place of ops.

    Code in C++ (``cpp_wrapper``, AOTInductor) calls the ops as before.

    Args:
        calls: by the name of an op, such as ``"torch.ops.tritonfp8.amax.default"``.
        import_line: a statement that defines the names of the functions. It is written into the code, which torch keeps
            on disk.

    Returns:
        Whether it will; False if this torch lacks a name for that.
    """
    try:
        from torch._inductor.codegen.custom_extern_kernel_codegen import (
            CUSTOM_EXTERN_KERNEL_CODEGEN,
            CustomCodegen,
        )
        from torch._inductor.codegen.wrapper import ExternKernelAllocLine
        from torch._inductor.virtualized import V
    except ImportError:
        return False

    class DirectCall(ExternKernelAllocLine):
        """A line that calls the other function. The rest of it is as Inductor writes it."""

        function: str

        def codegen(self, code: Any) -> None:
            node: Any = self.node
            name = node.python_kernel_name
            arguments = positional(node)
            node.python_kernel_name = self.function
            try:
                self.wrapper._generate_extern_kernel_alloc_helper(node, arguments)
            finally:
                node.python_kernel_name = name

    sites: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()

    def write(node: Any, writeline: Callable[[Any], None]) -> None:
        wrapper = V.graph.wrapper_code
        if V.graph.cpp_wrapper:
            writeline(ExternKernelAllocLine(wrapper, node))
            return
        # A graph inside of another one has no imports of its own.
        root = wrapper.get_root_graph() if hasattr(wrapper, "get_root_graph") else wrapper
        root.add_import_once(import_line)
        line = DirectCall(wrapper, node)
        line.function, maker, in_place = calls[node.python_kernel_name]
        if in_place is not None and is_free_after(node, in_place.place):
            line.function = in_place.function
        elif maker is not None and has_fixed_layouts(node):
            line.function = f"{SITE}{next(sites.setdefault(root, itertools.count()))}"
            root.add_import_once(f"{line.function} = {maker}")
        writeline(line)

    CUSTOM_EXTERN_KERNEL_CODEGEN.update(dict.fromkeys(calls, CustomCodegen(python=write)))
    return True


def is_called_directly(name: str) -> bool:
    """Whether code that Inductor writes now calls another function in place of an op, by :func:`call_directly`."""
    try:
        from torch._inductor import config
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN
    except ImportError:
        return False
    return name in CUSTOM_EXTERN_KERNEL_CODEGEN and not config.cpp_wrapper


class _Rewrite(NamedTuple):
    """A function that rewrites graphs, as an entry of Inductor's table of passes."""

    apply: Callable[[Any], int]


def rewrite_graphs(rewrite: Callable[[Any], int]) -> bool:
    """Let ``rewrite`` change each graph in place after autograd, before Inductor writes code for it.

    Args:
        rewrite: takes a ``torch.fx.Graph``; returns how many places it changed.

    Returns:
        Whether it will; False if this torch lacks the table of passes.
    """
    try:
        from torch._inductor.fx_passes import post_grad

        passes: list[Any] = post_grad.pass_patterns
    except (ImportError, AttributeError):
        return False
    passes[:] = [entry for entry in passes if not isinstance(entry, _Rewrite)] + [_Rewrite(rewrite)]
    return True


def has_fixed_layouts(node: Any) -> bool:
    """Whether every tensor that the call gets has sizes and strides that are numbers, not symbols."""
    tensors = [x for each in node.inputs for x in (each if isinstance(each, list | tuple) else [each])]
    sizes = itertools.chain.from_iterable((*x.get_size(), *x.get_stride()) for x in tensors)
    return all(isinstance(size, int) or size.is_Integer for size in sizes)


def is_free_after(node: Any, place: int) -> bool:
    """Whether nobody needs a tensor that a call gets, once the call returned: neither later code nor autograd.

    That holds for the last use of a tensor that only forward and backward of one graph know (torch: donated buffer), if
    no other one shares its memory. torch refuses to run such a backward twice.
    """
    try:
        from torch._inductor.ir import DonatedBuffer, ReinterpretView
        from torch._inductor.virtualized import V

        graph: Any = V.graph
        x = node.inputs[place]
        name = x.get_name()
        last_used = graph.scheduler.current_node.last_usage
        given = graph.graph_inputs_original.get(name)
        placeholders = graph.module.graph.find_nodes(op="placeholder")
    except (ImportError, AttributeError):
        return False
    if not isinstance(given, DonatedBuffer) or isinstance(x, ReinterpretView) or name not in last_used:
        return False
    fakes = {node.target: node.meta["val"] for node in placeholders if hasattr(node.meta.get("val"), "untyped_storage")}
    own = fakes.pop(name, None)
    if own is None:
        return False
    return all(other.untyped_storage()._cdata != own.untyped_storage()._cdata for other in fakes.values())


def call_ops(names: Iterable[str]) -> None:
    """Undo :func:`call_directly`, for graphs that are compiled from now on."""
    with contextlib.suppress(ImportError):
        from torch._inductor.codegen.custom_extern_kernel_codegen import CUSTOM_EXTERN_KERNEL_CODEGEN

        for name in names:
            CUSTOM_EXTERN_KERNEL_CODEGEN.pop(name, None)


def positional(node: Any) -> list[str]:
    """The arguments of a call in the code, by position and without defaults at the end.

    Inductor names each argument that the graph left out, and gives it the default of the schema.
    """
    schema = node.op_overload._schema.arguments
    by_position = node.codegen_args()
    by_name = dict(text.split("=", 1) for text in node.codegen_kwargs())
    found, given = list(by_position), len(by_position)
    for index, argument in enumerate(schema[given:], given + 1):
        name = argument.name
        is_default = name not in by_name or (
            argument.has_default_value() and node.kwargs.get(name) == argument.default_value
        )
        found.append(by_name.get(name, repr(argument.default_value)))
        given = given if is_default else index
    return found[:given]
