"""Compiled decoding and compiled training have the bits of eager code, given the option that make_exact chooses."""

import itertools

import pytest
import torch
from exact_models import DEVICES, exact, padded, positions, same, sequences, together
from rollout_models import IDS, MASK, OPTIONS, step

from tritonfp8.rollout import Rollout, check, generator


def compiled_difference(model, device):
    rollout = Rollout(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = OPTIONS | {"max_new_tokens": 12 if device == "cuda" else 4, "compile": True}
    found = check(model, rollout, IDS.to(device), MASK.to(device), **options)
    assert rollout.model._compiled_call is not None
    assert found.tokens > 9
    assert not torch._dynamo.utils.counters["graph_break"]
    # A window's cache counts tokens by a number of Python, which a replay does not change.
    has_window = any(hasattr(layer, "cumulative_length_int") for layer in rollout._cache[1].layers)
    assert (rollout._replayed._graph is not None) == (device == "cuda" and not has_window)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["olmoe"])
def test_compiled_decoding(kind, device):
    """On a GPU by CUDA graphs."""
    found = compiled_difference(exact(kind, num_hidden_layers=1, device=device), device)
    assert (found.max_difference, found.module) == (0, None)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", None])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "moe", "mistral", "gemma3"])
def test_cuda_graphs(kind, recipe):
    if kind == "moe" and recipe is None:
        pytest.skip("experts need a recipe")
    found = compiled_difference(exact(kind, recipe, device="cuda"), "cuda")
    assert (found.max_difference, found.module) == (0, None)


@pytest.mark.gpu
def test_cuda_graphs_under_autocast():
    model = exact("qwen3", "rowwise", torch.float32, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert compiled_difference(model, "cuda").max_difference == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise", None])
def test_a_graph_reads_what_changes_between_calls(recipe):
    """New weights at the same addresses, weights at others, other prompts, and a cache that is made again."""
    model = exact("llama", recipe, device="cuda")
    rollout, seen = Rollout(model), []
    for change in range(5):
        if change == 2:
            for p in model.parameters():
                p.data = p.data.clone()
        if change == 3:
            rollout.release()
        ids = IDS.cuda() + change
        step(model)
        rollout.refresh()
        found, expected = (
            rollout.generate(ids, MASK.cuda(), **OPTIONS | {"max_new_tokens": 8, "compile": compile})
            for compile in (True, False)
        )
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.log_probs, expected.log_probs)
        seen.append(rollout._replayed._graph)
    # The clone of a norm's weight is at another address, a released cache too.
    assert [id(x) == id(y) for x, y in itertools.pairwise(seen)] == [True, False, False, True]
    assert None not in seen


@pytest.mark.slow
def test_compiled_decoding_without_the_option(monkeypatch):
    """A compiler's fusions keep values in float32 that single operations round."""
    monkeypatch.setattr(generator, "EXACT_OPTIONS", {})
    found = compiled_difference(exact("gemma", num_hidden_layers=1), "cpu")
    assert found.max_difference > 0
    assert found.module is None


def losses(model, ids, mask):
    return model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits[mask.bool()].sum()


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_training_is_one_graph(kind):
    """Dynamo traces a forward in full, and its gradients equal gradients of eager code."""
    model = exact(kind)
    ids, mask = padded(sequences(), "left")
    losses(model, ids, mask).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses(compiled, ids, mask).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_training(device):
    model = exact("gemma", num_hidden_layers=1, device=device)
    rows = sequences(device=device)
    compiled = torch.compile(model, options={"emulate_precision_casts": True})
    assert same(together(compiled, rows, "left"), together(model, rows, "left"))
