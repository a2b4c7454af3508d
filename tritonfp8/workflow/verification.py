"""``tritonfp8.verify``: what each converted layer of a model really ran, and why a layer did not run in FP8."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tritonfp8.compat import counting
from tritonfp8.conversion import reshard
from tritonfp8.layers import recorded_modules
from tritonfp8.layers.linear import compared_casts, is_converted, require_module
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.recipes import GEMMS, Recipe
from tritonfp8.specs import MXFP4, spec_of
from tritonfp8.specs.checks import require, require_flag
from tritonfp8.specs.naming import unwrapped
from tritonfp8.workflow.outputs import floating_tensors, keywords, own_loss, total
from tritonfp8.workflow.unchanged import unchanged
from tritonfp8.workflow.verification_failures import (
    Converted,
    call_failures,
    device_failures,
    stale_failures,
    structural_failures,
)
from tritonfp8.workflow.verification_report import (
    ON_FAILURE,
    GemmReport,
    LayerReport,
    OtherGemms,
    VerificationReport,
    deliver,
)
from tritonfp8.workflow.weight_reads import WeightReads

_logger = logging.getLogger("tritonfp8")


def verify(
    model: nn.Module, *inputs: Any, backward: bool = True, on_failure: str = "raise", **kwargs: Any
) -> VerificationReport:
    """Run a converted model once, and report what each converted layer ran in each of its three GEMMs.

    Nothing of the model changes: gradients, buffers, training flags, numbers and texts in attributes, and random
    numbers are restored. The model runs in its present mode and under the caller's autocast. Compiled models run
    eagerly, so that each GEMM can be assigned to its layer. The model may be sharded: then every rank must call this.

    Args:
        model: a model that :func:`tritonfp8.convert` converted, or one around it (DDP, FSDP2, ``torch.compile``).
        inputs, kwargs: what the model is called with. One mapping of keywords that its forward takes, such as a
            tokenizer gives, counts as these keywords. Gradients stop at them.
        backward: also run backward, from ``outputs.loss`` if the output has one, else from the sum of all floating
            tensors of the output. False for inference: the model runs without gradients.
        on_failure: ``"raise"`` or ``"warn"``.

    Returns:
        A :class:`VerificationReport`; ``str(report)`` is a table. Its summary is logged to the logger ``tritonfp8``.

    Raises:
        VerificationError: a converted layer ran in high precision, was never called, was replaced after ``convert``, or
            lost its recipe. The message names each layer, the cause and what to do.
        ValueError: the model has no converted layer, or its output carries no gradient.
        TypeError: an argument of another type.

    Errors that the model raises reach the caller as they are.
    """
    require_module(model)
    require_flag("backward", backward)
    require("on_failure", on_failure, ON_FAILURE)
    layers: dict[str, Converted] = {
        unwrapped(name): module
        for name, module in model.named_modules()
        if is_converted(module) or is_converted_experts(module)
    }
    if len(inputs) == 1 and not kwargs and (named := keywords(model, inputs[0])) is not None:
        inputs, kwargs = (), dict(named)
    recorded = recorded_modules(model)
    if not layers and not recorded:
        raise ValueError("the model has no converted layer: use tritonfp8.convert first")
    failures = tuple(structural_failures(layers, recorded))
    report = VerificationReport({}, {}, failures, backward)
    # A layer without a recipe raises when it is called.
    if layers and all(isinstance(layer.__dict__.get("recipe"), Recipe) for layer in layers.values()):
        with compared_casts() as stale:
            log, reads, with_grad = _observed(model, inputs, kwargs, backward)
        report = _report(layers, log, reads, with_grad, [*failures, *stale_failures(layers, stale)], backward)
    _logger.log(logging.INFO if report.ok else logging.WARNING, "%s", report.summary)
    if not report.ok:
        deliver(report.message(), report, on_failure, stacklevel=2)
    return report


def _observed(
    model: nn.Module, inputs: Any, kwargs: Any, backward: bool
) -> tuple[counting.GemmLog, WeightReads, set[str]]:
    """The GEMMs of one forward and backward, and the names of the parameters that got a gradient."""
    cut = lambda x: x.detach().requires_grad_() if x.requires_grad else x  # noqa: E731
    inputs, kwargs = pytree.tree_map_only(Tensor, cut, (inputs, kwargs))
    reads = WeightReads(model)
    # Gathered parameters of FSDP2 take the places of these while the model runs.
    parameters = list(model.named_parameters(remove_duplicate=False))
    with unchanged(model), counting.log_gemms() as log, reads:
        if not backward:
            with torch.no_grad():
                model(*inputs, **kwargs)
            # Without a backward, the root of FSDP2 would keep its gathered weights.
            reshard(model)
            return log, reads, set()
        with torch.enable_grad():
            loss = _loss(model(*inputs, **kwargs))
            reads.in_backward = True
            # Backward has forward's dtypes: autocast is not meant for it.
            with torch.autocast(loss.device.type, enabled=False):
                loss.backward()
        return log, reads, {name for name, parameter in parameters if parameter.grad is not None}


def _loss(output: Any) -> Tensor:
    """The loss of a model's output, or the sum of its floating tensors that carry a gradient.

    Raises:
        ValueError: no tensor carries a gradient.
    """
    loss = own_loss(output)
    if loss is not None and loss.requires_grad:
        return loss if loss.ndim == 0 else loss.float().sum()
    found = [x for x in floating_tensors(output) if x.requires_grad]
    if not found:
        raise ValueError(
            "the output of the model carries no gradient, so there is no backward to verify: give backward=False, or "
            "a model with a trainable parameter"
        )
    return total(x.float().sum() for x in found)


def _report(
    layers: Mapping[str, Converted],
    log: counting.GemmLog,
    reads: WeightReads,
    with_grad: set[str],
    failures: Any,
    backward: bool,
) -> VerificationReport:
    others = _other_flops(reads, with_grad)
    names = {layer: name for name, layer in layers.items()}
    of_layers: defaultdict[str, defaultdict[str, list[counting.RanGemm]]]
    of_layers = defaultdict(lambda: defaultdict(list))
    for ran in log.gemms:
        if ran.layer in names and ran.gemm is not None:
            of_layers[names[ran.layer]][ran.gemm].append(ran)
    flops = sum(ran.flops for gemms in of_layers.values() for each in gemms.values() for ran in each)
    all_flops = max(1, flops + sum(n for _, n in others.values()))
    found = {
        name: LayerReport(
            layer.recipe.name,
            log.calls[layer],
            {
                gemm: _gemm(of_layers[name][gemm], all_flops, is_converted_experts(layer))
                for gemm in GEMMS
                if of_layers[name][gemm]
            },
        )
        for name, layer in layers.items()
    }
    failures = [*failures, *call_failures(layers, found, reads), *device_failures(layers, log, names)]
    rows = {name: OtherGemms(ops, n, n / all_flops) for name, (ops, n) in others.items()}
    return VerificationReport(found, rows, tuple(failures), backward)


def _gemm(ran: Sequence[counting.RanGemm], all_flops: int, is_grouped: bool) -> GemmReport:
    """The GEMMs of one kind of a layer as one row; it also names GEMMs that ran in another way than the first."""

    def joined(texts: Iterator[str]) -> str:
        return ", ".join(dict.fromkeys(texts))

    flops = sum(each.flops for each in ran)
    quantized, high = (f"{name}grouped_matmul" if is_grouped else f"{name}matmul" for name in ("scaled_", ""))
    return GemmReport(
        op=joined(f"tritonfp8.{_op(each.operands, quantized, high)}" for each in ran),
        dtype=joined(_dtype(each.operands) for each in ran),
        kind=joined(each.kind for each in ran),
        device=joined(each.device.type for each in ran),
        calls=len(ran),
        flops=flops,
        share=flops / all_flops,
    )


def _op(operands: tuple[str, str], quantized: str, high: str) -> str:
    if ":" not in operands[0]:
        return high
    return f"packed_{high}" if spec_of(operands[1], packed=True) == MXFP4 else quantized


def _dtype(operands: tuple[str, str]) -> str:
    left, right = operands
    return f"{spec_of(left).format} x {spec_of(right, packed=True).format}" if ":" in left else left


def _other_flops(reads: WeightReads, with_grad: set[str]) -> dict[str, tuple[tuple[str, ...], int]]:
    """The ops and FLOPs of each parameter that an op of torch multiplied, by name."""
    ops: defaultdict[str, list[str]] = defaultdict(list)
    flops: defaultdict[str, int] = defaultdict(int)
    for read, n in reads.flops.items():
        name = " = ".join(read.parameters)
        ops[name].append(f"{read.op} in {read.dtype}")
        flops[name] += n
    # The GEMM of a weight's gradient does not read the weight. It has as many FLOPs as the forward.
    for parameters, n in reads.forward_flops.items():
        if with_grad.intersection(parameters):
            flops[" = ".join(parameters)] += n
    return {name: (tuple(ops[name]), flops[name]) for name in ops}
