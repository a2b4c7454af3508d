"""A layer gets the operands of its GEMMs from a provider and from the source of its weight, and from nowhere else."""

from dataclasses import dataclass, field

import pytest
import torch
from cases import normal, with_gradients

from tritonfp8 import recipes
from tritonfp8.functional import SharedInput, linear, quantize_weight
from tritonfp8.layers.extensions import SOURCES
from tritonfp8.layers.linear import CASTS, LOCAL, OperandProvider, WeightSource, local_linear, source_of
from tritonfp8.specs.testing import assert_bitwise_equal


@dataclass(frozen=True)
class Noting(OperandProvider):
    """Notes what it is asked for."""

    key: object = None
    asked: list = field(default_factory=list, compare=False)

    @property
    def input_key(self):
        return self.key

    def input(self, x, specs):
        self.asked.append(("input", specs.spec is not None, specs.spec_t is not None))
        return super().input(x, specs)

    def grad_output(self, x, specs):
        self.asked.append(("grad_output", specs.spec is not None, specs.spec_t is not None))
        return super().grad_output(x, specs)

    def source(self):
        return NotingSource(self.asked)


@dataclass(frozen=True)
class NotingSource(WeightSource):
    """Notes in ``asked`` what it is asked for."""

    asked: list = field(compare=False)

    def now(self, weight, specs):
        self.asked.append(("now", specs.spec is not None, specs.spec_t is not None))
        pair, _ = super().now(weight, specs)
        return pair, torch.full((1,), 7.0)

    def later(self, weight, how, grad_output):
        self.asked.append(("later", how.amax_t.item(), tuple(grad_output.shape)))
        return super().later(weight, how, grad_output)


RECIPE = recipes.get("rowwise")


def operands():
    return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate([(33, 40), (24, 40)])]


def test_every_operand_comes_from_the_provider():
    (x, w), provider = operands(), Noting()
    out = local_linear(x, w, None, RECIPE, provider=provider, source=provider.source())
    assert provider.asked == [("input", True, True), ("now", True, True)]
    found = with_gradients(out, [x, w])
    assert provider.asked[2:] == [("grad_output", True, True), ("later", 7.0, (33, 24))]
    assert_bitwise_equal(found, with_gradients(linear(x, w, None, RECIPE), [x, w]))


def test_operands_that_no_gemm_reads_and_a_cached_weight_are_not_asked_for():
    (x, w), provider, other = operands(), Noting(), Noting()
    local_linear(x.detach(), w, None, RECIPE, provider=provider, source=provider.source()).sum().backward()
    assert provider.asked == [("input", True, True), ("now", True, False), ("grad_output", False, True)]
    how = {"provider": other, "source": other.source(), "quantized_weight": quantize_weight(w, RECIPE)}
    local_linear(x, w, None, RECIPE, **how).sum().backward()
    assert [name for name, *_ in other.asked] == ["input", "grad_output"]


@pytest.mark.parametrize("same", [True, False])
def test_siblings_share_an_input_only_where_the_key_is_equal(same):
    (x, w), shared = operands(), SharedInput.group(2)
    providers = Noting("a"), Noting("a" if same else "b")
    for provider, each in zip(providers, shared, strict=True):
        local_linear(x, w, None, RECIPE, shared_input=each, provider=provider)
    assert ("input", True, True) in providers[0].asked
    assert (("input", True, True) in providers[1].asked) == (not same)


def test_the_input_is_made_of_the_own_rows():
    x, w = operands()
    out = local_linear(torch.zeros_like(x), w, None, RECIPE, own_rows=x)
    assert_bitwise_equal(out, linear(x, w, None, RECIPE))


def test_a_weight_type_may_bring_its_source(monkeypatch):
    class Special(torch.Tensor):
        pass

    (x, w), source = operands(), NotingSource([])
    assert source_of(w) is source_of(torch.nn.Parameter(w.detach())) is CASTS
    monkeypatch.setitem(SOURCES, Special, source)
    assert source_of(w.detach().as_subclass(Special)) is source
    linear(x, w.detach().as_subclass(Special), None, RECIPE)
    assert [name for name, *_ in source.asked] == ["now"]
    monkeypatch.setitem(SOURCES, Special, CASTS)
    assert source_of(w.detach().as_subclass(Special)) is CASTS


def test_providers_and_sources_are_compared_by_value():
    assert (OperandProvider(), WeightSource()) == (LOCAL, CASTS)
    assert hash((OperandProvider(), WeightSource())) == hash((LOCAL, CASTS))
    assert Noting("a") == Noting("a") != Noting("b")
