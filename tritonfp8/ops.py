"""The place where ops are registered: schema, fake, CPU reference, CUDA launch.

``Library.define`` / ``impl`` and not ``custom_op``, which costs a third more host time a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import counting, hardware, launch, reference
from tritonfp8.formats import FORMATS
from tritonfp8.specs import empty_scale, scale_shape

NAMESPACE = "tritonfp8"
_library = torch.library.Library(NAMESPACE, "DEF")

_SPEC = "str {0}format{1}, int[] {0}block{1}, str {0}scale_format{1}, str {0}scale_rounding{1}"
_OPERAND = "Tensor {0}, Tensor {0}_scale, str {0}_format, int[] {0}_block, str {0}_scale_format"

SCHEMAS = {
    "amax": "(Tensor x, int[] block) -> Tensor",
    "quantize": f"(Tensor x, {_SPEC.format('', '')}, bool transpose=False, Tensor? amax=None) -> (Tensor, Tensor)",
    "quantize_both": (
        f"(Tensor x, {_SPEC.format('', '')}, {_SPEC.format('', '_t')}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "dequantize": f"(Tensor qdata, Tensor scale, {_SPEC.format('', '')}, ScalarType dtype) -> Tensor",
    "transpose": "(Tensor qdata) -> Tensor",
    "scaled_matmul": (
        f"({_OPERAND.format('a')}, {_OPERAND.format('b')}, Tensor? bias, str? activation, Tensor? residual, "
        "ScalarType out_dtype, str accumulation) -> Tensor"
    ),
    "matmul": "(Tensor a, Tensor b) -> Tensor",
}


def _amax_fake(x: Tensor, block: Sequence[int]) -> Tensor:
    return x.new_empty(scale_shape(x.shape, block), dtype=torch.float32)


def _quantize_fake(
    x: Tensor,
    format: str,
    block: Sequence[int],
    scale_format: str,
    scale_rounding: str,
    transpose: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = x.shape[::-1] if transpose else x.shape
    qdata = torch.empty(shape, dtype=FORMATS[format].dtype, device=x.device)
    return qdata, empty_scale(shape, block, scale_format, x.device)


def _quantize_both_fake(x: Tensor, *specs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_quantize_fake(x, *specs[:4]), *_quantize_fake(x.t(), *specs[4:])


def _dequantize_fake(qdata: Tensor, scale: Tensor, *args: Any) -> Tensor:
    return torch.empty(qdata.shape, dtype=args[-1], device=qdata.device)


def _transpose_fake(qdata: Tensor) -> Tensor:
    return qdata.new_empty(qdata.shape[::-1])


def _scaled_matmul_fake(a: Tensor, *args: Any) -> Tensor:
    b, out_dtype = args[4], args[-2]
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _matmul_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def _on_cuda(launcher: Callable[..., Any], fallback: Callable[..., Any]) -> Callable[..., Any]:
    """``launcher`` where the device converts to FP8, else the reference (``hardware`` has warned of it)."""
    of_device: dict[int, Callable[..., Any]] = {}

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        index = x.get_device()
        function = of_device.get(index)
        if function is None:
            function = of_device[index] = launcher if hardware.abilities(x.device).has_fp8_mma else fallback
        if index == torch.cuda.current_device():
            return function(x, *args, **kwargs)
        # Triton launches on the current device.
        with torch.cuda.device(index):
            return function(x, *args, **kwargs)

    return run


def _counted(function: Callable[..., Any], kind: Callable[..., str]) -> Callable[..., Any]:
    def run(a: Tensor, *args: Any) -> Any:
        out = function(a, *args)
        if counting.is_active():
            counting.record(kind(a, *args), a.shape[0], out.shape[1], a.shape[1])
        return out

    return run


def _scaled_kind(a: Tensor, a_scale: Tensor, a_format: str, a_block: Sequence[int], *args: Any) -> str:
    return launch.product_kind(a_block, a.device)


_FAKES: dict[str, Callable[..., Any]] = {
    "amax": _amax_fake,
    "quantize": _quantize_fake,
    "quantize_both": _quantize_both_fake,
    "dequantize": _dequantize_fake,
    "transpose": _transpose_fake,
    "scaled_matmul": _scaled_matmul_fake,
    "matmul": _matmul_fake,
}
_KINDS: dict[str, Callable[..., str]] = {"scaled_matmul": _scaled_kind, "matmul": lambda *args: "high_precision"}


def _register() -> None:
    for name, schema in SCHEMAS.items():
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        cpu = getattr(reference, name)
        cuda = _on_cuda(getattr(launch, name), cpu) if hasattr(launch, name) else cpu
        if name in _KINDS:
            cpu, cuda = _counted(cpu, _KINDS[name]), _counted(cuda, _KINDS[name])
        _library.impl(name, cpu, "CPU")
        _library.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES[name], lib=_library)


_register()

amax = torch.ops.tritonfp8.amax.default
quantize = torch.ops.tritonfp8.quantize.default
quantize_both = torch.ops.tritonfp8.quantize_both.default
dequantize = torch.ops.tritonfp8.dequantize.default
transpose = torch.ops.tritonfp8.transpose.default
scaled_matmul = torch.ops.tritonfp8.scaled_matmul.default
matmul = torch.ops.tritonfp8.matmul.default
