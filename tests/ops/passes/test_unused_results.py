"""Graphs cast in one orientation where nobody reads the other."""

import re
from collections import Counter

import pytest
import torch
from rewriting import code_of, rewritten
from torch import nn
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8 import ops
from tritonfp8.ops import passes
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(2)

ROWWISE, BLOCKWISE, TENSORWISE = (f"e4m3:{block}:fp32:pow2" for block in ("rowwise", "1x128", "tensorwise"))


@pytest.fixture
def x():
    return torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


def of_ops(graph):
    return [node.target.__name__ for node in graph.nodes if "tritonfp8" in str(node.target)]


OPS = torch.ops.tritonfp8
# The op, the arguments behind the matrix, and the op of its first two results.
CASTS = {
    "both": ("quantize_both", (ROWWISE, BLOCKWISE), "quantize"),
    "both, of codes": ("quantize_both", (BLOCKWISE, BLOCKWISE, True), "quantize"),
    "amax": ("quantize_with_amax", (TENSORWISE, TENSORWISE), "quantize"),
    "amax of codes": ("quantize_with_amax", (ROWWISE, ROWWISE, True), "quantize"),
    "matrices": ("quantize_matrices_with_amax", (ROWWISE, ROWWISE), "quantize_matrices"),
    "groups": ("quantize_groups_both", (ROWWISE, ROWWISE), "quantize_groups"),
    "groups of SwiGLU": ("quantize_groups_both", (ROWWISE, ROWWISE, None, None, True), "quantize_groups"),
}


def after_rewrite(x, name, read):
    """The rewrite of a cast whose first ``read`` results are read: how many places changed, and the op that is left."""
    op, arguments, _ = CASTS[name]
    if op.startswith("quantize_groups"):
        inputs = x, torch.tensor([16, 48], dtype=torch.int32)
    else:
        inputs = (x.view(2, 24, 96) if op.startswith("quantize_matrices") else x,)
    graph, found = rewritten(passes.rewrite, lambda *xs: getattr(OPS, op).default(*xs, *arguments)[:read], *inputs)
    (left,) = of_ops(graph)
    return found, left.removesuffix(".default")


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_of_which_two_results_are_read_makes_no_more(x, name):
    assert after_rewrite(x, name, 2) == (1, CASTS[name][2])


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_of_which_one_more_is_read_stays(x, name):
    assert after_rewrite(x, name, 3) == (0, CASTS[name][0])


def test_what_is_left_may_merge_with_another_cast(x):
    def function(x):
        return *ops.quantize_with_amax(x, ROWWISE, ROWWISE)[:2], *ops.quantize(x, BLOCKWISE, True)

    graph, found = rewritten(passes.rewrite, function, x)
    assert (found, of_ops(graph)) == (2, ["quantize_both.default"])


def casts(code):
    return Counter(re.findall(r"tritonfp8_site\('(quantize\w*)'\)", code))


@pytest.mark.slow
def test_forward_of_a_checkpointed_block_casts_its_inputs_in_one_orientation(x, told):
    layers = nn.Sequential(nn.Linear(96, 96, bias=False), nn.GELU(), nn.Linear(96, 112, bias=False)).bfloat16()
    tritonfp8.convert(layers, "rowwise")

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return checkpoint(self.layers, x, use_reentrant=False)

    found, code = code_of(Block(), x)
    # Forward: two inputs and two weights. Backward: both in both orientations, but for the last weight, and gradients.
    assert casts(code) == {"quantize": 5, "quantize_both": 5}
    told.pop()
    expected, code = code_of(Block(), x)
    assert casts(code) == {"quantize": 6, "quantize_both": 4, "quantize_with_amax": 2}
    assert_bitwise_equal(found, expected)
