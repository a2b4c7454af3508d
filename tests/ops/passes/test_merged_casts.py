"""Graphs that Inductor compiles have one op for the two casts of a matrix."""

import re
from collections import Counter

import pytest
import torch
from rewriting import code_of, graph_of, rewritten
from torch import nn
from torch._inductor.fx_passes import post_grad

import tritonfp8
from tritonfp8 import ops
from tritonfp8.compat import inductor_private
from tritonfp8.ops import passes
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(2)

ROWWISE, BLOCKWISE, TENSORWISE = (f"e4m3:{block}:fp32:pow2" for block in ("rowwise", "1x128", "tensorwise"))
QUANTIZE, BOTH = (getattr(torch.ops.tritonfp8, name).default for name in ("quantize", "quantize_both"))


def again(x):
    """The values of ``x`` as a layer in a compiled graph casts them in backward."""
    return x.neg().neg()


def counts(graph):
    targets = [node.target for node in graph.nodes]
    return targets.count(QUANTIZE), targets.count(BOTH)


def merged(function, *args):
    """The counts of both ops after the rewrite, which must keep the results to the bit."""
    graph, found = rewritten(passes.rewrite, function, *args)
    assert found >= counts(graph)[1]
    return counts(graph)


@pytest.fixture
def x():
    return torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("spec", [ROWWISE, BLOCKWISE, TENSORWISE])
def test_casts_of_one_matrix_become_one_op(x, spec):
    def normal_first(x):
        y = x + 1
        return *ops.quantize(y, spec), *ops.quantize(again(y).detach(), ROWWISE, True)

    def transposed_first(x):
        y = x + 1
        return *ops.quantize(again(y), ROWWISE, True), y * 2, *ops.quantize(y.detach(), spec)

    assert merged(normal_first, x) == (0, 1)
    assert merged(transposed_first, x) == (0, 1)


@pytest.mark.parametrize("spec", [TENSORWISE, ROWWISE])
def test_a_cast_with_the_amax_merges_with_the_one_that_reads_it(x, spec):
    def both(x):
        y = x + 1
        qdata, scale, amax = ops.quantize_with_amax(y, spec, spec)
        return qdata, scale, *ops.quantize(again(y).detach(), spec, True, amax)

    def of_something_else(x):
        qdata, scale, amax = ops.quantize_with_amax(x, spec, spec)
        return qdata, scale, *ops.quantize(x + 1, spec, True, amax)

    def for_backward_too(x):
        qdata, scale, amax = ops.quantize_with_amax(x, spec, spec)
        return qdata, scale, amax, *ops.quantize(x, spec, True, amax)

    assert merged(both, x) == (0, 1)
    for function in (of_something_else, for_backward_too):
        assert merged(function, x) == (1, 0)


def test_what_only_the_second_cast_read_is_gone_and_a_cast_reads_what_its_copy_was_made_of(x):
    for function, rewrites in (
        (lambda x: (*ops.quantize(x, ROWWISE), *ops.quantize(again(x), ROWWISE, True)), 2),
        (lambda x: ops.quantize(again(x + 1), ROWWISE, True), 1),
    ):
        module = graph_of(function, x)
        assert passes.rewrite(module.graph) == rewrites
        assert not [node for node in module.graph.nodes if node.target == torch.ops.aten.neg.default]


def test_other_values_and_other_casts_are_left_alone(x):
    def given(x):
        return *ops.quantize(x, ROWWISE), *ops.quantize(x, TENSORWISE, True, x.abs().amax().float().view(1, 1))

    def twice(x):
        y = x + 1
        return *ops.quantize(y, ROWWISE, True), *ops.quantize(again(y), ROWWISE, True)

    def others(x):
        return *ops.quantize(x, ROWWISE), *ops.quantize(x.neg(), ROWWISE, True)

    for function in (given, twice, others, lambda x: (*ops.quantize(x, ROWWISE), *ops.quantize(x, BLOCKWISE))):
        assert merged(function, x) == (2, 0)


def test_a_third_cast_stays(x):
    def function(x):
        return *ops.quantize(x, ROWWISE), *ops.quantize(x, BLOCKWISE), *ops.quantize(again(x), ROWWISE, True)

    assert merged(function, x) == (1, 1)


def casts(code):
    return Counter(re.findall(r"tritonfp8_site\('(quantize\w*)'\)", code))


@pytest.mark.slow
def test_inductor_rewrites_the_graphs_of_a_layer(x, told):
    # The partitioner keeps the cast of what a GEMM computed, as that takes half of the bytes.
    model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 128, bias=False)).bfloat16()
    tritonfp8.convert(model[1], "rowwise")
    found, code = code_of(model, x)
    assert casts(code) == {"quantize_both": 2, "quantize": 2}
    told.pop()
    expected, code = code_of(model, x)
    assert casts(code) == {"quantize_both": 1, "quantize_with_amax": 1, "quantize": 3}
    assert_bitwise_equal(found, expected)


@pytest.mark.slow
def test_graphs_of_any_size_are_rewritten(x, told):
    model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 128, bias=False), nn.Linear(128, 112)).bfloat16()
    for index in (1, 2):
        tritonfp8.convert(model[index], "rowwise")
    found, code = code_of(model, x, dynamic=True)
    assert (code.count("calls.quantize_both("), code.count("site('quantize_weights')")) == (3, 1)
    told.pop()
    expected, code = code_of(model, x, dynamic=True)
    assert (code.count("calls.quantize_both("), code.count("site('quantize_weights')")) == (2, 0)
    assert_bitwise_equal(found, expected)


def test_told_twice_inductor_has_one_rewrite(told):
    entries = len(told)
    assert inductor_private.rewrite_graphs(passes.rewrite)
    assert len(told) == entries


def test_a_torch_without_the_table_leaves_graphs_alone(monkeypatch):
    monkeypatch.delattr(post_grad, "pass_patterns")
    assert inductor_private.rewrite_graphs(passes.rewrite) is False


def test_a_transpose_of_codes_is_made_with_the_codes_or_reads_them(x):
    def in_one_pass(x):
        y = x + 1
        qdata, scale = ops.quantize(y, BLOCKWISE)
        return qdata, scale, *ops.transpose_codes(again(y).detach(), scale, BLOCKWISE, BLOCKWISE)

    assert merged(in_one_pass, x) == (0, 1)

    def from_codes(x):
        y = x + 1
        qdata, scale, amax = ops.quantize_with_amax(y, ROWWISE, ROWWISE, True)
        return qdata, scale, *ops.transpose_codes(again(y).detach(), scale, ROWWISE, ROWWISE, amax)

    graph, _ = rewritten(passes.rewrite, from_codes, x)
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.transpose_codes.default)
    assert node.args[0].meta["val"].dtype == torch.float8_e4m3fn

    def of_something_else(x):
        _, scale = ops.quantize(x, BLOCKWISE)
        return scale, *ops.transpose_codes(again(x + 1), scale, BLOCKWISE, BLOCKWISE)

    graph, found = rewritten(passes.rewrite, of_something_else, x)
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.transpose_codes.default)
    # It reads what its copy was made of.
    assert found == 1
    assert node.args[0].target is torch.ops.aten.add.Tensor
