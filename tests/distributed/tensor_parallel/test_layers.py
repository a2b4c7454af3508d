"""Linear layers on sharded operands: the results of one process, whatever is sharded over how many."""

import itertools

import covering
import pytest
import torch
from cases import IN_BYTES, QUANTIZED, normal, with_specials
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from tp_cases import SAME_BUT_FOR_ORDER, Recorder, check_layer, exact, integers, on_mesh, sharded, single

import tritonfp8
from tritonfp8 import distributed, recipes
from tritonfp8.distributed.global_scales import global_amax, quantize_by_amaxes
from tritonfp8.distributed.shard_layout import Mesh, align, aligned_to, flattened, unalign
from tritonfp8.functional import linear
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

# Not with the other tests of several processes: it has its own, and they would wait for it on a machine of two cores.
pytestmark = [pytest.mark.xdist_group("tensor parallel"), pytest.mark.one_in(4)]

NAMES = recipes.names()
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


WAYS = {
    "replicated": ([R], [R], [R]),
    "colwise": ([R], [S0], [S0]),
    "rowwise": ([S1], [S1], [R]),
    "rowwise of a replicated input": ([R], [S1], [R]),
    "rowwise, scattered": ([S1], [S1], [R], [S0]),
    "tokens": ([S0], [R], [R]),
    "tokens gathered": ([S0], [S0], [S0]),
    "tokens exchanged for features": ([S0], [S1], [R]),
}


# Ways meet recipes where blocks straddle shards, in the next test. Even shards are the easier case.
@pytest.mark.parametrize(("way", "name"), covering.each(list(WAYS), NAMES))
def test_layer_of_even_shards(ranks, way, name):
    ranks.run(2, check_layer, [name], (48,), 40, 64, WAYS[way])


# tests/distributed/test_parallelism.py has the first two, with each recipe.
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("colwise", "rowwise")])
def test_layer_whose_blocks_straddle_shards(ranks, way):
    ranks.run(2, check_layer, NAMES, (301,), 253, 357, WAYS[way])


@pytest.mark.parametrize("way", ["colwise", "rowwise", "rowwise, scattered", "tokens", "tokens gathered"])
def test_layer_over_three_ranks_that_do_not_divide(ranks, way):
    ranks.run(3, check_layer, NAMES, (131,), 140, 200, WAYS[way])


@pytest.mark.parametrize("way", ["rowwise, scattered", "tokens", "tokens gathered"])
def test_layer_with_fewer_tokens_than_ranks(ranks, way):
    ranks.run(3, check_layer, NAMES, (1,), 32, 48, WAYS[way])


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "placements", [([S1], [R], [R]), ([S1], [S0], [S0]), ([S2], [S1], [R], [S1])], ids=["kept", "gathered", "scattered"]
)
def test_tokens_of_a_batch_interleave(ranks, placements):
    ranks.run(2, check_layer, NAMES, (3, 77), 60, 90, placements)


GRIDS = {
    "data and colwise": ([S0, R], [R, S0], [R, S0]),
    "data and rowwise": ([S0, S1], [R, S1], [R, R]),
    "data and gathered": ([S0, S0], [R, S0], [R, S0]),
    "data and scattered": ([S0, S1], [R, S1], [R, R], [S0, S0]),
    "colwise and rowwise": ([R, S1], [S0, S1], [S0, R]),
}


# Scales of whole rows and of blocks with each of them. The other recipes have scales of the same kinds.
ON_A_GRID = {*itertools.product(GRIDS, ("rowwise", "blockwise")), *covering.each(list(GRIDS), NAMES)}


@pytest.mark.parametrize(("grid", "name"), sorted(ON_A_GRID))
def test_two_dims_of_a_mesh(ranks, grid, name):
    ranks.run(4, check_layer, [name], (301,), 253, 357, GRIDS[grid], (2, 2))


def test_sequence_and_batch_over_two_dims_of_a_mesh(ranks):
    ranks.run(4, check_layer, NAMES, (4, 75), 60, 90, ([S0, S1], [R, S0], [R, S0]), (2, 2))


def test_placements_that_follow(ranks):
    sharded, whole, summed = "(Shard(dim={}),)", "(Replicate(),)", "(Partial(sum),)"
    for way, expected in {
        "colwise": [summed, sharded.format(0), sharded.format(0)],
        "rowwise": [sharded.format(1), sharded.format(1), whole],
        "rowwise, scattered": [sharded.format(1), sharded.format(1), whole],
        "tokens": [sharded.format(0), summed, summed],
        "tokens gathered": [summed, sharded.format(0), sharded.format(0)],
    }.items():
        assert ranks.run(2, check_layer, ["rowwise"], (8,), 32, 64, WAYS[way])[0][1] == expected


def check_quantized_shards(mesh, names):
    """A shard of an operand has the codes and scales of the global tensor, whichever dim is sharded."""
    plain = Mesh((mesh.size(),), (mesh.get_local_rank(),), (mesh.get_group().group_name,))
    x = (normal(333, 410, seed=5) * torch.exp2(torch.arange(410) % 9)).to(mesh.device_type)
    gemms = (gemm for name in names for gemm in (recipes.get(name).output, recipes.get(name).grad_weight))
    specs = {spec for gemm in gemms for spec in (gemm.lhs, gemm.rhs) if spec is not None}
    for spec, dim in itertools.product(sorted(specs, key=str), (0, 1)):
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


@pytest.mark.parametrize("world", [2, 3])
def test_scales_are_those_of_the_global_tensor(ranks, world):
    """Losses of FP8 with TP that go NaN, or depend on the TP degree: scales of local shards."""
    assert ranks.run(world, check_quantized_shards, NAMES)[0] >= 5


def check_nonfinite(mesh, names):
    """NaN and infinities on any rank poison only their own blocks, as in one process."""
    for name in names:
        for placements in ([[S1], [S1], [R]], [[S0], [R], [R]], [[R], [S0], [S0]]):
            operands = with_specials(normal(200, 150)), normal(140, 150, seed=2), normal(140, seed=3)
            g = normal(200, 140, seed=4)
            _, got = sharded(operands, g, name, mesh, placements)
            for a, e in zip(got, single(*operands, g, name), strict=True):
                assert torch.equal(a.isfinite(), e.isfinite())
                if e.isfinite().any():
                    assert sqnr(torch.where(e.isfinite(), a, 0), torch.where(e.isfinite(), e, 0)) > SAME_BUT_FOR_ORDER
            assert not got[0].isfinite().all()


def test_nonfinite_blocks_stay_in_their_blocks(ranks):
    ranks.run(2, check_nonfinite, QUANTIZED)


def check_uneven(mesh, counts, dtype=torch.float32, contiguous=True):
    """With any token counts, output and gradients are the bits of quantize(gather(x))."""
    rank, world, total, device = mesh.get_local_rank(), mesh.size(), sum(counts), mesh.device_type
    for name in NAMES:
        # With more than two ranks the order of sums varies; integers give the same sums in any order.
        exactly = world > 2 and dtype == torch.float32 and exact(name)
        make, factor = (integers, 1) if exactly else (normal, torch.exp2(torch.arange(96) % 7))
        whole = (make(total, 96, seed=1) * factor).to(device, dtype)
        w, g = make(80, 96, seed=2).to(device, dtype), make(total, 80, seed=3).to(device, dtype)
        mine = whole.split(counts)[rank]
        x = (mine.clone() if contiguous else mine.t().contiguous().t()).detach().requires_grad_()
        weight = on_mesh(w, mesh, [S0])
        grad = distribute_tensor(g, mesh, [S1], src_data_rank=None)
        with distributed.token_counts(counts):
            xd = DTensor.from_local(x, mesh, [S0], run_check=False, shape=whole.shape, stride=(96, 1))
            out = linear(xd, weight, None, name)
        out.backward(grad)
        all_x, all_w = on_mesh(whole, mesh, [R]), on_mesh(w, mesh, [S0])
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


COUNTS = [(127, 129), (1, 1000), (192, 1), (0, 130), (129, 127)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tokens_in_any_numbers(ranks, counts):
    ranks.run(2, check_uneven, counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_in_any_numbers_over_four_ranks(ranks, dtype):
    ranks.run(4, check_uneven, (1, 127, 129, 192), dtype)


def test_tokens_of_a_non_contiguous_input(ranks):
    ranks.run(2, check_uneven, (127, 129), torch.bfloat16, contiguous=False)


def gathers(mesh, name, needs_grad):
    """All-gathers of a layer's forward on a [2 x 128, 256] bf16 input with sharded tokens: (dtype, elements)."""
    x = on_mesh(normal(256, 256).bfloat16(), mesh, [S0])
    w = on_mesh(normal(64, 256, seed=1).bfloat16(), mesh, [S0])
    w.requires_grad_(needs_grad)
    with Recorder() as seen:
        linear(x, w, None, name)
    return [(dtype, n) for op, dtype, n in seen.sent if "gather" in op]


@pytest.mark.parametrize(
    ("name", "needs_grad", "operands"),
    # Without a gradient of the weight, one operand.
    [("rowwise", True, 2), ("blockwise", True, 2), ("mxfp8", True, 2), ("tensorwise", True, 1), ("rowwise", False, 1)],
)
def test_tokens_are_sent_in_fp8(ranks, name, needs_grad, operands):
    """TransformerEngine gathers in high precision where blocks straddle ranks; here every recipe sends 8 bits."""
    sent = ranks.run(2, gathers, name, needs_grad)[0]
    assert sent.count((torch.uint8, 128 * 256)) == operands
    assert sum(dtype.itemsize * n for dtype, n in sent) <= operands * 128 * 256 * 1.04


def test_recipe_that_needs_the_input_in_high_precision_gathers_it_in_its_own_dtype(ranks):
    assert [dtype for dtype, _ in ranks.run(2, gathers, "rowwise_hp_grad_weight", True)[0]] == [torch.bfloat16]


def collectives_of_a_layer(mesh, name):
    """Numbers of elements of the collectives in forward, and in backward."""
    x, w = on_mesh(normal(5, 150), mesh, [R]), on_mesh(normal(140, 150), mesh, [S0])
    with Recorder() as forward:
        out = linear(x, w, None, name)
    grad = on_mesh(normal(5, 140), mesh, out.placements).detach()
    with Recorder() as backward:
        out.backward(grad)
    return [[n for *_, n in seen.sent] for seen in (forward, backward)]


@pytest.mark.parametrize(
    ("name", "weight", "grad_output"),
    # Of a weight [140, 150] cut at row 70 and 5 tokens: the blocks that the cut goes through.
    [("blockwise", 2, 5), ("rowwise", 150, 5), ("mxfp8", 150, 5), ("tensorwise", 1, 1)],
)
def test_ranks_talk_about_a_weight_once_and_in_forward(ranks, name, weight, grad_output):
    """In backward it would depend only on the weight, and compilers may then choose otherwise on each rank."""
    assert ranks.run(2, collectives_of_a_layer, name) == [[[weight], [grad_output]]] * 2


def check_local_scales(mesh, name):
    """A row-sharded layer with local scales computes as its parts, without a collective in forward."""
    x, w = normal(40, 128, seed=1), normal(48, 128, seed=2)
    parts = [linear(a, b, None, name) for a, b in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]
    with distributed.scales("local"), Recorder() as seen:
        out = linear(on_mesh(x, mesh, [S1]), on_mesh(w, mesh, [S1]), None, name)
    assert seen.sent == []
    assert sqnr(out.full_tensor().detach(), parts[0] + parts[1]) > SAME_BUT_FOR_ORDER


@pytest.mark.parametrize("name", QUANTIZED)
def test_local_scales_need_no_collective(ranks, name):
    ranks.run(2, check_local_scales, name)


def check_recomputed_with_local_scales(mesh, name, reentrant):
    """The gradients are the bits without checkpointing, without a collective; ``scales`` ends before backward."""
    results = []
    for checkpointed in (True, False):
        x, w = on_mesh(normal(40, 128, seed=1), mesh, [S1]), on_mesh(normal(48, 128, seed=2), mesh, [S1])

        def layer(x, w=w):
            return linear(x * 1, w, None, name).to_local()

        with distributed.scales("local"):
            out = checkpoint(layer, x, use_reentrant=reentrant) if checkpointed else layer(x)
        with Recorder() as seen:
            out.backward(normal(40, 48, seed=3).to(mesh.device_type))
        assert seen.sent == [] or not checkpointed
        results.append([x.grad.to_local(), w.grad.to_local()])
    assert_bitwise_equal(*results)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_recompute_scales_as_its_forward_did(ranks, reentrant):
    for name in ("rowwise", "blockwise"):
        ranks.run(2, check_recomputed_with_local_scales, name, reentrant)


def check_traced(mesh, placements):
    """A trace without backward says so when it is asked for one; a joint graph has the gradients of eager."""

    def layer(x, w):
        operands = (DTensor.from_local(each, mesh, [p]) for each, p in zip((x, w), placements, strict=True))
        return linear(*operands, None, "rowwise").to_local()

    def step(x, w):
        return torch.autograd.grad(layer(x, w).square().sum(), (x, w))

    args = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(((8, 32), (16, 32)))]
    out = make_fx(layer)(*args)(*args)
    with pytest.raises(RuntimeError, match="^this graph was traced without the backward of a layer of tritonfp8"):
        out.sum().backward()
    assert_bitwise_equal(out.detach(), layer(*args).detach())
    assert_bitwise_equal(*([each.detach() for each in run(*args)] for run in (make_fx(step)(*args), step)))


@pytest.mark.parametrize("placements", [(R, S0), (S1, S1), (S0, S0)], ids=["N", "K", "gathered"])
def test_a_traced_layer_has_its_backward_or_says_so(ranks, placements):
    ranks.run(2, check_traced, placements)


@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("name", IN_BYTES)
def test_local_scales_are_as_accurate_as_global_ones(name, outliers):
    x, w = normal(256, 1024, seed=1), normal(256, 1024, seed=2)
    if outliers:
        x[:, :4] *= 30
    exact = x.double() @ w.double().t()

    def accuracy(ranks):
        parts = zip(x.chunk(ranks, 1), w.chunk(ranks, 1), strict=True)
        return sqnr(sum(linear(a, b, None, name).double() for a, b in parts), exact)

    assert accuracy(1) > 28
    assert all(abs(accuracy(ranks) - accuracy(1)) < 0.5 for ranks in (2, 4, 8))


def test_scales_is_one_of_two():
    with pytest.raises(ValueError, match="'global', 'local'"), distributed.scales("rank"):
        pass


# On GPUs.


@pytest.mark.multigpu
@pytest.mark.parametrize("way", WAYS)
def test_layer_on_gpus(gpus, way):
    gpus.run(2, check_layer, NAMES, (301,), 253, 357, WAYS[way], timeout=240)


@pytest.mark.multigpu
def test_scales_on_gpus_are_those_of_the_global_tensor(gpus):
    gpus.run(2, check_quantized_shards, NAMES, timeout=240)


@pytest.mark.multigpu
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tokens_in_any_numbers_on_gpus(gpus, counts):
    gpus.run(2, check_uneven, counts, torch.bfloat16, timeout=240)
