"""Launch kernels by way of what Triton compiled for the same arguments before.

Finding the compiled kernel of a launch costs Triton tens of microseconds of host time for some forty arguments, more
than everything else in a launch. The compiled kernel itself can be launched directly.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tritonfp8 import hardware

ALIGNMENT = 16
MAX_ENTRIES = 2**14
# Of every compilation, and named in each: Triton's defaults differ by version, and an environment variable sets this
# one. A product and a sum that are not fused round twice: other bits.
COMPILER_OPTIONS = {"enable_fp_fusion": True}
# What the kernels of this process are was decided when they were decorated.
INTERPRETING = triton.knobs.runtime.interpret

_compiled: dict[tuple[object, ...], Any] = {}
_local = threading.local()


class Launched(NamedTuple):
    """One launch: the compiled kernel and its arguments, as :func:`run` takes them."""

    compiled: Any
    programs: int
    pointers: Sequence[Any]
    integers: Sequence[int]
    constants: Sequence[object]


@contextmanager
def recorded_launches() -> Iterator[list[Launched]]:
    """Note what :func:`run` launches on this thread inside the ``with`` block."""
    before = getattr(_local, "launches", None)
    launches: list[Launched] = []
    _local.launches = launches
    try:
        yield launches
    finally:
        _local.launches = before


def _describe(pointer: Any) -> object:
    """What Triton specializes a pointer or a TMA descriptor on. A descriptor's block shape is among the constants."""
    if isinstance(pointer, Tensor):
        return pointer.dtype, pointer.data_ptr() % ALIGNMENT == 0
    return None if pointer is None else pointer.base.dtype


def within_32_bits(x: Tensor) -> Tensor:
    """``x``, copied if an offset into it does not fit 32 bits, in which kernels address scales and vectors.

    In 64 bits ptxas schedules the loops of the Hopper kernel differently, and precise GEMMs were slower.
    """
    offset = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if offset < 2**31 else x.contiguous()


def run(
    kernel: Any,
    programs: int,
    pointers: Sequence[Any],
    integers: Sequence[int],
    constants: Mapping[str, object],
    **options: int,
) -> None:
    """Launch ``kernel`` on the current device.

    Args:
        kernel: a ``triton.jit`` or ``gluon.jit`` function of pointers, integers, constants and DEPENDENT, in this
            order. DEPENDENT says that it may start early, and has to wait (:mod:`tritonfp8.kernels.pdl`).
        programs: how many programs.
        pointers: tensors, TMA descriptors or None.
        integers: sizes and strides.
        constants: every compile-time argument by name, in the order of the kernel; they decide the block shapes of the
            descriptors.
        options: ``num_warps`` and ``num_stages``.

    Raises:
        RuntimeError: a CUDA graph is being captured, and this launch is the first of its kind.
    """
    if INTERPRETING:
        kernel[programs,](*pointers, *integers, **constants, DEPENDENT=False, **options)
        return
    device = torch.cuda.current_device()
    dependent = hardware.abilities(device).has_dependent_launch
    # Integers by value: finer than what Triton distinguishes (1, divisible by 16, wider than 32 bits), and exact.
    key = (
        kernel,
        device,
        tuple(integers),
        tuple(constants.values()),
        tuple(options.values()),
        tuple([_describe(pointer) for pointer in pointers]),
    )
    found = _compiled.get(key)
    if found is not None:
        found[programs, 1, 1](*pointers, *integers, *constants.values(), dependent)
    else:
        more = {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}
        found = _compile_and_launch(key, kernel, programs, pointers, integers, {**constants, **more}, options)
    if (launches := getattr(_local, "launches", None)) is not None:
        launches.append(Launched(found, programs, pointers, integers, (*constants.values(), dependent)))


def _compile_and_launch(
    key: tuple[object, ...],
    kernel: Any,
    programs: int,
    pointers: Sequence[Any],
    integers: Sequence[int],
    constants: Mapping[str, object],
    options: Mapping[str, int],
) -> Any:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{kernel.__name__} was not launched before for these sizes, strides and alignments (integers {integers}), "
            "and cannot be compiled or loaded while a CUDA graph is captured: run the same step once, with tensors of "
            "the same shapes, before the capture (tritonfp8 warmup makes that quick)"
        )
    compiled = kernel[programs,](*pointers, *integers, **constants, **options, **COMPILER_OPTIONS)
    if len(_compiled) >= MAX_ENTRIES:
        _compiled.clear()
    _compiled[key] = compiled
    return compiled
