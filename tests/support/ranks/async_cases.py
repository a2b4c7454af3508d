"""What the ranks run for the tests of asynchronous tensor parallelism and asynchronous collectives.

Passes of the compiler are imported where they run, on the ranks: a worker that collects the tests would load Inductor.
"""

import copy
import functools
from unittest import mock

import torch
from cases import normal
from fsdp_models import Block
from torch import nn
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from tp_cases import SAME_BUT_FOR_ORDER, assert_same
from tp_model_cases import Mlp, mlp_plan, sequence_plan_mlp

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel
from tritonfp8.functional import linear
from tritonfp8.layers import extensions
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

PLAIN, FLOAT8 = (ColwiseParallel, RowwiseParallel), (Float8ColwiseParallel, Float8RowwiseParallel)
HIDDEN, HEADS, INTERMEDIATE = 128, 4, 256
MLP = "gate", "up", "down"
LINEARS = "q", "k", "v", "o", *MLP


# Asynchronous tensor parallelism: the pass of torch.compile that overlaps slices of gathers with slices of GEMMs.


def sharded_layers(mesh, layers, name, float8, converted):
    """Llama layers whose tokens are sharded between attention and MLP; linear layers not ``converted`` are torch's."""
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for layer in LINEARS:
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
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [out.detach(), loss.detach(), x.grad, *grads]


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
    assert_same(got, wanted, bitwise=converted == LINEARS)
    return fused


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
    torch's own GEMMs differ in the last bit. Those of the last layer's MLP precede the backward of any norm.
    """
    wanted, unused = compiled_step(mesh, name, float8, converted, passes=False)
    got, fused = compiled_step(mesh, name, float8, converted, passes=True)
    assert unused == []
    exact = {"output", "loss"}
    if recipes.get(name).grad_weight.quantized:
        exact |= {f"1.{layer}.weight" for layer in MLP}
    assert exact <= got.keys()
    for name, value in got.items():
        if converted == LINEARS and name in exact:
            assert torch.equal(value, wanted[name]), name
        found = sqnr(value, wanted[name])
        assert found > SAME_BUT_FOR_ORDER, f"{name}: {found} dB"
    return fused


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


def check_without_handlers(mesh):
    """The result of a running collective computes like a plain tensor, also if no type has a handler."""
    x, w, b, _ = operands(mesh)
    wanted = linear(x, w, b)
    with mock.patch.object(extensions, "_filled", None), mock.patch.object(extensions, "distributed") as imported:
        assert_bitwise_equal(linear(on_its_way(x, mesh), w, b), wanted)
    assert not imported.called


def converted_mlp(mesh, name, plan):
    model = Mlp().to(mesh.device_type)
    tritonfp8.convert(model, name)
    return model if plan is None else parallelize_module(model, mesh, plan)


def results(model, x):
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters())]


def check_layers(mesh, name):
    """A converted model alone, and in the styles of tensor and of sequence parallelism."""
    x = normal(64, 64, seed=5).to(mesh.device_type)
    tensor_plan = mlp_plan(Float8ColwiseParallel, Float8RowwiseParallel)
    check_the_same_bytes(mesh, lambda send: results(converted_mlp(mesh, name, None), send(x)))
    check_the_same_bytes(mesh, lambda send: results(converted_mlp(mesh, name, tensor_plan), send(x)))
    check_the_same_bytes(
        mesh, lambda send: results(converted_mlp(mesh, name, sequence_plan_mlp()), own_rows(send(x), mesh))
    )


def check_output_of_a_style(mesh, name, float8):
    """An unsharded layer reads the output of a rowwise style, whose reduction is still running."""
    came, found = [], []

    def waits(module, args):
        came.append(type(args[0]))
        return args[0].clone()

    for hook in (waits, None):
        model = nn.Sequential(
            converted_mlp(mesh, name, mlp_plan(*(FLOAT8 if float8 else PLAIN))), converted_mlp(mesh, name, None)
        )
        if hook is not None:
            model[1].register_forward_pre_hook(hook)
        x = normal(64, 64, seed=5).to(mesh.device_type).requires_grad_()
        found.append([*results(model, x), x.grad])
    assert came == [AsyncCollectiveTensor]
    assert_bitwise_equal(found[1], found[0])
