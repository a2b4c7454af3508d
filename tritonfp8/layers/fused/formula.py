"""The formula that a module's forward computes, read from its source: none of it runs, and nothing is patched.

A forward has a formula if it has no branches and consists of local names, multiplications, and calls of linears, SiLU
and a few functions. With anything else (``if``, ``with``, a decorator, a helper, an attribute that is a number) it has
none.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import operator
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

FUNCTIONS = ((F.silu, "silu"), (operator.mul, "mul"), (torch.mul, "mul"))


class NoFormulaError(Exception):
    """A forward has no formula; the message names the reason."""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


@functools.lru_cache(maxsize=64)
def _definition(code: CodeType) -> ast.FunctionDef:
    """The definition that was compiled to ``code``."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
        # Compile the whole file, as Python did. If the file was edited since, its code differs.
        file = compile("".join(linecache.getlines(code.co_filename)), code.co_filename, "exec", dont_inherit=True)
    except (OSError, SyntaxError, IndexError) as error:
        raise NoFormulaError("its source is not available") from error
    if code not in _codes(file):
        raise NoFormulaError("its source is not what was compiled")
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list or code.co_freevars:
        raise NoFormulaError("it is decorated, closes over names, or is no plain function")
    return definition


class Formula(NamedTuple):
    """The formula of a module's forward.

    Attributes:
        text: calls of linears, ``silu`` and ``mul`` on ``x``; the operands of ``mul`` are sorted.
        reads: the other functions and modules that the forward calls, by the attribute of the module.
    """

    text: str
    reads: dict[str, object]


class _Reader:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.reads: dict[str, object] = {}
        forward = type(module).forward
        if not isinstance(forward, FunctionType):
            raise NoFormulaError("its forward is no plain function")
        self.globals = forward.__globals__
        definition = _definition(forward.__code__)
        arguments = definition.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        if len(names) != 2 or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults:
            raise NoFormulaError("it takes more than one input")
        self.self_name = names[0]
        self.locals = {names[1]: "x"}
        self.body = definition.body

    def read(self) -> Formula:
        return Formula(self._run(self.body), self.reads)

    def _run(self, body: list[ast.stmt]) -> str:
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name != self.self_name:
                    self.locals[name] = self._value(value)
                case ast.Return(value=ast.expr() as value) if statement is body[-1]:
                    return self._value(value)
                case _:
                    raise NoFormulaError(f"it has {ast.unparse(statement).splitlines()[0]!r}")
        raise NoFormulaError("it returns nothing")

    def _value(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name) if name in self.locals:
                return self.locals[name]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return _call("mul", [self._value(left), self._value(right)])
            case ast.Call(func=function, args=arguments, keywords=[]):
                return _call(self._callee(function), [self._value(argument) for argument in arguments])
        raise NoFormulaError(f"it has {ast.unparse(node)!r}")

    def _callee(self, node: ast.expr) -> str:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == self.self_name:
                called = getattr(self.module, attribute, None)
                if isinstance(called, nn.Linear):
                    return attribute
                self.reads[attribute] = called
                if isinstance(called, nn.Module):
                    return _activation(called)
            case _:
                called = self._global(node)
        for function, function_name in FUNCTIONS:
            if called is function:
                return function_name
        raise NoFormulaError(f"it calls {ast.unparse(node)}")

    def _global(self, node: ast.expr) -> object:
        match node:
            case ast.Name(id=name) if name not in self.locals:
                return self.globals.get(name)
            case ast.Attribute(value=value, attr=attribute):
                owner = self._global(value)
                return getattr(owner, attribute, None) if isinstance(owner, ModuleType) else None
        return None


def _activation(module: nn.Module) -> str:
    """The name of the function that a module computes: of ``nn.SiLU`` by its class, of others by their formula."""
    if type(module) is nn.SiLU:
        return "silu"
    name, argument = type(module).__name__, read_formula(module).text
    if argument != "silu(x)" or type(module).__call__ is not nn.Module.__call__:
        raise NoFormulaError(f"it calls {name}")
    return "silu"


def _call(name: str, operands: list[str]) -> str:
    return f"{name}({', '.join(sorted(operands) if name == 'mul' else operands)})"


def read_formula(module: nn.Module) -> Formula:
    """The formula of the forward that the module's class defines.

    Raises:
        NoFormulaError: it has no formula.
    """
    return _Reader(module).read()
