"""Backward of a gated MLP computes both gradients in the memory of their operands."""

import re

import pytest
import torch
import torch.nn.functional as F
from rewriting import code_of, rewritten
from torch import nn

import tritonfp8
from tritonfp8 import ops
from tritonfp8.ops import passes
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(4)

ROWWISE, TENSORWISE = "e4m3:rowwise:fp32:pow2", "e4m3:tensorwise:fp32:pow2"
WHERE = torch.ops.aten.where.self
converted = torch.ops.prims.convert_element_type.default
TOKENS, HIDDEN, FFN = 48, 64, 112


def of_tokens(*sizes):
    return torch.randn(TOKENS, *sizes, generator=torch.Generator().manual_seed(len(sizes))).bfloat16()


@pytest.fixture
def operands():
    """Gradient of the product, gate and other branch, as GEMMs computed them, and a weight."""
    grad, gate, up = of_tokens(3, FFN).unbind(1)
    return grad.contiguous(), gate.contiguous(), up.contiguous(), of_tokens(HIDDEN, FFN)[0].contiguous()


def gradients(grad, gate, up):
    """Of the other branch and of the gate, in float32 as Inductor computes them."""
    grad, gate, up = (converted(x, torch.float32) for x in (grad, gate, up))
    sigmoid = torch.sigmoid(gate)
    results = grad * gate * sigmoid, grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return tuple(converted(x, torch.bfloat16) for x in results)


def places(graph):
    """The place of each cast and GEMM, and of the node that makes one gradient depend on the other."""
    named = [(str(node.target), node.target) for node in graph.nodes if node.op == "call_function"]
    return [op._opname for name, op in named if op == WHERE or "quantize" in name or "matmul" in name]


def test_the_gradient_that_alone_reads_an_operand_is_first(operands):
    def backward(grad, gate, up, weight):
        of_up, of_gate = gradients(grad, gate, up)
        q, s = ops.quantize(weight, ROWWISE)
        codes = [ops.quantize_both(x, ROWWISE, ROWWISE) for x in (of_up, of_gate)]
        return *codes[0], *codes[1], *(ops.scaled_matmul(*x[:2], ROWWISE, q, s, ROWWISE) for x in codes)

    graph, found = rewritten(passes.order_casts, backward, *operands)
    assert found == 1
    # The gate's cast with its GEMM, and then the other one.
    assert places(graph) == ["quantize", "quantize_both", "scaled_matmul", "where", "quantize_both", "scaled_matmul"]
    cast, last = graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.quantize_both.default)
    (dependent,) = graph.find_nodes(op="call_function", target=WHERE)
    assert last.args[0] is dependent
    assert dependent.args[0].args[0] is cast.args[0]


def test_casts_of_groups(operands):
    """Experts have such casts if their activation is not one of our ops."""

    def backward(grad, gate, up, weight, offsets):
        rhs = ops.quantize_matrices(torch.stack([weight] * 2), ROWWISE)
        of_up, of_gate = gradients(grad, gate, up)
        casts = [ops.quantize_groups_both(x, offsets, ROWWISE, ROWWISE) for x in (of_up, of_gate)]
        args = ROWWISE, *rhs, ROWWISE, offsets
        return *casts[0], *casts[1], *(ops.scaled_grouped_matmul(*cast[:2], *args) for cast in casts)

    graph, found = rewritten(passes.order_casts, backward, *operands, torch.tensor([7, 40], dtype=torch.int32))
    assert found == 1
    cast = ["quantize_groups_both", "scaled_grouped_matmul"]
    assert places(graph) == ["quantize_matrices", *cast, "where", *cast]


def test_an_amax_reads_the_dependent_gradient_too(operands):
    def backward(grad, gate, up, _):
        of_up, of_gate = gradients(grad, gate, up)
        amaxes = [x.abs().amax().float().view(1, 1) for x in (of_up, of_gate)]
        return *ops.quantize(of_up, TENSORWISE, False, amaxes[0]), *ops.quantize(of_gate, TENSORWISE, False, amaxes[1])

    graph, found = rewritten(passes.order_casts, backward, *operands)
    assert found == 1
    (dependent,) = graph.find_nodes(op="call_function", target=WHERE)
    assert {user.target for user in dependent.users} == {
        torch.ops.aten.abs.default, torch.ops.tritonfp8.quantize.default,
    }  # fmt: skip


def test_what_gains_nothing_is_left_alone(operands):
    def up_is_read_again(grad, gate, up, _):
        of_up, of_gate = gradients(grad, gate, up)
        return *ops.quantize(of_up, ROWWISE), *ops.quantize(of_gate, ROWWISE), up.sum()

    def in_order(grad, gate, up, _):
        of_up, of_gate = gradients(grad, gate, up)
        return *ops.quantize(of_gate, ROWWISE), *ops.quantize(of_up, ROWWISE)

    def of_the_same(grad, gate, up, _):
        return *ops.quantize(grad + gate, ROWWISE), *ops.quantize(grad * gate, ROWWISE)

    def of_others(grad, gate, up, _):
        return *ops.quantize(grad + 1, ROWWISE), *ops.quantize(gate + up, ROWWISE)

    def not_computed(grad, gate, up, _):
        return *ops.quantize(grad, ROWWISE), *ops.quantize(grad + up, ROWWISE)

    def by_rows(grad, gate, up, _):
        return *ops.quantize(grad + 1, ROWWISE), *ops.quantize(grad + up[:, :1], ROWWISE)

    def chained(grad, gate, up, _):
        codes, scale = ops.quantize(grad * gate, ROWWISE)
        return codes, *ops.quantize(grad * gate * up * scale, ROWWISE)

    for function in (up_is_read_again, in_order, of_the_same, of_others, not_computed, by_rows, chained):
        graph, found = rewritten(passes.order_casts, function, *operands)
        assert (found, places(graph)) == (0, ["quantize", "quantize"]), function.__name__


class GatedMLP(nn.Module):
    """As in Llama (SiLU) and Gemma (GELU)."""

    def __init__(self, activation):
        super().__init__()
        self.activation = activation
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


def allocated(code):
    """How many tensors of the size of a gradient of a branch the backward of ``code`` allocates."""
    backward = code[code.rindex("def call(") :]
    return len(re.findall(rf"empty_strided_cpu\(\((1, )?{TOKENS}, {FFN}\)", backward))


@pytest.mark.slow
@pytest.mark.parametrize("activation", [F.silu, lambda x: F.gelu(x, approximate="tanh")], ids=["silu", "gelu"])
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "tensorwise", "mxfp8"])
def test_gradients_of_both_branches_take_no_new_memory(recipe, activation, told, monkeypatch):
    model, x = GatedMLP(activation).bfloat16(), of_tokens(HIDDEN)
    tritonfp8.convert(model, recipe)
    found, code = code_of(model, x)
    assert allocated(code) == 0
    monkeypatch.setattr(passes, "order_casts", lambda graph: 0)
    expected, code = code_of(model, x)
    assert allocated(code) == 1
    assert_bitwise_equal(found, expected)


@pytest.mark.slow
def test_sizes_that_change(told, monkeypatch):
    model, x = GatedMLP(F.silu).bfloat16(), of_tokens(2, HIDDEN)
    tritonfp8.convert(model, "rowwise")
    found, code = code_of(model, x, dynamic=True)
    monkeypatch.setattr(passes, "order_casts", lambda graph: 0)
    expected, before = code_of(model, x, dynamic=True)
    assert code != before
    assert_bitwise_equal(found, expected)
