"""Masks of exact attention: where sequences begin, and errors for all that is no padding on the left."""

import pytest
import torch
from exact_models import alone, exact, of_family, padded, positions, same, sequences
from torch import nn
from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function

from tritonfp8.rollout import make_exact
from tritonfp8.rollout.exact.attention import exact_attention_forward, places_of_tokens

MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()


def places(q_length, kv_length, **options):
    found = places_of_tokens(2, q_length, kv_length, mask_function=causal_mask_function, **options)
    return None if found is None else found.view(2, 2).tolist()


def test_places():
    assert places(4, 4) is None
    assert places(4, 4, attention_mask=torch.ones(2, 4)) is None
    # Padding on the right needs nothing.
    assert places(4, 4, attention_mask=MASK.flip(1)) is None
    assert places(4, 4, attention_mask=MASK) == [[2, 0], [0, 0]]
    # Two tokens lie in a cache that grows, or that has room for more.
    assert places(2, 4, q_offset=2) is None
    assert places(2, 9, q_offset=2, attention_mask=MASK) == [[2, 2], [0, 2]]
    assert places(2, 9, q_offset=torch.tensor(2)) == [[0, 2], [0, 2]]
    # A window's cache dropped three keys.
    assert places(1, 3, q_offset=5, kv_offset=3, attention_mask=MASK) == [[-1, 2], [-3, 2]]
    # No token at all.
    assert places(4, 4, attention_mask=MASK & False) == [[4, 0], [4, 0]]


def test_padding_between_tokens():
    with pytest.raises(ValueError, match="got a mask with padding between tokens: pad prompts on the left"):
        places(4, 4, attention_mask=torch.tensor([[0, 1, 0, 1], [1, 1, 1, 1]]))
    model = exact("llama")
    ids, mask = padded(sequences(), "right")
    mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
    with pytest.raises(ValueError, match="padding between tokens"):
        model(torch.cat([ids, ids[:, :1]], 1), attention_mask=mask)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_packed_sequences(kind):
    model = exact(kind)
    rows = sequences()
    place = torch.cat([torch.arange(len(row)) for row in rows])[None]
    with pytest.raises(ValueError, match="it takes no packed sequences"):
        model(torch.cat(rows)[None], position_ids=place, use_cache=False)


def test_other_patterns():
    chunked = chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="exact attention is causal, over one sequence in a row"):
        places_of_tokens(2, 5, 5, mask_function=chunked)
    with pytest.raises(ValueError, match="exact attention is causal"):
        places_of_tokens(2, 5, 5, mask_function=lambda b, h, q, k: q >= 0 * k)
    with pytest.raises(ValueError, match="exact attention is causal"):
        places_of_tokens(2, 5, 5, mask_function=causal_mask_function, use_vmap=True)


def test_a_window_is_no_other_pattern():
    """A window that is wider than the config says would show other keys than the layers see."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    for window in (1, 3, 9):
        pattern = sliding_window_causal_mask_function(window)
        assert places_of_tokens(2, 5, 5, mask_function=pattern, local_size=window) is None
    with pytest.raises(ValueError, match="exact attention is causal"):
        places_of_tokens(2, 5, 5, mask_function=sliding_window_causal_mask_function(4), local_size=3)


def test_a_mask_of_scores():
    model = make_exact(of_family("llama"))
    ids, _ = padded(sequences(), "left")
    scores = torch.zeros(3, 1, ids.shape[1], ids.shape[1])
    message = r"takes a mask of tokens \[B, T\], 0 at padding; got one of scores, torch.float32 \(3, 1, 23, 23\)"
    with pytest.raises(ValueError, match=message):
        model(ids, attention_mask=scores)


OPTIONS = {
    "dropout": ({"dropout": 0.1}, "exact attention has no dropout: set attention_dropout of the config to 0; got 0.1"),
    "softcap": ({"softcap": 30.0}, "exact attention does not take softcap"),
    "sinks": ({"s_aux": torch.zeros(2)}, "exact attention does not take s_aux"),
    "head mask": ({"head_mask": torch.ones(2)}, "exact attention does not take head_mask"),
    "not causal": ({"is_causal": False}, "exact attention is causal; Module has is_causal=False"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_are_refused(option):
    options, message = OPTIONS[option]
    q = torch.zeros(1, 2, 3, 32)
    with pytest.raises(ValueError, match=message):
        exact_attention_forward(nn.Module(), q, q, q, None, **options)


def test_compiled_code_checks_its_mask():
    """Nothing is read on the host then: the graph has the check."""
    model = exact("llama")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    rows = sequences()
    ids, mask = padded(rows, "left")
    with torch.no_grad():
        out = compiled(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
        assert same([each[seen.bool()] for each, seen in zip(out, mask, strict=True)], alone(model, rows))
        mask[:, 20] = 0
        with pytest.raises(RuntimeError, match="no padding between tokens"):
            compiled(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)
