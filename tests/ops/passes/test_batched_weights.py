"""Graphs that Inductor compiles cast the weights of a block to transposes by one op."""

import re

import pytest
import torch
from rewriting import code_of, rewritten
from torch import nn

import tritonfp8
from tritonfp8 import ops, recipes
from tritonfp8.ops import passes
from tritonfp8.ops.passes import batched_weights
from tritonfp8.specs.testing import assert_bitwise_equal

ROWWISE, TENSORWISE = "e4m3:rowwise:fp32:pow2", "e4m3:tensorwise:fp32:pow2"
ONE, OF_CODES, ALL = (
    getattr(torch.ops.tritonfp8, name).default for name in ("quantize", "transpose_codes", "quantize_weights")
)


def weights(*rows):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 32, generator=generator).bfloat16() for n in rows]


def cast(x, spec=ROWWISE):
    return ops.quantize(x.detach(), spec, True)


def batched(function, *args):
    """How many single casts and how many batches are left; the rewrite must keep the results to the bit."""
    graph, _ = rewritten(passes.rewrite, function, *args)
    targets = [node.target for node in graph.nodes]
    return targets.count(ONE) + targets.count(OF_CODES), targets.count(ALL)


def all_of(*xs):
    return [tensor for x in xs for tensor in cast(x)]


def with_scales(xs):
    """Weights, then the scales of their codes."""
    return *xs, *(ops.quantize(x, ROWWISE)[1] for x in xs)


def of_codes(*tensors, spec=ROWWISE):
    xs, scales = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    pairs = zip(xs, scales, strict=True)
    return [tensor for x, s in pairs for tensor in ops.transpose_codes(x.detach(), s.detach(), spec, ROWWISE)]


@pytest.mark.parametrize(
    ("rows", "left"), [((48, 64, 16), (0, 1)), ((48,), (1, 0)), ((16,) * 9, (1, 1)), ((16,) * 10, (0, 2))], ids=str
)
def test_weights_are_cast_by_ops_that_take_as_many_as_the_kernel(rows, left):
    """One weight is left alone."""
    assert batched(all_of, *weights(*rows)) == left
    assert batched(of_codes, *with_scales(weights(*rows))) == left


def test_a_batch_has_few_elements(monkeypatch):
    monkeypatch.setattr(batched_weights, "MOST_ELEMENTS", 64 * 32)
    assert batched(all_of, *weights(32, 32, 48, 16)) == (0, 2)
    monkeypatch.setattr(batched_weights, "MOST_ELEMENTS_OF_A_WEIGHT", 32 * 32)
    assert batched(all_of, *weights(32, 48, 32)) == (1, 1)


def test_other_casts_are_left_alone():
    xs = weights(48, 64)
    for function in (
        lambda x, y: (*cast(x + 1), *cast(y + 1)),
        lambda x, y: (*cast(x, TENSORWISE), *cast(y, TENSORWISE)),
        lambda x, y: (*ops.quantize(x, ROWWISE), *ops.quantize(y, ROWWISE)),
        lambda x, y: (*cast(x), *cast(y.float())),
        lambda x, y: (*cast(x), *cast(y, "e5m2:rowwise:fp32:pow2")),
        lambda x, y: (*cast(x), *ops.quantize(y, ROWWISE, True, y.float().abs().amax(0).view(-1, 1))),
    ):
        assert batched(function, *xs) == (2, 0)
    assert batched(all_of, xs[0], torch.randn(32, 48).bfloat16().t()) == (2, 0)


def test_other_transposes_of_codes_are_left_alone():
    """Of codes, by an amax that is known, by a scale that the graph makes, and beside a cast of values."""
    both = with_scales(weights(48, 64))
    codes = [x.float().clamp(-448, 448).to(torch.float8_e4m3fn) for x in both[:2]]
    for function, args in (
        (of_codes, (*codes, *both[2:])),
        (lambda x, y, s, t: of_codes(x, y, s * 1, t * 1), both),
        (lambda x, y, s, t: (*of_codes(x, s), *cast(y)), both),
        (lambda x, y, s, t: of_codes(x, y, s, t, spec="e4m3:1x128:fp32:pow2"), both),
    ):
        assert batched(function, *args) == (2, 0)
    amax = torch.ones(32, 1)
    given = lambda x, s, a: (*of_codes(x, s), *ops.transpose_codes(x, s, ROWWISE, ROWWISE, a))  # noqa: E731
    assert batched(given, both[0], both[2], amax) == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["values", "codes"])
def test_inductor_casts_the_weights_of_a_model_at_once(told, source):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)).bfloat16()
    tritonfp8.convert(model, recipes.get("rowwise", transposed_from=source))
    (x,) = weights(40)
    found, code = code_of(model, x)
    assert len(re.findall(r"tritonfp8_site\('quantize_weights'\)", code)) == 1
    told.pop()
    expected, code = code_of(model, x)
    assert "quantize_weights" not in code
    assert_bitwise_equal(found, expected)
    model.zero_grad()
    inputs = x.clone().requires_grad_()
    out = model(inputs)
    out.sum().backward()
    assert_bitwise_equal(found, [out.detach(), inputs.grad, *(p.grad for p in model.parameters())])
