"""A linear layer as one op that carries its gradients, for graphs that are traced outside of ``torch.compile``.

``torch.export``, ``make_fx``, ``torch.jit.trace`` and what is built on them (``torch.distributed.pipelining.pipeline``)
run an ``autograd.Function`` and record the ops inside its forward. Those have no gradient, so the graph would train
nothing and not say so. These ops have a registered autograd formula, which the graph that calls them keeps.
:mod:`tritonfp8.traced_linear` implements them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_mode, _PROXY = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_is_included, _PRE_DISPATCH = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PreDispatch
_is_jit_tracing = torch._C._is_tracing

NAMESPACE = "tritonfp8"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
# Tensors that may be missing come last: the dispatcher leaves out what is None at the end, and
# torch.export.draft_export takes an optional tensor that is given as None for one that the op writes to.
_HELD = "Tensor? qdata=None, Tensor? scale=None, Tensor? qdata_t=None, Tensor? scale_t=None"
_SCHEMAS = {
    "whole_linear": f"(Tensor input, Tensor weight, str recipe, Tensor? bias=None, {_HELD}) -> Tensor",
    "whole_linear_backward": (
        "(Tensor grad_output, Tensor input, Tensor weight, str recipe, bool needs_input, bool needs_weight, "
        f"bool needs_bias, {_HELD}) -> Tensor[]"
    ),
    "without_backward": "(Tensor out, Tensor a, Tensor? b=None, Tensor? c=None, Tensor? d=None) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

call = torch.ops.tritonfp8.whole_linear.default
"""``call(input, weight, *recipe.args, bias, *held)``, of plain tensors of one dtype, in which it computes.

``held`` is data and scale of the weight, then of its transpose, where they were quantized before
(:func:`tritonfp8.functional.quantize_weight`); each None where it was not.
"""
call_backward = torch.ops.tritonfp8.whole_linear_backward.default
_without_backward = torch.ops.tritonfp8.without_backward.default


def implement(name: str, run: Callable[..., Any], fake: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Register what an op does, its shapes, and its gradient: ``backward(ctx, *grads)``."""
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=_save, lib=_library)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    # What else there was, and where tensors go.
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def saved(ctx: Any) -> list[Any]:
    """The arguments that the op of a ``backward`` was called with."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if other is None else other[0] for other in ctx.others]


def is_traced() -> bool:
    """Whether operations are recorded into a graph just now, by other means than Dynamo."""
    # What get_proxy_mode of torch.fx and torch.jit.is_tracing ask, in less of an eager call's time.
    return _mode(_PROXY) is not None or _is_included(_PRE_DISPATCH) or _is_jit_tracing()


def sealed(out: Tensor, *sources: Tensor | None) -> Tensor:
    """The result ``out`` of an ``autograd.Function`` of up to four ``sources``.

    Where that is traced without its backward, the gradient of ``out`` in the graph is an error that says so.
    A graph that is traced together with its backward (a joint graph) has the gradients and does not ask for this one.
    """
    if torch.compiler.is_dynamo_compiling() or not is_traced():
        return out
    return _without_backward(out, *(x for x in sources if x is not None))


def _no_backward(*args: Any) -> Any:
    raise RuntimeError(
        "this graph was traced without the backward of a layer of tritonfp8 (one on DTensors or FSDP2's gathered "
        "weights, or a fused one), so it cannot be trained: use torch.compile, trace the backward together with the "
        "forward, or revert the layer first (tritonfp8.revert)"
    )


def _copy(out: Tensor, *sources: Tensor | None) -> Tensor:
    return out.clone()


implement("without_backward", _copy, _copy, _no_backward)
