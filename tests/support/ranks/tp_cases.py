"""Sharded linear layers and an MLP against one process: what the tests of several files compute and compare."""

import torch
from cases import generator, normal
from process_group import made_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from tritonfp8.functional import linear
from tritonfp8.specs.testing import sqnr

R = Replicate()
# dB between sums in different orders, on a CPU and on tensor cores. One wrong scale gives 20 to 40.
SAME_BUT_FOR_ORDER, SAME_ON_TENSOR_CORES = 100, 50
PLAIN, FLOAT8 = (ColwiseParallel, RowwiseParallel), (Float8ColwiseParallel, Float8RowwiseParallel)


def assert_same(got, wanted, bitwise=False):
    for a, e in zip(got, wanted, strict=True):
        assert a.shape == e.shape
        if bitwise:
            # Compare values, not bits: a sum over ranks has no -0.0.
            assert torch.equal(a, e)
        elif a.numel():
            found = sqnr(a, e)
            assert found > (SAME_ON_TENSOR_CORES if a.is_cuda else SAME_BUT_FOR_ORDER), found


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def integers(*shape, seed=0):
    """Small integers: exact as FP8 codes with power-of-two scales, and in float32 sums of any order."""
    return torch.randint(-3, 4, shape, generator=generator(seed)).float()


def exact(name):
    """Whether a recipe computes exactly on small integers."""
    recipe = recipes.get(name)
    gemms = (recipe.output, recipe.grad_input, recipe.grad_weight)
    return all(gemm.lhs is None or gemm.lhs.scale_rounding == "pow2" for gemm in gemms)


def single(x, w, b, g, recipe):
    x, w, b = (t.detach().clone().requires_grad_() for t in (x, w, b))
    out = linear(x, w, b, recipe)
    out.backward(g)
    return [out.detach(), x.grad, w.grad, b.grad]


def on_mesh(x, mesh, placements):
    return distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()


def sharded(operands, g, recipe, mesh, placements):
    """Placements of the output and of the gradients, and both as whole tensors."""
    operands = [on_mesh(t, mesh, p) for t, p in zip(operands, placements[:3], strict=True)]
    out = linear(*operands, recipe, output_placements=placements[3] if len(placements) > 3 else None)
    out.redistribute(placements=[R] * mesh.ndim).backward(
        distribute_tensor(g, mesh, [R] * mesh.ndim, src_data_rank=None)
    )
    grads = [t.grad for t in operands]
    found = [str(p) for p in out.placements], [str(tuple(g.placements)) for g in grads]
    return found, [t.full_tensor() for t in (out.detach(), *grads)]


def check_layer(mesh, names, lead, n, k, placements, grid=None):
    """Compare a layer with these placements to one process. Returns result placements.

    Args:
        placements: of input, weight and bias, and of the output, if the layer is told.
        grid: the sizes of a mesh of two dims over all ranks, or None for ``mesh``.
    """
    mesh, found = mesh if grid is None else made_mesh(mesh.device_type, grid, ("dp", "tp")), None
    for name in names:
        # Integers compare to the bit where the recipe is exact. Elsewhere they find nothing that normal values do not.
        for make in (integers, normal) if exact(name) else (normal,):
            operands = make(*lead, k, seed=1), make(n, k, seed=2), make(n, seed=3)
            operands = [t.to(mesh.device_type) for t in operands]
            g = make(*lead, n, seed=4).to(mesh.device_type)
            result_placements, got = sharded(operands, g, name, mesh, placements)
            assert_same(got, single(*operands, g, name), bitwise=make is integers)
            assert found in (None, result_placements)
            found = result_placements
    return found


class Recorder(TorchDispatchMode):
    """Records the results of casts, the data of collectives, and the names of our ops, in order."""

    def __init__(self):
        super().__init__()
        self.casts, self.sent, self.ops = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if func.namespace == "tritonfp8":
            self.ops.append(name.split(".")[1])
        if name.startswith(("tritonfp8.quantize.", "tritonfp8.quantize_both")):
            self.casts.append((tuple(args[0].shape), [t.clone() for t in out[:4]]))
        if func.namespace == "_c10d_functional" and isinstance(args[0], torch.Tensor) and "wait" not in name:
            self.sent.append((func.__name__.split(".")[0], args[0].dtype, args[0].numel()))
        return out


class Mlp(nn.Module):
    """Linear layers with a gate."""

    def __init__(self, hidden=96):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(64, hidden), nn.Linear(64, hidden), nn.Linear(hidden, 64)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def mlp_plan(styles, **options):
    colwise, rowwise = styles
    return {"gate": colwise(**options), "up": colwise(**options), "down": rowwise()}


def sequence_plan_mlp():
    return {
        "": PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=R),
        "gate": Float8ColwiseParallel(),
        "up": Float8ColwiseParallel(),
        "down": Float8RowwiseParallel(output_layouts=Shard(0)),
    }


def converted_mlp(mesh, name, plan=None, first=True, hidden=96):
    """An :class:`Mlp` that is converted, and sharded by ``plan`` after that, or before unless ``first``."""
    model = Mlp(hidden).to(mesh.device_type)
    if first:
        tritonfp8.convert(model, name)
    if plan is not None:
        parallelize_module(model, mesh, plan)
    if not first:
        tritonfp8.convert(model, name)
    return model


def results(model, x):
    """The output, the gradient of ``x``, and the gradients of all parameters, as whole tensors."""
    x = x.detach().requires_grad_()
    out = whole(model(x))
    out.backward(normal(*out.shape, seed=9).to(x.device))
    return [out.detach(), x.grad, *(whole(p.grad) for p in model.parameters())]
