"""Graphs before and after the rewrites of ``tritonfp8.ops.passes``, and the code that Inductor writes for them."""

import torch
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from tritonfp8.specs.testing import assert_bitwise_equal


def graph_of(function, *args):
    """The graph of ``function``, as Inductor has it: with a fake tensor for each node."""
    return make_fx(function, tracing_mode="fake")(*args)


def rewritten(rewrite, function, *args):
    """The graph of ``function`` after a rewrite, which keeps the results to the bit, and how many places it changed."""
    module = graph_of(function, *args)
    found = rewrite(module.graph)
    module.graph.lint()
    module.recompile()
    assert_bitwise_equal(list(module(*args)), list(function(*args)))
    return module.graph, found


def code_of(model, x, **options):
    """Output and gradients of a compiled model, and the code that Inductor wrote; with options of ``torch.compile``."""
    torch.compiler.reset()
    model.zero_grad()
    x = x.clone().requires_grad_()

    def run():
        out = torch.compile(model, fullgraph=True, **options)(x)
        out.sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in model.parameters())]

    with torch._inductor.config.patch(force_disable_caches=True):
        results, code = run_and_get_code(run)
    return results, "\n".join(code)
