"""Each token of an exact model has the same bits alone, in batches, with padding, in chunks and from caches."""

import pytest
import torch
from exact_models import DEVICES, LENGTHS, OTHERS, alone, exact, in_chunks, same, sequences, together
from rollout_models import FAMILIES

RECIPES = ("rowwise", "blockwise", "mxfp8", None)
LONGEST = max(LENGTHS)
CHUNKS = ((LONGEST,), (1,) * LONGEST, (5, 1, 9, 8))


def check(model, rows, caches=(False, True)):
    expected = alone(model, rows)
    for side in ("left", "right"):
        assert same(together(model, rows, side), expected), side
    # Other neighbours, and another number of them.
    assert same(together(model, rows[1:], "left"), expected[1:])
    assert same(together(model, rows * 3, "left"), expected * 3)
    for chunks in CHUNKS:
        for static in caches:
            assert same(in_chunks(model, rows, chunks, static), expected), (chunks, static)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_token_has_bits_of_its_own(kind, recipe, device):
    if kind == "moe" and recipe is None:
        pytest.skip("experts need a recipe")
    check(exact(kind, recipe, device=device), sequences(device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_families(kind, device):
    check(exact(kind, device=device), sequences(device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "recipe"), [("llama", "rowwise"), ("llama", None), ("moe", "rowwise")])
def test_float32(kind, recipe, device):
    check(exact(kind, recipe, torch.float32, device), sequences(device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_float32_weights_under_autocast(kind, device):
    model = exact(kind, "rowwise", torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        # The static cache of a Rollout takes keys and values of two dtypes, and transformers' own does not.
        check(model, sequences(device=device), (False,))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_256_sequences_from_one_token_on(kind, recipe, device):
    model = exact(kind, recipe, device=device)
    rows = sequences(range(1, 17), device)
    expected = alone(model, rows)
    for side in ("left", "right"):
        assert same(together(model, rows * 16, side), expected * 16), side
    assert same(in_chunks(model, rows * 16, (15, 1), True), expected * 16)


@pytest.mark.parametrize("device", DEVICES)
def test_a_long_sequence(device):
    """Nine splits of keys; the cache is read by a prefill in chunks, and by single tokens at its end."""
    model = exact("qwen3", max_position_embeddings=2048, device=device)
    rows = sequences((2048, 1500), device)
    expected = alone(model, rows)
    assert same(together(model, rows, "left"), expected)
    assert same(in_chunks(model, rows, (1024, 1000, 23, 1), True), expected)


def test_models_without_make_exact_differ():
    """What the tests above see: torch's own sums depend on the batch."""
    from exact_models import of_family

    model = of_family("llama", torch.float32)
    rows = sequences()
    assert not same(together(model, rows, "left"), alone(model, rows))
