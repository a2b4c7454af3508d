"""The reasons why a converted layer does not run in FP8, each with what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from tritonfp8.compat import hardware
from tritonfp8.compat.counting import GemmLog
from tritonfp8.layers.linear import ConvertedLayer, is_converted
from tritonfp8.layers.moe import ConvertedExperts, is_converted_experts
from tritonfp8.recipes import Recipe
from tritonfp8.workflow.verification_report import Failure, LayerReport
from tritonfp8.workflow.weight_reads import Read, WeightReads

Converted = ConvertedLayer | ConvertedExperts

_LEAVE_OUT = "leave it out by the filter of tritonfp8.convert"


def structural_failures(layers: Mapping[str, Converted], recorded: Mapping[str, nn.Module | None]) -> Iterator[Failure]:
    """Layers that were replaced after ``convert``, or that lost their recipe: this shows before anything runs."""
    for name, module in recorded.items():
        if module is None:
            yield Failure(
                name,
                "it was converted, and no module has its name now",
                "change the layers of the model first (fused projections, pruned blocks) and convert it last",
            )
        # An adapter has the converted layer inside.
        elif not any(is_converted(inner) or is_converted_experts(inner) for inner in module.modules()):
            yield Failure(
                name,
                f"a {type(module).__name__} has taken the place of the layer that was converted",
                "change the layers of the model first (resized embeddings and heads, fused projections) and convert "
                f"it last, or convert the new one: tritonfp8.convert(model.get_submodule({name!r}), recipe)",
            )
    for name, layer in layers.items():
        recipe = layer.__dict__.get("recipe")
        if not isinstance(recipe, Recipe):
            came = "no recipe" if recipe is None else f"a {type(recipe).__name__} as its recipe"
            yield Failure(name, f"it has {came}", "give it one: layer.recipe = tritonfp8.recipes.get('rowwise')")


def _weights(name: str, layer: Converted) -> set[str]:
    keys = layer.weights() if is_converted_experts(layer) else ["weight"]
    return {f"{name}.{key}" if name else key for key in keys}


def _readers(reads: WeightReads, name: str, layers: Mapping[str, Converted]) -> list[Read]:
    """The ops of torch that multiplied the weight of a converted layer, unless another layer has the same weight."""
    weights = _weights(name, layers[name])
    converted = set().union(*(_weights(each, layer) for each, layer in layers.items()))
    return [
        read
        for read in reads.flops
        if not weights.isdisjoint(read.parameters) and converted.issuperset(read.parameters)
    ]


def call_failures(
    layers: Mapping[str, Converted], found: Mapping[str, LayerReport], reads: WeightReads
) -> Iterator[Failure]:
    """Layers that were never called, or whose weight was multiplied by something else, too."""
    for name, layer in found.items():
        readers = _readers(reads, name, layers)
        how = ", ".join(f"{read.op} in {read.dtype}" for read in readers)
        if readers:
            called = (
                "its weight was also multiplied" if layer.calls else "it was never called: its weight was multiplied"
            )
            yield Failure(name, f"{called} by {how}, outside of the layer", _mend(readers))
        elif not layer.calls:
            yield Failure(
                name,
                "it was never called, and nothing of torch multiplied its weight",
                f"give inputs that reach it (every branch, every expert), or {_LEAVE_OUT}",
            )
        elif not layer.gemms:
            yield Failure(
                name,
                "it was called, and none of its GEMMs was seen",
                "verify the model outside of traces (torch.jit, make_fx) and CUDA graphs",
            )


def stale_failures(layers: Mapping[str, Converted], stale: Collection[object]) -> Iterator[Failure]:
    """Layers that took the cast of a sibling, though their input had other values by then."""
    for name, layer in layers.items():
        if getattr(layer, "shared_input", None) in stale:
            yield Failure(
                name,
                "it read the cast that a layer before it made of the same tensor, and the tensor has other values now: "
                "a write that torch does not count (x.data, x.numpy(), a kernel of your own) came in between",
                "write to a new tensor, or in place under torch.no_grad(), which torch counts",
            )


def _mend(readers: list[Read]) -> str:
    if any("transformer" in read.op or "multi_head" in read.op for read in readers):
        return f"use torch.backends.mha.set_fastpath_enabled(False), or {_LEAVE_OUT}"
    return f"call the layer where the code passes its weight to a function, or {_LEAVE_OUT}"


def device_failures(layers: Mapping[str, Converted], log: GemmLog, names: Mapping[Converted, str]) -> Iterator[Failure]:
    """Layers that ran in high precision though their recipe is in 8 bits, because of the device."""
    seen: set[str] = set()
    for ran in log.gemms:
        name = names.get(ran.layer)
        if name is None or ran.gemm is None or name in seen:
            continue
        if not getattr(layers[name].recipe, ran.gemm).quantized:
            continue
        abilities = hardware.abilities(ran.device)
        if ran.kind == "high_precision":
            seen.add(name)
            yield Failure(name, f"its GEMM {ran.gemm} ran in {ran.operands[0]}", "report it: this should not happen")
        elif ran.kind == "reference" and abilities.capability is not None:
            seen.add(name)
            major, minor = abilities.capability
            yield Failure(
                name,
                f"{abilities.name} (sm_{major}{minor}) has no FP8 tensor cores, so it ran by the reference in float32, "
                "which is slower than bf16",
                "use a GPU of sm_89 or later, or the model unconverted (tritonfp8.revert)",
            )
