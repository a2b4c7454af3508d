"""The settings of a training comparison, their defaults and checks, and the text and model that they name."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from tritonfp8 import recipes
from tritonfp8.compat import hardware
from tritonfp8.specs.checks import require_int
from tritonfp8.training import corpus
from tritonfp8.training.models import build_model, default_lr, require_train_extra

BASELINE = "bf16"
# Not a recipe: bf16 from slightly different weights. The difference between two bf16 runs is a comparison's noise.
PERTURBED = "bf16-perturbed"
DEFAULT_RECIPES = ("bf16", "rowwise", "blockwise")


@dataclass(frozen=True)
class Defaults:
    """Default settings of a device type."""

    steps: int
    batch_size: int
    seq_len: int
    compile: bool


DEFAULTS: Mapping[str, Defaults] = MappingProxyType(
    {"cpu": Defaults(60, 4, 128, False), "cuda": Defaults(500, 16, 1024, True)}
)


@dataclass(frozen=True)
class Settings:
    """One comparison, with every default filled in. Made by :meth:`resolve`.

    Attributes:
        model: a name of :data:`MODELS`, or the path of a transformers config (a JSON file, or a folder with one).
        recipes: names of built-in recipes, in the order in which they run.
        steps: optimizer steps a recipe.
        batch_size: sequences a step.
        seq_len: tokens (bytes of text) a sequence.
        lr: peak learning rate.
        compile: whether the forward and backward passes go through ``torch.compile``.
        device: ``"cpu"`` or ``"cuda"``, with or without an index.
        seed: seed of the initial weights and of the choice of text.
        data: file or folder of text, or None for the standard library.
        notice: a message to the user about the device, or None.
    """

    model: str
    recipes: tuple[str, ...]
    steps: int
    batch_size: int
    seq_len: int
    lr: float
    compile: bool
    device: str
    seed: int
    data: str | None
    notice: str | None

    @classmethod
    def resolve(
        cls,
        *,
        model: str = "tiny",
        recipes: tuple[str, ...] = DEFAULT_RECIPES,
        steps: int | None = None,
        batch_size: int | None = None,
        seq_len: int | None = None,
        lr: float | None = None,
        compile: bool | None = None,
        device: str | None = None,
        seed: int = 0,
        data: str | Path | None = None,
    ) -> Settings:
        """Settings in which defaults of the device (:data:`DEFAULTS`) and of the model replace None.

        Raises:
            ValueError: a value out of its range, an unknown model or recipe (the message names the nearest), or a
                device that does not exist or has no FP8 tensor cores.
        """
        _check_recipes(recipes)
        chosen, notice = choose_device(device)
        defaults = DEFAULTS[chosen.type]
        model_lr = default_lr(model)
        lr = model_lr if lr is None else lr
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"the learning rate must be a positive number; got {lr}")
        if not 0 <= seed < 2**63:
            raise ValueError(f"the seed must be from 0 to 2^63 - 1; got {seed}")
        given = {"steps": steps, "batch_size": batch_size, "seq_len": seq_len}
        sizes = {name: getattr(defaults, name) if size is None else size for name, size in given.items()}
        for name, size in sizes.items():
            require_int(name, size, 1)
        return cls(
            model=model,
            recipes=tuple(recipes),
            **sizes,
            lr=lr,
            compile=defaults.compile if compile is None else compile,
            device=str(chosen),
            seed=seed,
            data=None if data is None else str(data),
            notice=notice,
        )


@dataclass(frozen=True)
class Job:
    """Settings with their text and model.

    Attributes:
        settings: the settings.
        text: the text to train on.
        model: the model with its initial weights, float32, on the CPU; each recipe trains a copy.
    """

    settings: Settings
    text: corpus.Corpus
    model: nn.Module


def choose_device(requested: str | None) -> tuple[torch.device, str | None]:
    """The device to train on, and a message to the user about it, or None.

    The default is the current CUDA GPU if it has FP8 tensor cores, else the CPU.

    Raises:
        ValueError: the requested device does not exist, or is a GPU without FP8 tensor cores.
    """
    meaning = "the reference ops run on the CPU: losses can be compared, speeds mean nothing"
    if requested is None:
        if not torch.cuda.is_available():
            return torch.device("cpu"), f"No CUDA GPU here, so {meaning}."
        device = hardware.with_index("cuda")
        lacking = _lacks_fp8(device)
        return (torch.device("cpu"), f"{lacking}, so {meaning}.") if lacking else (device, None)
    device = existing_device(requested)
    if device.type == "cpu":
        return device, f"--device cpu: {meaning}."
    if lacking := _lacks_fp8(device):
        raise ValueError(f"{lacking}; use 'cpu', which runs the reference ops")
    return device, None


def existing_device(requested: str) -> torch.device:
    """The CPU, or a CUDA GPU with its number.

    Raises:
        ValueError: another device, or one that does not exist.
    """
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise ValueError(f"the device must be 'cpu' or 'cuda', or 'cuda:N'; got {requested!r}") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"the device must be 'cpu' or 'cuda', or 'cuda:N'; got {requested!r}")
    count = torch.cuda.device_count()
    if count:
        device = hardware.with_index(device)
    if (device.index or 0) >= count:
        raise ValueError(f"device {requested!r} does not exist: torch {torch.__version__} finds {count} CUDA GPUs here")
    return device


def _lacks_fp8(device: torch.device) -> str | None:
    # No warning: the notice or the error has the same message.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        abilities = hardware.abilities(device)
    if abilities.has_fp8_mma:
        return None
    major, minor = abilities.capability or (0, 0)
    return f"{abilities.name} (sm_{major}{minor}) has no FP8 tensor cores (sm_89 or later is needed)"


def _check_recipes(names: tuple[str, ...]) -> None:
    if not names:
        raise ValueError(f"at least one recipe is needed; recipes: {', '.join(recipes.names())}")
    for name in names:
        if name != PERTURBED:
            recipes.of_layers(name)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"each recipe can be given once; got more than once: {', '.join(twice)}")


def prepare(settings: Settings) -> Job:
    """Read the text and build the model.

    Raises:
        ValueError: text or config file missing, unreadable or too small; or a vocabulary below 256.
        ModuleNotFoundError: a package of the ``train`` extra is missing.
    """
    require_train_extra()
    text = corpus.hold_out(corpus.load(settings.data), settings.seq_len)
    next(corpus.batches(text, steps=1, batch_size=1, seq_len=settings.seq_len, seed=settings.seed))
    model = build_model(settings.model, settings.seq_len, settings.seed)
    return Job(settings, text, model)
