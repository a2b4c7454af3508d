"""Launch kernels by way of what Triton compiled for the same arguments before.

Finding the compiled kernel of a launch costs Triton tens of microseconds of host time for some forty arguments, more
than everything else in a launch. The compiled kernel itself can be launched directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8.compat import hardware, triton_private
from tritonfp8.launch.plan import ALIGNMENT

MAX_ENTRIES = 2**14
# Named in every compilation: Triton's defaults differ by version, and an environment variable sets this one. Without
# fusion a multiplication and an addition round twice, which gives other bits.
COMPILER_OPTIONS = {"enable_fp_fusion": True}

_compiled: dict[tuple[object, ...], Any] = {}


def _describe(pointer: Any) -> object:
    """The properties of a pointer or TMA descriptor that Triton specializes for; layouts follow from constants."""
    if isinstance(pointer, Tensor):
        return pointer.dtype, pointer.data_ptr() % ALIGNMENT == 0
    return None if pointer is None else (pointer.base.dtype, *pointer.block_shape)


def _kind(integer: int) -> object:
    """What Triton specializes for: 1 is a constant, others are multiples of 16 or not, and of 32 bits or of 64."""
    return integer if integer == 1 else (integer % ALIGNMENT == 0, integer.bit_length() >= 32)


def run(
    kernel: Any,
    programs: int,
    pointers: Sequence[Any],
    integers: Sequence[int],
    constants: Mapping[str, object],
    **options: int,
) -> Any:
    """Launch ``kernel`` on the current device and return its compiled form (None if kernels are interpreted).

    Args:
        kernel: a ``triton.jit`` or ``gluon.jit`` function of pointers, integers, constants and DEPENDENT, in this
            order. DEPENDENT says that it may start early, and has to wait (:mod:`tritonfp8.kernels.pdl`).
        programs: number of programs.
        pointers: tensors, TMA descriptors or None.
        integers: sizes and strides.
        constants: every compile-time argument by name, in the order of the kernel; they decide the block shapes of the
            descriptors.
        options: ``num_warps``, ``num_stages`` and other options of the compiler.

    Raises:
        RuntimeError: a CUDA graph is being captured, and this launch is the first of its kind.
    """
    if triton_private.INTERPRETING:
        kernel[programs,](*pointers, *integers, **constants, DEPENDENT=False, **options)
        return None
    # Before the kernel is hashed.
    triton_private.settle_key(kernel)
    device = torch.cuda.current_device()
    dependent = hardware.abilities(device).has_dependent_launch
    # Not by value: the number of tokens may be another one in each call.
    key = (
        kernel,
        device,
        tuple([_kind(integer) for integer in integers]),
        tuple(constants.values()),
        tuple(options.values()),
        tuple([_describe(pointer) for pointer in pointers]),
    )
    found = _compiled.get(key)
    if found is not None and not triton_private.MISSING:
        triton_private.launch_compiled(found, programs, (*pointers, *integers, *constants.values(), dependent))
        return found
    if found is None and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{kernel.__name__} was not launched before for these sizes, strides and alignments (integers {integers}), "
            "and cannot be compiled or loaded while a CUDA graph is captured: run the same step once, with tensors of "
            "the same shapes, before the capture (tritonfp8 warmup makes that quick)"
        )
    more = {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}
    found = kernel[programs,](*pointers, *integers, **constants, **more, **{**COMPILER_OPTIONS, **options})
    if len(_compiled) >= MAX_ENTRIES:
        _compiled.clear()
    _compiled[key] = found
    return found
