"""Producers fused with quantization, as functions on tensors without gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tritonfp8 import ops
from tritonfp8.checks import check_strided, require, require_flag, require_type
from tritonfp8.formats import HIGH_PRECISION_DTYPES
from tritonfp8.quantized import Quantized
from tritonfp8.specs import RMS_NORM_ROUNDINGS, QuantSpec


class Produced(NamedTuple):
    """The results of a fused producer.

    Attributes:
        normal: the quantized result, or None if its spec was None.
        transposed: the quantized transpose, or None likewise.
        rstd: of RMSNorm, ``[M]`` float32, which its backward pass needs.
        value: the result in the dtype of the input, or None unless ``keep``.
    """

    normal: Quantized | None
    transposed: Quantized | None
    rstd: Tensor | None = None
    value: Tensor | None = None


def _check_specs(spec: object, spec_t: object) -> tuple[QuantSpec, QuantSpec, str]:
    for name, value in (("spec", spec), ("spec_t", spec_t)):
        if value is not None and not isinstance(value, QuantSpec):
            raise TypeError(f"{name} must be a tritonfp8.QuantSpec or None; got {type(value).__name__}")
    normal, transposed = (s if isinstance(s, QuantSpec) else None for s in (spec, spec_t))
    either = normal or transposed
    if either is None:
        raise ValueError("one of spec and spec_t must be a tritonfp8.QuantSpec; got None for both")
    orientation = "both" if normal and transposed else "normal" if normal else "transposed"
    return normal or either, transposed or either, orientation


def _check_matrices(**tensors: Tensor) -> None:
    """Raise unless all are ``[M, K]`` of one shape, dtype and device."""
    (first, x), *others = tensors.items()
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"{first} must be bfloat16, float16 or float32; got {x.dtype}. Cast it first.")
    for name, tensor in tensors.items():
        check_strided(name, tensor)
    if x.ndim != 2:
        raise ValueError(f"{first} must be 2-D; got shape {tuple(x.shape)}. Flatten the leading dims first.")
    for name, other in others:
        if (other.shape, other.dtype, other.device) != (x.shape, x.dtype, x.device):
            raise ValueError(
                f"{name} must be as {first}, {x.dtype} of shape {tuple(x.shape)} on {x.device}; "
                f"got {other.dtype} of shape {tuple(other.shape)} on {other.device}"
            )


def check_norm(x: Tensor, weight: Tensor, rounding: str) -> None:
    """Raise unless ``weight`` and ``rounding`` fit an RMSNorm of ``x [..., K]``."""
    require("rounding", rounding, RMS_NORM_ROUNDINGS)
    for name, tensor in (("x", x), ("weight", weight)):
        require_type(name, tensor, Tensor, "a torch.Tensor")
        check_strided(name, tensor)
    if tuple(weight.shape) != tuple(x.shape[-1:]) or weight.dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(
            f"weight must be bfloat16, float16 or float32 of shape {tuple(x.shape[-1:])}; "
            f"got {weight.dtype} of shape {tuple(weight.shape)}"
        )
    if weight.device != x.device:
        raise ValueError(f"weight must be on {x.device}, where x is; got {weight.device}")


def _produced(results: list[Tensor], spec: QuantSpec, spec_t: QuantSpec, orientation: str, keep: bool) -> Produced:
    rest = list(results)
    value = rest.pop() if keep else None
    normal = Quantized(rest.pop(0), rest.pop(0), spec) if orientation != "transposed" else None
    transposed = Quantized(rest.pop(0), rest.pop(0), spec_t) if orientation != "normal" else None
    return Produced(normal, transposed, rest.pop() if rest else None, value)


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    spec: QuantSpec | None,
    spec_t: QuantSpec | None = None,
    rounding: str = "output",
    keep: bool = False,
) -> Produced:
    """RMSNorm of each row of ``x``, quantized without being written in high precision.

    Args:
        x: ``[M, K]``, bfloat16, float16 or float32, of any strides.
        weight: ``[K]``, of those dtypes.
        eps: added to the mean square.
        spec: of the normal result ``[M, K]``, or None.
        spec_t: of the transposed one ``[K, M]``, in its own coordinates, or None.
        rounding: ``"output"``, ``y = round(x rstd weight)`` as ``torch.nn.RMSNorm`` has it, or ``"normalized"``,
            ``y = round(round(x rstd) weight)`` as Llama in transformers has it; to the dtype of ``x`` each time.
        keep: return ``y`` too.

    Returns:
        A :class:`Produced` without gradients: exactly :func:`tritonfp8.quantize` of the rounded ``y``.

    Raises:
        TypeError: a dtype or spec other than those.
        ValueError: shapes or devices that do not fit together, no spec at all, or an unknown rounding.

    :mod:`tritonfp8.reference.fused` says how far kernels may be from the formulas.
    """
    normal, transposed, orientation = _check_specs(spec, spec_t)
    require_type("eps", eps, float | int, "a float")
    require_flag("keep", keep)
    _check_matrices(x=x)
    check_norm(x, weight, rounding)
    results = ops.rms_norm_quantize(
        x.detach(), weight.detach(), eps, rounding, *normal.args, *transposed.args, orientation, keep
    )
    return _produced(results, normal, transposed, orientation, keep)


def silu_mul_quantize(
    gate: Tensor, up: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None = None, keep: bool = False
) -> Produced:
    """``silu(gate) * up``, computed in float32, rounded once to the dtype of ``gate`` and quantized.

    Args:
        gate, up: ``[M, F]``, bfloat16, float16 or float32, of any strides: ``x[:, :F]`` and ``x[:, F:]`` too.
        spec: of the normal result ``[M, F]``, or None.
        spec_t: of the transposed one ``[F, M]``, in its own coordinates, or None.
        keep: return the unquantized result too.

    Returns, raises:
        As :func:`rms_norm_quantize`.
    """
    normal, transposed, orientation = _check_specs(spec, spec_t)
    require_flag("keep", keep)
    _check_matrices(gate=gate, up=up)
    results = ops.silu_mul_quantize(gate.detach(), up.detach(), *normal.args, *transposed.args, orientation, keep)
    return _produced(results, normal, transposed, orientation, keep)


def silu_mul_backward_quantize(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    spec: QuantSpec | None,
    spec_t: QuantSpec | None = None,
    keep: bool = False,
) -> tuple[Produced, Produced]:
    """The gradients of ``silu(gate) * up``, in float32, rounded to the dtype of ``gate`` and quantized.

    Args:
        grad: of ``silu(gate) * up``, ``[M, F]``.
        gate, up: ``[M, F]``, in the dtype of ``grad``.
        spec, spec_t, keep: as in :func:`silu_mul_quantize`, for both gradients.

    Returns, raises:
        As :func:`rms_norm_quantize`: the results for ``gate``, then for ``up``.
    """
    normal, transposed, orientation = _check_specs(spec, spec_t)
    require_flag("keep", keep)
    _check_matrices(grad=grad, gate=gate, up=up)
    results = ops.silu_mul_backward_quantize(
        grad.detach(), gate.detach(), up.detach(), *normal.args, *transposed.args, orientation, keep
    )
    first, second = (
        _produced([result[i] for result in results], normal, transposed, orientation, keep) for i in (0, 1)
    )
    return first, second
