"""A GEMM that a recipe keeps in high precision equals the GEMM of the plain layer, to the bit."""

import copy

import pytest
import torch
from cases import cpu_and_cuda, normal
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tritonfp8
from tritonfp8 import convert
from tritonfp8.compat import counting
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES
from tritonfp8.specs.testing import assert_bitwise_equal

SHAPES = [(72,), (1, 72), (150, 72), (3, 50, 72), (2, 3, 5, 72)]


def models(dtype=torch.bfloat16, device="cpu", bias=True):
    """A plain model, and a copy of it in the recipe bf16."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(72, 48, bias=bias), nn.Tanh(), nn.Linear(48, 32, bias=bias)).to(device, dtype)
    converted = copy.deepcopy(plain)
    convert(converted, "bf16")
    return plain, converted


def test_the_inputs_tell_one_rounding_from_two():
    """Without this the tests below could not fail."""
    layer, x = models()[0][0], normal(150, 72, dtype=torch.bfloat16)
    assert not torch.equal(layer(x), x @ layer.weight.t() + layer.bias)


@cpu_and_cuda
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_is_the_plain_model(shape, dtype, bias, device):
    plain, converted = models(dtype, device, bias)
    x = normal(*shape, dtype=dtype, device=device)
    expected = plain(x)
    assert_bitwise_equal(converted(x), expected)
    with torch.no_grad():
        assert_bitwise_equal(converted(x), expected)


@cpu_and_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bf16_under_autocast_is_the_plain_model(dtype, device):
    plain, converted = models(torch.float32, device)
    x = normal(3, 50, 72, device=device)
    with torch.autocast(device, dtype):
        expected = plain(x)
        assert expected.dtype is dtype
        assert_bitwise_equal(converted(x), expected)


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True)(x),
        lambda model, x: torch.export.export(model, (x,)).module()(x),
        lambda model, x: make_fx(lambda x: model(x))(x)(x),
        lambda model, x: torch.vmap(model)(x[None])[0],
    ],
    ids=["compile", "export", "make_fx", "vmap"],
)
def test_bf16_in_a_graph_is_the_plain_model(run):
    plain, converted = models()
    torch._dynamo.reset()
    x = normal(150, 72, dtype=torch.bfloat16)
    assert_bitwise_equal(run(converted, x).detach(), plain(x))


def test_gemms_with_a_bias_are_counted_and_labelled():
    """The bias is no operand of the GEMM: kind, sizes and dtypes are those without it."""
    _, model = models()
    x = normal(150, 72, dtype=torch.bfloat16)
    with counting.log_gemms() as log, counting.count_gemms() as counts:
        model(x).sum().backward()
    assert counts.calls == {"high_precision": 5}
    output = log.gemms[0]
    assert (output.m, output.n, output.k, output.operands) == (150, 48, 72, ("bfloat16", "bfloat16"))
    assert (output.layer, output.gemm) == (model[0], "output")
    assert [g.gemm for g in log.gemms] == ["output", "output", "grad_input", "grad_weight", "grad_weight"]
    report = tritonfp8.verify(model, x)
    for name, sizes in (("0", 48 * 72), ("2", 32 * 48)):
        found = report.layers[name].gemms["output"]
        assert (found.op, found.dtype, found.flops) == ("tritonfp8.matmul", "bfloat16", 2 * 150 * sizes)
    assert report.ok


def test_flops_are_those_of_the_plain_model():
    x, totals = normal(150, 72, dtype=torch.bfloat16), []
    for model in models():
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0
