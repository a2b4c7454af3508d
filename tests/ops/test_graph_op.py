"""The op that stands for a whole layer in a graph: what Dynamo traces of a layer, and what is compiled in its place."""

import os

import pytest
import torch
from cases import llama, normal, tokens, with_head
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.utils import counters

import tritonfp8
from tritonfp8 import Float8Linear, convert, ops, recipes
from tritonfp8.ops import graph_op
from tritonfp8.specs.testing import assert_bitwise_equal

each_recipe = pytest.mark.parametrize("name", recipes.names())


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def converted_llama(name, device="cpu", dtype=torch.bfloat16, layers=1):
    model = llama(num_hidden_layers=layers).to(device, dtype)
    convert(model, with_head(name))
    return model


def nodes_of_dynamo(model):
    """What Dynamo makes of a model: the targets of all calls, those in the bodies of higher-order ops among them."""
    found = []

    def backend(module, inputs):
        graphs = [each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule)]
        found.extend(node.target for graph in graphs for node in graph.nodes if node.op.startswith("call"))
        return module.forward

    torch.compile(model, backend=backend, fullgraph=True)(tokens(), use_cache=False)
    return found


# One op holds a recipe as its arguments, so one that quantizes all GEMMs and one that leaves some stand for all.
@pytest.mark.parametrize("name", ["rowwise", "rowwise_hp_grad_weight"])
def test_dynamo_traces_as_much_as_without_conversion(name):
    """The first step takes as long as Dynamo traces, and that is one call a layer."""
    model = llama(num_hidden_layers=2)
    plain = nodes_of_dynamo(model)
    converted = len(convert(model, with_head(name)).converted)
    nodes = nodes_of_dynamo(model)
    assert converted == 2 * 7 + 1
    assert nodes.count(graph_op.call) == converted
    assert len(nodes) == len(plain)


def inlined_functions(model):
    """How many calls of functions in the package Dynamo follows."""
    package = os.path.dirname(tritonfp8.__file__)
    inlined = []
    translate = InliningInstructionTranslator.inline_call_

    def counting(self):
        inlined.append(self.f_code.co_filename)
        return translate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InliningInstructionTranslator, "inline_call_", counting)
        nodes_of_dynamo(model)
    return sum(name.startswith(package) for name in inlined)


def test_dynamo_follows_few_functions_of_a_layer():
    model = converted_llama("rowwise", layers=1), converted_llama("rowwise", layers=2)
    fewer, more = map(inlined_functions, model)
    # Of seven linears, and of the hooks of two modules whose linears share an input.
    assert 0 < more - fewer <= 7 * 9 + 4


def test_compiled_graphs_consist_of_the_ops_of_the_layer():
    """The op of a whole layer is gone before anything is compiled: only what it consists of is fused and counted."""
    seen = []

    def compiler(module, inputs):
        seen.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return make_boxed_func(module.forward)

    x, layer = normal(33, 70).requires_grad_(), Float8Linear(70, 20, recipe="rowwise")
    torch.compile(layer, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(x).sum().backward()
    assert graph_op.call not in seen
    assert seen.count(ops.scaled_matmul) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_graph_says_by_what_its_layers_compute(dtype):
    """Torch keeps compiled graphs on disk, and takes two of one text for the same."""
    texts = set()

    def backend(module, inputs):
        texts.update(node.args[-2:] for node in module.graph.nodes if node.target is graph_op.call)
        return module.forward

    with torch.autocast("cpu", dtype):
        torch.compile(Float8Linear(70, 20, recipe="rowwise"), backend=backend)(normal(33, 70))
    assert texts == {(dtype, graph_op.CODE)}


@pytest.mark.parametrize("shares_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_recipe
def test_the_op_of_a_layer_is_the_layer(name, dtype, shares_input):
    # An input with a history: one that is given is not cast again.
    recipe, x = recipes.get(name), normal(2, 33, 70, dtype=dtype).requires_grad_() * 2
    layer = Float8Linear(70, 20, recipe=recipe, dtype=dtype)
    outs = layer(x), graph_op.call(x, layer.weight, layer.bias, *recipe.args, shares_input, dtype, graph_op.CODE)
    wanted = (x, layer.weight, layer.bias)
    assert_bitwise_equal(*([out, *torch.autograd.grad(out, wanted, normal(*out.shape, dtype=dtype))] for out in outs))
