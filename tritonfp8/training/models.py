"""The models that ``tritonfp8 train`` trains: presets by name, or any transformers config, with random weights."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tritonfp8.specs.checks import nearest
from tritonfp8.training.corpus import VOCABULARY


@dataclass(frozen=True)
class Preset:
    """A named model: the fields of its ``transformers.LlamaConfig``, and its default learning rate.

    With experts it is a mixture, of a ``transformers.MixtralConfig``, and ``intermediate_size`` is an expert's size.

    The difference between two runs from almost equal weights grows with the learning rate. A comparison needs one at
    which two runs of bf16 end close together; ``bf16-perturbed`` shows how close.
    """

    lr: float
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None

    def config(self) -> dict[str, int]:
        """The fields of the config."""
        return {name: value for name, value in vars(self).items() if name != "lr" and value is not None}


MODELS: Mapping[str, Preset] = MappingProxyType(
    {
        "tiny": Preset(1e-3, 128, 512, 4, 4, 4),
        "160m": Preset(1.5e-4, 1024, 3072, 12, 16, 16),
        "160m-moe": Preset(1.5e-4, 768, 512, 8, 12, 4, num_local_experts=16, num_experts_per_tok=2),
        "1b": Preset(3e-4, 2048, 8192, 16, 32, 8),
        "8b-slice": Preset(3e-4, 4096, 14336, 4, 32, 8),
    }
)
CONFIG_FILE_LR = 3e-4
MAX_SEQ_LEN = 8192


def default_lr(model: str) -> float:
    """The learning rate of a preset, or :data:`CONFIG_FILE_LR` for config files.

    Raises:
        ValueError: neither a preset nor an existing path; the message names a preset that is like it.
    """
    if preset := MODELS.get(model):
        return preset.lr
    if Path(model).exists():
        return CONFIG_FILE_LR
    raise ValueError(
        f"no model is named {model!r}, and no file or folder has this path{nearest(model, MODELS)} "
        f"Models: {', '.join(MODELS)}, or the path of a transformers config"
    )


def require_train_extra() -> None:
    """Raise ModuleNotFoundError unless the packages of the ``train`` extra are installed; it names the command."""
    if missing := [name for name in ("transformers", "matplotlib") if importlib.util.find_spec(name) is None]:
        raise ModuleNotFoundError(f'training needs {" and ".join(missing)}: pip install "tritonfp8[train]"')


def perturb(model: nn.Module, seed: int) -> None:
    """Change every parameter in place by a random relative 2^-9, about the error of rounding it to bf16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.mul_(1 + 2.0**-9 * noise)


def build_model(name: str, seq_len: int, seed: int) -> nn.Module:
    """A preset, or the model of a config file or folder, with random float32 weights from ``seed``, on the CPU.

    Raises:
        ValueError: the config cannot be read, is not of a causal language model, or has a vocabulary below 256 or fewer
            positions than ``seq_len``.
    """
    with _quiet_imports():
        from transformers import AutoModelForCausalLM
    config = read_config(name)
    text_config = config.get_text_config()
    if (getattr(text_config, "vocab_size", None) or 0) < VOCABULARY:
        raise ValueError(
            f"a token is a byte, so vocab_size must be at least {VOCABULARY}; {name} has "
            f"{getattr(text_config, 'vocab_size', None)}"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise ValueError(f"seq_len must be at most {positions}, the number of positions of {name}; got {seq_len}")
    torch.manual_seed(seed)
    try:
        with _quiet_imports():
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(f"{name} is not the config of a causal language model: {error}") from error
    return model


def read_config(name: str) -> Any:
    """The transformers config of a preset, of a JSON file, or of a folder with one.

    Raises:
        ValueError: neither a preset nor a config.
    """
    with _quiet_imports():
        from transformers import AutoConfig, LlamaConfig, MixtralConfig
    if preset := MODELS.get(name):
        config = LlamaConfig if preset.num_local_experts is None else MixtralConfig
        return config(
            vocab_size=VOCABULARY, max_position_embeddings=MAX_SEQ_LEN, tie_word_embeddings=False, **preset.config()
        )
    # A name that is neither raises.
    default_lr(name)
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    try:
        if not isinstance(json.loads(path.read_text()), dict):
            raise ValueError("a JSON object is needed")
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a transformers config: {error}") from error


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Silence warnings about optional extensions of other packages that transformers' imports log."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
