"""What a converted layer refuses as a weight: codes, which are no values without scales, and tensors of torchao."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_LOAD = "tritonfp8.export.load(model, folder) reads both from a checkpoint"


def refuse_codes(what: str, source: Tensor | Iterable[Tensor] | None) -> None:
    """Raise ValueError if a tensor that becomes the values of ``what`` has codes."""
    for x in [source] if isinstance(source, Tensor) else source or ():
        if x.dtype.itemsize == 1 and x.dtype is not torch.bool:
            raise ValueError(
                f"{what} must have values; got {x.dtype}, which are codes that mean nothing without their scales. "
                f"{_LOAD}; values that are whole numbers are cast first"
            )


def refuse_scales(layer: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Raise ValueError for a scale of a state_dict that lies beside the parameters of ``layer``, which has none."""
    for name in state:
        key = name[len(prefix) :]
        is_scale = name.startswith(prefix) and "." not in key and (key.startswith("scale") or "_scale" in key)
        if is_scale and not any(key in members for members in (layer._parameters, layer._buffers)):
            raise ValueError(
                f"{name} is a scale, and a converted layer has none: the tensors beside it may be codes, which "
                f"load_state_dict would take for values. {_LOAD}; leave out the scales of tensors that have values"
            )


def check_not_torchao(what: str, x: object) -> None:
    """Raise TypeError for a tensor subclass of torchao, which only torchao's own layers can read."""
    if type(x).__module__.partition(".")[0] == "torchao":
        raise TypeError(
            f"{what} must be a plain or a sharded tensor; got {type(x).__name__} of torchao. torchao's quantize_ and "
            "tritonfp8 cannot both compute one layer: leave the layer out of one of them by its filter, or call "
            "tritonfp8.revert(model) before quantize_"
        )
