"""The quantizer of transformers by which ``AutoModel...from_pretrained`` stores weights as config.json says."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from tritonfp8.export import CONFIG, ENTRY, INSIDE, OURS
from tritonfp8.integrations.pretrained import TRAIN, loaded
from tritonfp8.recipes import get
from tritonfp8.specs.checks import require


@register_quantization_config(OURS)
class StoredWeightsConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a folder whose weights are stored in 8 bits when transformers loads it::

        StoredWeightsConfig(train="adapters").write(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)

    The program that loads imports ``tritonfp8.integrations.transformers`` before. The model is the one that
    :func:`from_pretrained` gives.

    Args:
        recipe: a name; None for the recipe that reads the codes of the checkpoint as they are.
        train: None, ``"adapters"`` or ``"full"``.
        checkpoint: the quantization config that the checkpoint had; None in high precision.
        **others: of other versions; not used.

    Raises:
        ValueError: an unknown recipe or ``train``.
    """

    def __init__(
        self,
        recipe: str | None = None,
        train: str | None = None,
        checkpoint: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        require("train", train, TRAIN)
        if recipe is not None:
            get(recipe)
        self.quant_method, self.recipe, self.train, self.checkpoint = OURS, recipe, train, checkpoint

    def write(self, folder: str | Path) -> None:
        """Put this config into ``config.json`` of a checkpoint, around the one that is there."""
        path = Path(folder) / CONFIG
        data = json.loads(path.read_text(encoding="utf-8"))
        before = data.get(ENTRY)
        if before is not None and before.get("quant_method") == OURS:
            before = before.get(INSIDE)
        data[ENTRY] = {"quant_method": OURS, "recipe": self.recipe, "train": self.train, INSIDE: before}
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


@register_quantizer(OURS)
class _StoredWeights(HfQuantizer):
    """Has :func:`from_pretrained` load a model in the place of transformers, which is left an empty one to fill."""

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = None if self.quantization_config.train == "full" else dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str], device_map: Any = None, **others: Any
    ) -> None:
        devices = set(device_map.values()) if isinstance(device_map, dict) else {device_map or "cpu"}
        if len(devices) != 1 or devices & {"auto", "balanced", "balanced_low_0", "sequential", "disk"}:
            raise ValueError(
                "weights that are stored in 8 bits are loaded to one device: give device_map='cpu' or 'cuda', or none; "
                f"got {device_map!r}"
            )
        self._device = torch.device(devices.pop())
        self._root = Path(checkpoint_files[0]).parent
        self._nothing = tempfile.TemporaryDirectory()
        checkpoint_files[:] = [str(Path(self._nothing.name) / "model.safetensors")]
        save_file({}, checkpoint_files[0], {"format": "pt"})
        model._modules.clear()
        model.all_tied_weights_keys, model._tp_plan = {}, {}

    def _process_model_after_weight_loading(self, model: Any, **others: Any) -> None:
        self._nothing.cleanup()
        config = self.quantization_config
        found = loaded(self._root, model.config, type(model), config.recipe, config.train, self._dtype, self._device)
        # The caller has this object.
        vars(model).clear()
        vars(model).update(vars(found))

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return True
