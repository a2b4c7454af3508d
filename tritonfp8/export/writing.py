"""save: an export as a folder of safetensors files. A file under its final name is whole.

A model that was loaded is written in the format of its checkpoint: files, or tensors, that training did not change are
copied. A tensor did not change if it is what a load of the checkpoint gives, so nothing is noted at a load but the
folder.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.conversion import bare
from tritonfp8.conversion.selection import Filter
from tritonfp8.export.files import (
    CONFIG,
    ENTRY,
    GENERATION_CONFIG,
    INDEX,
    MODELOPT_CONFIG,
    ONE_FILE,
    QUANTIZATION_CONFIG,
    Read,
    Stored,
    find_config,
    opened_all,
    source_of,
    stored_tensors,
    written_before,
)
from tritonfp8.export.matching import Placed, name_of_weight
from tritonfp8.export.permanent import check_adapters, permanent, value_of
from tritonfp8.export.places import check_whole, places
from tritonfp8.export.reading import matched_with, prepared
from tritonfp8.export.report import ExportedLayer, ExportReport
from tritonfp8.export.stream import WrittenTensor, planned, rounding_of
from tritonfp8.layers.linear import require_module
from tritonfp8.layers.stored import CodesTensor, plain_weight
from tritonfp8.specs import READ_SPECS
from tritonfp8.specs.checks import require_int, require_type
from tritonfp8.specs.formats import SCALE_FORMATS
from tritonfp8.specs.naming import listed

MAX_SHARD_BYTES = 5_000_000_000
# Tensors keep the dtype of the checkpoint, whatever dtype the model computes in. The Trainer sets use_cache.
_SET_BY_OTHERS = ("dtype", "transformers_version", "quantization_config", "use_cache")


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
        ValueError: as :func:`plan` and :func:`tensors`, sharded weights, a folder that has weights, or
            ``max_shard_bytes`` below 1. Without ``format``: a model that was not loaded, or whose checkpoint is gone.
        TypeError: an argument of another type.
        OSError: a file cannot be written.
    """
    require_type("folder", folder, str | Path, "a str or a Path")
    require_int("max_shard_bytes", max_shard_bytes, 1)
    root = Path(folder)
    if found := written_before(root):
        raise ValueError(f"{root} must not have weights yet; it has {listed(found)}. Give another folder")
    if format is None:
        if (filter, scale_rounding, scale_fmt, dtype, max_shard_bytes) != (None, "pow2", None, None, MAX_SHARD_BYTES):
            raise ValueError("without format= the checkpoint that was loaded decides the format: give adapters= only")
        return _save_as_loaded(model, root, adapters)
    entries, report, model = planned(model, format, filter, scale_rounding, scale_fmt, dtype, adapters)
    check_whole(places(model), "tritonfp8.export.save")
    floating = (entry.dtype for entry in entries if entry.row is None and entry.dtype.is_floating_point)
    configs = _configs(model, report, dtype or next(floating, torch.bfloat16))
    root.mkdir(parents=True, exist_ok=True)
    with _temporary(root) as draft:
        names = _write_shards(entries, draft, max_shard_bytes)
        files = _finish(draft, root, names, configs)
    return replace(report, files=files)


def _finish(draft: Path, root: Path, names: list[str], configs: dict[str, str]) -> dict[str, int]:
    """Write the configs, and give all files their names. Returns their bytes."""
    for name, text in configs.items():
        _write_text(draft / name, text)
    order = [*names, *configs]
    files = {name: (draft / name).stat().st_size for name in order}
    for name in order:
        os.replace(draft / name, root / name)
    _sync(root)
    return files


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


def _save_as_loaded(model: nn.Module, root: Path, adapters: str | None) -> ExportReport:
    require_module(model)
    model = bare(model)
    check_adapters(model, adapters)
    model = permanent(model)
    check_whole(places(model), "tritonfp8.export.save")
    source, ignore = source_of(model)
    stored, config = stored_tensors(source), find_config(source)
    jobs = matched_with(model, stored, config, ignore).jobs
    texts = _configs_as_loaded(model, source)
    with ExitStack() as stack:
        read = stack.enter_context(opened_all(source, stored))
        changed = _changed(jobs, read)
        _check_written(changed)
        root.mkdir(parents=True, exist_ok=True)
        draft = stack.enter_context(_temporary(root))
        names = list(dict.fromkeys(header.file for header in stored.values()))
        for file in names:
            here = [name for name, header in stored.items() if header.file == file]
            if new := _tensors_of({id(job): job for name in here if (job := changed.get(name))}.values(), stored):
                _write_tensors(draft / file, {name: _owned(new[name] if name in new else read(name)) for name in here})
            else:
                shutil.copyfile(source / file, draft / file)
                _sync(draft / file)
        if (source / INDEX).is_file():
            names.append(INDEX)
            _write_text(draft / INDEX, (source / INDEX).read_text(encoding="utf-8"))
        files = _finish(draft, root, names, texts)
    return replace(_report_as_loaded(jobs, stored, changed, source), quantization_config=config or {}, files=files)


def _changed(jobs: list[Placed], read: Read) -> dict[str, Placed]:
    """By name the tensors of a checkpoint, scales too, whose place in the model has other values than a load gives."""
    found: dict[str, Placed] = {}
    for each in prepared(jobs, read, torch.device("cpu")):
        now, before = value_of(each.jobs[0].place.tensor), each.x
        if isinstance(now, CodesTensor) and not isinstance(before, CodesTensor):
            before = now.of_values(before)
        now, before = plain_weight(now), plain_weight(before)
        for job in each.jobs:
            if not torch.equal(_cut(now, job), _cut(before, job)):
                found.update(dict.fromkeys(job.names, job))
    return found


def _check_written(changed: Mapping[str, Placed]) -> None:
    """Raise ValueError for a changed tensor whose format is read and not written."""
    names = [name for name, job in changed.items() if job.row is not None and job.row.spec.args[0] in READ_SPECS]
    if names:
        row = changed[names[0]].row
        raise ValueError(
            f"{listed(names)} changed since the load, and their format, {row and row.name!r}, is read and not written: "
            "give format=, such as 'compressed_channel'"
        )


def _cut(x: Tensor, job: Placed) -> Tensor:
    """The matrix of a job in a weight of experts; any other weight as it is."""
    return x if job.part is None else x[job.part.expert, job.part.start : job.part.stop]


def _tensors_of(jobs: Iterable[Placed], stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The tensors of these jobs by name, as the model has them now, in the dtypes and shapes of the checkpoint."""
    found: dict[str, Tensor] = {}
    together: dict[tuple[object, ...], list[Placed]] = {}
    for job in jobs:
        # The matrices of one weight of experts, whose values are computed once; any other tensor by itself.
        together.setdefault((id(job.place), job.row, job.name if job.part is None else None), []).append(job)
    for group in together.values():
        first, row = group[0], group[0].row
        if row is None:
            values = plain_weight(value_of(first.place.tensor))
            found.update({job.name: _cut(values, job).to(job.stored.dtype) for job in group})
            continue
        if not SCALE_FORMATS[row.spec.scale_format].exponent_only:
            # A config does not say how scales were rounded, and powers of two are exact in each dtype of a scale.
            row = replace(row, spec=replace(row.spec, scale_rounding="pow2"))
        weight = first.place.tensor
        if first.is_transposed:
            weight = plain_weight(value_of(weight)).mT.contiguous()
        names = {job.name: name_of_weight(job.name) for job in group}
        parts = {names[job.name]: job.part for job in group if job.part is not None}
        rounding = rounding_of(first.place)
        made = dict(WrittenTensor(names[first.name], weight, row, first.stored.dtype, parts, rounding).tensors())
        for job in group:
            assert job.scale is not None
            found[job.name] = made[row.codes_of(names[job.name])].reshape(job.stored.shape)
            found[job.scale] = _scale_like(job.scale, made[row.scale_of(names[job.name])], stored[job.scale])
    return found


def _scale_like(name: str, scale: Tensor, header: Stored) -> Tensor:
    """A scale in the dtype and shape of a header; both are exact."""
    x = scale.view(header.dtype) if scale.dtype == torch.uint8 else scale.to(header.dtype)
    if scale.dtype != torch.uint8 and not torch.equal(x.float(), scale):
        raise ValueError(f"{name} must be exact in {header.dtype}, as in the checkpoint: give format=")
    return x.reshape(header.shape)


def _report_as_loaded(
    jobs: list[Placed], stored: Mapping[str, Stored], changed: Mapping[str, Placed], source: Path
) -> ExportReport:
    layers, count = {}, sum(job.name in changed for job in jobs)
    for job in jobs:
        if job.row is not None:
            whole, after = job.place.tensor, sum(stored[name].nbytes for name in job.names)
            before = whole.nbytes * math.prod(job.shape) // whole.numel()
            layers[job.layer] = ExportedLayer(str(job.row.spec), None, before, after)
    return ExportReport(
        " and ".join(sorted({job.row.name for job in jobs if job.row is not None})) or "high precision",
        layers,
        {job.name: job.stored.nbytes for job in jobs if job.row is None},
        {},
        {},
        sum({id(job.place): job.place.tensor.nbytes for job in jobs}.values()),
        sum(header.nbytes for header in stored.values()),
        (f"{count} of {len(jobs)} tensors changed since the load; the others are copies from {source}",),
    )


def _configs_as_loaded(model: nn.Module, source: Path) -> dict[str, str]:
    """The texts of the configs of a checkpoint, with what changed in the configs of the model; the last one tells how
    to read the tensors.
    """
    texts = {}
    for name, key in (
        (MODELOPT_CONFIG, ""),
        (QUANTIZATION_CONFIG, ""),
        (GENERATION_CONFIG, "generation_config"),
        (CONFIG, "config"),
    ):
        if not (source / name).is_file():
            continue
        texts[name] = (source / name).read_text(encoding="utf-8")
        config: Any = getattr(model, key, None)
        if callable(getattr(config, "to_json_string", None)):
            before, now = (_as_dict(each) for each in (type(config).from_pretrained(source), config))
            data = json.loads(texts[name])
            if _update(data, before, now):
                texts[name] = _json(data)
    return texts


def _as_dict(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def _update(data: dict[str, Any], before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Put what is in ``now`` and not in ``before`` into ``data``, but for what loaders and trainers set.

    Returns whether anything is.
    """
    is_changed = False
    for key, value in now.items():
        if key.startswith("_") or key in _SET_BY_OTHERS or (key in before and before[key] == value):
            continue
        if isinstance(value, dict) and isinstance(data.get(key), dict) and isinstance(before.get(key), dict):
            is_changed |= _update(data[key], before[key], value)
            continue
        data[key], is_changed = value, True
    return is_changed
