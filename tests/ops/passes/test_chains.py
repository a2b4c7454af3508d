"""Graphs that Inductor compiles call ops of ours that follow one another as one, to the same bits."""

import re

import pytest
import torch
from rewriting import code_of, graph_of, rewritten
from torch import nn

import tritonfp8
from tritonfp8 import ops, recipes, reference
from tritonfp8.compat import inductor_private
from tritonfp8.ops import direct, passes
from tritonfp8.ops.passes import chains
from tritonfp8.specs.testing import assert_bitwise_equal

SPEC = "e4m3:rowwise:fp32:pow2"
SITE = re.compile(r"tritonfp8_site\('(\w+)'\)")


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 64, generator=generator).bfloat16() for rows in (40, 24)]


def gemm(x, y):
    return ops.scaled_matmul(*ops.quantize(x, SPEC), SPEC, *ops.quantize(y, SPEC), SPEC)


def steps_of(function, *args):
    """The ops of each chain; the rewrite must keep the results to the bit."""
    graph, found = rewritten(passes.join_chains, function, *args)
    texts = [node.args[2] for node in graph.nodes if node.target == torch.ops.tritonfp8.chain.default]
    assert found == len(texts)
    return [[step.op for step in reference.Chain.of(text).steps] for text in texts]


def test_ops_that_follow_one_another_are_one_chain(operands):
    assert steps_of(gemm, *operands) == [["quantize", "quantize", "scaled_matmul"]]

    def codes_too(x, y):
        pair = ops.quantize(x, SPEC)
        return *pair, pair[0].view(torch.uint8), ops.scaled_matmul(*pair, SPEC, *ops.quantize(y, SPEC), SPEC)

    def twice(x, y):
        q, s, q_t, s_t, total = ops.quantize_both_sum(x, SPEC, SPEC)
        return total, *ops.quantize_weights(y, [x], SPEC, []), q_t, s_t, ops.scaled_matmul(q, s, SPEC, q, s, SPEC)

    assert steps_of(codes_too, *operands) in (
        [["quantize", "quantize", "scaled_matmul"]],
        [["quantize", "scaled_matmul"]],
    )
    assert steps_of(twice, *operands) == [["quantize_both_sum", "quantize_weights", "scaled_matmul"]]


def test_a_computation_in_between_ends_a_chain(operands):
    def between(x, y):
        pair = ops.quantize(x, SPEC)
        return *pair, *ops.quantize(y + 1, SPEC)

    def after(x, y):
        return ops.quantize(gemm(x, y).view(-1, 8), SPEC)

    assert steps_of(between, *operands) == []
    assert steps_of(after, *operands) == [["quantize", "quantize", "scaled_matmul"]]
    assert steps_of(lambda x, y: ops.quantize(x, SPEC), *operands) == []


def test_a_view_of_something_else_ends_no_chain(operands):
    def function(x, y):
        return *ops.quantize(x, SPEC), *ops.quantize(y.view(-1, 8), SPEC)

    assert steps_of(function, *operands) == [["quantize", "quantize"]]


def test_long_gemms_mx_operands_and_batch_invariance_are_no_steps(operands, monkeypatch):
    mx = recipes.get("mxfp8").output.lhs.args

    def of_mx(x, y):
        return *ops.quantize(x, *mx), *ops.quantize(y, *mx)

    def invariant(x, y):
        pair, other = ops.quantize(x, SPEC), ops.quantize(y, SPEC)
        return ops.scaled_matmul(*pair, SPEC, *other, SPEC, None, None, None, None, "precise", True)

    assert steps_of(of_mx, *operands) == []
    assert steps_of(invariant, *operands) == [["quantize", "quantize"]]
    monkeypatch.setattr(chains, "MOST_WORK", 40 * 24 * 64 - 1)
    assert steps_of(gemm, *operands) == [["quantize", "quantize"]]
    monkeypatch.setattr(chains, "MOST_WORK", 40 * 24 * 64)
    assert steps_of(gemm, *operands) == [["quantize", "quantize", "scaled_matmul"]]


def test_results_of_another_layout_are_not_joined(operands, monkeypatch):
    """A fake that differs from the ops in a graph would let Inductor allocate and index wrongly."""
    graph = graph_of(gemm, *operands).graph
    monkeypatch.setattr(chains, "layouts", lambda tensors: object())
    assert passes.join_chains(graph) == 0


def test_chains_are_only_where_code_calls_functions(operands, monkeypatch):
    """Through the dispatcher, modes would see a chain and not its GEMM."""
    graph = graph_of(gemm, *operands).graph
    monkeypatch.setattr(inductor_private, "is_called_directly", lambda name: False)
    assert direct.rewrite(graph) == 0
    monkeypatch.setattr(
        inductor_private, "is_called_directly", lambda name: name == "torch.ops.tritonfp8.chain.default"
    )
    assert direct.rewrite(graph) == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_inductor_calls_chains_to_the_bits_of_the_ops(recipe, monkeypatch):
    model = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32, bias=False)).bfloat16()
    tritonfp8.convert(model, recipe)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    inductor_private.call_directly(direct._calls, direct._IMPORT)
    inductor_private.rewrite_graphs(direct.rewrite)
    found, code = code_of(model, x)
    # Six GEMMs, and casts with each.
    assert set(SITE.findall(code)) == {"chain"}
    assert len(SITE.findall(code)) <= 6
    monkeypatch.setattr(chains, "MOST_WORK", 0)
    expected, code = code_of(model, x)
    assert "chain" not in SITE.findall(code)
    assert_bitwise_equal(found, expected)
