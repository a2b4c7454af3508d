"""A call of a launch function as data: buffers to allocate, kernels to launch, views to return.

A planner (such as ``plan_quantize`` of :mod:`tritonfp8.launch.casts`) fills a :class:`Planner`. It sees shapes,
strides, dtypes and alignments and no memory, so one plan serves every call with the same key.
:mod:`tritonfp8.launch.executor` runs plans.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8.compat.hardware import Abilities
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS

ALIGNMENT = 16
MAX_OFFSET = 2**31
TMA_ALIGNMENT = 16
# As torch's allocator aligns.
BUFFER_ALIGNMENT = 512
MAX_TMA_STRIDE = 2**40


class View(NamedTuple):
    """A strided view of an input or of a buffer of a plan.

    Attributes:
        slot: index among the inputs of the call, followed by the buffers of its plan.
        shape: sizes.
        strides: in elements.
        dtype: of the elements.
        offset: bytes from the address of the slot to the first element.
        aligned: whether the address of the slot is a multiple of :data:`ALIGNMENT`.
    """

    slot: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0
    aligned: bool = True

    @classmethod
    def of(cls, tensor: Tensor, slot: int = 0) -> View:
        """All of ``tensor``."""
        aligned = tensor.data_ptr() % ALIGNMENT == 0
        return cls(slot, tuple(tensor.shape), tensor.stride(), tensor.dtype, 0, aligned)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another, in the order of their indices."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def transposed(self, a: int, b: int) -> View:
        """Dims ``a`` and ``b`` exchanged."""
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self._replace(shape=tuple(self.shape[i] for i in order), strides=tuple(self.strides[i] for i in order))

    def t(self) -> View:
        """A matrix transposed."""
        return self._replace(shape=self.shape[::-1], strides=self.strides[::-1])

    def retyped(self, dtype: torch.dtype) -> View:
        """The same bytes as another dtype of the same size."""
        assert dtype.itemsize == self.itemsize
        return self._replace(dtype=dtype)

    def strided(self, shape: Sequence[int], strides: Sequence[int], start: int = 0) -> View:
        """Other sizes and strides, from element ``start`` of this view on."""
        return self._replace(shape=tuple(shape), strides=tuple(strides), offset=self.offset + start * self.itemsize)

    def viewed(self, shape: Sequence[int]) -> View | None:
        """The same elements in another shape (one size may be -1); None if the strides do not allow that."""
        layout = torch.empty_strided(self.shape, self.strides, device="meta")
        try:
            layout = layout.view(*shape)
        except RuntimeError:
            return None
        return self.strided(layout.shape, layout.stride())

    def folded(self) -> View | None:
        """``[..., K]`` as ``[rows, K]``; None if the strides do not allow that."""
        return self if self.ndim == 2 else self.viewed((-1, self.shape[-1]))

    def within_32_bits(self) -> bool:
        """Whether the offset of every element fits 32 bits, in which kernels address scales and vectors.

        In 64 bits ptxas schedules the loops of the Hopper kernel differently, and precise GEMMs were slower.
        """
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) < MAX_OFFSET

    def has_tma_layout(self) -> bool:
        """Whether TMA can address this matrix: rows contiguous, start and row stride 16-byte aligned."""
        stride = self.strides[0] * self.itemsize
        return (
            self.strides[1] == 1
            and self.aligned
            and self.offset % TMA_ALIGNMENT == 0
            and stride % TMA_ALIGNMENT == 0
            and 0 < stride < MAX_TMA_STRIDE
            and self.numel() > 0
        )


class TensorMap(NamedTuple):
    """A TMA descriptor of a view.

    Attributes:
        view: the whole tensor, with a last stride of 1.
        block: sizes of the box that one copy moves.
        swizzle: bytes of the swizzle of the box in shared memory, for Gluon kernels; None lets Triton choose it.
    """

    view: View
    block: tuple[int, ...]
    swizzle: int | None = None


Pointer = View | TensorMap | None


class Buffer(NamedTuple):
    """Memory that a call allocates: a tensor of this layout, of zeros if ``zeroed``."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        """From the first byte to behind the last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


class Launch(NamedTuple):
    """One launch; see :func:`tritonfp8.launch.kernel_cache.run` for the fields."""

    kernel: Any
    programs: int
    pointers: tuple[Pointer, ...]
    integers: tuple[int, ...]
    constants: Mapping[str, object]
    options: Mapping[str, int]


class Plan(NamedTuple):
    """All that a call does.

    Attributes:
        inputs: number of tensors (or None) that the call passes, the first slots.
        buffers: the slots after the inputs, allocated in this order.
        launches: in this order.
        outputs: views of buffers.
    """

    inputs: int
    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    outputs: tuple[View, ...]


def workspace(plan: Plan) -> tuple[dict[int, int], int]:
    """Where buffers that a call does not return lie in one block of memory.

    Buffers share bytes if no launch from the first to the last that uses one of them uses the other. A launch may
    start early, but touches no memory before the previous launch ended.

    Returns:
        The offset in bytes of each such buffer, by its index; and the bytes of the block.
    """
    uses: dict[int, list[int]] = {}
    for index, launch in enumerate(plan.launches):
        for pointer in launch.pointers:
            view = pointer.view if isinstance(pointer, TensorMap) else pointer
            if view is not None and view.slot >= plan.inputs:
                uses.setdefault(view.slot - plan.inputs, []).append(index)
    kept = {view.slot - plan.inputs for view in plan.outputs}
    offsets: dict[int, int] = {}
    ends: dict[int, tuple[int, int]] = {}
    for index in sorted(uses, key=lambda index: uses[index][0]):
        buffer = plan.buffers[index]
        if index in kept or buffer.zeroed:
            continue
        size = -(-max(1, buffer.nbytes) // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        busy = sorted((offsets[other], end) for other, (end, last) in ends.items() if last >= uses[index][0])
        start = 0
        for other, end in busy:
            if start + size <= other:
                break
            start = max(start, end)
        offsets[index], ends[index] = start, (start + size, uses[index][-1])
    return offsets, max((end for end, _ in ends.values()), default=0)


class Planner:
    """Collects the buffers and launches of a plan.

    Attributes:
        device: what the launches run on.
    """

    def __init__(self, device: Abilities, inputs: int) -> None:
        self.device = device
        self._inputs = inputs
        self._buffers: list[Buffer] = []
        self._launches: list[Launch] = []

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None, zeroed: bool = False
    ) -> View:
        """Allocate a buffer, contiguous unless ``strides`` are given."""
        sizes = tuple(shape)
        if strides is None:
            strides = [math.prod(max(size, 1) for size in sizes[i + 1 :]) for i in range(len(sizes))]
        self._buffers.append(Buffer(sizes, tuple(strides), dtype, zeroed))
        return View(self._inputs + len(self._buffers) - 1, sizes, tuple(strides), dtype)

    def like(self, layout: Tensor) -> View:
        """Allocate a buffer of the layout of a tensor on the meta device."""
        return self.empty(layout.shape, layout.dtype, layout.stride())

    def launch(
        self,
        kernel: Any,
        programs: int,
        pointers: Sequence[Pointer],
        integers: Sequence[int],
        constants: Mapping[str, object],
        **options: int,
    ) -> None:
        """Add a launch; see :func:`tritonfp8.launch.kernel_cache.run` for the arguments."""
        self._launches.append(Launch(kernel, programs, tuple(pointers), tuple(integers), constants, options))

    def plan(self, outputs: Sequence[View]) -> Plan:
        """The plan of all that was added."""
        return Plan(self._inputs, tuple(self._buffers), tuple(self._launches), tuple(outputs))


PlanFunction = Callable[..., Sequence[View] | None]
"""Takes a :class:`Planner`, a view (or None) of each input, and options; returns the outputs, or None: cannot plan."""


def make_plan(
    function: PlanFunction, views: Sequence[View | None], options: Sequence[object], device: Abilities
) -> Plan | None:
    """The plan of a call; None if the call needs more than buffers and launches, such as a copy of an input."""
    planner = Planner(device, len(views))
    outputs = function(planner, *views, *options)
    return None if outputs is None else planner.plan(outputs)


@functools.cache
def kernel_constants(spec: QuantSpec, block: tuple[int, int], suffix: str = "") -> Mapping[str, object]:
    """The constants of one result of a kernel, in the order in which kernels take them.

    Args:
        spec: of the result.
        block: its block in the coordinates of the input, -1 for a whole dim.
        suffix: of every name, ``"_T"`` for a transposed result.
    """
    fmt = FORMATS[spec.format]
    values = {
        "ROWS": block[0],
        "COLS": block[1],
        "QMAX": fmt.qmax,
        "EMAX": fmt.emax,
        "QMAX_MANTISSA": fmt.qmax_mantissa,
        "MANTISSA_BITS": fmt.mantissa_bits,
        "EMIN": fmt.emin,
        "E8M0": SCALE_FORMATS[spec.scale_format].exponent_only,
        "POW2": spec.scale_rounding == "pow2",
    }
    return MappingProxyType({f"{name}{suffix}": value for name, value in values.items()})
