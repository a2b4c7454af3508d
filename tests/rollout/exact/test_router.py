"""Routers choose in one order, and sums over experts and over the vocabulary have one order."""

import pytest
import torch
from exact_models import exact

from tritonfp8 import ops
from tritonfp8.rollout.exact import row_logsumexp
from tritonfp8.rollout.exact.functions import routed
from tritonfp8.rollout.scoring import chosen_log_probs

LOGITS = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("normalize", [False, True])
def test_shares_are_those_of_softmax(normalize):
    logits, other = (LOGITS.clone().requires_grad_() for _ in range(2))
    weights, indices = routed(logits, 3, normalize)
    expected, chosen = torch.softmax(other, -1).topk(3, -1)
    if normalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(indices, chosen)
    torch.testing.assert_close(weights, expected)
    factors = torch.arange(1.0, 4.0)
    (weights * factors).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)


@pytest.mark.parametrize("experts", [4, 40, 200])
def test_ties_go_to_the_lower_index(experts):
    logits = torch.zeros(3, experts)
    logits[1, experts // 2 :] = 1.0
    _, indices = ops.routed(logits, 3, True)
    firsts = torch.tensor([0, experts // 2, 0])
    n = min(3, experts // 2)
    assert torch.equal(indices[:, :n], firsts[:, None] + torch.arange(n))


def test_a_router_with_equal_experts():
    model = exact("moe")
    router = model.model.layers[0].mlp.gate
    with torch.no_grad():
        router.weight.copy_(router.weight[:1].expand_as(router.weight))
        logits, weights, indices = router(torch.randn(2, 5, 128).bfloat16())
    assert torch.equal(logits, logits[:, :1].expand_as(logits))
    assert torch.equal(indices, torch.arange(3).expand(10, 3))
    assert torch.equal(weights, torch.full_like(weights, 1 / 4))


def test_log_probs_of_a_row_do_not_depend_on_others():
    """torch adds a row that is contiguous in another order than a row that is not."""
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(64)
    expected = chosen_log_probs(logits, tokens, 0.7)
    torch.testing.assert_close(expected, torch.log_softmax(logits / 0.7, -1)[tokens, tokens])
    for i in range(64):
        assert torch.equal(chosen_log_probs(logits[i], tokens[i], 0.7), expected[i])
        assert torch.equal(chosen_log_probs(logits[: i + 1, None], tokens[: i + 1, None], 0.7)[-1, 0], expected[i])
    assert torch.equal(chosen_log_probs(logits.t().contiguous().t(), tokens, 0.7), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_log_probs(dtype):
    logits, other = (LOGITS.to(dtype).requires_grad_() for _ in range(2))
    row_logsumexp(logits, 0.7).pow(2).sum().backward()
    (other.float() / 0.7).logsumexp(-1).pow(2).sum().backward()
    torch.testing.assert_close(logits.grad, other.grad)
