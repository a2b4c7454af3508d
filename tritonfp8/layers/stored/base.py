"""The base of all tensors of codes: they have no memory of their own, and other programs meet them as Parameters.

Shards of them have the hooks by which FSDP2 gathers their bytes.
"""

from __future__ import annotations

import inspect
import math
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from tritonfp8.checks import require
from tritonfp8.compat import torch_private
from tritonfp8.layers.extensions import distributed

DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes in which every code times its scale is exact. In float16 a small scale would be rounded."""


# Float32 scales behind codes must begin at a multiple of 4 bytes; TMA reads from multiples of 16.
_ALIGNMENT = 16


class _Made(torch_private.TensorType):
    """Lets other programs make a Parameter of the type of one that they have: ``type(p)(x, requires_grad=...)``."""

    def __call__(cls, *args: Any, requires_grad: bool | None = None, **options: Any) -> Any:
        if len(args) == 2 and isinstance(args[-1], bool):
            *args, requires_grad = args  # type: ignore[assignment]
        if requires_grad is None and len(args) != 1:
            return super().__call__(*args, **options)
        found = _parameter_of(cls, args[0], requires_grad is not False, inspect.currentframe())
        # init_empty_weights passes all attributes of the other one, its inner tensors among them.
        vars(found).update({name: value for name, value in options.items() if name not in vars(found)})
        return found


def _parameter_of(cls: Any, x: Any, requires_grad: bool, call: FrameType | None) -> nn.Parameter:
    if isinstance(x, CodesTensor):
        return nn.Parameter(x, requires_grad)
    before = None if call is None or call.f_back is None else _replaced(cls, x, call.f_back)
    if before is None:
        raise TypeError(
            f"a {cls.__name__} is made of codes, and {type(x).__name__} has none: a weight that is stored in 8 bits "
            "takes values by copy_, by load_state_dict, or by an assignment to its layer (layer.weight = "
            "nn.Parameter(values))"
        )
    return nn.Parameter(before.of_values(x), requires_grad)


def _replaced(cls: type, x: Any, caller: FrameType) -> Any:
    """The stored weight whose place ``x`` is about to take, among the variables of the code that makes the Parameter.

    accelerate has the module and the name of the parameter, and the parameter itself.
    """
    found = list(caller.f_locals.values())
    names = [each for each in found if isinstance(each, str)]
    owned = [each._parameters.get(name) for each in found if isinstance(each, nn.Module) for name in names]
    alike: list[Any] = [each for each in [*owned, *found] if type(each) is cls]
    return next((each for each in alike if each.shape == getattr(x, "shape", None)), None)


class _Read(torch.autograd.Function):
    """The values of a weight; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        found: Tensor = weight.plain_values()
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class CodesTensor(Tensor, metaclass=_Made):
    """A tensor whose values are computed from codes at each use, and which has no memory of its own.

    torch writes to the memory of any tensor in some of the methods below, which would end the process. A derived class
    has ``__tensor_flatten__`` and ``__tensor_unflatten__``.
    """

    __torch_function__ = torch_private.without_torch_function
    # Whether other ranks may have a part of its blocks.
    is_part = False

    def plain_values(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in the shape of the weight: a plain tensor without a gradient, exact.

        Raises:
            ValueError: not every value is exact in this dtype. A cast of a model raises nothing: it keeps the codes.
        """
        dtype = dtype or self.dtype
        if dtype == torch.float64:
            return self._plain(torch.float32).double()
        require(
            "the dtype of a weight that is stored in 8 bits (cast the model by bfloat16() or float())", dtype, DTYPES
        )
        return self._plain(dtype)

    def _plain(self, dtype: torch.dtype) -> Tensor:
        """The values in one of :data:`DTYPES`."""
        raise self._refusal("dequantize()")

    def tolist(self) -> Any:
        """The values as nested lists of numbers."""
        return self.plain_values().tolist()

    def dequantize(self) -> Tensor:
        """The values in the shape and dtype of the weight: a plain tensor, exact. Its gradient is the weight's."""
        if self.requires_grad and torch.is_grad_enabled():
            found: Tensor = _Read.apply(self)  # type: ignore[no-untyped-call]
            return found
        return self.plain_values()

    def of_values(self, values: Tensor) -> Self:
        """Another tensor of this kind, of the codes of ``values``, which have the shape of this one.

        Raises:
            NotImplementedError: the scales are not known from these values alone.
        """
        raise self._refusal("to take values of another tensor")

    def _inner(self) -> dict[str, Tensor]:
        """The tensors that have memory, by the names of attributes."""
        return {name: getattr(self, name) for name in self.__tensor_flatten__()[0]}  # type: ignore[attr-defined]

    @classmethod
    def _refusal(cls, what: str) -> NotImplementedError:
        # Not a TypeError: torch would replace it, in an operator such as +=, by one that names no cause.
        return NotImplementedError(
            f"{what} does not work on a weight that is stored in 8 bits ({cls.__name__}). Read its values by "
            "weight.dequantize(), a plain tensor, and write values by weight.copy_(values); average it in a "
            "tritonfp8.optim.float32_copy(model); or use tritonfp8.revert(model), which gives the layers plain weights "
            "again"
        )

    def become(self, other: Tensor) -> None:
        """Take codes, dtype and device of another tensor of the same type; whoever has this tensor sees them."""
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.__dict__.update(vars(other))

    def share_memory_(self) -> Self:
        """Move codes and scales to memory that processes share."""
        for x in self._inner().values():
            x.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether processes share the memory of codes and scales."""
        return all(x.is_shared() for x in self._inner().values())

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: a write to the array would be lost.

        Raises:
            NotImplementedError: always.
        """
        raise self._refusal("numpy()")

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise self._refusal("numpy()")

    def apply_(self, function: Any) -> Any:
        """Refused: torch would write to memory that this tensor lacks.

        Raises:
            NotImplementedError: always.
        """
        raise self._refusal("apply_")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle does not know memory of 8-bit floats, so they are sent as bytes.
        context, inner = self.__tensor_flatten__()[1], self._inner()  # type: ignore[attr-defined]
        sent = {name: (t.view(torch.uint8) if t.itemsize == 1 else t, t.dtype) for name, t in inner.items()}
        others = {name: value for name, value in self.__dict__.items() if name not in inner}
        return _unpickled, (type(self), sent, context, self.requires_grad, isinstance(self, nn.Parameter), others)


def _unpickled(
    cls: Any,
    sent: dict[str, tuple[Tensor, torch.dtype]],
    context: Any,
    requires_grad: bool,
    is_parameter: bool,
    others: dict[str, Any],
) -> Tensor:
    x = cls.__tensor_unflatten__({name: t.view(dtype) for name, (t, dtype) in sent.items()}, context, None, None)
    found: Tensor = nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)
    found.__dict__.update(others)
    return found


def carry_marks(found: Tensor, before: Tensor) -> Tensor:
    """``found``, with the attributes that other code set on ``before``, whose place it takes.

    transformers marks what it has loaded, and initializes a weight without the mark again.
    """
    if found is not before:
        # A tensor subclass has attributes of its own, which belong to its memory.
        own = nn.Parameter(before.detach(), False).__dict__.keys() | found.__dict__.keys()
        found.__dict__.update({name: value for name, value in before.__dict__.items() if name not in own})
    return found


def replacing(before: Tensor, weight: Tensor, requires_grad: bool) -> nn.Parameter:
    """A Parameter of ``weight`` in the place of ``before``, whose marks it has."""
    parameter = nn.Parameter(weight, requires_grad)
    carry_marks(parameter, before)
    return parameter


class Gathered:
    """The all-gather hooks of a shard, which FSDP2 calls by name: codes and scales are sent as bytes.

    The class that inherits from it is a tensor with rows, or experts, along dim 0.
    """

    shape: torch.Size
    # The size of dim 0 of all shards together, if this is a shard of FSDP2.
    total: int | None
    # Whether tritonfp8.distributed has checked how FSDP2 gathers it.
    is_checked = False

    def as_bytes(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as uint8, not copied; dim 0 is that of the tensor."""
        raise NotImplementedError

    def _of_gathered(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole weight over the gathered bytes, views of them."""
        raise NotImplementedError

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """The bytes that this rank sends, as many on every rank."""
        if not self.is_checked:
            distributed().check_gather(self)
            self.is_checked = True
        total = self.shape[0] if self.total is None else self.total
        # With torch's replicate, a rank has more than a shard of this mesh: all of the weight.
        size = max(-(-total // mesh.size()), self.shape[0])
        sent = tuple(_extended(x, size) for x in self.as_bytes())
        # FSDP2 sends nothing if a shard is the whole, and hands on the first tensor only.
        return (_joined(*sent),) if size == total else sent, None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The gathered weight, a view of the gathered bytes; FSDP2 cuts off what fills uneven shards."""
        if out is not None:
            # It is a view of the same memory, which FSDP2 has filled again.
            return None
        codes, scales = outputs if len(outputs) > 1 else self._parted(outputs[0])
        return self._of_gathered(codes, scales, param_dtype), ()

    def _parted(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of :func:`_joined`, of the whole weight: views of the buffer."""
        total = self.shape[0] if self.total is None else self.total
        codes, scales = ((total, *x.shape[1:]) for x in self.as_bytes())
        sizes = math.prod(codes), math.prod(scales)
        return buffer[: sizes[0]].view(codes), buffer[_start_of_scales(sizes[0]) :][: sizes[1]].view(scales)


def _extended(x: Tensor, size: int) -> Tensor:
    """``x`` with zeros behind it, up to this size of dim 0."""
    missing = size - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _start_of_scales(codes: int) -> int:
    return -(-codes // _ALIGNMENT) * _ALIGNMENT


def _joined(codes: Tensor, scales: Tensor) -> Tensor:
    """Both in one buffer: a copy, free again when FSDP2 has copied it."""
    gap = codes.new_zeros(_start_of_scales(codes.numel()) - codes.numel())
    return torch.cat([codes.reshape(-1), gap, scales.reshape(-1)])
