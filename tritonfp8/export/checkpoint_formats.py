"""Checkpoint formats: how the codes and scales of a linear layer are named and shaped in a file.

A checkpoint format is a row of a table. Its config is what an engine finds as ``quantization_config`` in config.json.

Sources: the checkpoints of DeepSeek-V3, and ``FineGrainedFP8Config`` of transformers; ``QuantizationConfig``, the
presets FP8_DYNAMIC, FP8_BLOCK, MXFP8 and NVFP4, and the compressors of compressed-tensors 0.20; for NVFP4 of ModelOpt
``NVFP4Tensor`` of torchao 0.18, and the checkpoints that NVIDIA publishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8.specs import BLOCK_1X32, BLOCK_128X128, MXFP4, NVFP4, ROWWISE, TENSORWISE, QuantSpec
from tritonfp8.specs.checks import require
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS

UE8M0 = "ue8m0"
REFUSED_EXPERTS = "transformers 5 refuses experts in this format: for it leave them out by filter"


class GlobalScale(NamedTuple):
    """The scale of a whole tensor, float32, beside the scales of its blocks, which are e4m3.

    Attributes:
        name: the last part of its name.
        divides: whether the scales of blocks are divided by it; else they are multiplied.
    """

    name: str
    divides: bool

    def of(self, scale: Tensor, whole: Tensor) -> Tensor:
        """The float32 scales of blocks with the scale of the tensor, rounded once."""
        return scale.float() / whole if self.divides else scale.float() * whole


@dataclass(frozen=True)
class CheckpointFormat:
    """How a linear layer ``X`` of weight ``[N, K]`` is stored: ``X.weight`` in 8 bits, and its scale beside it.

    Attributes:
        name: its name in :func:`tritonfp8.export.save`.
        method: ``quant_method`` of the config.
        spec: the spec of the codes; its scale rounding is the default of an export.
        scale_name: the last part of the name of the scale. The scale multiplies to dequantize, whatever its name says.
        multiples: what N and K must be multiples of, so that engines read the layer as it was written.
        why: the reason for ``multiples``, as a report gives it.
        scale_fmts: the values of the option ``scale_fmt``.
        matches_parts: whether engines take the names of modules in high precision for beginnings and ends of names.
        arguments: what else the config has about the codes.
        note_on_experts: which engine does not read experts in this format; empty if none is known.
        codes_end: how the name of the codes ends, in place of ``weight`` or behind the name of a weight of experts.
        is_blocked: whether the last dim of codes is the bytes of a block, and the dim before it the blocks.
        global_scale: of a format with a second scale, for the whole tensor.
    """

    name: str
    method: str
    spec: QuantSpec
    scale_name: str
    multiples: tuple[int, int] = (1, 1)
    why: str = ""
    scale_fmts: tuple[str, ...] = ()
    matches_parts: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    note_on_experts: str = ""
    codes_end: str = "weight"
    is_blocked: bool = False
    global_scale: GlobalScale | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the codes."""
        return FORMATS[self.spec.format].dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scale in a file: float32, or uint8 for an exponent biased by 127."""
        scales = SCALE_FORMATS[self.spec.scale_format]
        return torch.uint8 if scales.exponent_only else scales.dtype

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that programs give the scale in a file."""
        scales = SCALE_FORMATS[self.spec.scale_format]
        if self.global_scale is not None:
            return (torch.float8_e4m3fn,)
        if scales.exponent_only:
            return torch.uint8, scales.dtype
        return torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the codes in a file, for a weight of ``shape``."""
        codes = self.spec.qdata_shape(shape)
        if not self.is_blocked:
            return codes
        width = self.spec.qdata_shape(self.spec.block)[1]
        return (*codes[:-1], codes[-1] // width, width)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scale in a file, for a weight of ``shape``: ``[1]`` for one scale, else the grid of blocks."""
        return (1,) if self.spec.block == TENSORWISE else self.spec.scale_shape(shape)

    def codes_of(self, weight: str) -> str:
        """The name of the codes of a weight, by its name."""
        return weight.removesuffix("weight") + self.codes_end

    def scale_of(self, weight: str) -> str:
        """The name of the scale of a weight, by its name."""
        return weight.removesuffix("weight") + self.scale_name

    def scale_beside(self, codes: str) -> str:
        """The name of the scale, by the name of the codes of a weight."""
        return self.scale_of(codes.removesuffix(self.codes_end) + "weight" if codes.endswith(self.codes_end) else codes)

    def scale_read(self, shape: Sequence[int], scale: Tensor, whole: Tensor | None = None) -> Tensor:
        """The scale of codes of ``shape`` in the dtype and shape of the spec.

        Args:
            shape: of the weight.
            scale: as in a file.
            whole: the scale of the whole tensor, if the format has one.
        """
        x = scale.reshape(self.spec.scale_shape(shape))
        if self.global_scale is not None and whole is not None:
            return self.global_scale.of(x, whole)
        scales = SCALE_FORMATS[self.spec.scale_format]
        return x.view(scales.dtype) if scales.exponent_only else x.to(scales.dtype)

    def check_scale(self, name: str, scale: Tensor, layer: str) -> None:
        """Raise ValueError for a scale, as in a file or in the spec's dtype, that is NaN, infinite or negative."""
        scales = SCALE_FORMATS[self.spec.scale_format]
        x = (scale.view(scales.dtype) if scales.exponent_only else scale).float()
        if not bool((x.isfinite() & (x >= 0)).all()):
            raise ValueError(f"{name} must be finite and not negative; the weights of {layer} are unusable")

    def config(self, ignored: Sequence[str], scale_fmt: str | None = None) -> dict[str, Any]:
        """The quantization config of a checkpoint in which the modules ``ignored`` are in high precision."""
        if self.method == "fp8":
            config = {
                "quant_method": self.method,
                "fmt": self.spec.format,
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.spec.block),
                "modules_to_not_convert": list(ignored),
            }
            return config if scale_fmt is None else {**config, "scale_fmt": scale_fmt}
        bits = 8 // FORMATS[self.spec.format].codes_a_byte
        codes, inputs = {"num_bits": bits, "type": "float", "symmetric": True}, self.arguments["input_activations"]
        group = {
            "targets": ["Linear"],
            "weights": {**codes, "dynamic": False, **self.arguments["weights"]},
            "input_activations": inputs and {**codes, "dynamic": True, **inputs},
            "output_activations": None,
            "format": self.arguments["format"],
        }
        return {
            "quant_method": self.method,
            "format": self.arguments["format"],
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


READ_SCALES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp8": ("weight_scale_inv", "weight_scale", "scale"),
        "compressed-tensors": ("weight_scale",),
        "modelopt": ("weight_scale",),
        "mxfp4": ("_scales",),
    }
)
"""The end of the name of a scale, by quant_method: DeepSeek-V3 and transformers, AutoFP8, DeepSeek-V4; gpt-oss."""


def _compressed(
    name: str,
    spec: QuantSpec,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    *,
    format: str = "float-quantized",
    **others: Any,
) -> CheckpointFormat:
    arguments = {"weights": weights, "input_activations": inputs, "format": format}
    return CheckpointFormat(name, "compressed-tensors", spec, "weight_scale", arguments=arguments, **others)


_pow2 = partial(QuantSpec, "e4m3", scale_rounding="pow2")
_MX = {"strategy": "group", "group_size": BLOCK_1X32[1], "scale_dtype": "torch.uint8"}
_WHOLE_GROUPS = "compressed-tensors needs whole groups of K"
_ROWS = (
    CheckpointFormat(
        "fine_grained",
        "fp8",
        _pow2(BLOCK_128X128),
        "weight_scale_inv",
        BLOCK_128X128,
        "transformers derives blocks of other sizes from the grid of scales, and reads other weights",
        (UE8M0,),
        matches_parts=True,
    ),
    _compressed("compressed_channel", _pow2(ROWWISE), {"strategy": "channel"}, {"strategy": "token"}),
    _compressed("compressed_tensor", _pow2(TENSORWISE), {"strategy": "tensor"}, {"strategy": "token"}),
    _compressed(
        "compressed_block",
        _pow2(BLOCK_128X128),
        {"strategy": "block", "block_structure": list(BLOCK_128X128)},
        {"strategy": "group", "group_size": BLOCK_128X128[1]},
        multiples=(1, BLOCK_128X128[1]),
        why="the kernels of vLLM need whole blocks of K",
        note_on_experts=REFUSED_EXPERTS,
    ),
    _compressed(
        "compressed_mxfp8",
        _pow2(BLOCK_1X32, scale_format="e8m0"),
        _MX,
        _MX,
        format="mxfp8-quantized",
        multiples=(1, BLOCK_1X32[1]),
        why=_WHOLE_GROUPS,
        note_on_experts=REFUSED_EXPERTS,
    ),
    _compressed(
        "compressed_mxfp4",
        MXFP4,
        _MX,
        None,
        format="mxfp4-pack-quantized",
        multiples=(1, BLOCK_1X32[1]),
        why=_WHOLE_GROUPS,
        note_on_experts=REFUSED_EXPERTS,
        codes_end="weight_packed",
    ),
)

CHECKPOINT_FORMATS: Mapping[str, CheckpointFormat] = MappingProxyType({row.name: row for row in _ROWS})
"""Checkpoint formats by name."""

_READ_ROWS = (
    # gpt-oss: the weights of experts [E, N, K] as X_blocks [E, N, K/32, 16] and X_scales [E, N, K/32].
    CheckpointFormat("mxfp4", "mxfp4", MXFP4, "_scales", (1, BLOCK_1X32[1]), codes_end="_blocks", is_blocked=True),
    _compressed(
        "compressed_nvfp4",
        NVFP4,
        {"strategy": "tensor_group", "group_size": NVFP4.block[1]},
        None,
        format="nvfp4-pack-quantized",
        codes_end="weight_packed",
        global_scale=GlobalScale("weight_global_scale", True),
    ),
    CheckpointFormat(
        "modelopt_nvfp4", "modelopt", NVFP4, "weight_scale", global_scale=GlobalScale("weight_scale_2", False)
    ),
)
READ_FORMATS: Mapping[str, CheckpointFormat] = MappingProxyType({row.name: row for row in _READ_ROWS})
"""Checkpoint formats that are read and not written, by name."""


def checkpoint_format(name: object, scale_rounding: str, scale_fmt: str | None) -> CheckpointFormat:
    """The row of this name with these options.

    Raises:
        ValueError: an unknown name, or an option that the format does not have.
    """
    require("format", name, tuple(CHECKPOINT_FORMATS))
    row = CHECKPOINT_FORMATS[str(name)]
    require(f"scale_fmt of {row.name!r}", scale_fmt, (None, *row.scale_fmts))
    if scale_fmt is not None and scale_rounding != row.spec.scale_rounding:
        raise ValueError(
            f"scale_fmt {scale_fmt!r} says that scales are powers of two: it needs scale_rounding "
            f"{row.spec.scale_rounding!r}; got {scale_rounding!r}"
        )
    return replace(row, spec=replace(row.spec, scale_rounding=scale_rounding))
