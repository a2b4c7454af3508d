"""Quantized: 8-bit data with its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonfp8.checks import check_strided, require_type
from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.specs import QuantSpec, scale_shape


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized tensor: ``dequantized = float32(qdata) * float32(scale)``, the scale broadcast over its block.

    A frozen container and a pytree node, not a Tensor subclass: ``torch.compile``, checkpointing and ``tree_map`` see
    its two tensors.

    Invariants:
        - ``qdata.dtype`` is the torch dtype of ``spec.format``, ``scale.dtype`` that of ``spec.scale_format``.
        - ``scale.ndim == qdata.ndim`` and ``scale.shape[i] == ceil(qdata.shape[i] / block[i])``. A block entry of -1
          is the whole dimension: 1 scale, also for an empty dimension.
        - ``scale`` multiplies to dequantize. A NaN scale marks a block that had a NaN or an infinity.

    Attributes:
        qdata: the 8-bit elements, in the shape of the tensor that was quantized.
        scale: one scale a block.
        spec: the QuantSpec of both.

    Raises:
        ValueError: the tensors break an invariant.
        TypeError: ``qdata`` or ``scale`` is not a dense tensor, or ``spec`` is not a QuantSpec.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    spec: QuantSpec

    def __post_init__(self) -> None:
        spec, qdata, scale = self.spec, self.qdata, self.scale
        require_type("spec", spec, QuantSpec, "a tritonfp8.QuantSpec")
        for name, tensor, dtype in (
            ("qdata", qdata, FORMATS[spec.format].dtype),
            ("scale", scale, SCALE_FORMATS[spec.scale_format].dtype),
        ):
            require_type(name, tensor, torch.Tensor, "a torch.Tensor")
            if tensor.dtype != dtype:
                raise ValueError(f"{name} of a {spec} tensor must be {dtype}; got {tensor.dtype}")
            check_strided(name, tensor)
        expected = scale_shape(qdata.shape, spec.block)
        if tuple(scale.shape) != expected:
            raise ValueError(
                f"scale of a {self.spec} tensor of shape {tuple(self.qdata.shape)} must have shape {expected}; "
                f"got {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that was quantized."""
        return self.qdata.shape

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor that was quantized."""
        return self.qdata.ndim

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        return self.qdata.device

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales together."""
        return int(self.qdata.nbytes + self.scale.nbytes)

    def __repr__(self) -> str:
        return f"Quantized({self.spec}, shape={tuple(self.shape)}, device={str(self.device)!r})"


def _flatten(q: Quantized) -> tuple[list[torch.Tensor], QuantSpec]:
    return [q.qdata, q.scale], q.spec


def _flatten_with_keys(q: Quantized) -> tuple[list[tuple[pytree.KeyEntry, torch.Tensor]], QuantSpec]:
    return [(pytree.GetAttrKey("qdata"), q.qdata), (pytree.GetAttrKey("scale"), q.scale)], q.spec


def unchecked(qdata: Any, scale: Any, spec: QuantSpec) -> Quantized:
    """A Quantized without the checks, which cost host time: for tensors that keep the invariants, as ops return."""
    q = object.__new__(Quantized)
    object.__setattr__(q, "qdata", qdata)
    object.__setattr__(q, "scale", scale)
    object.__setattr__(q, "spec", spec)
    return q


def _unflatten(children: Any, spec: QuantSpec) -> Quantized:
    # Unchecked: tree_map may put other objects in the leaves (shapes, None, futures).
    qdata, scale = children
    return unchecked(qdata, scale, spec)


pytree.register_pytree_node(
    Quantized,
    _flatten,
    _unflatten,
    serialized_type_name="tritonfp8.Quantized",
    flatten_with_keys_fn=_flatten_with_keys,
    to_dumpable_context=lambda spec: spec.to_dict(),
    from_dumpable_context=lambda data: QuantSpec(**data),
)
