"""Functions of each rank in the tests of sharded linear layers. Each returns plain data or raises."""

import torch
from cases import generator, normal, with_specials
from process_group import made_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8 import distributed, recipes
from tritonfp8.functional import linear
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

R = Replicate()
# dB between sums in different orders, on a CPU and on tensor cores. One wrong scale gives 20 to 40.
SAME_BUT_FOR_ORDER, SAME_ON_TENSOR_CORES = 100, 50


def device():
    return "cuda" if "nccl" in torch.distributed.get_backend_config() else "cpu"


def tolerance():
    return SAME_BUT_FOR_ORDER if device() == "cpu" else SAME_ON_TENSOR_CORES


def mesh_of(sizes):
    """A mesh of these sizes, which all ranks must make together; a mesh is returned unchanged."""
    if isinstance(sizes, DeviceMesh):
        return sizes
    return made_mesh(device(), tuple(sizes), ("dp", "tp")[-len(sizes) :])


def integers(*shape, seed=0):
    """Small integers: exact as FP8 codes with power-of-two scales, and in float32 sums of any order."""
    return torch.randint(-3, 4, shape, generator=generator(seed)).float()


def exact(name):
    """Whether a recipe computes exactly on small integers."""
    recipe = recipes.get(name)
    gemms = (recipe.output, recipe.grad_input, recipe.grad_weight)
    return all(gemm.lhs is None or gemm.lhs.scale_rounding == "pow2" for gemm in gemms)


def leaf(x):
    return None if x is None else x.detach().clone().requires_grad_()


def single(x, w, b, g, recipe):
    x, w, b = leaf(x), leaf(w), leaf(b)
    out = linear(x, w, b, recipe)
    out.backward(g)
    return [t for t in (out.detach(), x.grad, w.grad, b.grad if b is not None else None) if t is not None]


def on_mesh(x, mesh, placements):
    return None if x is None else distribute_tensor(x, mesh, placements, src_data_rank=None).requires_grad_()


def sharded(operands, g, recipe, mesh, placements):
    x, w, b = (on_mesh(t, mesh, p) for t, p in zip(operands, placements, strict=True))
    out = linear(x, w, b, recipe)
    whole = out.redistribute(placements=[R] * mesh.ndim)
    whole.backward(distribute_tensor(g, mesh, [R] * mesh.ndim, src_data_rank=None))
    grads = [t.grad for t in (x, w, b) if t is not None]
    return (
        [str(p) for p in out.placements],
        [str(tuple(g.placements)) for g in grads],
        [t.full_tensor() for t in (out.detach(), *grads)],
    )


def assert_same(got, wanted, bitwise):
    for a, e in zip(got, wanted, strict=True):
        assert a.shape == e.shape
        # Compare values, not bits: a sum over ranks has no -0.0.
        assert torch.equal(a, e) if bitwise else sqnr(a, e) > tolerance(), sqnr(a, e)


def check_layer(mesh_sizes, names, lead, n, k, placements, bias=True):
    """Compare a layer with these placements of input, weight and bias to one process. Returns result placements."""
    mesh, found = mesh_of(mesh_sizes), None
    for name in names:
        # Integers compare to the bit where the recipe is exact. Elsewhere they find nothing that normal values do not.
        for make in (integers, normal) if exact(name) else (normal,):
            operands = [make(*lead, k, seed=1), make(n, k, seed=2), make(n, seed=3) if bias else None]
            operands = [t if t is None else t.to(device()) for t in operands]
            g = make(*lead, n, seed=4).to(device())
            out_placements, grads, got = sharded(operands, g, name, mesh, placements)
            assert_same(got, single(*operands, g, name), bitwise=make is integers)
            assert found in (None, (out_placements, grads))
            found = out_placements, grads
    return found


def check_nonfinite(names):
    """NaN and infinities on any rank poison only their own blocks, as in one process."""
    mesh = mesh_of([2])
    for name in names:
        for placements in ([[Shard(1)], [Shard(1)], [R]], [[Shard(0)], [R], [R]], [[R], [Shard(0)], [Shard(0)]]):
            operands = with_specials(normal(200, 150)), normal(140, 150, seed=2), normal(140, seed=3)
            g = normal(200, 140, seed=4)
            wanted = single(*operands, g, name)
            *_, got = sharded(operands, g, name, mesh, placements)
            for a, e in zip(got, wanted, strict=True):
                assert torch.equal(a.isfinite(), e.isfinite())
                if not e.isfinite().any():
                    continue
                assert sqnr(torch.where(e.isfinite(), a, 0), torch.where(e.isfinite(), e, 0)) > SAME_BUT_FOR_ORDER
            assert not got[0].isfinite().all()


class Recorder(TorchDispatchMode):
    """Records the results of casts and the data of collectives, in order."""

    def __init__(self):
        super().__init__()
        self.casts, self.sent = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(("tritonfp8.quantize.", "tritonfp8.quantize_both")):
            self.casts.append((tuple(args[0].shape), [t.clone() for t in out[:4]]))
        if func.namespace == "_c10d_functional" and isinstance(args[0], torch.Tensor) and "wait" not in name:
            self.sent.append((func.__name__.split(".")[0], args[0].dtype, args[0].numel()))
        return out


def check_quantized_shards(names):
    """Codes and scales of every operand's shard are those of the global tensor, whichever dim is sharded."""
    from tritonfp8.distributed.global_scales import global_amax, quantize_by_amaxes
    from tritonfp8.distributed.shard_layout import Mesh, align, aligned_to, flattened, unalign

    mesh = mesh_of([torch.distributed.get_world_size()])
    plain = Mesh((mesh.size(),), (mesh.get_local_rank(),), (mesh.get_group().group_name,))
    x = (normal(333, 410, seed=5) * torch.exp2(torch.arange(410) % 9)).to(device())
    specs = {
        s
        for name in names
        for gemm in (recipes.get(name).output, recipes.get(name).grad_weight)
        for s in (gemm.lhs, gemm.rhs)
        if s is not None
    }
    for spec in sorted(specs, key=str):
        for dim in (0, 1):
            block = max(*spec.block, 1)
            layouts = [flattened([n], plain, [Shard(0)] if d == dim else [R]) for d, n in enumerate(x.shape)]
            layouts = [aligned_to(layout, block) for layout in layouts]
            start, length = layouts[dim].segments[0]
            here = align(layouts[dim], x.narrow(dim, start, length), dim)
            pairs = quantize_by_amaxes(here, spec, spec, global_amax(here, spec, spec, tuple(layouts)))
            wholes = (tritonfp8.quantize(x, spec), tritonfp8.quantize(x, spec, transpose=True))
            for (qdata, scale), whole, along in zip(pairs, wholes, (dim, 1 - dim), strict=True):
                mine = unalign(layouts[dim], qdata.view(torch.uint8), along)
                assert torch.equal(mine, whole.qdata.view(torch.uint8).narrow(along, start, length))
                b = spec.block[along]
                if b == 1:
                    bits = scale.view(torch.uint8) if scale.itemsize == 1 else scale
                    scale = unalign(layouts[dim], bits, along).view(whole.scale.dtype)
                n_blocks = 1 if b == -1 else scale.shape[along]
                first = 0 if b == -1 else start // b
                assert_bitwise_equal(scale.contiguous(), whole.scale.narrow(along, first, n_blocks).contiguous())
    return len(specs)


def check_uneven(names, counts, dtype, contiguous):
    """With any token counts, output and gradients equal those of quantize(gather(x)) to the bit."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh, total = mesh_of([world]), sum(counts)
    for name in names:
        # With more than two ranks the order of sums varies; integers give the same sums in any order.
        exactly = world > 2 and dtype == torch.float32 and exact(name)
        make, factor = (integers, 1) if exactly else (normal, torch.exp2(torch.arange(96) % 7))
        whole = (make(total, 96, seed=1) * factor).to(device(), dtype)
        w, g = make(80, 96, seed=2).to(device(), dtype), make(total, 80, seed=3).to(device(), dtype)
        mine = whole.split(counts)[rank]
        local = mine.clone() if contiguous else mine.t().contiguous().t()
        x = local.detach().requires_grad_()
        weight = on_mesh(w, mesh, [Shard(0)])
        grad = distribute_tensor(g, mesh, [Shard(1)], src_data_rank=None)
        with distributed.token_counts(counts):
            xd = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(96, 1))
            out = linear(xd, weight, None, name)
        out.backward(grad)
        all_x, all_w = on_mesh(whole, mesh, [R]), on_mesh(w, mesh, [Shard(0)])
        wanted = linear(all_x, all_w, None, name)
        wanted.backward(grad)
        assert_bitwise_equal([out.to_local().detach()], [wanted.to_local().detach()])
        assert_bitwise_equal([weight.grad.to_local()], [all_w.grad.to_local()])
        wanted_grad = all_x.grad.full_tensor().split(counts)[rank]
        # A sum over two ranks has only one order.
        if world == 2 or exactly:
            assert_bitwise_equal([x.grad], [wanted_grad])
        else:
            assert x.grad.shape == wanted_grad.shape
            assert x.grad.numel() == 0 or sqnr(x.grad, wanted_grad) > (100 if dtype == torch.float32 else 45)


def gather_bytes(name, needs_grad):
    """Collectives of a layer's forward on a [2 x 128, 256] bf16 input with sharded tokens: (op, dtype, elements)."""
    mesh = mesh_of([2])
    x = on_mesh(normal(256, 256).bfloat16(), mesh, [Shard(0)])
    w = on_mesh(normal(64, 256, seed=1).bfloat16(), mesh, [Shard(0)])
    w.requires_grad_(needs_grad)
    with Recorder() as seen:
        linear(x, w, None, name)
    return [(op, str(dtype), n) for op, dtype, n in seen.sent]


def collectives_of_a_layer(name, placements, lead=(5,), n=140, k=150):
    """Numbers of elements of the collectives in forward, and of those in backward."""
    mesh = mesh_of([2])
    x, w = (on_mesh(normal(*shape), mesh, p) for shape, p in zip(((*lead, k), (n, k)), placements, strict=True))
    with Recorder() as forward:
        out = linear(x, w, None, name)
    grad = on_mesh(normal(*lead, n), mesh, out.placements).detach()
    with Recorder() as backward:
        out.backward(grad)
    return [[sent[2] for sent in seen.sent] for seen in (forward, backward)]


def local_scales(name):
    """(collectives, output, expected output) of a row-sharded layer with local scales."""
    mesh = mesh_of([2])
    x, w = normal(40, 128, seed=1), normal(48, 128, seed=2)
    parts = [linear(a, b, None, name) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
    with distributed.scales("local"), Recorder() as seen:
        out = linear(on_mesh(x, mesh, [Shard(1)]), on_mesh(w, mesh, [Shard(1)]), None, name)
    return len(seen.sent), out.full_tensor().detach(), (parts[0] + parts[1])


def recomputed_with_local_scales(name, reentrant):
    """(collectives of backward, gradients, gradients without checkpointing); ``scales`` ends before backward."""
    mesh, results = mesh_of([2]), []
    for checkpointed in (True, False):
        x, w = on_mesh(normal(40, 128, seed=1), mesh, [Shard(1)]), on_mesh(normal(48, 128, seed=2), mesh, [Shard(1)])

        def layer(x, w=w):
            return linear(x * 1, w, None, name).to_local()

        with distributed.scales("local"):
            out = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
        with Recorder() as seen:
            out.backward(normal(40, 48, seed=3).to(device()))
        results.append((len(seen.sent), [x.grad.to_local(), w.grad.to_local()]))
    (sent, found), (_, expected) = results
    return sent, found, expected


def traced(placements):
    """(outputs traced and eager, error of the trace's backward, gradients of a joint graph and eager)."""
    mesh = mesh_of([2])

    def layer(x, w):
        operands = (DTensor.from_local(each, mesh, [p]) for each, p in zip((x, w), placements, strict=True))
        return linear(*operands, None, "rowwise").to_local()

    def step(x, w):
        return torch.autograd.grad(layer(x, w).square().sum(), (x, w))

    args = [normal(*shape, seed=i).to(device()).requires_grad_() for i, shape in enumerate(((8, 32), (16, 32)))]
    out, message = make_fx(layer)(*args)(*args), None
    try:
        out.sum().backward()
    except RuntimeError as error:
        message = str(error)
    joint = [[each.detach() for each in run(*args)] for run in (make_fx(step)(*args), step)]
    return (out.detach(), layer(*args).detach()), message, joint
