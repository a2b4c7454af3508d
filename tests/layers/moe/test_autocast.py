"""Experts where autocast is on: tokens are cast to its dtype, and read from where they are, as without autocast."""

import pytest
import torch
from cases import each_recipe, normal, with_gradients

from tritonfp8 import Float8Experts
from tritonfp8.layers.moe import experts as module
from tritonfp8.layers.moe import routing
from tritonfp8.specs.testing import assert_bitwise_equal

TOKENS, TOP_K = 20, 2
each_factors = pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16], ids=str)


def made(recipe, bias, dtype):
    torch.manual_seed(0)
    return Float8Experts(5, 32, 48, recipe=recipe, bias=bias, dtype=dtype)


def gradients(experts, hidden_dtype, factors_dtype, run=None):
    """The output, and the gradients of the tokens, of the router's weights and of the parameters."""
    hidden = normal(TOKENS, 32, dtype=hidden_dtype).requires_grad_()
    factors = normal(TOKENS, TOP_K, seed=1).softmax(1).to(factors_dtype).requires_grad_()
    index = torch.arange(TOKENS * TOP_K).view(TOKENS, TOP_K) * 3 % 5
    with torch.autocast("cpu", torch.bfloat16):
        out = (experts if run is None else run)(hidden, index, factors)
    return with_gradients(out, (hidden, factors, *experts.parameters()), normal(*out.shape, seed=2, dtype=out.dtype))


@pytest.fixture
def copies(monkeypatch):
    """How many copies of the tokens in the order of the experts were made."""
    found = []

    def gather(hidden, way):
        found.append(hidden.shape)
        return routing.gather(hidden, way)

    monkeypatch.setattr(module, "gather", gather)
    return found


@each_recipe
@each_factors
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_in_its_dtype_are_not_copied(recipe, factors, parameters, copies, monkeypatch):
    """And all results have the bits of the ones from copies."""
    found = gradients(made(recipe, True, parameters), torch.bfloat16, factors)
    assert not copies
    monkeypatch.setattr(module, "can_route", lambda *args: False)
    assert_bitwise_equal(found, gradients(made(recipe, True, parameters), torch.bfloat16, factors))
    assert len(copies) == 1


@each_recipe
@each_factors
def test_tokens_in_float32_are_cast_before_they_are_routed(recipe, factors, copies):
    """The bits of the results of cast tokens; what autocast is not asked for keeps its dtype."""
    found = gradients(made(recipe, True, torch.float32), torch.float32, factors)
    assert not copies
    assert [x.dtype for x in found[:3]] == [torch.float32, torch.float32, factors]
    cast = gradients(made(recipe, True, torch.float32), torch.bfloat16, factors)
    assert_bitwise_equal(found, [x.to(like.dtype) for x, like in zip(cast, found, strict=True)])


def test_tokens_in_float64_are_refused_under_autocast():
    """As by a linear layer, whose input autocast leaves in float64."""
    with pytest.raises(TypeError, match="float64"):
        gradients(made("rowwise", False, torch.float32), torch.float64, torch.float32)


@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_in_one_graph(tokens, copies):
    experts = made("rowwise", False, torch.float32)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    expected = gradients(experts, tokens, torch.float32)
    assert_bitwise_equal(gradients(experts, tokens, torch.float32, compiled), expected)
    assert not copies
