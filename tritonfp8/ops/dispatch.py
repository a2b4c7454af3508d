"""The implementations of an op by device, kernels or reference; and the count of GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import launch, reference
from tritonfp8.compat import counting, hardware, torch_private
from tritonfp8.compat.counting import listeners
from tritonfp8.reference import Chain, recorded


def on_cuda(
    launcher: Callable[..., Any],
    fallback: Callable[..., Any],
    kind: Callable[..., str] | None = None,
    contraction: Callable[..., int] | None = None,
) -> Callable[..., Any]:
    """``launcher`` if the device converts to FP8, else the reference; ``hardware`` has warned about that.

    GEMMs, which have a ``kind``, are counted here: a function around this one would cost each eager call time.
    """
    of_device: dict[int, Callable[..., Any]] = {}
    # A tensor lies on CUDA, so CUDA is initialized, and the check of torch.cuda.current_device is not needed.
    current_device = torch_private.current_device_getter()

    def run(x: Tensor, *args: Any) -> Any:
        index = x.get_device()
        function = of_device.get(index)
        if function is None:
            function = of_device[index] = launcher if hardware.abilities(x.device).has_fp8_mma else fallback
        if index == current_device():
            out = function(x, *args)
        else:
            # Triton launches on the current device, whatever the tensors are on.
            with torch.cuda.device(index):
                out = function(x, *args)
        if kind is not None and listeners:
            _count(kind, contraction, out, x, *args)
        return out

    return run


def chained(launcher: Callable[..., Any], ops: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """``launcher`` of chains; where somebody sees ops, and on other devices, ``ops`` one after another."""
    on_device = on_cuda(launcher, reference.chain)
    modes, is_profiled = torch_private.dispatch_mode_count, torch_private.is_profiled

    def run(x: Tensor, others: Sequence[Tensor], chain: str) -> Any:
        if not x.is_cuda or listeners or modes() or is_profiled():
            return Chain.of(chain).run((x, *others), ops.__getitem__)
        return on_device(x, others, chain)

    return run


def chain_of(function: Callable[..., Any], given: tuple[bool, ...]) -> tuple[str, tuple[bool, ...]] | None:
    """:func:`tritonfp8.reference.recorded`; None if a call of the function may be no step of a chain."""
    text, present = recorded(function, given)
    steps = Chain.of(text).steps
    return (text, present) if all(launch.may_chain(op, args) for op, args in steps) else None


def counted(
    function: Callable[..., Any], kind: Callable[..., str], contraction: Callable[..., int] | None = None
) -> Callable[..., Any]:
    """``function``, a GEMM, whose calls are counted while somebody counts."""

    def run(a: Tensor, *args: Any) -> Any:
        out = function(a, *args)
        if listeners:
            _count(kind, contraction, out, a, *args)
        return out

    return run


def _count(
    kind: Callable[..., str], contraction: Callable[..., int] | None, out: Tensor, a: Tensor, *args: Any
) -> None:
    # The operands of `scaled_matmul` have specs; both of `matmul` have one dtype.
    dtype = str(a.dtype).removeprefix("torch.")
    operands = (args[1], args[4]) if len(args) > 1 and isinstance(args[1], str) else (dtype, dtype)
    # A GEMM of groups along K has a result for each: together they are one GEMM over the columns of all groups.
    k = a.shape[1] if contraction is None else contraction(a, *args)
    counting.record(kind(a, *args), a.shape[0], out.shape[-1], k, operands, a.device)


def scaled_matmul_kind(a: Tensor, a_scale: Tensor, a_spec: str, *args: Any) -> str:
    """The kind under which a GEMM on quantized operands is counted: how this device computes it."""
    # Of the arguments after these, batch_invariant is the ninth; a call at its default may leave it out.
    return launch.product_kind(a_spec, a.device, a.shape[0], len(args) > 8 and args[8])


def packed_groups_kind(a: Tensor, a_scale: Tensor, a_spec: str, *args: Any) -> str:
    """The kind of a grouped GEMM whose weights have packed codes: no number of tokens changes it."""
    return launch.product_kind(a_spec, a.device, a.shape[0], batch_invariant=True)


def grouped_contraction(a: Tensor, *args: Any) -> int:
    """The K with which a grouped GEMM is counted: of groups of columns the tokens, without the zeros between groups."""
    return int(args[10]) if args[2].ndim == 2 else a.shape[1]


def matmul_kind(*args: object) -> str:
    """The kind under which a GEMM in high precision is counted."""
    return "high_precision"
