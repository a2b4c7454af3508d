"""The files of a checkpoint: safetensors with an index, and configs. Nothing is unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8.specs.checks import require_type
from tritonfp8.specs.naming import listed

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, QUANTIZATION_CONFIG, GENERATION_CONFIG = "config.json", "quantization_config.json", "generation_config.json"
ENTRY = "quantization_config"
# The quant_method by which transformers hands a checkpoint to tritonfp8, and the entry with the config that it had.
OURS, INSIDE = "tritonfp8", "checkpoint"
# ModelOpt writes it beside a config.json that does not speak of it.
MODELOPT_CONFIG = "hf_quant_config.json"
_MISSING = f"neither {CONFIG} with an entry {ENTRY!r}, nor {QUANTIZATION_CONFIG}"
# As safetensors spells them.
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor in a file, by its header."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


class LoadedFrom(NamedTuple):
    """The folder of the checkpoint that a model was loaded from, and the patterns of ``ignore``."""

    folder: Path
    ignore: tuple[str, ...]


# An attribute of a model.
_SOURCE = "_tritonfp8_source"


def remember(model: Any, folder: Path, ignore: Iterable[str]) -> None:
    """Note that a model was loaded from a folder, for :func:`source_of`."""
    model.__dict__[_SOURCE] = LoadedFrom(folder.absolute(), tuple(ignore))


def source_of(model: Any) -> LoadedFrom:
    """Where a model was loaded from. Raises ValueError if tritonfp8 did not load it, or the folder is gone."""
    source: LoadedFrom | None = model.__dict__.get(_SOURCE)
    if source is None:
        raise ValueError(
            "the model was not loaded by tritonfp8.export.load or from_pretrained, so it has no format to go on in: "
            "give format="
        )
    if not source.folder.is_dir():
        raise ValueError(
            f"{source.folder}, from which the model was loaded, is gone, and weights that did not change are copied "
            "from it: put it back, or give format="
        )
    return source


def written_before(folder: Path) -> list[str]:
    """The files of weights in a folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.name == INDEX or path.suffix == ".safetensors")


def read_config(folder: Path) -> dict[str, Any]:
    """The quantization config of the checkpoint in ``folder``.

    Raises:
        ValueError: no folder, no config, or one that is no JSON object.
    """
    found = find_config(folder)
    if found is None:
        raise ValueError(
            f"{folder} has no quantization config: {_MISSING}. A checkpoint in high precision is read by the loader of "
            "its library"
        )
    return found


def find_config(folder: Path) -> dict[str, Any] | None:
    """As :func:`read_config`; None of a checkpoint in high precision."""
    if not folder.is_dir():
        raise ValueError(f"{folder} must be the folder of a checkpoint; it does not exist")
    for name in (CONFIG, QUANTIZATION_CONFIG):
        if not (folder / name).is_file():
            continue
        data = _read_json(folder / name)
        config = data.get(ENTRY) if name == CONFIG else data
        if isinstance(config, dict) and config.get("quant_method") == OURS:
            config = config.get(INSIDE)
        if config is not None:
            if not isinstance(config, dict):
                raise ValueError(f"{ENTRY} of {folder / name} must be a JSON object; got {type(config).__name__}")
            return config
    if (folder / MODELOPT_CONFIG).is_file():
        return {**(_read_json(folder / MODELOPT_CONFIG).get("quantization") or {}), "quant_method": "modelopt"}
    if codes := _codes_in(folder):
        raise ValueError(
            f"{folder} has no quantization config ({_MISSING}), and {codes} has codes, whose blocks the config would "
            "say: copy it from the checkpoint that the model came from"
        )
    return None


def _codes_in(folder: Path) -> str | None:
    """A tensor of 8-bit floats in a checkpoint; None if it has none, or cannot be read."""
    try:
        stored = stored_tensors(folder)
    except ValueError:
        return None
    return next((name for name, x in stored.items() if x.dtype.is_floating_point and x.dtype.itemsize == 1), None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}. Copy the checkpoint again") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must be a JSON object; got {type(data).__name__}")
    return data


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open. Raises ValueError for one that is missing, truncated or of another kind."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"{path} is missing: copy the whole checkpoint")
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no complete safetensors file ({error}): copy it again") from error
    with file:
        yield file


Read = Callable[[str], Tensor]
"""Reads a tensor of a checkpoint by its name, on the CPU."""


@contextmanager
def opened_all(folder: Path, stored: Mapping[str, Stored]) -> Iterator[Read]:
    """The files of a checkpoint, each opened once, when its first tensor is read."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}

        def read(name: str) -> Tensor:
            file = stored[name].file
            if file not in files:
                files[file] = stack.enter_context(opened(folder / file))
            return files[file].get_tensor(name)

        yield read


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of the checkpoint in ``folder``, by name, read from the headers of its files.

    Raises:
        ValueError: no file, one that is missing or truncated, or an index that does not fit the files.
    """
    if not (folder / INDEX).is_file():
        if not (folder / ONE_FILE).is_file():
            others = sorted(path.name for path in folder.iterdir())
            raise ValueError(
                f"{folder} must have {ONE_FILE} or {INDEX}; it has {listed(others) or 'nothing'}. Files of pickles are "
                "not read"
            )
        return _headers(folder, ONE_FILE)
    weight_map = _weight_map(folder / INDEX)
    found: dict[str, Stored] = {}
    for file in dict.fromkeys(weight_map.values()):
        headers = _headers(folder, file)
        if others := [name for name in headers if weight_map.get(name) != file]:
            raise ValueError(f"{folder / file} has tensors that {INDEX} does not place there: {listed(others)}")
        found.update(headers)
    if missing := [name for name in weight_map if name not in found]:
        raise ValueError(f"{INDEX} in {folder} places tensors in files that do not have them: {listed(missing)}")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} must have a 'weight_map' from names to files; got {type(weight_map).__name__}")
    for name, file in weight_map.items():
        # A path could lead out of the folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{path} must place {name} in a safetensors file of its folder; got {file!r}")
    return weight_map


def _headers(folder: Path, file: str) -> dict[str, Stored]:
    found = {}
    with opened(folder / file) as opened_file:
        for name in opened_file.keys():  # noqa: SIM118  no mapping
            header = opened_file.get_slice(name)
            kind = header.get_dtype()
            if kind not in DTYPES:
                raise ValueError(f"{name} in {folder / file} must be of a dtype among {', '.join(DTYPES)}; got {kind}")
            found[name] = Stored(file, DTYPES[kind], tuple(header.get_shape()))
    return found


def given_tensors(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of an export by name. Raises TypeError for anything else, ValueError for a name that comes twice."""
    found: dict[str, Tensor] = {}
    for name, x in tensors.items() if isinstance(tensors, Mapping) else tensors:
        require_type(f"the tensor {name!r}", x, Tensor, "a tensor")
        if name in found:
            raise ValueError(f"{name} came twice: give the tensors of one export")
        found[name] = x
    return found


def headers_of(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """The headers of tensors that are in memory, in no file."""
    return {name: Stored("", x.dtype, tuple(x.shape)) for name, x in tensors.items()}
