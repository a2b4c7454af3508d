"""Record the ops of this package that a training step calls, by running the step on tensors without data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tritonfp8 import ops
from tritonfp8.conversion import convert
from tritonfp8.functional import grouped_linear
from tritonfp8.layers.linear import Float8Linear
from tritonfp8.recipes import Recipe
from tritonfp8.specs.checks import first_line
from tritonfp8.training import build_model, next_token_loss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Layout:
    """A tensor without its data: shape, strides and offset in elements, dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        """The layout of ``x``."""
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def zeros(self, device: torch.device | str) -> Tensor:
        """A new tensor of this layout, filled with zero bytes."""
        size = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) + 1
        # Filled as uint8: some devices cannot fill some 8-bit floats.
        memory = torch.zeros(max(size, 0) * self.dtype.itemsize, dtype=torch.uint8, device=device).view(self.dtype)
        return memory.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Call:
    """A call of one of the package's ops: its name and all arguments, tensors as :class:`Layout`, lists as tuples."""

    op: str
    args: tuple[object, ...]

    @classmethod
    def of(cls, op: str, args: tuple[Any, ...]) -> Call:
        """The call of ``tritonfp8::op`` with ``args``; trailing arguments at their defaults may be left out."""

        def plain(arg: object) -> object:
            if isinstance(arg, Tensor):
                return Layout.of(arg)
            return tuple(map(plain, arg)) if isinstance(arg, list) else arg

        # The dispatcher leaves defaults out. They are taken from the reference: a schema has dtypes as numbers.
        reference = ops.OPS[op].reference
        assert reference is not None
        given = inspect.signature(reference).bind(*args)
        given.apply_defaults()
        return cls(op, tuple(map(plain, given.args)))

    @property
    def overload(self) -> Any:
        """The op itself."""
        return getattr(getattr(torch.ops, ops.NAMESPACE), self.op).default

    def named(self) -> dict[str, Any]:
        """The arguments by the names of the op's schema."""
        names = [argument.name for argument in self.overload._schema.arguments]
        return dict(zip(names, self.args, strict=True))

    def arguments(self, device: torch.device | str) -> list[Any]:
        """The arguments for a call on ``device``, tensors full of zeros."""

        def made(arg: Any) -> Any:
            if isinstance(arg, Layout):
                return arg.zeros(device)
            return list(map(made, arg)) if isinstance(arg, tuple) else arg

        return list(map(made, self.args))

    def __str__(self) -> str:
        shapes = [f"[{', '.join(map(str, arg.shape))}]" for arg in self.args if isinstance(arg, Layout)]
        return f"{self.op}({', '.join(shapes)})"


class Recorder(TorchDispatchMode):
    """Records every call of the package's ops inside the ``with`` block, backward passes included.

    Attributes:
        calls: the distinct calls, in the order of their first occurrence.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Call, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the call, and run it."""
        name = func._schema.name.partition("::")[2]
        if func.namespace == ops.NAMESPACE and name in ops.OPS and ops.OPS[name].reference is not None:
            self.calls[Call.of(name, args)] = None
        return func(*args, **(kwargs or {}))


def training_step(model: nn.Module, tokens: Tensor, autocast: bool) -> None:
    """Forward and backward of :func:`tritonfp8.training.next_token_loss`, as ``tritonfp8 train`` runs them."""
    next_token_loss(model, tokens, autocast).backward()


def record_model(model: str, recipe: str, tokens: tuple[int, int], dtype: str) -> list[Call]:
    """The distinct calls of a training step of a model.

    Args:
        model: a preset or the path of a transformers config.
        recipe: the recipe of all linear layers.
        tokens: sequences a step, tokens a sequence.
        dtype: dtype of the weights: ``"float32"`` (runs under bfloat16 autocast), ``"bfloat16"`` or ``"float16"``.

    Raises:
        ValueError: an unknown model or recipe, or a model whose step depends on the values of tensors, which have no
            data here.
    """
    batch, length = tokens
    # On the CPU, so that no GPU is needed: shapes and layouts are the same there.
    with _recording(model) as recorder:
        built = _of_dtype(build_model(model, length, seed=0).train(), DTYPES[dtype])
        convert(built, recipe)
        training_step(built, torch.zeros(batch, length + 1, dtype=torch.long), autocast=dtype == "float32")
    return list(recorder.calls)


def _of_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the parameters of ``model``. ``model.to`` does not work on tensors without data."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
    return model


def record_linear(mnk: tuple[int, ...], recipe: str | Recipe, dtype: str) -> list[Call]:
    """The distinct calls of forward and backward of one linear layer: ``[m, k]`` tokens, ``n`` out features.

    ``recipe`` is a name or a :class:`~tritonfp8.Recipe`; ``dtype`` as for :func:`record_model`.
    """
    m, n, k = mnk
    with _recording("the layer") as recorder:
        compute = _autocast_dtype(dtype)
        layer = Float8Linear(k, n, bias=False, dtype=compute, recipe=recipe)
        out = layer(torch.empty(m, k, dtype=compute, requires_grad=True))
        out.backward(torch.empty_like(out))
    return list(recorder.calls)


def record_grouped_linear(sizes: tuple[int, ...], recipe: str | Recipe, dtype: str) -> list[Call]:
    """The distinct calls of forward and backward of one linear layer of experts.

    Args:
        sizes: tokens of all experts, experts, out features, in features.
        recipe: a name or a :class:`~tritonfp8.Recipe`.
        dtype: as for :func:`record_model`.
    """
    tokens, experts, n, k = sizes
    with _recording("experts") as recorder:
        compute = _autocast_dtype(dtype)
        x, weight = (torch.empty(shape, dtype=compute, requires_grad=True) for shape in ((tokens, k), (experts, n, k)))
        out = grouped_linear(x, weight, torch.empty(experts, dtype=torch.int32), recipe=recipe)
        out.backward(torch.empty_like(out))
    return list(recorder.calls)


def _autocast_dtype(dtype: str) -> torch.dtype:
    """The dtype in which layers compute: autocast would convert float32 to bfloat16."""
    return torch.bfloat16 if dtype == "float32" else DTYPES[dtype]


@contextlib.contextmanager
def _recording(what: str) -> Iterator[Recorder]:
    """Record the calls in the block, whose tensors have shape, strides and dtype, but no data."""
    try:
        with torch.random.fork_rng(devices=[]), FakeTensorMode(), Recorder() as recorder:
            yield recorder
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"a training step of {what} cannot be recorded on tensors without data ({first_line(error)}); list its "
            "linear layers in a file of shapes instead"
        ) from error
