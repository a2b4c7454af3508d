"""torchao: ``quantize_(model, TritonFP8Config("rowwise"))`` converts linear layers for inference.

Importing this module registers the config with torchao.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from tritonfp8.conversion import convert
from tritonfp8.recipes import Recipe, get

__all__ = ["TritonFP8Config"]


@dataclass(frozen=True)
class TritonFP8Config(AOBaseConfig):
    """Layers follow a recipe of tritonfp8, and keep 8-bit codes in place of their weights.

    ``torchao.quantization.quantize_(model, TritonFP8Config("rowwise"), filter_fn)`` is
    ``tritonfp8.convert(model, "rowwise", filter_fn, mode="inference")``. ``filter_fn`` chooses the layers, and nothing
    else does: without it output heads and routers are converted too, which ``convert`` leaves out. torchao hands over
    one layer at a time, so a weight that two layers share is not noticed. Leave such layers out.

    Attributes:
        recipe: a name, the path of a TOML file, or a :class:`~tritonfp8.Recipe`.
        batch_invariant: see ``convert``.

    Raises:
        ValueError: an unknown recipe, or one that cannot be batch-invariant; of ``quantize_``, a weight that cannot be
            stored (:func:`tritonfp8.convert`).
    """

    recipe: str | Recipe = "rowwise"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        get(self.recipe, batch_invariant=self.batch_invariant)


@register_quantize_module_handler(TritonFP8Config)  # type: ignore[untyped-decorator]
def _convert(module: nn.Module, config: TritonFP8Config, **options: Any) -> nn.Module:
    everything = lambda layer, name: True  # noqa: E731
    convert(module, config.recipe, everything, mode="inference", batch_invariant=config.batch_invariant)
    return module
