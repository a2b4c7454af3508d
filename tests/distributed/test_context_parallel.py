"""Context parallelism around converted layers: each rank computes its tokens, attention sees those of all."""

import context_parallel_cases
import pytest
import torch

from tritonfp8 import recipes

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("recipe", recipes.names())
def test_context_parallel_of_torch(ranks, recipe):
    """Without a causal mask: for that torch shards no CPU kernel."""
    ranks.run(2, context_parallel_cases.check_torch, recipe=recipe, causal=False, backend="MATH")


@pytest.mark.parametrize("recipe", recipes.names())
def test_causal_attention_on_gathered_keys(ranks, recipe):
    ranks.run(2, context_parallel_cases.check_gathered_keys, recipe=recipe)


@pytest.mark.parametrize("recipe", recipes.names())
def test_sequence_parallel_layers_have_the_scales_of_all_tokens(ranks, recipe):
    ranks.run(2, context_parallel_cases.check_global_scales, recipe=recipe)


@pytest.mark.parametrize("recipe", recipes.names())
def test_only_a_scale_of_the_whole_input_depends_on_the_ranks(recipe):
    """Output and grad_input scale each token by itself in all recipes but tensorwise."""
    found = context_parallel_cases.alone_and_in_parts(recipe)
    for gemm, (alone, in_parts) in zip(("output", "grad_input"), found, strict=True):
        per_tensor = getattr(getattr(recipes.get(recipe), gemm).lhs, "block", None) == (-1, -1)
        assert torch.equal(alone, in_parts) != per_tensor


@pytest.mark.multigpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("recipe", recipes.names())
def test_context_parallel_of_torch_on_gpus(gpus, recipe, causal):
    options = {"recipe": recipe, "causal": causal, "backend": "EFFICIENT_ATTENTION"}
    gpus.run(gpus.size, context_parallel_cases.check_torch, **options)
