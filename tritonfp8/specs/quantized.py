"""Quantized, QuantizedGroups: codes with their scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tritonfp8.specs.checks import check_strided, require, require_type
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS
from tritonfp8.specs.quant_spec import (
    GROUP_ALIGNMENT,
    GROUP_LAYOUTS,
    QuantSpec,
    check_group_spec,
    grouped_scale_shape,
)


class _CodesAndScales:
    """What all containers of codes and scales answer."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        return self.qdata.device

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales together."""
        return int(self.qdata.nbytes + self.scale.nbytes)


@dataclass(frozen=True, eq=False)
class Quantized(_CodesAndScales):
    """A quantized tensor: ``dequantized = float32(qdata) * float32(scale)``, the scale broadcast over its block.

    A frozen container and a pytree node, not a Tensor subclass: ``torch.compile``, checkpointing and ``tree_map`` see
    its two tensors.

    Invariants:
        - ``qdata.dtype`` is the torch dtype of ``spec.format``, ``scale.dtype`` the dtype of ``spec.scale_format``.
        - ``scale.ndim == qdata.ndim`` and ``scale.shape[i] == ceil(shape[i] / block[i])``. A block entry of -1
          is the whole dimension: 1 scale, also for an empty dimension.
        - ``shape`` is the shape of ``qdata``, with as many columns as codes where a byte holds several.
        - ``scale`` multiplies to dequantize. A NaN scale marks a block that had a NaN or an infinity.

    Attributes:
        qdata: the codes, in the shape of the tensor that was quantized, or packed along its last dim.
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
        _check_dtypes(self.qdata, self.scale, self.spec)
        _check_scale(self.shape, self.scale, self.spec, self.spec.scale_shape(self.shape))

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that was quantized."""
        return torch.Size(self.spec.shape_of(self.qdata.shape))

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor that was quantized."""
        return self.qdata.ndim

    def __repr__(self) -> str:
        return f"Quantized({self.spec}, shape={tuple(self.shape)}, device={str(self.device)!r})"


def _check_dtypes(qdata: torch.Tensor, scale: torch.Tensor, spec: QuantSpec) -> None:
    require_type("spec", spec, QuantSpec, "a tritonfp8.QuantSpec")
    for name, tensor, dtype in (
        ("qdata", qdata, FORMATS[spec.format].dtype),
        ("scale", scale, SCALE_FORMATS[spec.scale_format].dtype),
    ):
        require_type(name, tensor, torch.Tensor, "a torch.Tensor")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} of a {spec} tensor must be {dtype}; got {tensor.dtype}")
        check_strided(name, tensor)


def _check_scale(shape: Sequence[int], scale: torch.Tensor, spec: QuantSpec, expected: tuple[int, ...]) -> None:
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale of a {spec} tensor of shape {tuple(shape)} must have shape {expected}; got {tuple(scale.shape)}"
        )


@dataclass(frozen=True, eq=False)
class QuantizedGroups(_CodesAndScales):
    """The quantized operand of a grouped GEMM: one matrix for each group of tokens, in one tensor.

    No scale belongs to two groups, so each group has the bits that its matrix has when it is quantized by itself.

    Attributes:
        qdata: the 8-bit elements, by ``layout``:

            - ``"rows"``: ``[tokens, K]``, the rows of a group adjacent;
            - ``"columns"``: ``[N, columns]``. Group g, whose first token is ``start``, begins at column
              ``128 * (start // 128 + g)``, and zeros follow it, quantized with its scales;
            - ``"matrices"``: ``[groups, N, K]``, as the weights of experts.
        scale: one scale a block, like :class:`Quantized`; but where a block is all rows of tokens or all columns of
            tokens, one for each group: ``[groups, 1]`` or ``[N, groups]``.
        spec: the QuantSpec of both.
        layout: where the groups lie.
        groups: how many there are.

    Raises:
        ValueError: the tensors do not fit ``layout``, or each other.
        TypeError: ``qdata`` or ``scale`` is not a dense tensor, or ``spec`` is not a QuantSpec.
    """

    qdata: torch.Tensor
    scale: torch.Tensor
    spec: QuantSpec
    layout: str
    groups: int

    def __post_init__(self) -> None:
        _check_dtypes(self.qdata, self.scale, self.spec)
        require("layout", self.layout, GROUP_LAYOUTS)
        check_group_spec(self.spec, self.layout)
        shape, groups = tuple(self.shape), self.groups
        if type(groups) is not int or groups < 1:
            raise ValueError(f"groups must be a positive int; got {groups!r}")
        fits = {
            "rows": len(shape) == 2,
            "columns": len(shape) == 2 and shape[1] % GROUP_ALIGNMENT == 0 and shape[1] >= GROUP_ALIGNMENT * groups,
            "matrices": len(shape) == 3 and shape[0] == groups,
        }
        if not fits[self.layout]:
            needed = {
                "rows": "[tokens, K]",
                "columns": f"[N, columns] with columns a multiple of {GROUP_ALIGNMENT}, one for each group or more",
                "matrices": f"[{groups}, N, K]",
            }
            raise ValueError(
                f"qdata of {groups} groups in {self.layout} must be {needed[self.layout]}; got shape {shape}"
            )
        _check_scale(shape, self.scale, self.spec, grouped_scale_shape(shape, self.spec.block, self.layout, groups))

    @property
    def shape(self) -> torch.Size:
        """Shape of ``qdata``, with as many columns as codes where a byte holds several."""
        return torch.Size(self.spec.shape_of(self.qdata.shape))

    def __repr__(self) -> str:
        return (
            f"QuantizedGroups({self.spec}, shape={tuple(self.shape)}, {self.groups} groups in {self.layout}, "
            f"device={str(self.device)!r})"
        )


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


def _flatten_groups(q: QuantizedGroups) -> tuple[list[torch.Tensor], tuple[QuantSpec, str, int]]:
    return [q.qdata, q.scale], (q.spec, q.layout, q.groups)


def unchecked_groups(children: Any, context: tuple[QuantSpec, str, int]) -> QuantizedGroups:
    """A QuantizedGroups of ``(qdata, scale)`` and ``(spec, layout, groups)`` without the checks."""
    q = object.__new__(QuantizedGroups)
    for name, value in zip(("qdata", "scale", "spec", "layout", "groups"), (*children, *context), strict=True):
        object.__setattr__(q, name, value)
    return q


pytree.register_pytree_node(
    QuantizedGroups,
    _flatten_groups,
    unchecked_groups,
    serialized_type_name="tritonfp8.QuantizedGroups",
    to_dumpable_context=lambda context: [context[0].to_dict(), *context[1:]],
    from_dumpable_context=lambda data: (QuantSpec(**data[0]), *data[1:]),
)
