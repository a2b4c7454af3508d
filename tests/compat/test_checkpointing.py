"""Backward of a compiled checkpoint recomputes what an autograd function inside it computes."""

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import tritonfp8
from tritonfp8 import ops
from tritonfp8.compat.checkpointing import marking_inside

TOKENS, WIDTH, OUT = 64, 32, 48


def _saved(recipe: str, storage: str) -> list[tuple[int, ...]]:
    """The shapes of what a compiled checkpoint of two layers saves for backward."""
    model = nn.Sequential(nn.Linear(WIDTH, OUT, bias=False), nn.Linear(OUT, WIDTH, bias=False))
    tritonfp8.convert(model, recipe, weight_storage=storage)
    compiled = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager_decomp_partition")
    shapes: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        compiled(torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert (TOKENS, WIDTH) in shapes
    return shapes


def test_no_result_of_a_gemm_is_saved() -> None:
    """Of weights that are stored in 8 bits Dynamo traces the autograd function; other ones are called as an op."""
    assert (TOKENS, OUT) not in _saved("rowwise", "quantized")
    assert (TOKENS, OUT) not in _saved("rowwise", "parameters")


def _checkpointed(ours: bool) -> tuple[GraphModule, GraphModule]:
    """A graph that calls an autograd function, and the graph of its forward."""
    inner = Graph()
    x = inner.placeholder("x")
    inner.output((inner.call_function(ops.amax if ours else torch.relu, (x, [-1, -1]) if ours else (x,)), ()))
    body = GraphModule({}, inner)
    outer = Graph()
    x = outer.placeholder("x")
    forward = outer.get_attr("body")

    def autograd_function_apply(*args: object) -> object: ...

    outer.output(outer.call_function(autograd_function_apply, (forward, forward, x)))
    return GraphModule({"body": body}, outer), body


def _tag_nodes(gmod: GraphModule, is_sac: bool) -> GraphModule:
    for node in gmod.graph.nodes:
        if node.op == "call_function":
            node.meta |= {"ac_graph_id": 7, "recompute": None if is_sac else CheckpointPolicy.PREFER_RECOMPUTE}
    return gmod


def _marks(ours: bool, is_sac: bool) -> list[object]:
    gmod, body = _checkpointed(ours)
    marking_inside(_tag_nodes)(gmod, is_sac)
    return [node.meta.get("recompute") for node in body.graph.nodes if node.op == "call_function"]


def test_marks_reach_our_functions_only() -> None:
    """Selective checkpointing asks its policy inside of functions, and other functions are left to torch."""
    assert _marks(ours=True, is_sac=False) == [CheckpointPolicy.PREFER_RECOMPUTE]
    assert _marks(ours=True, is_sac=True) == [None]
    assert _marks(ours=False, is_sac=False) == [None]
