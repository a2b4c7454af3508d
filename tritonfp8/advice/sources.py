"""The models that ``tritonfp8 advise`` reads: transformers configs, shapes of layers, and functions in Python files."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.advice.run import Prepare
from tritonfp8.training import read_config
from tritonfp8.warmup.run import parse_tokens, read_shapes

PIXELS, IDS = "pixel_values", "input_ids"


@dataclass(frozen=True)
class Source:
    """A model and what it is called with.

    Attributes:
        model: may be on the meta device; then ``prepare`` gives it weights.
        args, kwargs: of a call.
        prepare: as for :func:`tritonfp8.advise`.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    prepare: Prepare | None = None


def from_config(name: str, tokens: str, dtype: torch.dtype, device: torch.device | None) -> Source:
    """The model of a transformers config, on the meta device.

    Args:
        name: a preset of ``tritonfp8 train``, or the path of a config (a JSON file, or a folder with one).
        tokens: ``"4x4096"``, sequences x tokens a sequence; for a model of images ``"64"``, the images.
        dtype: of the weights.
        device: where a copy gets its weights; None for a prediction.

    Raises:
        ValueError: the config cannot be read, no class of transformers has it, or tokens that do not fit.
    """
    config = read_config(name)
    for each in (config, config.get_text_config()):
        # A cache is for generation: it would keep the keys of one step for the next.
        if hasattr(each, "use_cache"):
            each.use_cache = False
    with torch.device("meta"):
        model = _class_of(config, name)._from_config(config, dtype=dtype)

    def prepare(cut: nn.Module) -> nn.Module:
        made: Any = cut.to_empty(device=device)
        # Buffers that no checkpoint has are computed here, too.
        made.init_weights()
        return made

    inputs = _images(model, config, tokens, dtype) if model.main_input_name == PIXELS else _text(model, config, tokens)
    if device is not None:
        inputs = {key: x.to(device) for key, x in inputs.items()}
    return Source(model, (), inputs, None if device is None else prepare)


def _class_of(config: Any, name: str) -> Any:
    """The class of a config: the one it names itself, or transformers' causal language model of its type."""
    import transformers

    for each in getattr(config, "architectures", None) or ():
        if hasattr(transformers, each):
            return getattr(transformers, each)
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError as error:
        raise ValueError(
            f"{name} names no class of transformers in 'architectures', and {type(config).__name__} has no causal "
            "language model: give a Python file with a function that returns the model and its inputs"
        ) from error


def _text(model: Any, config: Any, tokens: str) -> dict[str, Tensor]:
    shape = parse_tokens(tokens)
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and shape[1] > positions:
        raise ValueError(f"tokens must have at most {positions} a sequence, as the model; got {tokens}")
    ids = torch.randint(0, text.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    if model.main_input_name != IDS:
        raise ValueError(
            f"{type(model).__name__} is called with {model.main_input_name}, which advise cannot make: give a Python "
            "file with a function that returns the model and its inputs"
        )
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    has_a_label_a_token = any(part in type(model).__name__ for part in ("LM", "ForConditionalGeneration"))
    return {IDS: ids, "labels": ids} if takes_labels and has_a_label_a_token else {IDS: ids}


def _images(model: Any, config: Any, tokens: str, dtype: torch.dtype) -> dict[str, Tensor]:
    images, one = parse_tokens(tokens)
    if "x" not in tokens.lower():
        images, one = one, 1
    if one != 1:
        raise ValueError(f"tokens of a model of images are the images of a batch, such as 64; got {tokens}")
    size = getattr(config, "image_size", None)
    if size is None:
        raise ValueError(
            f"the config of {type(model).__name__} does not say how large images are: give a Python file with a "
            "function that returns the model and its inputs"
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    generator = torch.Generator().manual_seed(0)
    return {PIXELS: torch.randn(images, channels, height, width, generator=generator).to(dtype)}


class Layers(nn.Module):
    """Linear layers, each called with its own input."""

    def __init__(self, shapes: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"{m}x{n}x{k}": nn.Linear(k, n, bias=False, dtype=dtype) for m, n, k in shapes})

    def forward(self, xs: dict[str, Tensor]) -> list[Tensor]:
        """The result of each layer, by its name."""
        return [self.layers[name](x) for name, x in xs.items()]


def from_shapes(path: Path, dtype: torch.dtype, device: torch.device | None) -> Source:
    """Linear layers of the shapes in a JSON file (``[{"m": tokens, "n": out features, "k": in features}, ...]``).

    Raises:
        ValueError: the file cannot be read, or has no such list.
    """
    shapes = list(dict.fromkeys(read_shapes(path)))
    on = device or torch.device("cpu")
    with torch.device(on):
        model = Layers(shapes, dtype)
        xs = {f"{m}x{n}x{k}": torch.randn(m, k, dtype=dtype).requires_grad_() for m, n, k in shapes}
    return Source(model, (xs,))


def from_file(text: str, tokens: str, dtype: torch.dtype, device: torch.device | None) -> Source:
    """The model of a function in a Python file: ``model.py:function``.

    The function returns the model and a mapping of the keywords of a call, or a tuple of arguments. It may take
    ``tokens`` (a str), ``dtype`` and ``device`` by these names.

    Raises:
        ValueError: no such file or function, or a result of another kind.
    """
    path, _, name = text.rpartition(":")
    if not path:
        raise ValueError(f"a Python file needs the name of a function, such as model.py:build; got {text!r}")
    made = _function(Path(path), name)
    offered = {"tokens": tokens, "dtype": dtype, "device": device or torch.device("cpu")}
    wanted = {key: value for key, value in offered.items() if key in inspect.signature(made).parameters}
    found = made(**wanted)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
        raise ValueError(f"{text} must return a model and its inputs; got {type(found).__name__}")
    model, inputs = found
    if isinstance(inputs, dict):
        return Source(model, (), inputs)
    return Source(model, tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,))


def _function(path: Path, name: str) -> Callable[..., Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, name, None)
    if not callable(made):
        raise ValueError(f"{path} has no function {name!r}")
    return made
