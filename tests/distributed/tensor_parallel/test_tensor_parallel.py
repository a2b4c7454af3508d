"""Linear layers on sharded operands: the results of one process, whatever is sharded over how many."""

import itertools

import covering
import pytest
import torch
import tp_cases
import tp_model_cases
from cases import QUANTIZED, normal
from process_group import Ranks
from torch.distributed.tensor import Replicate, Shard

from tritonfp8 import recipes
from tritonfp8.distributed import PrepareFloat8ModuleInput, scales
from tritonfp8.functional import linear
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

# Not with the other tests of several processes: it has its own, and they would wait for it on a machine of two cores.
pytestmark = [pytest.mark.xdist_group("tensor parallel"), pytest.mark.in_turn(3)]

NAMES = recipes.names()
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
WAYS = {
    "replicated": ([R], [R], [R]),
    "colwise": ([R], [S0], [S0]),
    "rowwise": ([S1], [S1], [R]),
    "rowwise of a replicated input": ([R], [S1], [R]),
    "tokens": ([S0], [R], [R]),
    "tokens gathered": ([S0], [S0], [S0]),
    "tokens exchanged for features": ([S0], [S1], [R]),
}
OUTPUTS = {"colwise": "S(1)", "rowwise": "P(sum)", "tokens": "S(0)", "tokens gathered": "S(1)"}


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    with Ranks(4) as ranks:
        yield ranks


# Ways meet recipes where blocks straddle shards, in the next test. Even shards are the easier case.
@pytest.mark.parametrize(("way", "name"), covering.each(list(WAYS), NAMES))
def test_layer_of_even_shards(two, way, name):
    two.run(tp_cases.check_layer, [2], [name], (48,), 40, 64, WAYS[way])


# tests/distributed/test_parallelism.py has the first two, with each recipe.
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("colwise", "rowwise")])
def test_layer_whose_blocks_straddle_shards(two, way):
    two.run(tp_cases.check_layer, [2], NAMES, (301,), 253, 357, WAYS[way])


@pytest.mark.parametrize("way", ["colwise", "rowwise", "tokens", "tokens gathered"])
def test_layer_over_three_ranks_that_do_not_divide(three, way):
    three.run(tp_cases.check_layer, [3], NAMES, (131,), 140, 200, WAYS[way])


@pytest.mark.parametrize("way", ["tokens", "tokens gathered"])
def test_layer_with_fewer_tokens_than_ranks(three, way):
    three.run(tp_cases.check_layer, [3], NAMES, (1,), 32, 48, WAYS[way])


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("weight", [[R], [S0]], ids=["kept", "gathered"])
def test_tokens_of_a_batch_interleave(two, weight):
    two.run(tp_cases.check_layer, [2], NAMES, (3, 77), 60, 90, ([S1], weight, weight))


GRIDS = {
    "data and colwise": ([S0, R], [R, S0], [R, S0]),
    "data and rowwise": ([S0, S1], [R, S1], [R, R]),
    "data and gathered": ([S0, S0], [R, S0], [R, S0]),
    "colwise and rowwise": ([R, S1], [S0, S1], [S0, R]),
}
# Scales of whole rows and of blocks with each of them. The other recipes have scales of the same kinds.
ON_A_GRID = {*itertools.product(GRIDS, ("rowwise", "blockwise")), *covering.each(list(GRIDS), NAMES)}


@pytest.mark.parametrize(("grid", "name"), sorted(ON_A_GRID))
def test_two_dims_of_a_mesh(four, grid, name):
    four.run(tp_cases.check_layer, [2, 2], [name], (301,), 253, 357, GRIDS[grid])


def test_sequence_and_batch_over_two_dims_of_a_mesh(four):
    four.run(tp_cases.check_layer, [2, 2], NAMES, (4, 75), 60, 90, ([S0, S1], [R, S0], [R, S0]))


def test_placements_that_follow(two):
    results = {way: two.run(tp_cases.check_layer, [2], ["rowwise"], (8,), 32, 64, WAYS[way])[0] for way in OUTPUTS}
    sharded, whole, summed = "(Shard(dim={}),)", "(Replicate(),)", "(Partial(sum),)"
    assert {way: grads for way, (_, grads) in results.items()} == {
        "colwise": [summed, sharded.format(0), sharded.format(0)],
        "rowwise": [sharded.format(1), sharded.format(1), whole],
        "tokens": [sharded.format(0), summed, summed],
        "tokens gathered": [summed, sharded.format(0), sharded.format(0)],
    }


@pytest.mark.parametrize("world", ["two", "three"])
def test_scales_are_those_of_the_global_tensor(world, request):
    """Losses of FP8 with TP that go NaN, or depend on the TP degree: scales of local shards."""
    assert request.getfixturevalue(world).run(tp_cases.check_quantized_shards, NAMES)[0] >= 5


def test_nonfinite_blocks_stay_in_their_blocks(two):
    two.run(tp_cases.check_nonfinite, QUANTIZED)


COUNTS = [(127, 129), (1, 1000), (192, 1), (0, 130), (129, 127)]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tokens_in_any_numbers(two, counts):
    two.run(tp_cases.check_uneven, NAMES, list(counts), torch.float32, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_in_any_numbers_over_four_ranks(four, dtype):
    four.run(tp_cases.check_uneven, NAMES, [1, 127, 129, 192], dtype, True)


def test_tokens_of_a_non_contiguous_input(two):
    two.run(tp_cases.check_uneven, NAMES, [127, 129], torch.bfloat16, False)


@pytest.mark.parametrize("counts", [(127, 129), (1, 192)], ids=str)
def test_module_of_tokens_in_any_numbers(two, counts):
    two.run(tp_model_cases.check_sequence_mlp_with_counts, NAMES, list(counts))


def test_tokens_are_sent_in_fp8(two):
    """TransformerEngine gathers in high precision where blocks straddle ranks; here every recipe sends 8 bits."""
    elements = 128 * 256
    for name in ("rowwise", "blockwise", "mxfp8", "tensorwise"):
        sent = two.run(tp_cases.gather_bytes, name, True)[0]
        gathers = [(dtype, n) for op, dtype, n in sent if op == "all_gather_into_tensor"]
        operands = 1 if name == "tensorwise" else 2
        assert len(gathers) == 1
        assert gathers[0][0] == "torch.uint8"
        assert operands * elements <= gathers[0][1] <= operands * elements * 1.04
    # Without a gradient of the weight, half of that.
    ((dtype, n),) = [(d, n) for op, d, n in two.run(tp_cases.gather_bytes, "rowwise", False)[0] if "gather" in op]
    assert (dtype, elements <= n <= elements * 1.04) == ("torch.uint8", True)


def test_recipe_that_needs_the_input_in_high_precision_gathers_it_in_its_own_dtype(two):
    sent = two.run(tp_cases.gather_bytes, "rowwise_hp_grad_weight", True)[0]
    assert [d for op, d, _ in sent if "gather" in op] == ["torch.bfloat16"]


@pytest.mark.parametrize("name", NAMES)
def test_siblings_gather_once_and_scatter_their_gradient_once(two, name):
    assert two.run(tp_model_cases.collectives_of_siblings, name) == [[1, 1]] * 2


@pytest.mark.parametrize(("name", "compile"), [*((name, False) for name in NAMES), ("rowwise_hp_grad_weight", True)])
def test_gradients_of_what_a_norm_returns_are_scattered_once(two, name, compile):
    """In its dtype: that of the input of two siblings, that of the head's; and what the MLP returns in forward.

    Compiled, it is one graph of the same bytes.
    """
    rows = 2 * 33
    found = two.run(tp_model_cases.scatters_after_norms, name, compile, timeout=150)
    assert found == [(3, 3 * rows * 64 * 2)] * 2


@pytest.mark.parametrize(("local", "first"), list(itertools.product([True, False], repeat=2)))
def test_plain_styles(two, local, first):
    two.run(tp_model_cases.check_mlp, NAMES, local, first, False)


@pytest.mark.parametrize(("local", "first"), [(True, True), (False, True), (True, False)])
def test_float8_styles(two, local, first):
    two.run(tp_model_cases.check_mlp, NAMES, local, first, True)


def test_plain_styles_of_features_that_do_not_divide(three):
    three.run(tp_model_cases.check_mlp, NAMES, False, True, False, 100)


# A compiled layer of tensor parallelism takes seconds, so each recipe and each kind of outputs is compiled once: local
# ones of "rowwise" in any number of tokens, those of sequence parallelism above and in a Llama below.
@pytest.mark.parametrize("name", ["tensorwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8"])
def test_compiled_module_is_one_graph_of_the_same_bytes(two, name):
    two.run(tp_model_cases.check_compiled_mlp, name, False, [33], timeout=150)


def test_compiled_module_takes_any_number_of_tokens(two):
    assert max(two.run(tp_model_cases.check_compiled_mlp, "rowwise", True, [34, 40, 51, 130], timeout=150)) <= 2


# use_local_output, the FP8 styles, sequence parallelism
LLAMAS = {
    "float8, sequence": (False, True, True),
    "plain": (True, False, False),
    "plain DTensor outputs": (False, False, False),
    "plain, sequence": (True, False, True),
}
# One Llama of each recipe takes ten steps, as losses go NaN after some. The others compare two: the second is the first
# on weights that changed. Most have one layer, whose input and output are placed as a second layer's.
STEPS, FEW_STEPS = 10, 2
DEEP = ("rowwise", "blockwise")


def check_losses(ranks, name, llama, steps=FEW_STEPS, compiled=False, layers=1, **options):
    cases = ranks.run(tp_model_cases.llama_losses, name, *LLAMAS[llama], compiled, steps, layers, **options)
    for alone, together in cases:
        assert len(together) == steps
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-3
        assert alone[-1] != alone[0]


@pytest.mark.parametrize("name", NAMES)
def test_losses_do_not_go_nan_and_are_those_of_one_process(two, name):
    check_losses(two, name, "float8, sequence", STEPS, layers=2 if name in DEEP else 1)


# Where outputs are DTensors, three ranks below have each recipe. Of local outputs two kinds of scales are enough.
FEW = [("rowwise", "plain"), ("blockwise", "plain"), ("bf16", "plain DTensor outputs")]


@pytest.mark.parametrize(("name", "llama"), [*((name, "plain, sequence") for name in NAMES), *FEW])
def test_losses_of_other_styles_are_those_of_one_process(two, name, llama):
    check_losses(two, name, llama)


# Of three ranks the middle one's features of the MLP begin inside a block. Four divide as two do.
MORE_RANKS = [
    *(("three", "plain DTensor outputs", name) for name in QUANTIZED),
    *(("four", "float8, sequence", name) for name in DEEP),
]


@pytest.mark.parametrize(("world", "llama", "name"), MORE_RANKS)
def test_losses_over_more_ranks_are_those_of_one_process(request, world, name, llama):
    check_losses(request.getfixturevalue(world), name, llama)


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_sequence_parallelism_are_the_same_bits_by_whichever_styles(two, name):
    """What is gathered in 8 bits are the bytes that would be cast after the gather."""
    styles = (LLAMAS[llama] for llama in ("float8, sequence", "plain, sequence"))
    float8, plain = (two.run(tp_model_cases.sharded_losses, name, *each) for each in styles)
    assert float8 == plain


@pytest.mark.parametrize("float8", [False, True], ids=["plain", "float8"])
def test_loss_parallel(two, float8):
    for name in NAMES:
        two.run(tp_model_cases.check_loss_parallel, name, float8)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_of_a_step_are_those_of_one_process(two, name, sequence):
    assert min(two.run(tp_model_cases.scales_of_a_step, name, sequence)) >= 6


@pytest.mark.parametrize(
    ("name", "weight", "grad_output"),
    # Of a weight [140, 150] cut at row 70 and 5 tokens: the blocks that the cut goes through.
    [("blockwise", 2, 5), ("rowwise", 150, 5), ("mxfp8", 150, 5), ("tensorwise", 1, 1)],
)
def test_ranks_talk_about_a_weight_once_and_in_forward(two, name, weight, grad_output):
    """In backward it would depend on the weight alone, and compilers may then choose otherwise on each rank."""
    for forward, backward in two.run(tp_cases.collectives_of_a_layer, name, ([R], [S0])):
        assert forward == [weight]
        assert backward == [grad_output]


# Recipes differ in the ops of a layer: tests above compare the compiled layer of each with the eager one, bit by bit.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rowwise"])
def test_compiled_llama_trains_as_one_process(two, name):
    check_losses(two, name, "float8, sequence", compiled=True, timeout=240)


def test_local_scales_need_no_collective(two):
    for name in QUANTIZED:
        for sent, out, expected in two.run(tp_cases.local_scales, name):
            assert sent == 0
            assert sqnr(out, expected) > tp_cases.SAME_BUT_FOR_ORDER


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_recompute_scales_as_its_forward_did(two, reentrant):
    for name in ("rowwise", "blockwise"):
        for sent, found, expected in two.run(tp_cases.recomputed_with_local_scales, name, reentrant):
            assert sent == 0
            assert_bitwise_equal(found, expected)


@pytest.mark.parametrize(
    "placements", [(Replicate(), Shard(0)), (Shard(1), Shard(1)), (Shard(0), Shard(0))], ids=["N", "K", "gathered"]
)
def test_a_traced_layer_has_its_backward_or_says_so(two, placements):
    for outs, message, gradients in two.run(tp_cases.traced, placements):
        assert_bitwise_equal(*outs)
        assert message.startswith("this graph was traced without the backward of a layer of tritonfp8")
        assert_bitwise_equal(*gradients)


@pytest.mark.parametrize("outliers", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("name", QUANTIZED)
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
    with pytest.raises(ValueError, match="'global', 'local'"), scales("rank"):
        pass


@pytest.mark.parametrize(
    ("case", "error", "says"),
    [
        ("plain input", "TypeError", "ColwiseParallel"),
        ("plain bias", "TypeError", "as bias"),
        ("embedding", "TypeError", "got Embedding"),
        ("not converted", "TypeError", "tritonfp8.convert"),
        ("nothing inside", "TypeError", "tritonfp8.convert"),
        ("chunks", "ValueError", "token_counts"),
        ("counts", "ValueError", "give every rank the counts of all"),
        ("features", "ValueError", "input [..., K] and weight [N, K]"),
    ],
)
def test_wrong_use_says_the_right_one(two, case, error, says):
    for kind, message in two.run(tp_model_cases.error_of, case):
        assert kind == error
        assert says in message


def test_prepare_float8_module_input_keeps_dtensors():
    with pytest.raises(ValueError, match="use_local_output must be False"):
        PrepareFloat8ModuleInput(input_layouts=S0, desired_input_layouts=R, use_local_output=True)


def test_equal_results_of_all_ranks(two):
    first, second = two.run(tp_model_cases.llama_losses, "rowwise", *LLAMAS["plain"], False, FEW_STEPS)
    assert_bitwise_equal([torch.tensor(first[1])], [torch.tensor(second[1])])


@pytest.fixture(scope="module")
def gpus():
    with Ranks(2, "cuda") as ranks:
        yield ranks


@pytest.mark.multigpu
@pytest.mark.parametrize("way", WAYS)
def test_layer_on_gpus(gpus, way):
    gpus.run(tp_cases.check_layer, [2], NAMES, (301,), 253, 357, WAYS[way], timeout=240)


@pytest.mark.multigpu
def test_scales_on_gpus_are_those_of_the_global_tensor(gpus):
    gpus.run(tp_cases.check_quantized_shards, NAMES, timeout=240)


@pytest.mark.multigpu
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_tokens_in_any_numbers_on_gpus(gpus, counts):
    gpus.run(tp_cases.check_uneven, NAMES, list(counts), torch.bfloat16, True, timeout=240)


@pytest.mark.multigpu
@pytest.mark.parametrize("local", [True, False])
def test_styles_on_gpus(gpus, local):
    gpus.run(tp_model_cases.check_mlp, NAMES, local, True, True, timeout=240)


@pytest.mark.multigpu
@pytest.mark.parametrize("llama", LLAMAS)
@pytest.mark.parametrize("name", NAMES)
def test_llama_trains_on_gpus_as_on_one(gpus, name, llama):
    for alone, together in gpus.run(tp_model_cases.llama_losses, name, *LLAMAS[llama], STEPS, 2, timeout=240):
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-3
