"""save without a format: a model that was loaded, in the format of its checkpoint.

Files, or tensors, that training did not change are copied. A tensor did not change if it is what a load of the
checkpoint gives, so nothing is noted at a load but the folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.conversion import bare
from tritonfp8.export.files import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    MODELOPT_CONFIG,
    QUANTIZATION_CONFIG,
    LoadedFrom,
    Read,
    Stored,
    find_config,
    opened_all,
    source_of,
    stored_tensors,
)
from tritonfp8.export.matching import Placed, name_of_weight
from tritonfp8.export.permanent import check_adapters, permanent, value_of
from tritonfp8.export.reading import matched_with, prepared
from tritonfp8.export.report import ExportedLayer, ExportReport
from tritonfp8.export.stream import WrittenTensor, rounding_of
from tritonfp8.export.writing.together import (
    Write,
    copy_file,
    groups_of,
    json_text,
    owned,
    taken,
    together,
    write_files,
    write_tensors,
)
from tritonfp8.layers.stored import CodesTensor, StoredRows, plain_weight, store, stored_part
from tritonfp8.specs import READ_SPECS
from tritonfp8.specs.formats import SCALE_FORMATS
from tritonfp8.specs.naming import listed

# Tensors keep the dtype of the checkpoint, whatever dtype the model computes in. The Trainer sets use_cache.
_SET_BY_OTHERS = ("dtype", "transformers_version", "quantization_config", "use_cache")


def save_as_loaded(model: nn.Module, root: Path, adapters: str | None) -> ExportReport:
    """See :func:`save`; all ranks that have parts of the model call this."""
    groups = groups_of(model)

    def planned_as_loaded() -> tuple[LoadedFrom, list[Placed], dict[str, str]]:
        whole = bare(model)
        check_adapters(whole, adapters)
        whole = permanent(whole)
        source = source_of(whole)
        matched = matched_with(whole, stored_tensors(source.folder), find_config(source.folder), source.ignore)
        return source, matched.jobs, _configs_as_loaded(whole, source.folder)

    (source, _), jobs, texts = together(groups, root, planned_as_loaded)
    stored = stored_tensors(source)
    with opened_all(source, stored) as read:
        changed = _changed(jobs, read)
        _check_written(changed)

        def made(file: str, keep: bool) -> Write:
            here = [name for name, header in stored.items() if header.file == file]
            new = taken(
                _tensors_of({id(job): job for name in here if (job := changed.get(name))}.values(), stored), keep
            )
            if not new:
                return partial(copy_file, source / file)
            return lambda path: write_tensors(
                path, {name: new[name] if name in new else owned(read(name)) for name in here}
            )

        names = dict.fromkeys(header.file for header in stored.values())
        if (source / INDEX).is_file():
            texts = {INDEX: (source / INDEX).read_text(encoding="utf-8")} | texts
        files = write_files(groups, root, {name: partial(made, name) for name in names}, texts)
    report = _report_as_loaded(jobs, stored, changed, source)
    return replace(report, quantization_config=find_config(source) or {}, files=files)


def _changed(jobs: list[Placed], read: Read) -> dict[str, Placed]:
    """By name the tensors of a checkpoint, scales too, whose place in the model has other values than a load gives."""
    found: dict[str, Placed] = {}
    for each in prepared(jobs, read, torch.device("cpu")):
        tensor, before = each.jobs[0].place.tensor, each.x
        now, part = value_of(tensor), stored_part(tensor)
        if isinstance(now, CodesTensor) and not isinstance(before, CodesTensor):
            before = now.of_values(before)
        elif isinstance(part, StoredRows) and not isinstance(now, CodesTensor):
            # Ranks have columns of it, and what they gather is the values.
            before = store(plain_weight(before), part.spec)
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


def _tensors_of(jobs: Iterable[Placed], stored: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these jobs by name, as the model has them now, in the dtypes and shapes of the checkpoint."""
    together: dict[tuple[object, ...], list[Placed]] = {}
    for job in jobs:
        # The matrices of one weight of experts, whose values are computed once; any other tensor by itself.
        together.setdefault((id(job.place), job.row, job.name if job.part is None else None), []).append(job)
    for group in together.values():
        first, row = group[0], group[0].row
        if row is None:
            values = plain_weight(value_of(first.place.tensor))
            yield from ((job.name, _cut(values, job).to(job.stored.dtype)) for job in group)
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
            yield job.name, made[row.codes_of(names[job.name])].reshape(job.stored.shape)
            yield job.scale, _scale_like(job.scale, made[row.scale_of(names[job.name])], stored[job.scale])


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
                texts[name] = json_text(data)
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
