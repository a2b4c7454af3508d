"""Checks of arguments: each raises an error that names what was required and what came.

Exports the checks that several folders use.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = [
    "nearest",
    "check_floating",
    "check_strided",
    "first_line",
    "is_among",
    "require",
    "require_flag",
    "require_int",
    "require_type",
    "shown",
]


def require(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``; the message names ``allowed`` and ``value``."""
    if not is_among(value, allowed):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {shown(value)}")


def is_among(value: object, allowed: Sequence[object]) -> bool:
    """Whether ``value`` is one of ``allowed``, which are not arrays or tensors."""
    # `in` compares arrays and tensors element by element and raises; they are never allowed.
    return not hasattr(value, "__array__") and value in allowed


def shown(value: object, limit: int = 80) -> str:
    """``value`` as text for a message: its repr, cut to ``limit`` characters; the dtype of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}"
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, with the known name most like ``name``; a full stop if none is like it."""
    found = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else "."


def require_type(name: str, value: object, kind: Any, what: str) -> None:
    """Raise TypeError unless ``value`` is a ``kind`` (a type or a union); the message calls it ``what``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {what}; got {type(value).__name__}")


def require_int(name: str, value: object, least: int) -> None:
    """Raise TypeError unless ``value`` is an int, and no flag; and ValueError below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def require_flag(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    require_type(name, value, bool, "True or False")


_FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_floating(name: str, x: torch.Tensor) -> None:
    """Raise TypeError unless ``x`` is a tensor of bf16, fp16, fp32 or fp64."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
    if x.dtype not in _FLOATING:
        raise TypeError(f"{name} must be bfloat16, float16, float32 or float64; got {x.dtype}. Cast it first.")
    check_strided(name, x)


def check_strided(name: str, x: torch.Tensor) -> None:
    """Raise TypeError for a sparse, nested or opaque tensor."""
    # Skipped under Dynamo, which traces dense tensors only and must not read the layout.
    if torch.compiler.is_dynamo_compiling():
        return
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"a {x.layout} tensor"
        raise TypeError(f"{name} must be a dense (torch.strided) tensor; got {kind}. Use its to_dense() or padding.")
