"""Every read of a trained stored weight carries its gradient to the weight, or raises."""

import pytest
import torch
import torch.nn.functional as F
from cases import CODES, IN_BYTES, QUANTIZED, cpu_and_cuda, named, normal
from stored_layers import spec_of
from torch import nn

import tritonfp8
from tritonfp8.layers.stored import StoredMatrices, store
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

N, K = 24, 48
TOKENS = torch.tensor([3, 0, 3])

READS = {
    "dequantize": lambda w: values_of(w).pow(2),
    "pow": lambda w: w.pow(3),
    "operators": lambda w: (2 * w - 1) / (w * w + 1),
    "norm": lambda w: w.norm(),
    "vector norm": lambda w: torch.linalg.vector_norm(w, 1),
    "singular values": lambda w: torch.linalg.svdvals(w),
    "cat": lambda w: torch.cat([w, 2 * w]).exp(),
    "stack": lambda w: torch.stack([w, w]).square(),
    "a row": lambda w: w[3].square(),
    "rows": lambda w: w[2:9].square(),
    "elements": lambda w: w[TOKENS, 5].square(),
    "view": lambda w: w.view(-1).square(),
    "reshape": lambda w: w.reshape(K, N).square(),
    "split": lambda w: w.split(7)[1].square(),
    "chunk": lambda w: w.chunk(2)[1].square(),
    "hsplit": lambda w: w.hsplit(2)[1].square(),
    "transpose": lambda w: w.T.square(),
    "a view of a view": lambda w: w.view(-1)[5:50].view(9, 5).square(),
    "diagonal": lambda w: w.diagonal().square(),
    "linear": lambda w: F.linear(data(), w).square(),
    "matmul": lambda w: (data() @ w.t()).square(),
    "matmul from the left": lambda w: (w @ data().t()).square(),
    "embedding": lambda w: F.embedding(TOKENS, w).square(),
    "to another dtype": lambda w: w.double().square() if type(w) is nn.Parameter else w.to(torch.float64).square(),
    "clone": lambda w: w.clone().square(),
    "where": lambda w: torch.where(w > 0, w, 0 * w).square(),
    "sum": lambda w: w.sum(),
    "max": lambda w: w.amax(1),
    "loss": lambda w: F.mse_loss(w, torch.ones(N, K)),
    "softmax": lambda w: w.log_softmax(-1).square(),
    "einsum": lambda w: torch.einsum("nk,mk->nm", w, w),
    "foreach": lambda w: torch._foreach_mul([w], 2.0)[0].square(),
    "parameters_to_vector": lambda w: nn.utils.parameters_to_vector([w]).square(),
}


# Not to the bit on an Intel CPU limited to AVX2, as seen for the first two: torch may choose the GEMM of a gradient by
# the strides of its operands, which a stored weight does not have. Sums of 24 to 48 float32 products in another order,
# each rounded by 2^-25 of their sum, agree to 140 dB.
GEMMS, SUMS = {"linear", "matmul", "matmul from the left", "einsum"}, 120


def data():
    return normal(5, K)


def values_of(w):
    return w if type(w) is nn.Parameter else w.dequantize()


def pair(recipe="rowwise", device="cpu"):
    torch.manual_seed(0)
    w = nn.Parameter(store(torch.randn(N, K).to(device), spec_of(recipe)))
    return w, nn.Parameter(w.detach().dequantize())


def gradient(read, w):
    read(w).double().sum().backward()
    return w.grad


@pytest.mark.parametrize("name", READS)
def test_has_the_gradient_of_a_plain_weight(name):
    stored, plain = pair()
    expected, found = gradient(READS[name], plain), gradient(READS[name], stored)
    assert expected.abs().sum() > 0
    if name in GEMMS:
        assert sqnr(found, expected) > SUMS
    else:
        assert_bitwise_equal([found], [expected])


@cpu_and_cuda
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_dequantized_values_in_every_recipe(recipe, device):
    assert_bitwise_equal(*([gradient(READS["dequantize"], w)] for w in pair(recipe, device)))


def test_weights_of_experts():
    torch.manual_seed(0)
    w = nn.Parameter(StoredMatrices.of(torch.randn(3, N, K), spec_of("blockwise")))
    plain = nn.Parameter(w.detach().dequantize())
    for read in (lambda x: values_of(x).square(), lambda x: x[1].square(), lambda x: torch.bmm(x, x.mT)):
        w.grad = plain.grad = None
        assert_bitwise_equal([gradient(read, w)], [gradient(read, plain)])


def test_without_a_gradient_nothing_is_recorded():
    w, _ = pair()
    with torch.no_grad():
        assert not w.dequantize().requires_grad
    assert not w.detach().dequantize().requires_grad
    assert w.dequantize().requires_grad


def trained_layer(recipe):
    torch.manual_seed(0)
    layer = nn.Linear(K, N)
    tritonfp8.convert(layer, recipe, weight_storage="quantized")
    return layer


@pytest.mark.parametrize("recipe", [*IN_BYTES, *CODES.values()], ids=named)
def test_a_penalty_beside_a_layer_trains(recipe):
    """The gradient of the layer and the gradient of the penalty add up."""
    layer, grads = trained_layer(recipe), []
    for share in (0.0, 1.0):
        layer.zero_grad()
        (layer(data()).sum() + share * layer.weight.dequantize().square().sum()).backward()
        grads.append(layer.weight.grad.clone())
    assert_bitwise_equal([grads[1]], [grads[0] + 2 * layer.weight.detach().dequantize()])


def test_a_penalty_inside_a_compiled_loss():
    layer, x = trained_layer("rowwise"), data()

    def loss():
        return layer(x).square().mean() + layer.weight.dequantize().square().sum()

    loss().backward()
    expected = layer.weight.grad.clone()
    layer.zero_grad()
    torch.compile(loss, backend="aot_eager", fullgraph=True)().backward()
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-6, atol=1e-6)


def test_several_views_at_once_are_an_error():
    w, _ = pair()
    for read in (w.unbind, lambda: list(w)):
        with pytest.raises(NotImplementedError, match=r"stored in 8 bits .*dequantize\(\)"):
            read()
