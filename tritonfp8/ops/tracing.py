"""A linear layer as one op that carries its gradients, for graphs that are traced outside of ``torch.compile``.

``torch.export``, ``make_fx``, ``torch.jit.trace`` and tools on top of them (``torch.distributed.pipelining.pipeline``)
record the ops inside the forward of an ``autograd.Function``. These ops have no gradient, so the graph would silently
not train. The ops ``whole_linear`` and ``whole_linear_backward`` have a registered gradient, which a graph keeps;
:mod:`tritonfp8.layers.linear.traced` implements them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonfp8.compat.torch_private import is_exporting as is_exporting
from tritonfp8.compat.torch_private import is_traced as is_traced
from tritonfp8.ops.registry import implement, overload


def sealed(out: Tensor, *sources: Tensor | None) -> Tensor:
    """The result ``out`` of an ``autograd.Function`` of up to four ``sources``.

    If it is traced without its backward, taking the gradient of ``out`` in the graph raises an error that says so. A
    graph that is traced together with its backward (a joint graph) has the gradients and never reaches that error.
    """
    if torch.compiler.is_dynamo_compiling() or not is_traced():
        return out
    return without_backward(out, *(x for x in sources if x is not None))


def _no_backward(*args: Any) -> Any:
    raise RuntimeError(
        "this graph was traced without the backward of a layer of tritonfp8 (one on DTensors or FSDP2's gathered "
        "weights, or experts), so it cannot be trained: use torch.compile, trace the backward together "
        "with the forward, or revert the layer first (tritonfp8.revert)"
    )


def _copy(out: Tensor, *sources: Tensor | None) -> Tensor:
    return out.clone()


implement("without_backward", _copy, _no_backward)
without_backward = overload("without_backward")
