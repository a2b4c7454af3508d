"""save: an export as a folder of safetensors files. A file under its final name is whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.conversion.selection import Filter
from tritonfp8.export.files import (
    CONFIG,
    ENTRY,
    GENERATION_CONFIG,
    INDEX,
    ONE_FILE,
    QUANTIZATION_CONFIG,
    written_before,
)
from tritonfp8.export.places import check_whole, places
from tritonfp8.export.report import ExportReport
from tritonfp8.export.stream import WrittenTensor, planned
from tritonfp8.specs.checks import require_int, require_type
from tritonfp8.specs.naming import listed

MAX_SHARD_BYTES = 5_000_000_000


def save(
    model: nn.Module,
    folder: str | Path,
    format: str,
    *,
    filter: Filter | None = None,
    scale_rounding: str = "pow2",
    scale_fmt: str | None = None,
    dtype: torch.dtype | None = None,
    adapters: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ExportReport:
    """Write a model as a checkpoint in 8 bits, which :func:`load`, transformers and inference engines read.

    The folder gets ``model.safetensors``, or shards with ``model.safetensors.index.json``. If the model has a config of
    transformers, the folder also gets ``config.json`` with ``quantization_config``, and ``generation_config.json``. A
    model without one gets ``quantization_config.json``, which :func:`load` reads. The tokenizer is no part of a model:
    save it yourself.

    Files are written under a temporary name and renamed when all of them are complete, the config last. A run that is
    killed leaves no part of a file under its final name. Memory grows by one shard.

    Args:
        model, format, filter, scale_rounding, scale_fmt, dtype, adapters: as for :func:`plan`.
        folder: made if it is missing. It must not have weights yet.
        max_shard_bytes: the most bytes of tensors in a file; a layer that is larger gets a file of its own.

    Returns:
        An :class:`ExportReport` with the files.

    Raises:
        ValueError: as :func:`plan` and :func:`tensors`, sharded weights, a folder that has weights, or
            ``max_shard_bytes`` below 1.
        TypeError: an argument of another type.
        OSError: a file cannot be written.
    """
    require_type("folder", folder, str | Path, "a str or a Path")
    require_int("max_shard_bytes", max_shard_bytes, 1)
    entries, report, model = planned(model, format, filter, scale_rounding, scale_fmt, dtype, adapters)
    check_whole(places(model), "tritonfp8.export.save")
    root = Path(folder)
    if found := written_before(root):
        raise ValueError(f"{root} must not have weights yet; it has {listed(found)}. Give another folder")
    floating = (entry.dtype for entry in entries if entry.row is None and entry.dtype.is_floating_point)
    configs = _configs(model, report, dtype or next(floating, torch.bfloat16))
    root.mkdir(parents=True, exist_ok=True)
    with _temporary(root) as draft:
        names = _write_shards(entries, draft, max_shard_bytes)
        for name, text in configs.items():
            _write_text(draft / name, text)
        order = [*names, *configs]
        files = {name: (draft / name).stat().st_size for name in order}
        for name in order:
            os.replace(draft / name, root / name)
        _sync(root)
    return replace(report, files=files)


@contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    """A folder inside ``root``, on the same disk, so that a rename moves no data; removed in any case."""
    draft = Path(tempfile.mkdtemp(prefix=".export-", dir=root))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _shards(entries: list[WrittenTensor], limit: int) -> list[list[WrittenTensor]]:
    shards: list[list[WrittenTensor]] = []
    room = 0
    for entry in entries:
        if not shards or entry.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(entry)
        room -= entry.nbytes
    return shards


def _write_shards(entries: list[WrittenTensor], draft: Path, limit: int) -> list[str]:
    """Write the shards and their index. Returns the names of the files, the index last."""
    shards = _shards(entries, limit)
    count = len(shards)
    names = [ONE_FILE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    weight_map, total = {}, 0
    for name, shard in zip(names, shards, strict=True):
        tensors = {key: _owned(x) for entry in shard for key, x in entry.tensors()}
        _write_tensors(draft / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(x.nbytes for x in tensors.values())
    if count == 1:
        return names
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_text(draft / INDEX, _json(index))
    return [*names, INDEX]


def _owned(x: Tensor) -> Tensor:
    """``x`` on the CPU, contiguous, and in memory that it does not share, as safetensors writes it."""
    x = x.cpu().contiguous()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    # safetensors lets only the user read its files, so an engine of another user could not: take the usual mode.
    path.touch()
    mode = path.stat().st_mode
    # transformers reads a file only if its metadata names the framework.
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    _sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    # A rename may reach the disk before the data, so that a crash of the machine would leave an empty file.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _configs(model: nn.Module, report: ExportReport, dtype: torch.dtype) -> dict[str, str]:
    """The texts of the configs by file name; the one that tells how to read the tensors is last."""
    config = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {QUANTIZATION_CONFIG: _json(report.quantization_config)}
    texts = {}
    generation = getattr(model, "generation_config", None)
    if generation is not None and callable(getattr(generation, "to_json_string", None)):
        texts[GENERATION_CONFIG] = generation.to_json_string() + "\n"
    data = json.loads(config.to_json_string())  # type: ignore[union-attr]
    data["architectures"] = data.get("architectures") or [type(model).__name__]
    data["dtype"] = str(dtype).removeprefix("torch.")
    return {**texts, CONFIG: _json({**data, ENTRY: report.quantization_config})}


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
