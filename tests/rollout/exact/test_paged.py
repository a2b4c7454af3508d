"""Continuous batching over a cache in pages: the bits of training, whatever runs at a time."""

import types

import pytest
import torch
from exact_models import DEVICES, exact, of_family, positions
from rollout_models import IDS, MASK, OPTIONS
from transformers import ContinuousBatchingConfig

import tritonfp8
from tritonfp8.rollout import Rollout, check, continuous, log_probs
from tritonfp8.rollout.exact import attention, functions, paged

PAGED = OPTIONS | {"cache_implementation": "paged", "max_new_tokens": 20}
# Blocks of 4 tokens, so few that sequences wait or begin again, and prompts in steps of 5 tokens.
FEW = {"block_size": 4, "num_blocks": 14, "max_batch_tokens": 5}


def generate(rollout, device="cpu", **options):
    return rollout.generate(IDS.to(device), MASK.to(device), **PAGED | options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["qwen3", "llama", "moe", "mistral", "gemma3", "qwen2"])
def test_no_difference(kind, device):
    """Full attention, sliding windows, and layers of both; twice, which is to give the same."""
    model = exact(kind, device=device)
    rollout = Rollout(model)
    found = check(model, rollout, IDS.to(device), MASK.to(device), **PAGED)
    assert (found.max_difference, found.tokens > 40) == (0, True)
    again = generate(rollout, device)
    assert all(torch.equal(x, y) for x, y in zip(again, found.generated, strict=True))
    assert rollout.model.config._attn_implementation == attention.NAME
    assert "forward" not in vars(rollout.model)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_tokens_on_both_sides_of_a_split(kind, device):
    """Splits of 256 keys count from the first token, which a window of 100 keys dropped."""
    window = {"sliding_window": 100} if kind == "mistral" else {}
    model = exact(kind, device=device, max_position_embeddings=512, **window)
    ids = torch.randint(3, 64, (2, 250), generator=torch.Generator().manual_seed(0)).to(device)
    assert check(model, Rollout(model), ids, **PAGED).max_difference == 0


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_few_pages_change_nothing(kind):
    model = exact(kind)
    rollout = Rollout(model)
    expected = generate(rollout, num_return_sequences=3)
    blocks = FEW | ({"num_blocks": 40} if kind == "gemma3" else {})
    found = generate(rollout, num_return_sequences=3, continuous_batching_config=ContinuousBatchingConfig(**blocks))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    scored = log_probs(model, found.sequences, found.attention_mask, found.mask.shape[1])
    assert torch.equal(scored, found.log_probs)
    assert len(found.sequences) == 9
    # Each draws for itself.
    assert len({tuple(row.tolist()) for row in found.sequences}) == 9


@pytest.mark.parametrize("end", [None, [34, 54]])
def test_the_most_probable_tokens_are_the_ones_of_a_static_cache(end):
    rollout = Rollout(exact("qwen3"))
    options = PAGED | {"eos_token_id": end, "do_sample": False, "seed": None}
    found = rollout.generate(IDS, MASK, **options)
    del options["cache_implementation"]
    expected = rollout.generate(IDS, MASK, **options)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert (end is None) == bool(found.mask.all())


def test_autocast_and_a_gradient():
    model = exact("llama", dtype=torch.float32)
    rollout = Rollout(model, autocast=torch.bfloat16)
    made = generate(rollout)
    with rollout.computing():
        scored = log_probs(model, made.sequences, made.attention_mask, made.mask.shape[1])
    assert torch.equal(scored, made.log_probs)
    scored.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_is_drawn_has_the_probabilities_of_the_scores():
    torch.manual_seed(0)
    scores = torch.tensor([[0.0, -torch.inf, 1.0, 2.0]]).expand(20000, 4)
    found = continuous._drawn(scores, torch.rand(20000, dtype=torch.float64)).bincount(minlength=4) / 20000
    torch.testing.assert_close(found, torch.softmax(scores[0], -1), atol=0.02, rtol=0)
    edges = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert continuous._drawn(torch.tensor([[-torch.inf, 1.0, -torch.inf]]).expand(2, 3), edges).tolist() == [1, 1]


def test_options_change_what_is_drawn_and_no_log_prob():
    model = exact("qwen3")
    made = generate(Rollout(model), top_k=1, temperature=0.7)
    new = made.mask.shape[1]
    assert torch.equal(log_probs(model, made.sequences, made.attention_mask, new, 0.7), made.log_probs)
    # Of equal logits any is drawn.
    mask = made.attention_mask
    out = model(made.sequences, attention_mask=mask, position_ids=positions(mask), logits_to_keep=new + 1)
    logits = out.logits[:, :-1]
    assert torch.equal(logits.gather(-1, made.sequences[:, -new:, None])[..., 0], logits.amax(-1))


def test_a_row_of_sequences_and_a_batch_are_inverse():
    lengths = paged.Lengths.of(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 3)
    row = torch.arange(1, 6)
    batch, exists = lengths.padded(row)
    assert (batch * exists).tolist() == [[0, 1, 2], [0, 0, 0], [3, 4, 5]]
    assert lengths.row(batch, 5).tolist() == row.tolist()
    # Rows behind the last sequence are anything.
    assert lengths.row(batch, 7)[:5].tolist() == row.tolist()


def test_nan_among_the_keys_of_another_sequence_is_not_read():
    """Three tokens begin a sequence, and the third token of another one reads two keys, as many as its window has."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, 2, 16, generator=generator).bfloat16() for n in (4, 5, 5))
    key[2], value[2] = torch.nan, torch.nan
    cache = types.SimpleNamespace(dtype=torch.bfloat16, update=lambda **given: (key, value))
    new = (x[:4].transpose(0, 1)[None] for x in (query, key, value))
    out, _ = paged.exact_paged_attention(
        types.SimpleNamespace(layer_idx=0), *new, None, sliding_window=2, cache=cache,
        position_ids=torch.tensor([[0, 1, 2, 2]]), cu_seq_lens_q=torch.tensor([0, 3, 4]),
        cu_seq_lens_k=torch.tensor([0, 3, 5]), max_seqlen_q=3, max_seqlen_k=3,
    )  # fmt: skip
    of_second = (x.transpose(0, 1)[None] for x in (query[3:], key[3:], value[3:]))
    # The cache dropped the first of its keys.
    expected = functions.attention(*of_second, 16**-0.5, 2, torch.tensor([[-1, 1]], dtype=torch.int32))
    assert torch.equal(out[:, 3:], expected)
    assert out[:, 2].isnan().all()


def test_check_sees_a_cache_that_is_at_fault(monkeypatch):
    real = paged.computed

    def wrong(module, query, key, value, places, *args):
        # Splits of keys begin elsewhere.
        return real(module, query, key.roll(1, 2), value.roll(1, 2), places + 1, *args)

    model = exact("qwen3")
    rollout = Rollout(model)
    monkeypatch.setattr(paged, "computed", wrong)
    found = check(model, rollout, IDS, MASK, **PAGED)
    assert found.max_difference > 0
    assert found.module is None
    assert "the cache that was asked for" in str(found)


def test_an_error_of_a_step_is_raised(monkeypatch):
    rollout = Rollout(exact("qwen3"))
    with monkeypatch.context() as patch:
        patch.setattr(paged, "computed", lambda *args: (_ for _ in ()).throw(ValueError("no such kernel")))
        with pytest.raises(RuntimeError, match="no such kernel"):
            generate(rollout)
    assert generate(rollout).mask.any()


MISTAKES = {
    "make_exact first": {},
    "takes options of the generation config; got assistant": {"assistant": 1},
    "continuous batching is not compiled here": {"compile": True},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message):
    model = exact("qwen3")
    if not MISTAKES[message]:
        model = of_family("qwen3")
        tritonfp8.convert(model, "rowwise", batch_invariant=True)
    with pytest.raises(ValueError, match=message):
        generate(Rollout(model), **MISTAKES[message])


def test_pages_are_needed():
    model = exact("qwen3")
    model.set_attn_implementation(attention.PAGED_NAME)
    with pytest.raises(ValueError, match="only continuous batching of transformers has pages"):
        model(IDS)
