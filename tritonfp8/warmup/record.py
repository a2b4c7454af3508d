"""Which ops of this package a training step calls, found by running the step on tensors without data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tritonfp8 import ops
from tritonfp8.convert import convert
from tritonfp8.layers.linear import Float8Linear
from tritonfp8.recipes import Recipe

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
        """A tensor of this layout and zero bytes, a view of memory of its own."""
        size = self.offset + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) + 1
        # As bytes: not every device fills every 8-bit float.
        memory = torch.zeros(max(size, 0) * self.dtype.itemsize, dtype=torch.uint8, device=device).view(self.dtype)
        return memory.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Call:
    """A call of one of the package's ops: its name and all arguments, tensors as :class:`Layout`, lists as tuples."""

    op: str
    args: tuple[object, ...]

    @classmethod
    def of(cls, op: str, args: tuple[Any, ...]) -> Call:
        """The call of ``tritonfp8::op`` with ``args``, those at the end that are at their defaults given or not."""

        def plain(arg: object) -> object:
            if isinstance(arg, Tensor):
                return Layout.of(arg)
            return tuple(map(plain, arg)) if isinstance(arg, list) else arg

        # The dispatcher leaves defaults out. A schema has dtypes as numbers, the reference has them as they are.
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
    """Notes every call of the package's ops inside the ``with`` block, backward passes included.

    Attributes:
        calls: the distinct calls, in the order in which they first came.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Call, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call and let it go on."""
        name = func._schema.name.partition("::")[2]
        if func.namespace == ops.NAMESPACE and name in ops.OPS and ops.OPS[name].reference is not None:
            self.calls[Call.of(name, args)] = None
        return func(*args, **(kwargs or {}))


def training_step(model: nn.Module, tokens: Tensor, autocast: bool) -> None:
    """Forward and backward of a causal language model, as ``tritonfp8 train`` runs them.

    Args:
        model: returns ``.logits``, ``[batch, length, vocabulary]``.
        tokens: int64 ``[batch, length + 1]``.
        autocast: whether bfloat16 autocast is on.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()


def record_model(model: str, recipe: str, tokens: tuple[int, int], dtype: str) -> list[Call]:
    """What a training step of a model calls.

    Args:
        model: a preset or the path of a transformers config.
        recipe: of all its linear layers.
        tokens: sequences a step, tokens a sequence.
        dtype: of the weights: ``"float32"``, with bfloat16 autocast; or ``"bfloat16"`` or ``"float16"``, without.

    Raises:
        ValueError: no such model or recipe, or the step decides by what tensors hold, which these do not.
    """
    from tritonfp8.training import build_model

    batch, length = tokens
    # On the CPU: shapes and layouts are those of a GPU, and none is needed.
    with torch.random.fork_rng(devices=[]), _without_data(model), Recorder() as recorder:
        built = _of_dtype(build_model(model, length, seed=0).train(), DTYPES[dtype])
        convert(built, recipe)
        training_step(built, torch.zeros(batch, length + 1, dtype=torch.long), autocast=dtype == "float32")
    return list(recorder.calls)


def _of_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model.to(dtype)``, which does not work on tensors without data, as far as parameters go."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != dtype:
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
    return model


def record_linear(mnk: tuple[int, ...], recipe: str | Recipe, dtype: str) -> list[Call]:
    """What forward and backward of one linear layer call: ``[m, k]`` tokens, ``n`` out features.

    ``recipe`` is a name or a :class:`~tritonfp8.Recipe`; ``dtype`` as for :func:`record_model`.
    """
    m, n, k = mnk
    with torch.random.fork_rng(devices=[]), _without_data("the layer"), Recorder() as recorder:
        # Autocast would make bfloat16 of float32.
        compute = torch.bfloat16 if dtype == "float32" else DTYPES[dtype]
        layer = Float8Linear(k, n, bias=False, dtype=compute, recipe=recipe)
        out = layer(torch.empty(m, k, dtype=compute, requires_grad=True))
        out.backward(torch.empty_like(out))
    return list(recorder.calls)


@contextlib.contextmanager
def _without_data(what: str) -> Iterator[None]:
    """Make every tensor in the ``with`` block one of shape, strides and dtype alone."""
    try:
        with FakeTensorMode():
            yield
    except (RuntimeError, NotImplementedError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"a training step of {what} cannot be followed without running it ({type(error).__name__}: {first}); list "
            "its linear layers in a file of shapes instead"
        ) from error
