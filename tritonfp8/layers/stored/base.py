"""The base of all tensors of codes: they have no memory of their own, and other programs meet them as Parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from tritonfp8 import ops
from tritonfp8.compat import torch_private
from tritonfp8.specs import EXPANDED, QuantSpec, are_transposable, expands_to
from tritonfp8.specs.checks import require
from tritonfp8.specs.formats import BYTE_FORMATS

DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes in which every code times its scale is exact. In float16 a small scale would be rounded."""


def decomposed(func: Any, args: Any, options: Any) -> Any:
    """The result of an op that torch decomposes before it comes to a tensor type, but not in inference mode.

    NotImplemented for other ops. ``DTensor.to_local()`` calls such an op.
    """
    return func.decompose(*args, **options) if torch.is_inference_mode_enabled() else NotImplemented


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
            NotImplementedError: these values do not determine the scales.
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
        others = {name: value for name, value in self.__dict__.items() if name not in {*inner, "_row_scale"}}
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


class StoredTensor(CodesTensor):
    """A weight, or a part of one, that has codes and scales in memory, and no copy in high precision.

    A derived class is made of the tensors that it names in ``inner_names``, and of the attributes that it names in
    ``attribute_names``, in this order.
    """

    inner_names: tuple[str, str]
    attribute_names: tuple[str, ...]
    spec: QuantSpec
    # Whether this tensor is the transpose of the codes.
    is_transposed: bool = False
    _qdata: Tensor
    # The scales that ``expand_codes`` gives rows, float32 ``[..., N, 1]``; None where each expansion finds them. A part
    # of the memory of a whole weight has them for its writes, not for its reads, as FSDP2 fills memory of parts again.
    _row_scale: Tensor | None = None
    # Quantizes values, or their transpose: ``(qdata, scale)``.
    _cast: Callable[..., tuple[Tensor, Tensor]] = staticmethod(ops.quantize)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.inner_names), tuple(getattr(self, name) for name in self.attribute_names)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Self:
        return cls(*(inner[name] for name in cls.inner_names), *context)

    def _stable_hash_for_caching(self) -> str:
        """What a graph on disk depends on; the same in every process."""
        inner = [(x.dtype, tuple(x.shape), x.stride(), x.device) for x in self._inner().values()]
        return repr((self.spec.args, *self.__tensor_flatten__()[1][1:], inner))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype}, {self.spec})"

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and scales."""
        return sum(x.nbytes for x in self._inner().values())

    def data_ptr(self) -> int:
        """Address of the codes: accelerate tells parameters apart by it when it gives its optimizer the shards."""
        return torch_private.address_of(self._qdata, inspect.currentframe())

    def _both(self) -> tuple[Tensor, Tensor]:
        """Codes, and scales as this tensor keeps them."""
        codes, scales = self.inner_names
        return getattr(self, codes), getattr(self, scales)

    def _with(self, qdata: Tensor, scales: Tensor, dtype: torch.dtype | None = None, **others: Any) -> Self:
        """A tensor of these codes and scales, all else as this one has it."""
        attributes = {name: getattr(self, name) for name in self.attribute_names}
        return type(self)(qdata, scales, **{**attributes, "dtype": dtype or self.dtype, **others})

    def _mapped(self, move: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """A tensor that has what ``move`` makes of each tensor that has memory, all else as this one has it."""
        codes, scales = map(move, self._both())
        others: dict[str, Any] = {} if self.is_part or self._row_scale is None else {"row_scale": move(self._row_scale)}
        return self._with(codes, scales, dtype, **others)

    def _find_row_scale(self) -> None:
        """Find the scales of rows again, after codes were written."""
        if self._row_scale is not None:
            self._row_scale.copy_(ops.measure_rows(*self._as_operand(), *self.spec.args)[0])

    def _same(self) -> Self:
        return self._mapped(lambda x: x)

    def _to(self, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Self:
        """``Tensor.to``: codes move, and are not cast."""
        allowed = {name: options[name] for name in ("non_blocking", "copy") if name in options}
        return self._mapped(lambda x: x.to(device=device, **allowed), dtype)

    def _as_operand(self) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of the codes as they are; scales in the form of the spec."""
        raise NotImplementedError

    def rows_rounded(self) -> int:
        """How many rows of codes of fewer than 8 bits have a value that e4m3 does not hold by a scale a row.

        A recipe that reads a scale a row (``rowwise``) rounds these values; one of the blocks of the codes (``mxfp8``)
        none. The host waits for the device.
        """
        if self.spec.format in BYTE_FORMATS:
            return 0
        _, rounded = ops.measure_rows(*self._as_operand(), *self.spec.args)
        return int((rounded > 0).sum())

    def read_operand(self, spec: QuantSpec, transposed: bool) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of the weight, or of its transpose, quantized by ``spec``.

        Raises:
            ValueError: the weight is stored for another recipe.
        """
        assert not self.is_transposed, "a layer reads the weight in the order of its codes"
        if spec == self.spec and (spec.block[0] == spec.block[1] or not transposed):
            qdata, scale = self._as_operand()
            return (qdata.mT.contiguous(), scale.mT.contiguous()) if transposed else (qdata, scale)
        if not transposed and expands_to(self.spec, spec):
            if spec == EXPANDED:
                row_scale = None if self.is_part else self._row_scale
                return ops.expand_codes(*self._as_operand(), *self.spec.args, row_scale)
            return self._cast(self.plain_values(), *spec.args)
        if not transposed:
            raise ValueError(
                f"the weight is stored as {self.spec}, and its recipe reads {spec}: swap to a recipe with the same "
                "weights, or convert the model again from high precision"
            )
        if are_transposable(self.spec, spec):
            return ops.transpose_codes(*self._as_operand(), *self.spec.args, *spec.args)
        return self._cast(self.plain_values(), *spec.args, True)
