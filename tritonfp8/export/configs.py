"""The quantization config of a checkpoint that is read: in which checkpoint format a layer is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tritonfp8.export.checkpoint_formats import CHECKPOINT_FORMATS, READ_FORMATS, UE8M0, CheckpointFormat
from tritonfp8.export.files import find_config
from tritonfp8.specs import BLOCKS, TENSORWISE, QuantSpec
from tritonfp8.specs.checks import require, shown
from tritonfp8.specs.formats import FORMATS

# By key the default of compressed-tensors, and what is read here.
_CODES = (("type", "int", "float"), ("symmetric", True, True), ("dynamic", False, False))
# What transformers calls scales that are no powers of two.
FLOAT = "float"
# Layouts that are not read here: what they are, and what reads them.
_ELSEWHERE = {"fbgemm_fp8": ("FBGEMM (one scale a row)", "transformers with fbgemm-gpu, and vLLM")}


class FormatGroup(NamedTuple):
    """Layers of one checkpoint format: names, regular expressions after ``re:``, or names of classes."""

    targets: tuple[str, ...]
    row: CheckpointFormat

    def rank(self, names: tuple[str, ...], classes: tuple[str, ...]) -> int | None:
        """How closely a layer is matched: 0 by name, 1 by an expression, 2 by a class; None: not at all."""
        if any(target in names for target in self.targets):
            return 0
        expressions = (target[3:] for target in self.targets if target.startswith("re:"))
        if any(re.match(expression, name) for expression in expressions for name in names):
            return 1
        return 2 if any(target in classes for target in self.targets) else None


def groups(config: Mapping[str, Any]) -> list[FormatGroup]:
    """The groups of a quantization config.

    Raises:
        ValueError: an unknown ``quant_method``, or another kind of codes or scales than a row of
            :data:`CHECKPOINT_FORMATS` or :data:`READ_FORMATS` has.
    """
    method = config.get("quant_method")
    if isinstance(method, str) and method in _ELSEWHERE:
        raise _elsewhere(repr(method), *_ELSEWHERE[method])
    require("quant_method of the quantization config", method, tuple(_READERS))
    return _READERS[str(method)](config)


def _elsewhere(method: str, what: str, readers: str) -> ValueError:
    return ValueError(
        f"quant_method {method} is the layout of {what}, which {readers} read. load reads "
        f"{' and '.join(map(repr, _READERS))}: take a checkpoint of these, or one in high precision"
    )


def specs_of(folder: Path) -> list[QuantSpec]:
    """The specs of the codes that the config of a checkpoint speaks of; none of a checkpoint in high precision."""
    config = find_config(folder)
    return [] if config is None else [group.row.spec for group in groups(config)]


def row_of(found: list[FormatGroup], names: tuple[str, ...], classes: tuple[str, ...]) -> CheckpointFormat | None:
    """The checkpoint format of a layer, or None if no group has it.

    Args:
        found: the groups.
        names: of the layer, in the checkpoint and in the model.
        classes: the names of its class and of the base classes.
    """
    ranked = [(rank, at) for at, group in enumerate(found) if (rank := group.rank(names, classes)) is not None]
    return found[min(ranked)[1]].row if ranked else None


def _fine_grained(config: Mapping[str, Any]) -> list[FormatGroup]:
    row = CHECKPOINT_FORMATS["fine_grained"]
    require("fmt of the quantization config", config.get("fmt", row.spec.format), (row.spec.format,))
    require("scale_fmt of the quantization config", config.get("scale_fmt"), (None, FLOAT, UE8M0))
    require("activation_scheme of the quantization config", _activations(config), ("dynamic", "static"))
    size = config.get("weight_block_size")
    # AutoFP8 and Mistral write one scale a tensor, and no block.
    row = _with_block(row, TENSORWISE if size is None else _block("weight_block_size", size, row))
    for key in ("modules_to_not_convert", "ignored_layers"):
        _names(key, config.get(key) or [])
    return [FormatGroup(("re:.*",), row)]


def _activations(config: Mapping[str, Any]) -> object:
    return config.get("activation_scheme", "dynamic")


def scales_of_activations(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The last parts of the names of the static scales of activations that a config, which was read, speaks of."""
    schemes = config.get("config_groups") or {}
    inputs = [scheme.get("input_activations") for scheme in schemes.values()]
    # A tensor that has scales of blocks, too, is "local": these are dynamic.
    is_static = any(isinstance(each, dict) and each.get("dynamic", False) in (False, None, "local") for each in inputs)
    if config.get("quant_method") == "modelopt":
        # Caches of keys and values have their scales beside the layers that make these.
        return ("input_scale", "k_scale", "v_scale")
    if is_static or _activations(config) == "static":
        return ("input_scale", "activation_scale", "input_global_scale")
    return ()


def _compressed(config: Mapping[str, Any]) -> list[FormatGroup]:
    _names("ignore", config.get("ignore") or [])
    schemes = config.get("config_groups")
    if not isinstance(schemes, dict) or not schemes:
        raise ValueError(f"config_groups of the quantization config must be a JSON object; got {shown(schemes)}")
    found = []
    for name, scheme in schemes.items():
        if not isinstance(scheme, dict):
            raise ValueError(f"{name} of config_groups must be a JSON object; got {shown(scheme)}")
        # A group without weights: only activations, such as a cache's.
        if scheme.get("weights") is not None:
            targets = _names(f"targets of {name}", scheme.get("targets"))
            found.append(FormatGroup(targets, _compressed_row(name, scheme["weights"])))
    return found


def _experts(config: Mapping[str, Any]) -> list[FormatGroup]:
    _names("modules_to_not_convert", config.get("modules_to_not_convert") or [])
    return [FormatGroup(("re:.*",), READ_FORMATS["mxfp4"])]


def _modelopt(config: Mapping[str, Any]) -> list[FormatGroup]:
    if (algorithm := config.get("quant_algo")) != "NVFP4":
        what = "NVIDIA ModelOpt (one scale a tensor, or others), of which NVFP4 is read"
        raise _elsewhere(f"'modelopt' with quant_algo {algorithm!r}", what, "TensorRT-LLM, vLLM and SGLang")
    row = READ_FORMATS["modelopt_nvfp4"]
    sizes = [config, *((scheme.get("weights") or {}) for scheme in (config.get("config_groups") or {}).values())]
    for each in sizes:
        require("group_size of the quantization config", each.get("group_size", row.spec.block[1]), row.spec.block[1:])
    for key in ("ignore", "exclude_modules"):
        _names(key, config.get(key) or [])
    return [FormatGroup(("re:.*",), row)]


_READERS: Mapping[str, Callable[[Mapping[str, Any]], list[FormatGroup]]] = {
    "fp8": _fine_grained,
    "compressed-tensors": _compressed,
    "mxfp4": _experts,
    "modelopt": _modelopt,
}


def _compressed_row(group: str, weights: object) -> CheckpointFormat:
    if not isinstance(weights, dict):
        raise ValueError(f"weights of {group} must be a JSON object; got {shown(weights)}")
    bits = weights.get("num_bits", 8)
    require(f"num_bits of the weights of {group}", bits, (8, 4))
    rows = {
        row.arguments["weights"]["strategy"]: row
        for row in (*CHECKPOINT_FORMATS.values(), *READ_FORMATS.values())
        if "weights" in row.arguments and FORMATS[row.spec.format].codes_a_byte * bits == 8
    }
    for key, default, needed in _CODES:
        require(f"{key} of the weights of {group}", weights.get(key, default), (needed,))
    require(f"strategy of the weights of {group}", weights.get("strategy"), tuple(rows))
    row = rows[weights["strategy"]]
    needed = row.arguments["weights"]
    for key in ("group_size", "scale_dtype"):
        if key in needed:
            require(f"{key} of the weights of {group}", weights.get(key), (needed[key],))
    if "block_structure" in needed:
        return _with_block(row, _block(f"block_structure of {group}", weights.get("block_structure"), row))
    return row


def _block(name: str, value: object, row: CheckpointFormat) -> tuple[int, int]:
    scales = row.spec.scale_format
    blocks = tuple(list(block) for block, entry in BLOCKS.items() if min(block) > 0 and scales in entry.scale_formats)
    require(name, value, blocks)
    return value[0], value[1]  # type: ignore[index]


def _with_block(row: CheckpointFormat, block: tuple[int, int]) -> CheckpointFormat:
    return replace(row, spec=QuantSpec(row.spec.format, block))


def _names(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{key} of the quantization config must be a list of names; got {shown(value)}")
    return tuple(value)
