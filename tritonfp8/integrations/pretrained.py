"""from_pretrained: a checkpoint of transformers, quantized or not, as a model whose weights are stored in 8 bits."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from tritonfp8 import quantized_init, recipes
from tritonfp8.conversion import convert, revert
from tritonfp8.conversion.selection import converted
from tritonfp8.export import load_any, specs_of
from tritonfp8.layers.stored import is_stored, names_of_weights, recipe_of_storage, stored_part, why_experts_stay
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec, expands_to
from tritonfp8.specs.checks import require
from tritonfp8.specs.formats import BYTE_FORMATS

# By the blocks of its weights the recipe that reads codes as they are; the first is for checkpoints without codes.
RECIPES = ("rowwise", "blockwise", "mxfp8")
TRAIN = (None, "adapters", "full")
log = logging.getLogger("tritonfp8")


def from_pretrained(
    folder: str | Path,
    recipe: str | Recipe | None = None,
    train: Literal["adapters", "full"] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **changes: Any,
) -> PreTrainedModel:
    """Load a checkpoint of transformers into a model whose linear layers and experts store their weights in 8 bits.

    It reads what :func:`tritonfp8.export.load` reads (``quantization_config`` of fine-grained FP8 and of
    compressed-tensors), and checkpoints in high precision. The model is built on the meta device and filled tensor by
    tensor: no weight that is stored is ever in memory in high precision with another one. Codes whose scales are powers
    of two are kept where the recipe has their blocks. A log record (``tritonfp8``, INFO) is the report, which says for
    each layer what was kept, and what rounding it again costs in dB.

    Args:
        folder: of the checkpoint, or its name on the Hugging Face Hub.
        recipe: of all layers. Default: the recipe that reads the codes of the checkpoint as they are; ``"rowwise"`` for
            one scale a weight, and for checkpoints in high precision.
        train: None to generate: eval mode, all parameters frozen. ``"adapters"``: frozen, in training mode, for
            adapters such as peft's. ``"full"``: all parameters train. Stored weights have no copy in high precision
            and count as float32, so ``dtype`` is float32; experts are not stored then. Any optimizer of torch rounds at
            random, and :class:`tritonfp8.optim.AdamW` once a step; compute in bfloat16 by autocast.
        dtype: of parameters that are not stored. Default: as the config says, float32 for ``"full"``.
        device: where the model is made.
        **changes: to attributes of the config, such as ``attn_implementation``.

    Returns:
        The model, of the class that the config names. It has no ``quantization_config``: for transformers it is a model
        in high precision, which trains, and which ``save_pretrained`` writes in high precision.
        :func:`tritonfp8.export.save` without a format writes the format of the checkpoint.

    Raises:
        ValueError: as :func:`tritonfp8.export.load`; an unknown ``train`` or recipe, a ``dtype`` that ``"full"`` does
            not have, or a config that names no class of transformers.
    """
    root = _local(folder)
    config = AutoConfig.from_pretrained(root, **changes)
    model = loaded(root, config, _class_of(config), recipe, train, dtype, torch.device(device))
    model.config.name_or_path = model.name_or_path = str(folder)
    return model


def loaded(
    root: Path,
    config: PretrainedConfig,
    made_of: Any,
    recipe: str | Recipe | None,
    train: object,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Any:
    """A model of this class and config from the checkpoint in ``root``; see :func:`from_pretrained`."""
    require("train", train, TRAIN)
    if train == "full" and dtype not in (None, torch.float32):
        raise ValueError(f"train='full' steps weights that count as float32: leave out dtype; got {dtype}")
    config.__dict__.pop("quantization_config", None)
    chosen = recipes.get(recipe or _recipe_of(specs_of(root)))
    in_high = torch.float32 if train == "full" else dtype or config.dtype or torch.float32
    with init_empty_weights(include_buffers=False), quantized_init(chosen):
        model = made_of._from_config(config, dtype=in_high)
    # accelerate gives each name a tensor of its own.
    model.tie_weights()
    _keep_in_float32(model)
    if train == "full":
        _give_back_experts(model)
    log.info("%s as %s: %s", root, chosen.name, load_any(model, root, device))
    model.to(device).requires_grad_(train == "full")
    if train == "full":
        convert(model, chosen, weight_storage="quantized")
    if (root / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(root)
    return model.train(train is not None)


def _local(folder: str | Path) -> Path:
    if (root := Path(folder)).is_dir():
        return root
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise ValueError(f"{folder} must be the folder of a checkpoint, or its name on the Hub: {error}") from error


def _recipe_of(specs: list[QuantSpec]) -> str:
    """The recipe that reads the codes of the first spec that has one; one scale a weight is one for each row, too."""
    read = {name: recipe_of_storage(recipes.get(name)).output.rhs for name in RECIPES}
    for spec in specs:
        for name, rhs in read.items():
            # Codes of fewer bits are read by a scale a row, which has a kernel on every GPU.
            if rhs is not None and (
                expands_to(spec, rhs) if spec.format not in BYTE_FORMATS else _has_blocks(spec, rhs)
            ):
                return name
    return RECIPES[0]


def _has_blocks(spec: QuantSpec, rhs: QuantSpec) -> bool:
    return (rhs.block, rhs.scale_format) == (spec.block, spec.scale_format)


def _class_of(config: PretrainedConfig) -> Any:
    names = getattr(config, "architectures", None) or [""]
    made_of = getattr(transformers, names[0], None)
    if made_of is None:
        raise ValueError(
            f"config.json must name a class of transformers in 'architectures'; got {names[0] or 'none'}. A model with "
            "code of its own is made inside of tritonfp8.quantized_init, and filled by tritonfp8.export.load"
        )
    return made_of


def _keep_in_float32(model: Any) -> None:
    """Give float32 to what the class keeps so beside 16 bits, such as the biases by which tokens choose experts."""
    kept = [re.escape(key).replace(r"\*", ".*") for key in model._keep_in_fp32_modules_strict or ()]
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers) if kept else ():
            for key, x in own.items():
                is_floating = x is not None and x.is_floating_point() and stored_part(x) is None
                if is_floating and re.search("|".join(kept), f"{path}.{key}"):
                    own[key] = x.float() if own is module._buffers else nn.Parameter(x.float(), x.requires_grad)


def _give_back_experts(model: nn.Module) -> None:
    """Plain weights for experts, which are not stored where they train."""
    for layer in converted(model).values():
        for key in names_of_weights(layer) if is_stored(layer) else ():
            layer._parameters[key].requires_grad_()  # type: ignore[union-attr]
        if why_experts_stay(layer, False) is not None:
            revert(layer)
