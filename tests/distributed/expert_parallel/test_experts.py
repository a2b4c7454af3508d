"""Experts over ranks: the results of one process with the tokens of all ranks."""

import functools

import expert_cases
import pytest
import torch
from cases import CODES, QUANTIZED, SPECS, banded, each_recipe

import tritonfp8
from tritonfp8.distributed.expert_parallel import payload_of
from tritonfp8.specs import BLOCK_1X32, ROWWISE, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(4)]

# A number of tokens for each rank: even ones, uneven ones, a rank without tokens.
TOKENS = {2: [(16, 16), (130, 3), (0, 20)], 4: [(16,) * 4, (5, 0, 140, 1), (0, 0, 0, 9)]}
EVERYTHING = {
    "out", "grad_hidden", "grad_weights", "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"
}  # fmt: skip


def outcome(ranks, world, **options):
    rows = ranks.run(world, expert_cases.against_one_process, **options)
    return [row for row, _ in rows], max(size for _, size in rows)


@each_recipe
@pytest.mark.parametrize("world", TOKENS)
def test_the_bits_of_one_process(ranks, recipe, world):
    for tokens in TOKENS[world]:
        rows, _ = outcome(ranks, world, tokens=tokens, recipe=recipe)
        assert rows == [{}] * world, tokens


@each_recipe
def test_autocast(ranks, recipe):
    """Tokens in float32 have the bits of one process, too, and are sent in the dtype of autocast."""
    rows, sent = outcome(ranks, 4, tokens=(9, 5, 0, 30), recipe=recipe, dtype="float32", autocast=True)
    assert rows == [{}] * 4
    assert sent == outcome(ranks, 4, tokens=(9, 5, 0, 30), recipe=recipe, dtype="bfloat16")[1]


@pytest.mark.parametrize("experts", [5, 3, 2])
def test_experts_that_do_not_divide_and_ranks_without_one(ranks, experts):
    """Of four ranks, two have no expert of two."""
    for recipe in ("rowwise", "tensorwise"):
        rows, _ = outcome(ranks, 4, tokens=(9, 5, 0, 30), experts=experts, recipe=recipe, dtype="float32")
        assert rows == [{}] * 4


@pytest.mark.parametrize("routing", ["one", "none"])
def test_all_tokens_at_one_expert_and_tokens_at_none(ranks, routing):
    rows, _ = outcome(ranks, 4, tokens=(9, 5, 0, 30), routing=routing)
    assert rows == [{}] * 4


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_weights_that_are_quantized_once(ranks, recipe):
    for experts in (8, 2):
        rows, _ = outcome(ranks, 4, tokens=(9, 5, 0, 30), experts=experts, recipe=recipe, once=True)
        assert rows == [{}] * 4


def test_transposed_weights_of_gpt_oss(ranks):
    for average in (False, True):
        rows, _ = outcome(ranks, 4, tokens=(9, 5, 0, 30), experts=4, family="gpt_oss", average=average)
        assert rows == [{}] * 4


def test_averaged_gradients_are_the_sums_over_the_ranks(ranks):
    rows, _ = outcome(ranks, 4, tokens=(9, 5, 0, 30), average=True)
    assert rows == [{}] * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@each_recipe
def test_rows_in_8_bits(ranks, recipe, dtype):
    """Products that read rows have the same bits. Products and sums over tokens read the rounded rows."""
    found = {
        payload: outcome(ranks, 4, tokens=(40, 70, 0, 33), recipe=recipe, payload=payload, dtype=dtype)
        for payload in ("float8", "high_precision")
    }
    (rows, sent), (exact, sent_exact) = found.values()
    assert exact == [{}] * 4
    if recipe in ("bf16", "tensorwise"):
        assert rows == exact
        assert sent == sent_exact
        return
    # One of two ways is in 8 bits, forward and backward: with scales a byte for two of bfloat16, for four of float32.
    assert sent < (0.8 if dtype == "bfloat16" else 0.7) * sent_exact
    worst = {name: max(row.get(name, 0.0) for row in rows) for name in EVERYTHING}
    # Rounded twice by powers of two, an element has the code that it has when it is rounded once, unless it is tiny.
    limit = 0.1 if recipe == "rowwise_hp_grad_weight" else 1e-5
    limits = {"gate_up_proj": limit, "down_proj": limit, "down_proj_bias": 0.1}
    assert all(off <= limits.get(name, 0.0) for name, off in worst.items()), worst
    assert worst["down_proj_bias"] > 0, "this test can fail: the payload is rounded"


each_codes = pytest.mark.parametrize("recipe", CODES.values(), ids=CODES)
WAYS = {
    "even": {"tokens": (40, 40, 40, 40)},
    "in float32": {"tokens": (40, 70, 0, 33), "dtype": "float32"},
    "ranks without experts": {"tokens": (9, 5, 0, 30), "experts": 2},
    "tokens at no expert": {"tokens": (9, 5, 0, 30), "routing": "none"},
    "tokens at one expert": {"tokens": (9, 5, 0, 30), "routing": "one"},
    "quantized once": {"tokens": (9, 5, 0, 30), "once": True},
    "transposed weights, no SwiGLU": {"tokens": (9, 5, 0, 30), "experts": 4, "family": "gpt_oss"},
}


@each_codes
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_codes_are_read_as_they_arrive(ranks, recipe, way):
    """Both GEMMs and ``grad_weight`` have the bits of one process: nothing is quantized again on arrival."""
    rows, _ = outcome(ranks, 4, recipe=recipe, payload="float8", **way)
    # A bias of the last layer sums the gradients that arrived.
    assert all(row.pop("down_proj_bias", 0.0) < 0.1 for row in rows)
    assert rows == [{}] * 4


@pytest.fixture(scope="module")
def with_fsdp(ranks):
    """Training with FSDP2 that gathers in high precision, once for each recipe and payload."""

    @functools.cache
    def run(recipe, payload):
        return ranks.run(4, expert_cases.train_with_fsdp, recipe=recipe, payload=payload)

    return run


@pytest.mark.parametrize("payload", ["float8", "high_precision"])
@each_recipe
def test_with_fsdp2(with_fsdp, recipe, payload):
    # A tensorwise scale is of the tokens of a rank, where one process has the tokens of all.
    limit = 2e-3 if payload == "float8" or recipe == "tensorwise" else 2e-4
    for expected, losses, stuck in with_fsdp(recipe, payload):
        assert losses == pytest.approx(expected, rel=limit)
        assert losses[-1] < losses[0]
        assert stuck == []


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_8_bit_gather_of_fsdp2_changes_no_bit(ranks, with_fsdp, recipe):
    for reshard in (True, False) if recipe == "rowwise" else (True,):
        options = {"recipe": recipe, "payload": "float8", "reshard": reshard}
        on = ranks.run(4, expert_cases.train_with_fsdp, gather=True, **options)
        assert [row[1:] for row in on] == [row[1:] for row in with_fsdp(recipe, "float8")]


def test_payload_of_specs():
    """Rows travel in 8 bits only where a GEMM would read the same values."""
    pow2, exact = QuantSpec("e4m3", ROWWISE, "fp32", "pow2"), QuantSpec("e4m3", ROWWISE)
    assert payload_of(pow2, torch.bfloat16) == pow2
    assert payload_of(pow2, torch.float16) is None
    assert payload_of(exact, torch.bfloat16) is None
    assert payload_of(QuantSpec("e4m3", scale_rounding="pow2"), torch.bfloat16) is None
    assert payload_of(QuantSpec("e5m2", BLOCK_1X32, "e8m0", "floor"), torch.float32) is not None
    assert payload_of(None, torch.bfloat16) is None


@pytest.mark.parametrize("spec", [spec for spec in SPECS if payload_of(spec, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_that_is_quantized_twice_has_the_values_of_the_payload(spec, dtype):
    """Of ordinary sizes, of the smallest subnormal ones, and of zeros."""
    x = torch.cat([banded(64, 256), torch.zeros(3, 256)]).to(dtype)
    once = tritonfp8.quantize(x, spec)
    sent = tritonfp8.dequantize(once, dtype)
    twice = tritonfp8.quantize(sent, spec)
    assert_bitwise_equal(tritonfp8.dequantize(twice), tritonfp8.dequantize(once))


def test_checkpoints(ranks, tmp_path):
    assert ranks.run(4, expert_cases.checkpoint, path=str(tmp_path)) == [True] * 4


def test_errors(ranks):
    texts = ranks.run(2, expert_cases.errors)[0]
    for text, message in zip(
        texts,
        (
            "ValueError: the model has no converted experts that route tokens",
            "ValueError: mesh must have one dim",
            "ValueError: payload",
            "TypeError: average_gradients",
            "ValueError: average_gradients must be True, False, or at least 1; got 0",
            "ValueError: the experts of the model are sharded already (gate_up_proj, ",
            "ValueError: the experts are sharded over ranks",
            "TypeError: the weights of sharded experts must be DTensors; got a Parameter",
        ),
        strict=True,
    ):
        assert text.startswith(message)


# On GPUs.


@pytest.mark.multigpu
@pytest.mark.parametrize("payload", ["float8", "high_precision"])
@each_recipe
def test_two_gpus(gpus, recipe, payload):
    """In high precision to the bit, as on CPUs; in 8 bits what reads rows, and sums over tokens closely."""
    for tokens in TOKENS[2]:
        rows, _ = outcome(gpus, 2, tokens=tokens, recipe=recipe, payload=payload)
        if payload == "high_precision":
            assert rows == [{}] * 2, tokens
            continue
        off = {name: x for row in rows for name, x in row.items()}
        assert off.keys() <= {"gate_up_proj", "down_proj", "down_proj_bias"}, off
        assert all(x < 0.1 for x in off.values()), off


@pytest.mark.multigpu
@each_codes
def test_codes_on_two_gpus(gpus, recipe):
    for tokens in TOKENS[2]:
        rows, _ = outcome(gpus, 2, tokens=tokens, recipe=recipe, payload="float8")
        assert all(row.pop("down_proj_bias", 0.0) < 0.1 for row in rows)
        assert rows == [{}] * 2, tokens
