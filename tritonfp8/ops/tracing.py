"""A linear layer as one op that carries its gradients, for graphs that are traced outside of ``torch.compile``.

``torch.export``, ``make_fx``, ``torch.jit.trace`` and what is built on them (``torch.distributed.pipelining.pipeline``)
run an ``autograd.Function`` and record the ops inside its forward. Those have no gradient, so the graph would train
nothing and not say so. These ops have a registered autograd formula, which the graph that calls them keeps.
:mod:`tritonfp8.layers.linear.traced` implements them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonfp8.compat.torch_private import is_traced as is_traced
from tritonfp8.ops.registry import implement, without_backward


def sealed(out: Tensor, *sources: Tensor | None) -> Tensor:
    """The result ``out`` of an ``autograd.Function`` of up to four ``sources``.

    Where that is traced without its backward, the gradient of ``out`` in the graph is an error that says so.
    A graph that is traced together with its backward (a joint graph) has the gradients and does not ask for this one.
    """
    if torch.compiler.is_dynamo_compiling() or not is_traced():
        return out
    return without_backward(out, *(x for x in sources if x is not None))


def _no_backward(*args: Any) -> Any:
    raise RuntimeError(
        "this graph was traced without the backward of a layer of tritonfp8 (one on DTensors or FSDP2's gathered "
        "weights, or a fused one), so it cannot be trained: use torch.compile, trace the backward together with the "
        "forward, or revert the layer first (tritonfp8.revert)"
    )


def _copy(out: Tensor, *sources: Tensor | None) -> Tensor:
    return out.clone()


implement("without_backward", _copy, _no_backward)
