"""FSDP2 with weights gathered in 8 bits: half the bytes of bf16, and the same losses to the bit.

Each rank quantizes its rows by the scales of the whole weight. When the model's forward begins, one small collective
finds the scales of all weights, so they always belong to the weights of that forward; its backward uses the same
scales. A forward that does not go through the model needs one collective for each ``fully_shard``.

Each gather of a weight of N x K sends N K bytes (bf16: 2 N K) and, for mxfp8, N K / 32 bytes of scales. Forward gathers
the weight as ``output`` reads it; backward gathers it transposed, as ``grad_input`` reads it. If one gather serves both
passes (``reshard_after_forward`` False or an int), it carries both orientations, unless they are the same bytes
(tensorwise, blockwise). Activation checkpointing recomputes forward in backward, which reads the untransposed weight
again: rowwise and mxfp8 then gather it once more, layer by layer, 1.5 times the bytes of a step.

With tensor parallelism (TP x FSDP2, HSDP x TP) each part of a weight is gathered over its ranks of FSDP2. A second
small collective, over the ranks of tensor parallelism, makes the scales global: of the whole weight. They stay global
under ``scales("local")``.

Converted experts are also gathered in 8 bits, where FSDP2 shards them over experts: one rank has each expert and its
scales, so the scales come with the codes and nothing is reduced. Otherwise a warning names the weight in the first
forward, and it is gathered in high precision.

Ranks must run the same layers in the same order, as FSDP itself requires. If a rank fails or skips a layer, the others
wait in a collective until the timeout of the process group.
"""

from __future__ import annotations

from torch import nn

from tritonfp8.conversion import ConversionReport
from tritonfp8.distributed.fsdp.all_gather import Float8AllGather
from tritonfp8.distributed.fsdp.orientations import weight_orientations
from tritonfp8.distributed.torch_private import FSDP, require_names
from tritonfp8.layers.linear import Float8Conv1D, Float8Linear, require_module
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.layers.stored import is_stored
from tritonfp8.specs.checks import require
from tritonfp8.specs.naming import listed

CASTS = ("param_dtype", "master")
CONV1D = "a Conv1D: its weight is stored transposed, and is gathered in its own dtype"
EXPERTS = "experts whose recipe reads their weights in high precision"
STORED = "stored in 8 bits: FSDP2 gathers its codes without this"


def _reason_to_skip(layers: list[tuple[str, nn.Module, str]]) -> str | None:
    """Why a parameter with these owners cannot be gathered in 8 bits, or None."""
    if any(is_stored(module) for _, module, _ in layers):
        return STORED
    for name, module, parameter in layers:
        if not isinstance(module, Float8Linear) or parameter != "weight":
            return f"shared with {name}.{parameter}, which needs it in high precision"
    recipes = [module.recipe for _, module, _ in layers if isinstance(module, Float8Linear)]
    if not weight_orientations(recipes[0]):
        return f"recipe {recipes[0].name!r} reads it in high precision"
    if any(weight_orientations(recipe) != weight_orientations(recipes[0]) for recipe in recipes):
        return "shared by layers whose recipes read other bytes: " + listed(name for name, _, _ in layers)
    return None


def _check_once(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear) and module.on_revert is not None and not is_stored(module):
            raise ValueError(
                f"the weight of {name or 'the model'} is gathered in 8 bits already: call enable_float8_all_gather once"
            )
    hooks = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    if any(isinstance(owner, Float8AllGather) and owner.converts_experts for owner in hooks):
        raise ValueError("the experts of the model are gathered in 8 bits already: call enable_float8_all_gather once")


def _choose(model: nn.Module) -> tuple[dict[str, list[Float8Linear]], dict[str, str]]:
    """The layers whose weight is gathered in 8 bits, by the name of the first; and the reasons for all others."""
    owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((name, module, key))
    enabled: dict[str, list[Float8Linear]] = {}
    skipped: dict[str, str] = {}
    for found in owners.values():
        mine = [name for name, module, key in found if isinstance(module, Float8Linear) and key == "weight"]
        if not mine:
            conv1ds = [name for name, module, key in found if isinstance(module, Float8Conv1D) and key == "weight"]
            skipped.update(dict.fromkeys(conv1ds, CONV1D))
            continue
        if reason := _reason_to_skip(found):
            skipped.update(dict.fromkeys(mine, reason))
        else:
            enabled[mine[0]] = [module for _, module, _ in found if isinstance(module, Float8Linear)]
    return enabled, skipped


def gather_of(layer: nn.Module) -> Float8AllGather | None:
    """The object that gathers the layer's weight in 8 bits, or will once FSDP2 shards it; None if none does."""
    owner = getattr(getattr(layer, "on_revert", None), "__self__", None)
    return owner if isinstance(owner, Float8AllGather) and owner.gathers(layer) else None


def enable_float8_all_gather(model: nn.Module, cast: str = "param_dtype") -> ConversionReport:
    """Gather the weights of converted layers in 8 bits under FSDP2: half the bytes of bf16, and the same losses.

    Call it after :func:`tritonfp8.convert`, on the outermost module that ``fully_shard`` is applied to. It may come
    before or after ``parallelize_module``, ``fully_shard``, ``torch.compile`` and the optimizer: no parameter is
    touched, the first forward has FSDP gather the weights in 8 bits::

        tritonfp8.convert(model, "rowwise")
        enable_float8_all_gather(model)
        for block in model.layers:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mp_policy=...)
        optimizer = torch.optim.AdamW(model.parameters())

    Which bytes are sent when, and what all ranks must do: :mod:`tritonfp8.distributed.fsdp.enable`.

    Works with tensor parallelism, HSDP, mixed precision policies, CPU offload, meta-device init, frozen weights,
    gradient accumulation, ``torch.compile`` and autocast around the model's call. Parameters, their state_dict and
    gradients are the same as with plain ``fully_shard``. :func:`tritonfp8.revert` undoes it, before ``fully_shard`` and
    after.

    Args:
        model: a converted model, sharded or not. Tied layers stay tied.
        cast: the values that are quantized. ``"param_dtype"``: the shard is first rounded to the dtype that the layer
            computes in, so the losses equal plain FSDP's to the bit. That dtype is the ``param_dtype`` of
            ``MixedPrecisionPolicy``, else the dtype of an autocast around the model's call. ``"master"``: the shard is
            quantized without that rounding, and the losses differ.

    Returns:
        A :class:`~tritonfp8.ConversionReport` with the recipe of each layer, and of each module of experts, that is
        gathered in 8 bits, and the reason why the weight of any other converted layer is not. A recipe may read it in
        high precision, or another module that shares it.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: nothing to gather in 8 bits, a second call, or an unknown cast. In forward: a weight that FSDP
            shards along another dim than 0.
        RuntimeError: this torch lacks a private name that is needed. In forward: ``fully_shard`` was applied above
            ``model``, ranks disagree on how a weight is gathered, or ``param.data = ...`` on a shard had no effect.
    """
    require_names("enable_float8_all_gather", FSDP)
    require_module(model)
    require("cast", cast, CASTS)
    _check_once(model)
    enabled, skipped = _choose(model)
    found = {name: module for name, module in model.named_modules() if is_converted_experts(module)}
    experts = {n: each for n, each in found.items() if weight_orientations(each.recipe) and not is_stored(each)}
    skipped |= {n: STORED if is_stored(each) else EXPERTS for n, each in found.items() if n not in experts}
    recipes = {name: layers[0].recipe for name, layers in enabled.items()}
    gathered = {**recipes, **{name: each.recipe for name, each in experts.items()}}
    report = ConversionReport(gathered, skipped, action="gathered in 8 bits")
    if not report.converted:
        raise ValueError(f"no weight can be gathered in 8 bits: {report if skipped else 'convert the model first'}")
    source = Float8AllGather(model, enabled, experts, cast == "param_dtype")
    for layers in enabled.values():
        for layer in layers:
            layer.on_revert = source.release
    return report
