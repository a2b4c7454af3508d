"""Collectives that end later, and torch's pass that cuts them and products into pieces (asynchronous TP).

Passes of the compiler are imported where they run, on the ranks: a worker that collects the tests would load Inductor.
"""

import copy
import functools
from unittest import mock

import pytest
import torch
from cases import QUANTIZED, normal
from fsdp_models import Block
from torch import nn
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from tp_cases import (
    FLOAT8,
    PLAIN,
    SAME_BUT_FOR_ORDER,
    assert_same,
    converted_mlp,
    mlp_plan,
    sequence_plan_mlp,
)

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.functional import linear
from tritonfp8.layers import extensions
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]

NAMES = recipes.names()


# Asynchronous collectives: the first read of a tensor waits for it.


def on_its_way(x, mesh):
    """``x`` on all ranks, as the result of a running all-gather; the ranks must divide its rows."""
    shard = DTensor.from_local(own_rows(x, mesh), mesh, [Shard(0)], run_check=False)
    x = shard.redistribute(placements=[Replicate()], async_op=True).to_local()
    assert type(x) is AsyncCollectiveTensor
    return x


def own_rows(x, mesh):
    return x.chunk(mesh.size())[mesh.get_local_rank()]


def check_the_same_bytes(mesh, call):
    """Assert that ``call`` returns the same bytes for plain tensors and for results of running collectives."""
    waited, got = (call(send) for send in (lambda x: x, lambda x: on_its_way(x, mesh)))
    assert_bitwise_equal(got, waited)


def operands(mesh):
    shapes = (64, 96), (80, 96), (80,), (64, 80)
    return [normal(*shape, seed=i).to(mesh.device_type, torch.bfloat16) for i, shape in enumerate(shapes)]


def check_functions(mesh, name):
    x, w, b, g = operands(mesh)
    recipe = recipes.get(name)

    def products(send):
        specs = [spec for spec in (recipe.output.lhs, recipe.output.rhs) if spec is not None]
        casts = [tritonfp8.quantize(send(t), spec) for t, spec in zip((x, w), specs, strict=False)]
        return [part for q in casts for part in (q.qdata, q.scale)]

    def layers(send):
        leaf, weight, bias = (t.clone().requires_grad_() for t in (x, w, b))
        outs = linear(send(x), weight, bias, name), linear(leaf, send(w), send(b), name)
        for out in outs:
            out.backward(send(g))
        return [*(out.detach() for out in outs), weight.grad, bias.grad, leaf.grad]

    for call in (products, layers):
        check_the_same_bytes(mesh, call)


def test_functions_of_what_a_collective_has_yet_to_bring(ranks):
    for name in NAMES:
        ranks.run(2, check_functions, name)


def check_without_handlers(mesh):
    """The result of a running collective computes like a plain tensor, also if no type has a handler."""
    x, w, b, _ = operands(mesh)
    wanted = linear(x, w, b)
    with mock.patch.object(extensions, "_filled", None), mock.patch.object(extensions, "distributed") as imported:
        assert_bitwise_equal(linear(on_its_way(x, mesh), w, b), wanted)
    assert not imported.called


def test_only_dtensors_import_the_subpackage(ranks):
    ranks.run(2, check_without_handlers)


def local_gradients(model):
    return [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]


def results(model, x):
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *local_gradients(model)]


def check_layers(mesh, name):
    """A converted model alone, and in the styles of tensor and of sequence parallelism."""
    x = normal(64, 64, seed=5).to(mesh.device_type)
    for plan in (None, mlp_plan(FLOAT8)):
        check_the_same_bytes(mesh, lambda send, plan=plan: results(converted_mlp(mesh, name, plan), send(x)))
    check_the_same_bytes(
        mesh, lambda send: results(converted_mlp(mesh, name, sequence_plan_mlp()), own_rows(send(x), mesh))
    )


def test_layers_of_what_a_collective_has_yet_to_bring(ranks):
    for name in NAMES:
        ranks.run(2, check_layers, name)


def check_output_of_a_style(mesh, name, styles):
    """An unsharded layer reads the output of a rowwise style, whose reduction is still running."""
    came, found = [], []

    def waits(module, args):
        came.append(type(args[0]))
        return args[0].clone()

    for hook in (waits, None):
        model = nn.Sequential(converted_mlp(mesh, name, mlp_plan(styles)), converted_mlp(mesh, name))
        if hook is not None:
            model[1].register_forward_pre_hook(hook)
        x = normal(64, 64, seed=5).to(mesh.device_type).requires_grad_()
        found.append([*results(model, x), x.grad])
    assert came == [AsyncCollectiveTensor]
    assert_bitwise_equal(found[1], found[0])


@pytest.mark.parametrize("styles", [PLAIN, FLOAT8], ids=["plain", "float8"])
def test_layer_without_a_style_after_one_that_sums_over_the_ranks(ranks, styles):
    for name in NAMES:
        ranks.run(2, check_output_of_a_style, name, styles)


@pytest.mark.multigpu
def test_what_a_collective_has_yet_to_bring_on_gpus(gpus):
    for name in NAMES:
        gpus.run(2, check_functions, name)
        gpus.run(2, check_layers, name)
        gpus.run(2, check_output_of_a_style, name, FLOAT8)


# Asynchronous tensor parallelism: the pass of torch.compile that overlaps slices of gathers with slices of GEMMs.

HIDDEN, HEADS, INTERMEDIATE = 128, 4, 256
MLP = "gate", "up", "down"
ALL = "q", "k", "v", "o", *MLP


def sharded_layers(mesh, layers, name, float8, converted):
    """Llama layers whose tokens are sharded between attention and MLP; linear layers not ``converted`` are torch's."""
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for layer in ALL:
        colwise, rowwise = FLOAT8 if float8 and layer in converted else PLAIN
        sums = layer in ("o", "down")
        plan[layer] = rowwise(output_layouts=Shard(1)) if sums else colwise(input_layouts=Shard(1))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(HIDDEN, HEADS, INTERMEDIATE) for _ in range(layers)))
    for layer in model.to(mesh.device_type):
        tritonfp8.convert(layer, name, filter=lambda module, at: at in converted)
        parallelize_module(layer, mesh, plan)
    return model


def step(model, mesh):
    """Output, loss and gradients of this rank's tokens."""
    x = normal(2, 32, HIDDEN, seed=5).to(mesh.device_type)
    x = x.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone().requires_grad_()
    # Flash attention sums the gradients of queries in an order that varies.
    with sdpa_kernel(SDPBackend.MATH):
        out = model(x)
        loss = out.square().mean()
        loss.backward()
    return [out.detach(), loss.detach(), x.grad, *local_gradients(model)]


def fused_ops(graph):
    """The fused ops by which the pass replaced collectives and GEMMs."""
    return [str(node.target) for node in graph.nodes if "symm_mem" in str(node.target)]


@functools.cache
def run_fused_ops_on_cpu():
    """Register torch's fallbacks for runs without symmetric memory."""
    for op in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        torch.library.impl(f"symm_mem::{op}", "CPU", getattr(symmetric_memory, f"_{op}_fallback"))


def step_of_graphs(model, mesh, passes):
    """A step of the first layer by its graphs, op by op, with the pass on them or without; what it fused in each."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    fused = []

    def compiler(module, inputs):
        passed = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
        post_grad.remove_noop_ops(passed.graph)
        post_grad.view_to_reshape(passed)
        if passes:
            with symmetric_memory._test_mode(), mock.patch("torch.distributed.is_nccl_available", return_value=True):
                micro_pipeline_tp_pass(passed.graph)
        passed.graph.lint()
        passed.recompile()
        fused.append(fused_ops(passed.graph))
        return make_boxed_func(passed)

    torch._dynamo.reset()
    model.zero_grad()
    model[0].compile(backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    return step(model, mesh), fused


def check_micro_pipelined_graphs(mesh, name, float8, converted):
    """Compare a layer with the pass on its graphs and without it. Returns the fused ops of each graph."""
    model = sharded_layers(mesh, 1, name, float8, converted)
    if mesh.device_type == "cpu":
        run_fused_ops_on_cpu()
        wanted = step(model, mesh)
    else:
        # On a GPU an eager norm is one kernel; in a graph it is several ops.
        wanted, _ = step_of_graphs(model, mesh, passes=False)
    got, fused = step_of_graphs(model, mesh, passes=True)
    assert_same(got, wanted, bitwise=converted == ALL)
    return fused


PIPELINED = [("rowwise_hp_grad_weight", False, ALL), ("tensorwise", True, MLP)]
# Collectives of attention that the pass fuses. The MLP has as many.
OF_ATTENTION = 4


@pytest.mark.parametrize(("name", "float8", "converted"), PIPELINED, ids=["plain", "float8, mlp alone"])
def test_micro_pipelining_leaves_converted_layers_alone(ranks, name, float8, converted):
    """It fuses a gather with products of what it gathers: products of torch's layers, as ours quantize in between."""
    for fused in ranks.run(2, check_micro_pipelined_graphs, name, float8, converted, timeout=150):
        assert len(fused) == 2
        assert any(fused) == (converted != ALL)
        assert sum(map(len, fused)) <= OF_ATTENTION


def compiled_step(mesh, name, float8, converted, passes):
    import torch._inductor.config as inductor
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    model, fused = sharded_layers(mesh, 2, name, float8, converted), []

    def noted(graph):
        micro_pipeline_tp_pass(graph)
        fused.append(fused_ops(graph))

    torch._dynamo.reset()
    # Fused kernels must round as eager ones do, and Inductor must not choose kernels by measured speed.
    exact = {option: True for option in ("emulate_precision_casts", "deterministic") if hasattr(inductor, option)}
    options = {"_micro_pipeline_tp": passes, "force_disable_caches": True, **exact}
    with (
        # Without symmetric memory fused ops run as separate collectives and GEMMs.
        symmetric_memory._test_mode(),
        mock.patch.object(post_grad, "micro_pipeline_tp_pass", noted),
        inductor.patch(options),
    ):
        for layer in model:
            layer.compile(fullgraph=True)
        names = ["output", "loss", "input", *(name for name, _ in model.named_parameters())]
        return dict(zip(names, step(model, mesh), strict=True)), fused


def check_micro_pipelined(mesh, name, float8, converted):
    """Compare two compiled layers with the pass and without it. Returns the fused ops of each graph.

    Not all gradients are equal to the bit: if one graph is compiled twice, gradients of norms, of their inputs and of
    torch's own GEMMs differ in the last bit. The gradients of the last layer's MLP precede the backward of any norm.
    """
    wanted, unused = compiled_step(mesh, name, float8, converted, passes=False)
    got, fused = compiled_step(mesh, name, float8, converted, passes=True)
    assert unused == []
    exact = {"output", "loss"}
    if recipes.get(name).grad_weight.quantized:
        exact |= {f"1.{layer}.weight" for layer in MLP}
    assert exact <= got.keys()
    for name, value in got.items():
        if converted == ALL and name in exact:
            assert torch.equal(value, wanted[name]), name
        found = sqnr(value, wanted[name])
        assert found > SAME_BUT_FOR_ORDER, f"{name}: {found} dB"
    return fused


@pytest.mark.multigpu
@pytest.mark.parametrize(
    ("name", "float8", "converted"),
    [*((name, float8, ALL) for name in QUANTIZED for float8 in (False, True)), ("rowwise", True, MLP)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_micro_pipelining_on_gpus(gpus, name, float8, converted):
    """By torch's compiler; and op by op, where losses and gradients are to the bit those without the pass."""
    for check in (check_micro_pipelined, check_micro_pipelined_graphs)[: 2 if converted == ALL else 1]:
        for fused in gpus.run(2, check, name, float8, converted, timeout=300):
            assert len(fused) >= 2
            assert any(fused) == (converted != ALL)
