"""``grouped_linear`` and its casts on a GPU, against the reference on a CPU; on CPU tensors the reference runs."""

import gc

import pytest
import torch
from cases import CUDA, QUANTIZED, cpu_and_cuda, each_recipe
from grouped_runs import (
    HOSTILE,
    MIXED,
    SIZES,
    TOKENS,
    WIDTHS,
    assert_groups_close,
    captured,
    cast_of_group,
    casts,
    layer_of,
    of_group,
    peak_bytes,
    run,
    soil,
)
from routings import ends

from tritonfp8 import ops, recipes, reference
from tritonfp8.compat.counting import count_gemms
from tritonfp8.reference import group_bounds
from tritonfp8.specs.testing import assert_bitwise_equal, assert_matmul_close

pytestmark = pytest.mark.one_in(3)

each_quantized = pytest.mark.parametrize("recipe", QUANTIZED)
each_width = pytest.mark.parametrize(("n", "k"), WIDTHS)
each_hostile = pytest.mark.parametrize("hostile", HOSTILE, ids=str)
poisoned = pytest.mark.usefixtures("poisoned_outputs")


@poisoned
@cpu_and_cuda
@each_width
@each_recipe
def test_every_group_is_close_to_the_reference(device, n, k, recipe):
    layer = layer_of(n, k)
    for sizes in SIZES.values():
        offsets = ends(sizes)
        found = run(layer.to(device), offsets.to(device), recipe)
        assert_groups_close(found, run(layer.to(torch.float32), offsets, recipe), offsets)


@pytest.mark.gpu
@each_recipe
def test_gemms_count_as_what_ran(recipe):
    with count_gemms() as counts:
        run(layer_of(device="cuda"), ends(MIXED).cuda(), recipe)
    gemms = [getattr(recipes.get(recipe), name) for name in ("output", "grad_input", "grad_weight")]
    assert counts.calls.total() == 3
    assert counts.calls["high_precision"] == sum(not gemm.quantized for gemm in gemms)
    assert not counts.calls["reference"]


@poisoned
@cpu_and_cuda
@each_width
@each_quantized
def test_casts_have_the_bits_of_the_reference(device, n, k, recipe):
    layer = layer_of(n, k)
    for sizes in SIZES.values():
        expected = casts(reference, layer, ends(sizes), recipe)
        assert_bitwise_equal(casts(ops, layer.to(device), ends(sizes).to(device), recipe), expected)


# Groups that have the same tokens in both, at other places.
KEPT, BESIDE = (2, 4, 5), (40, 0, 129, 3, 7, 300, 0, 60)


def with_other_groups(layer):
    """Another layer, in which the groups KEPT have the tokens and the weights that they have in ``layer``."""
    other, bounds, beside = layer_of(seed=10), group_bounds(ends(MIXED), TOKENS), group_bounds(ends(BESIDE), TOKENS)
    for group in KEPT:
        for x, y in ((layer.input, other.input), (layer.grad, other.grad)):
            y[slice(*beside[group])] = x[slice(*bounds[group])]
        other.weight[group], other.bias[group] = layer.weight[group], layer.bias[group]
    return other


@cpu_and_cuda
@each_recipe
def test_other_groups_change_nothing(device, recipe):
    """The tokens of some experts move, and other experts get others and other weights; the GEMMs keep their sizes."""
    layer, places = layer_of(), [ends(MIXED), ends(BESIDE)]
    layers = [each.to(device) for each in (layer, with_other_groups(layer))]
    results = [run(each, offsets.to(device), recipe) for each, offsets in zip(layers, places, strict=True)]
    for group in KEPT:
        assert_bitwise_equal(*(of_group(of, offsets, group) for of, offsets in zip(results, places, strict=True)))


@cpu_and_cuda
@each_quantized
def test_other_groups_change_no_cast(device, recipe):
    layer, places, recipe = layer_of(), [ends(MIXED), ends(BESIDE)], recipes.get(recipe)
    inputs = [each.input.to(device) for each in (layer, with_other_groups(layer))]
    for spec, transpose in ((recipe.output.lhs, False), (recipe.grad_weight.rhs, True)):
        if spec is None:
            continue
        found = [
            [part.cpu() for part in ops.quantize_groups(x, offsets.to(device), *spec.args, transpose)]
            for x, offsets in zip(inputs, places, strict=True)
        ]
        for group in KEPT:
            parts = (
                cast_of_group(q, spec, offsets, TOKENS, group, transpose)
                for q, offsets in zip(found, places, strict=True)
            )
            assert_bitwise_equal(*parts)


@pytest.mark.one_in(1)
@poisoned
@cpu_and_cuda
@each_recipe
@pytest.mark.parametrize("sizes", [MIXED, SIZES["all empty"]], ids=str)
def test_what_belongs_to_no_group_is_not_read(device, recipe, sizes):
    """NaN in the weights of empty groups, and in rows of no group."""
    layer, offsets = layer_of(device=device), ends(sizes).to(device)
    expected = run(layer, offsets, recipe)
    empty = torch.tensor([not size for size in sizes], device=device)
    for x in (layer.weight, layer.bias):
        x[empty] = torch.nan
    for x in (layer.input, layer.grad):
        x[sum(sizes) :] = torch.nan
    found = run(layer, offsets, recipe)
    assert_bitwise_equal(found, expected)
    for grad in found[2:]:
        assert not grad[empty].any()


@cpu_and_cuda
@each_recipe
def test_dirty_memory_changes_nothing(device, recipe):
    layer, offsets = layer_of(device=device), ends(MIXED).to(device)
    soil(device)
    first = run(layer, offsets, recipe)
    expected = [x.cpu() for x in first]
    del first
    soil(device)
    assert_bitwise_equal(run(layer, offsets, recipe), expected)


@poisoned
@cpu_and_cuda
@each_hostile
@each_quantized
def test_ops_clamp_hostile_offsets(device, recipe, hostile):
    layer, offsets = layer_of(), torch.tensor(hostile, dtype=torch.int32)
    expected, gemms = casts(reference, layer, offsets, recipe), recipes.get(recipe)
    assert_bitwise_equal(casts(ops, layer.to(device), offsets.to(device), recipe), expected)
    calls = [(expected["input"], expected["weight False"], gemms.output, layer.bias, 0)]
    if gemms.grad_weight.quantized:
        calls.append((expected["grad transposed"], expected["input transposed"], gemms.grad_weight, None, TOKENS))
    for a, b, gemm, bias, tokens in calls:
        args = (*a, *gemm.lhs.args, *b, *gemm.rhs.args, offsets, bias)
        on_device = [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]
        found = ops.scaled_grouped_matmul(*on_device, torch.bfloat16, tokens=tokens)
        wanted = reference.scaled_grouped_matmul(*args, torch.float32, tokens=tokens)
        assert_matmul_close(found.cpu().flatten(0, -2), wanted.flatten(0, -2), torch.bfloat16)


@poisoned
@cpu_and_cuda
@each_hostile
def test_ops_in_high_precision_clamp_hostile_offsets(device, hostile):
    layer, offsets = layer_of(), torch.tensor(hostile, dtype=torch.int32)
    of, places, exact = layer.to(device), offsets.to(device), layer.to(torch.float32)
    for found, expected in zip(*(
        (
            by.grouped_matmul(x.input, x.weight, at, x.bias),
            by.grouped_matmul(x.grad.t(), x.input.t(), at),
            by.grouped_sum(x.grad, at),
        )
        for by, x, at in ((ops, of, places), (reference, exact, offsets))
    ), strict=True):  # fmt: skip
        assert_matmul_close(found.cpu().flatten(0, -2), expected.flatten(0, -2), torch.bfloat16)


@pytest.mark.parametrize("device", [CUDA])
@each_hostile
@each_recipe
def test_a_layer_clamps_hostile_offsets(device, recipe, hostile):
    """On a CPU they are an error."""
    layer, offsets = layer_of(device=device), torch.tensor(hostile, dtype=torch.int32)
    clamped = torch.tensor([end for _, end in group_bounds(offsets, TOKENS)], dtype=torch.int32)
    assert_bitwise_equal(run(layer, offsets.to(device), recipe), run(layer, clamped.to(device), recipe))


@pytest.mark.one_in(1)
@cpu_and_cuda
@each_recipe
def test_any_subset_of_gradients(device, recipe):
    layer, offsets = layer_of(device=device), ends(MIXED).to(device)
    everything = run(layer, offsets, recipe)
    for which in range(7):
        needed = [bool(which >> i & 1) for i in range(3)]
        wanted = [x for x, need in zip(everything, (True, *needed), strict=True) if need]
        with count_gemms() as counts:
            assert_bitwise_equal(run(layer, offsets, recipe, needed), wanted)
        assert counts.calls.total() == 1 + sum(needed[:2])


@cpu_and_cuda
@each_recipe
def test_a_graph_serves_every_routing(device, recipe):
    """A CUDA graph is replayed with other offsets, and other tokens, in the same memory."""
    layer, offsets = layer_of(device=device), ends(MIXED).to(device)
    results, replay = captured(lambda: run(layer, offsets, recipe), device)
    for seed, sizes in enumerate((*SIZES.values(), BESIDE, MIXED)):
        offsets.copy_(ends(sizes))
        layer.input.copy_(layer_of(seed=10 * seed).input)
        replay()
        found = [x.clone() for x in results]
        assert_bitwise_equal(found, run(layer, offsets, recipe))


# Tokens, groups, N and K. Beside these, tables, partial maxima and what an allocator rounds are little.
LARGE = 3995, 8, 2032, 1040


@pytest.mark.gpu
@each_recipe
def test_peak_memory(recipe):
    """Scales add 1/32 of the codes at most; a copy of the tokens or of the weights would be more than is allowed."""
    tokens, groups, n, k = LARGE
    layer, offsets = layer_of(n, k, tokens, groups, "cuda"), ends((0, 1, 1700, 0, 7, 1000, 1200, 0)).cuda()
    run(layer, offsets, recipe)
    # What earlier tests left in cycles would be freed in the middle, and lower the peak.
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run(layer, offsets, recipe)
    torch.cuda.synchronize()
    found, needed = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, peak_bytes(recipe, *LARGE)
    assert needed / 2 < found < 1.05 * needed, f"{found / 2**20:.1f} MiB where {needed / 2**20:.1f} are needed"
