"""How many kernels of ours a compiled training step launches: at small sizes a launch takes longer than its kernel.

Counted on the meta device, by plans made for an H200. The kernels that Inductor writes, and cuBLAS's, are not counted.
"""

import dataclasses

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import tritonfp8
from bench import models, shapes
from tritonfp8 import ops
from tritonfp8.compat import hardware
from tritonfp8.conversion.selection.cost import H200
from tritonfp8.launch import executor
from tritonfp8.launch.gemms import widened
from tritonfp8.ops import passes

MODEL = "gpt 2 xl layers"
# Of one block of GPT-2 XL, 8 x 1024 tokens, forward and backward. A figure may only be replaced by a smaller one, or
# for less memory: casting GELU's result again in backward is a launch more where forward cast it in both orientations.
# On an H200 four blocks launched 412 kernels in all by rowwise and 196 in bf16; the goal is at most 294. Four of them
# sum the gradients of biases, for which Inductor launched nine.
MOST_LAUNCHES = {"rowwise": 46, "blockwise": 33, "tensorwise": 57, "mxfp8": 57}


# Of one block of a diffusion transformer 1152 wide, 8 x 1024 tokens, as above.
DIFFUSION, MOST_OF_DIFFUSION = "dit 1152 blocks", {"rowwise": 46, "tensorwise": 59, "blockwise": 35}


def graphs_of(model, x):
    """The graphs of forward and backward of a compiled ``model``."""
    found = []

    def note(graph, inputs):
        found.append(graph)
        return make_boxed_func(graph.forward)

    # As Inductor does: what is cheap is computed again and not saved.
    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    torch.compiler.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x).sum().backward()
    return found


def block_of(name):
    """The model ``name`` of the bench with one block, on the meta device, and its input."""
    (shape,) = (shape for shape in shapes.select("model", [shapes.ALL]) if shape.name == name)
    one = dataclasses.replace(shape, size=(1, *shape.size[1:]))
    *_, batch, sequence = shape.size
    x = torch.empty(batch, sequence, shape.size[1], dtype=torch.bfloat16, device="meta")
    return models.build(one, torch.device("meta")), x.requires_grad_()


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched from now on, for an H200; torch's GEMMs of MX operands among them."""
    names = []
    monkeypatch.setattr(hardware, "abilities", lambda device: H200)
    monkeypatch.setattr(executor, "run", lambda kernel, *args, **options: names.append(kernel.__name__))
    monkeypatch.setattr(widened, "_multiply", lambda *args: names.append("torch.matmul"))
    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(executor, "_repeat_or_warn", lambda *args: None)
    return names


def launch(node):
    """Launch the op of a node of a graph, on tensors without memory."""

    def value(argument):
        if isinstance(argument, list):
            return [*map(value, argument)]
        if not isinstance(argument, torch.fx.Node):
            return argument
        fake = argument.meta["val"]
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")

    name = node.target.name().removeprefix("tritonfp8::").removesuffix(".default")
    ops.registry.OPS[name].launch(*map(value, node.args))


def is_launched(node):
    return node.op == "call_function" and str(node.target).startswith("tritonfp8.")


@pytest.mark.parametrize("recipe", MOST_LAUNCHES)
def test_a_block_of_gpt_2_launches_no_more_kernels_than_before(recipe, launched):
    model, x = block_of(MODEL)
    tritonfp8.convert(model, recipe)
    graphs = graphs_of(model, x)
    for graph in graphs:
        passes.rewrite(graph.graph)
    nodes = [node for graph in graphs for node in graph.graph.nodes if is_launched(node)]
    for node in nodes:
        launch(node)
    # Three GEMMs of each of the four layers.
    assert sum("matmul" in name for name in launched) == 12
    assert len(launched) <= MOST_LAUNCHES[recipe], sorted(launched)


@pytest.mark.parametrize("recipe", MOST_OF_DIFFUSION)
def test_a_block_of_a_diffusion_transformer_calls_us_about_once_a_gemm(recipe, launched):
    """Ops that follow one another are one call of the host, whatever they launch."""
    model, x = block_of(DIFFUSION)
    tritonfp8.convert(model, recipe)
    nodes = []
    for graph in graphs_of(model, x):
        passes.rewrite(graph.graph)
        passes.join_chains(graph.graph)
        nodes += [node for node in graph.graph.nodes if is_launched(node)]
    for node in nodes:
        launch(node)
    gemms = sum("matmul" in name for name in launched)
    assert gemms == 12
    assert len(nodes) <= 1.5 * gemms
    assert len(launched) <= MOST_OF_DIFFUSION[recipe], sorted(launched)


def test_a_torch_that_does_not_count_autograd_as_compiling_batches_weights(monkeypatch):
    """In torch 2.11 ``is_compiling`` is False while AOT autograd traces the layer."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    model, x = block_of(MODEL)
    tritonfp8.convert(model, "rowwise")
    graphs = graphs_of(model, x)
    for graph in graphs:
        passes.rewrite(graph.graph)
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes if is_launched(node)]
    assert "tritonfp8.quantize_weights.default" in names
