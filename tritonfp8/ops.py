"""The place where ops are registered: schema, fake, CPU reference, CUDA launch.

``Library.define`` / ``impl`` and not ``custom_op``, which costs a third more host time a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import counting, hardware, launch, launch_fused, reference, reference_fused
from tritonfp8.formats import FORMATS
from tritonfp8.specs import empty_scale, scale_shape, spec_of

NAMESPACE = "tritonfp8"
_library = torch.library.Library(NAMESPACE, "DEF")

_PRODUCER = "str spec, str spec_t, str orientation, bool keep"

SCHEMAS = {
    "amax": "(Tensor x, int[] block) -> Tensor",
    "quantize": "(Tensor x, str spec, bool transpose=False, Tensor? amax=None) -> (Tensor, Tensor)",
    "quantize_both": "(Tensor x, str spec, str spec_t) -> (Tensor, Tensor, Tensor, Tensor)",
    "dequantize": "(Tensor qdata, Tensor scale, str spec, ScalarType dtype) -> Tensor",
    "transpose": "(Tensor qdata) -> Tensor",
    "scaled_matmul": (
        "(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, "
        "Tensor? bias=None, str? activation=None, Tensor? residual=None, ScalarType out_dtype=bfloat16, "
        "str accumulation='precise') -> Tensor"
    ),
    "matmul": "(Tensor a, Tensor b) -> Tensor",
    "rms_norm_quantize": f"(Tensor x, Tensor weight, float eps, str rounding, {_PRODUCER}) -> Tensor[]",
    "rms_norm_backward": (
        "(Tensor grad, Tensor x, Tensor weight, Tensor rstd, str rounding, Tensor? residual, bool needs_weight) "
        "-> Tensor[]"
    ),
    "silu_mul_quantize": f"(Tensor gate, Tensor up, {_PRODUCER}) -> Tensor[]",
    "silu_mul_backward_quantize": f"(Tensor grad, Tensor gate, Tensor up, {_PRODUCER}) -> Tensor[]",
}


def _amax_fake(x: Tensor, block: Sequence[int]) -> Tensor:
    return x.new_empty(scale_shape(x.shape, block), dtype=torch.float32)


def _quantize_fake(x: Tensor, spec: str, transpose: bool = False, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    s = spec_of(spec)
    shape = x.shape[::-1] if transpose else x.shape
    qdata = torch.empty(shape, dtype=FORMATS[s.format].dtype, device=x.device)
    return qdata, empty_scale(shape, s.block, s.scale_format, x.device)


def _quantize_both_fake(x: Tensor, spec: str, spec_t: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_quantize_fake(x, spec), *_quantize_fake(x.t(), spec_t)


def _dequantize_fake(qdata: Tensor, scale: Tensor, *args: Any) -> Tensor:
    return torch.empty(qdata.shape, dtype=args[-1], device=qdata.device)


def _transpose_fake(qdata: Tensor) -> Tensor:
    return qdata.new_empty(qdata.shape[::-1])


def _scaled_matmul_fake(a: Tensor, *args: Any) -> Tensor:
    b, out_dtype = args[2], args[8] if len(args) > 8 else torch.bfloat16
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _matmul_fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]))


def _results_fake(x: Tensor, count: int, args: Sequence[Any]) -> list[Tensor]:
    spec, spec_t, orientation = args[:3]
    return reference_fused.empty_results(count, x.shape, spec_of(spec), spec_of(spec_t), orientation, x.device)


def _rms_norm_quantize_fake(x: Tensor, weight: Tensor, eps: float, rounding: str, *args: Any) -> list[Tensor]:
    rstd = x.new_empty(x.shape[:1], dtype=torch.float32)
    return [*_results_fake(x, 0, args), rstd, *([x.new_empty(x.shape)] if args[-1] else [])]


def _rms_norm_backward_fake(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> list[Tensor]:
    return [x.new_empty(x.shape), *([weight.new_empty(weight.shape)] if args[-1] else [])]


def _silu_mul_quantize_fake(gate: Tensor, up: Tensor, *args: Any) -> list[Tensor]:
    return [*_results_fake(gate, 0, args), *([gate.new_empty(gate.shape)] if args[-1] else [])]


def _silu_mul_backward_quantize_fake(grad: Tensor, gate: Tensor, up: Tensor, *args: Any) -> list[Tensor]:
    return [*_results_fake(gate, 2, args), *([gate.new_empty((2, *gate.shape))] if args[-1] else [])]


def _on_cuda(
    launcher: Callable[..., Any], fallback: Callable[..., Any], kind: Callable[..., str] | None = None
) -> Callable[..., Any]:
    """``launcher`` where the device converts to FP8, else the reference (``hardware`` has warned of it).

    Products, which have a ``kind``, are counted here: a function around this one would cost each eager call.
    """
    of_device: dict[int, Callable[..., Any]] = {}
    # There is a tensor on CUDA, so CUDA is initialized, which torch.cuda.current_device would look into.
    current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

    def run(x: Tensor, *args: Any) -> Any:
        index = x.get_device()
        function = of_device.get(index)
        if function is None:
            function = of_device[index] = launcher if hardware.abilities(x.device).has_fp8_mma else fallback
        if index == current_device():
            out = function(x, *args)
        else:
            # Triton launches on the current device.
            with torch.cuda.device(index):
                out = function(x, *args)
        if kind is not None and counting.is_active():
            _count(kind, out, x, *args)
        return out

    return run


def _counted(function: Callable[..., Any], kind: Callable[..., str]) -> Callable[..., Any]:
    def run(a: Tensor, *args: Any) -> Any:
        out = function(a, *args)
        if counting.is_active():
            _count(kind, out, a, *args)
        return out

    return run


def _count(kind: Callable[..., str], out: Tensor, a: Tensor, *args: Any) -> None:
    counting.record(kind(a, *args), a.shape[0], out.shape[1], a.shape[1])


def _scaled_kind(a: Tensor, a_scale: Tensor, a_spec: str, *args: Any) -> str:
    return launch.product_kind(a_spec, a.device)


_FAKES: dict[str, Callable[..., Any]] = {
    "amax": _amax_fake,
    "quantize": _quantize_fake,
    "quantize_both": _quantize_both_fake,
    "dequantize": _dequantize_fake,
    "transpose": _transpose_fake,
    "scaled_matmul": _scaled_matmul_fake,
    "matmul": _matmul_fake,
    "rms_norm_quantize": _rms_norm_quantize_fake,
    "rms_norm_backward": _rms_norm_backward_fake,
    "silu_mul_quantize": _silu_mul_quantize_fake,
    "silu_mul_backward_quantize": _silu_mul_backward_quantize_fake,
}
_KINDS: dict[str, Callable[..., str]] = {"scaled_matmul": _scaled_kind, "matmul": lambda *args: "high_precision"}


def _find(name: str, *modules: Any) -> Callable[..., Any] | None:
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)


def reference_of(name: str) -> Callable[..., Any]:
    """The op of this name in plain torch: the same parameters with the same defaults."""
    found = _find(name, reference, reference_fused)
    assert found is not None
    return found


def _register() -> None:
    for name, schema in SCHEMAS.items():
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        cpu, launcher, kind = reference_of(name), _find(name, launch, launch_fused), _KINDS.get(name)
        counted = cpu if kind is None else _counted(cpu, kind)
        _library.impl(name, counted, "CPU")
        _library.impl(name, counted if launcher is None else _on_cuda(launcher, cpu, kind), "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES[name], lib=_library)


_register()

amax = torch.ops.tritonfp8.amax.default
quantize = torch.ops.tritonfp8.quantize.default
quantize_both = torch.ops.tritonfp8.quantize_both.default
dequantize = torch.ops.tritonfp8.dequantize.default
transpose = torch.ops.tritonfp8.transpose.default
scaled_matmul = torch.ops.tritonfp8.scaled_matmul.default
matmul = torch.ops.tritonfp8.matmul.default
rms_norm_quantize = torch.ops.tritonfp8.rms_norm_quantize.default
rms_norm_backward = torch.ops.tritonfp8.rms_norm_backward.default
silu_mul_quantize = torch.ops.tritonfp8.silu_mul_quantize.default
silu_mul_backward_quantize = torch.ops.tritonfp8.silu_mul_backward_quantize.default
