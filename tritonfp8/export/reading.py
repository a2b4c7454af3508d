"""load and load_tensors: a checkpoint in 8 bits, or the tensors of an export, into a model.

Everything that headers tell is checked before the model changes: names, shapes, dtypes, files, and the scales.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonfp8.compat import CheckpointNames, uninterrupted
from tritonfp8.conversion import bare, reshard
from tritonfp8.export.checkpoint_formats import checkpoint_format
from tritonfp8.export.configs import FormatGroup, groups, scales_of_activations
from tritonfp8.export.experts import rows_of_block
from tritonfp8.export.files import (
    Read,
    Stored,
    find_config,
    given_tensors,
    headers_of,
    opened_all,
    read_config,
    remember,
    stored_tensors,
)
from tritonfp8.export.matching import Match, Placed, match, patterns_of
from tritonfp8.export.places import Place, buffers_on_meta, check_has_memory, places, whole
from tritonfp8.export.report import LoadedLayer, LoadReport, loaded, loaded_experts, shown_format
from tritonfp8.functional import dequantize
from tritonfp8.layers.linear import require_module
from tritonfp8.layers.stored import (
    DTYPES,
    StoredMatrices,
    StoredWeight,
    copy_whole,
    plain_weight,
    replacing,
    stored_part,
)
from tritonfp8.specs import READ_SPECS, QuantSpec, expands_to, scale_shape
from tritonfp8.specs.checks import require_type
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS
from tritonfp8.specs.naming import listed
from tritonfp8.specs.quantized import Quantized


def load(
    model: nn.Module,
    folder: str | Path,
    *,
    ignore: Collection[str] = (),
    device: torch.device | str = "cpu",
) -> LoadReport:
    """Read a checkpoint in 8 bits into a model, in place; weights are dequantized.

    Reads what :func:`save` writes, and checkpoints of DeepSeek, transformers, llm-compressor and compressed-tensors in
    the formats of :func:`plan`, in MXFP4 (gpt-oss; ``mxfp4-pack-quantized``) and NVFP4 (``nvfp4-pack-quantized``,
    ModelOpt): safetensors files beside ``config.json``. Codes with a scale are dequantized as ``float32(code) *
    float32(scale)``, rounded once to the dtype of the parameter. Scales that are powers of two lose nothing in
    bfloat16, but for magnitudes below 2^-133. Whether a layer is in 8 bits is what its tensors say; the config says in
    which blocks. Of sharded models every rank reads whole tensors, one at a time, and keeps its part. Stored weights on
    the meta device take the codes of MXFP4, if their recipe reads these; others take the values.

    Args:
        model: converted or not. Parameters stay the same objects, except on the meta device, where they are replaced
            by ones in memory.
        folder: of the checkpoint.
        ignore: patterns of tensors that need no partner: in the checkpoint they are not read, such as ``"*.k_scale"``
            of a cache; in the model they keep their values, such as a new head. No pattern is needed for what the class
            of transformers leaves out, such as layers that predict further tokens, and for static scales of activations
            (``input_scale``, ``activation_scale``) that the config names.
        device: where parameters on the meta device are made.

    Returns:
        A :class:`LoadReport`. For each converted layer it says whether quantizing again gives the codes of the
        checkpoint. This is computed, because equal specs do not guarantee it: a block whose largest code is 224 or
        less gets twice the codes and half the scale, which stand for the same values.

    Raises:
        ValueError: a sharded weight on the meta device; a tensor of the checkpoint that the model does not have, or the
            reverse; codes without a scale, or the reverse; another shape, dtype, ``quant_method`` or block; a missing
            or truncated file; a scale that is NaN, infinite or negative; a pattern that matches nothing. The model is
            unchanged then. Also values that are NaN, or beyond the dtype of the parameter; the layers before are
            changed then.
        TypeError: an argument of another type.
    """
    require_module(model)
    model = bare(model)
    require_type("folder", folder, str | Path, "a str or a Path")
    patterns, root = patterns_of(ignore), Path(folder)
    return _load(model, root, read_config(root), patterns, torch.device(device))


def load_any(model: nn.Module, root: Path, device: torch.device) -> LoadReport:
    """As :func:`load`, also of checkpoints in high precision."""
    return _load(model, root, find_config(root), (), device)


def _load(
    model: nn.Module, root: Path, config: dict[str, Any] | None, patterns: Collection[str], device: torch.device
) -> LoadReport:
    reshard(model)
    stored = stored_tensors(root)
    matched = matched_with(model, stored, config, patterns)
    with opened_all(root, stored) as read:
        _check_scales(matched.jobs, read)
        filled = _fill_all(prepared(matched.jobs, read, device))
    remember(model, root, patterns)
    return _report(model, matched, filled, 2)


def matched_with(
    model: nn.Module, stored: Mapping[str, Stored], config: dict[str, Any] | None, patterns: Collection[str]
) -> Match:
    """Which tensor of a checkpoint with this quantization config goes where. Raises as :func:`load`."""
    found, static = ([], ()) if config is None else (groups(config), scales_of_activations(config))
    return _matched(model, stored, found, patterns, static)


def load_tensors(
    model: nn.Module,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    format: str,
    *,
    ignore: Collection[str] = (),
    device: torch.device | str = "cpu",
) -> LoadReport:
    """Put the tensors of an export into a model, in place: new weights for a copy that generates while another trains.

    All tensors are taken, and everything is checked, before the model changes. So an error, or Ctrl-C, leaves the old
    weights or the new ones, and never some of both. Codes of stored weights (``mode="inference"``) are copied as codes
    where the format has their blocks, so forward reads what the trainer's forward reads. Memory stays where it is: CUDA
    graphs of the model stay valid. For tensors of an inference engine there is :class:`tritonfp8.rollout.Receiver`.

    Args:
        model: as for :func:`load`.
        tensors: names and tensors, such as :func:`tritonfp8.export.tensors` gives, of this process or another one. They
            are in memory together (half the bytes of a model in bfloat16), with the values of weights not stored.
        format: the checkpoint format that they are in; see :func:`tritonfp8.export.plan`.
        ignore, device: as for :func:`load`.

    Returns:
        A :class:`LoadReport`; see :func:`load`.

    Raises:
        ValueError: as :func:`load`; an unknown format; or two tensors of one name. The model is unchanged then.
        TypeError: an argument of another type.
    """
    require_module(model)
    model = bare(model)
    patterns, found = patterns_of(ignore), groups(checkpoint_format(format, "pow2", None).config(()))
    given = given_tensors(tensors)
    reshard(model)
    matched = _matched(model, headers_of(given), found, patterns)
    _check_scales(matched.jobs, given.__getitem__)
    ready = list(prepared(matched.jobs, given.__getitem__, torch.device(device)))
    with uninterrupted():
        filled = _fill_all(ready)
    return _report(model, matched, filled, 1)


def _matched(
    model: nn.Module,
    stored: Mapping[str, Stored],
    found: list[FormatGroup],
    patterns: Collection[str],
    static: Collection[str] = (),
) -> Match:
    model_places = places(model)
    check_has_memory(model_places)
    # By it classes of transformers name tensors of their checkpoints that they do not read.
    extra = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return match(stored, model_places, found, patterns, static, extra, CheckpointNames(model).in_model)


def _report(
    model: nn.Module, matched: Match, filled: tuple[dict[str, LoadedLayer], dict[str, str]], depth: int
) -> LoadReport:
    """The report; ``depth`` is the number of functions between the caller's call and this one."""
    on_meta = buffers_on_meta(model)
    if on_meta:
        warnings.warn(
            f"checkpoints do not have these buffers, which are on the meta device still: {listed(on_meta)}. Build the "
            "model with its buffers in memory, or compute them",
            stacklevel=depth + 2,
        )
    return LoadReport(*filled, matched.ignored, matched.left, tuple(on_meta), matched.of_activations)


def _scale(job: Placed, read: Read) -> Tensor:
    """The scale of a job, in the dtype and shape of its spec."""
    assert job.scale is not None
    assert job.row is not None
    return job.row.scale_read(job.shape, *(read(name) for name in job.names[1:]))


class Prepared(NamedTuple):
    """A tensor as its place takes it, read by one job or by one a matrix of experts.

    ``source`` is its codes, or a text for the report; of experts also None, if no weight has their codes together.
    ``is_exact``: of experts, whether the dtype of the parameter holds the values exactly.
    """

    jobs: list[Placed]
    x: Tensor
    source: Quantized | StoredMatrices | str | None
    is_exact: bool = True


def _check_scales(jobs: Iterable[Placed], read: Read) -> None:
    for job in jobs:
        if job.row is not None:
            if job.whole is not None:
                job.row.check_scale(job.whole, read(job.whole), job.layer)
            job.row.check_scale(str(job.scale), _scale(job, read), job.layer)


def prepared(jobs: list[Placed], read: Read, device: torch.device) -> Iterator[Prepared]:
    """What goes into each place, file by file; experts last."""
    stacks: dict[int, list[Placed]] = {}
    for job in sorted(jobs, key=lambda job: job.stored.file):
        if job.part is not None:
            stacks.setdefault(id(job.place), []).append(job)
            continue
        x, source = _values(job, read, device)
        yield Prepared([job], _kept(job.place.tensor, source, x), source)
    for stack in stacks.values():
        yield _prepared_stack(stack, read, device)


def _fill_all(found: Iterable[Prepared]) -> tuple[dict[str, LoadedLayer], dict[str, str]]:
    """Put all into their places. Returns the layers and the other tensors of the report."""
    layers: dict[str, LoadedLayer] = {}
    copied: dict[str, str] = {}
    filled: dict[int, Tensor] = {}
    for jobs, x, source, is_exact in found:
        job = jobs[0]
        if id(job.place) in filled:
            _check_tied(job, filled[id(job.place)], x)
            copied[job.name_in_model] = "tied"
            continue
        target = filled[id(job.place)] = _fill(job.place, x)
        weight = x if isinstance(x, StoredWeight | StoredMatrices) else whole(target)
        if isinstance(source, str):
            copied[job.name_in_model] = source
        elif isinstance(source, Quantized):
            assert job.row is not None
            shown = shown_format(job.row)
            if x.ndim == 3:
                layers[job.layer] = loaded_experts(job.owner, shown, weight, source, plain_weight(x), is_exact)
            else:
                layers[job.layer] = loaded(job.owner, shown, weight, source)
        elif formats := {shown_format(job.row) for job in jobs if job.row is not None}:
            shown = f"{' and '.join(sorted(formats))}, of each expert"
            layers[job.place.name] = loaded_experts(job.owner, shown, weight, source, plain_weight(x), is_exact)
        else:
            copied[job.place.name] = "copied, of each expert"
    return layers, copied


def _check_tied(job: Placed, target: Tensor, x: Tensor) -> None:
    if not torch.equal(plain_weight(whole(target)), plain_weight(x)):
        raise ValueError(
            f"{' and '.join(job.place.names)} are one tensor in the model, and differ in the checkpoint: build the "
            "model with tie_word_embeddings=False"
        )


def _values(job: Placed, read: Read, device: torch.device) -> tuple[Tensor, Quantized | str]:
    """A tensor as the model has it, and what it was made from."""
    target = job.place.tensor
    to = _device_of(target, device)
    x = read(job.name).to(to)
    if job.row is None:
        values, shown = x.to(target.dtype), f"copied, {x.dtype} to {target.dtype}".replace("torch.", "")
        if x.dtype == target.dtype:
            return values, "copied"
        finite = x.isfinite().equal(values.isfinite())
        made_from: Quantized | str = shown
    else:
        x = x.reshape(job.row.spec.qdata_shape(job.shape))
        made_from = Quantized(x, _scale(job, read).to(to), job.row.spec)
        values = dequantize(made_from, target.dtype)
        values = values.mT if job.is_transposed else values
        finite = bool(values.isfinite().all())
    _check_finite(job, finite)
    return values, made_from


def _check_finite(job: Placed, finite: bool) -> None:
    if not finite:
        dtype = job.place.tensor.dtype
        raise ValueError(f"{job.name} must be finite in {dtype}; it has a NaN or values beyond that dtype")


def _kept(target: Tensor, made_from: Quantized | str, x: Tensor) -> Tensor:
    """``x``, or the codes that it was made from, where a stored weight of the same spec takes its place."""
    part = stored_part(target)
    if part is None or not isinstance(made_from, Quantized):
        return x
    if (spec := _kept_spec(made_from.scale, made_from.spec, target)) is None:
        return x
    kind, is_transposed = StoredMatrices if x.ndim == 3 else StoredWeight, getattr(part, "is_transposed", False)
    return kind(made_from.qdata, made_from.scale, spec, target.dtype, is_transposed)


def _kept_spec(scale: Tensor, spec: QuantSpec, target: Tensor) -> QuantSpec | None:
    """By which spec a stored weight has codes of ``spec``; None if it cannot have them."""
    part = stored_part(target)
    # Scales that are no powers of two would make the values inexact. The config does not always say what they are.
    if part is None or not _are_powers(scale):
        return None
    if target.is_meta and not target.requires_grad and expands_to(spec, part.spec):
        # Nobody has these codes yet, and the recipe reads fewer bits as well. They take no step.
        return spec
    return part.spec if replace(spec, scale_rounding=part.spec.scale_rounding) == part.spec else None


def _are_powers(scale: Tensor) -> bool:
    return bool((torch.frexp(scale.float()).mantissa == 0.5).all())


def _prepared_stack(jobs: list[Placed], read: Read, device: torch.device) -> Prepared:
    """A weight of experts from the matrices of all experts: in codes, unless a block would have rows of two."""
    target = jobs[0].place.tensor
    made = _stacked_codes(jobs, read, device)
    if made is None:
        x, is_exact = _stacked_values(jobs, read, device)
    elif (spec := _kept_spec(made._scale, made.spec, target)) is not None:
        x, is_exact = StoredMatrices(made._qdata, made._scale, spec, target.dtype), True
    else:
        x, is_exact = made.dequantize(), _are_powers(made._scale)
    return Prepared(jobs, x, made, is_exact)


def _stacked_values(jobs: list[Placed], read: Read, device: torch.device) -> tuple[Tensor, bool]:
    """The values of all experts, and whether the dtype of the parameter holds them exactly."""
    target, is_exact = jobs[0].place.tensor, True
    x = torch.empty(target.shape, dtype=target.dtype, device=_device_of(target, device))
    for job in jobs:
        assert job.part is not None
        x[job.part.expert, job.part.start : job.part.stop], made_from = _values(job, read, device)
        is_exact &= not isinstance(made_from, Quantized) or _are_powers(made_from.scale)
    return x, is_exact


def _device_of(target: Tensor, device: torch.device) -> torch.device:
    return device if target.device.type == "meta" else target.device


def _stacked_codes(jobs: list[Placed], read: Read, device: torch.device) -> StoredMatrices | None:
    """The codes of all experts as one weight; None if a block of it would have rows of two of their matrices.

    Raises:
        ValueError: values beyond the dtype of the parameter, or NaN.
    """
    target = jobs[0].place.tensor
    experts, n, k = target.shape
    specs = {None if job.row is None else job.row.spec for job in jobs}
    spec = specs.pop()
    if spec is None or specs or target.dtype not in DTYPES or spec.args[0] in READ_SPECS:
        return None
    parts = [job.part for job in jobs if job.part is not None]
    rows = min((rows_of_block(spec, part) or 0 for part in parts), default=0)
    if not rows:
        return None
    to = _device_of(target, device)
    qdata = torch.empty(experts, *spec.qdata_shape((n, k)), dtype=FORMATS[spec.format].dtype, device=to)
    sizes = experts, *scale_shape((n, k), spec.block)
    scale = torch.empty(sizes, dtype=SCALE_FORMATS[spec.scale_format].dtype, device=to)
    for job, part in zip(jobs, parts, strict=True):
        found = Quantized(read(job.name).to(to), _scale(job, read).to(to), spec)
        qdata[part.expert, part.start : part.stop].view(torch.uint8).copy_(found.qdata.view(torch.uint8))
        scale[part.expert, part.start // rows : -(-part.stop // rows)].copy_(found.scale)
        _check_finite(job, bool(dequantize(found, target.dtype).isfinite().all()))
    return StoredMatrices(qdata, scale, spec, target.dtype)


@torch.no_grad()
def _fill(place: Place, x: Tensor) -> Tensor:
    """Put values into a place. Returns the tensor that the model has then."""
    if place.tensor.device.type != "meta":
        copy_whole(place.owners[0].module, place.tensor, x)
        return place.tensor
    # The memory of a tensor that was read is the file, which may change later.
    x = x.clone()
    target = place.tensor
    if isinstance(target, StoredWeight) and not isinstance(x, StoredWeight):
        x = type(target).of(x, target.spec, target.is_transposed)
    tensor = replacing(target, x, target.requires_grad) if place.owners[0].is_parameter else x
    for owner in place.owners:
        setattr(owner.module, owner.key, tensor)
    return tensor
