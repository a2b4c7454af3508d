"""save: an export as a folder of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from tritonfp8.conversion.selection import Filter
from tritonfp8.export.files import CONFIG, ENTRY, GENERATION_CONFIG, INDEX, ONE_FILE, QUANTIZATION_CONFIG
from tritonfp8.export.report import ExportReport
from tritonfp8.export.stream import WrittenTensor, planned
from tritonfp8.export.writing.as_loaded import save_as_loaded
from tritonfp8.export.writing.together import Write, groups_of, json_text, taken, together, write_files, write_tensors
from tritonfp8.layers.linear import require_module
from tritonfp8.specs.checks import require_int, require_type

MAX_SHARD_BYTES = 5_000_000_000


def save(
    model: nn.Module,
    folder: str | Path,
    format: str | None = None,
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

    Of a model that FSDP2 or tensor parallelism sharded all ranks call this: each takes part in
    gathering one weight at a time, and the first rank of their mesh writes the files of the whole model.

    Without ``format`` a model that was loaded is written as its checkpoint: the same files, names, dtypes, configs.
    Tensors that did not change are copied, also codes that the load rounded again. The others are quantized once, to
    scales that are powers of two; codes of the model are written as they are.

    Args:
        model, format, filter, scale_rounding, scale_fmt, dtype, adapters: as for :func:`plan`; without ``format`` only
            ``adapters`` is given.
        folder: made if it is missing. It must not have weights yet.
        max_shard_bytes: the most bytes of tensors in a file; a layer that is larger gets a file of its own.

    Returns:
        An :class:`ExportReport` with the files.

    Raises:
        ValueError: as :func:`plan` and :func:`tensors`, a folder that has weights, or ``max_shard_bytes`` below 1.
            Without ``format``: a model that was not loaded, or whose checkpoint is gone.
        TypeError: an argument of another type.
        OSError: a file cannot be written.
        RuntimeError: another rank raised, with its text.
    """
    require_type("folder", folder, str | Path, "a str or a Path")
    require_int("max_shard_bytes", max_shard_bytes, 1)
    require_module(model)
    root = Path(folder)
    if format is None:
        if (filter, scale_rounding, scale_fmt, dtype, max_shard_bytes) != (None, "pow2", None, None, MAX_SHARD_BYTES):
            raise ValueError("without format= the checkpoint that was loaded decides the format: give adapters= only")
        return save_as_loaded(model, root, adapters)
    options = filter, scale_rounding, scale_fmt, dtype, adapters
    groups = groups_of(model)
    entries, report, model = together(groups, root, lambda: planned(model, format, *options))
    floating = (entry.dtype for entry in entries if entry.row is None and entry.dtype.is_floating_point)
    configs = _configs(model, report, dtype or next(floating, torch.bfloat16))
    return replace(report, files=write_files(groups, root, *_shards(entries, max_shard_bytes, configs)))


def _shards(
    entries: list[WrittenTensor], limit: int, configs: dict[str, str]
) -> tuple[dict[str, Callable[[bool], Write]], dict[str, str]]:
    """The files of an export, as :func:`_write_files` takes them, and their index before the configs."""
    shards: list[list[WrittenTensor]] = []
    room = 0
    for entry in entries:
        if not shards or entry.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(entry)
        room -= entry.nbytes
    count = len(shards)
    names = [ONE_FILE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    headers = {
        name: {k: x for entry in shard for k, x in entry.headers().items()}
        for name, shard in zip(names, shards, strict=True)
    }
    index = {
        "metadata": {"total_size": sum(x.nbytes for each in headers.values() for x in each.values())},
        "weight_map": {key: name for name, each in headers.items() for key in each},
    }

    def made(shard: list[WrittenTensor], keep: bool) -> Write:
        found = taken((pair for entry in shard for pair in entry.tensors()), keep)
        return lambda path: write_tensors(path, found)

    files: dict[str, Callable[[bool], Write]] = {
        name: partial(made, shard) for name, shard in zip(names, shards, strict=True)
    }
    return files, ({} if count == 1 else {INDEX: json_text(index)}) | configs


def _configs(model: nn.Module, report: ExportReport, dtype: torch.dtype) -> dict[str, str]:
    """The texts of the configs by file name; the one that tells how to read the tensors is last."""
    config = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {QUANTIZATION_CONFIG: json_text(report.quantization_config)}
    texts = {}
    generation = getattr(model, "generation_config", None)
    if generation is not None and callable(getattr(generation, "to_json_string", None)):
        texts[GENERATION_CONFIG] = generation.to_json_string() + "\n"
    data = json.loads(config.to_json_string())  # type: ignore[union-attr]
    # FSDP2 makes a class of its own.
    made_of = next((cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.")), type(model))
    data["architectures"] = data.get("architectures") or [made_of.__name__]
    data["dtype"] = str(dtype).removeprefix("torch.")
    return {**texts, CONFIG: json_text({**data, ENTRY: report.quantization_config})}
