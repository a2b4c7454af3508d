"""The exact ops' reference: a row has the same bits in every batch, layout, padding, chunk and cache."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import normal

from tritonfp8 import reference

DTYPES = (torch.bfloat16, torch.float32)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def qkv(t, b=1, heads=4, kv_heads=2, d=24, dtype=torch.float32, s=None):
    shapes = ((b, heads, t, d), (b, kv_heads, s or t, d), (b, kv_heads, s or t, d))
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def attend(q, k, v, window=0, places=None):
    places = None if places is None else torch.tensor(places, dtype=torch.int32)
    return reference.exact_attention(q, k, v, q.shape[-1] ** -0.5, window, places)


def plain(q, k, v, window=0):
    """The same by softmax in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    rows = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    keys = torch.arange(k.shape[2])
    seen = (keys <= rows) & ((keys > rows - window) if window else True)
    scores = scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


class TestAttention:
    @each_dtype
    @pytest.mark.parametrize("window", [0, 70])
    def test_is_softmax(self, dtype, window):
        q, k, v = qkv(600, dtype=dtype)
        out, logsumexp = attend(q[:, :, -300:], k, v, window)
        expected, expected_logsumexp = plain(q[:, :, -300:], k, v, window)
        tolerance = 2e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=1e-6, atol=1e-5)

    @each_dtype
    @pytest.mark.parametrize("window", [0, 70])
    def test_a_row_has_bits_of_its_own(self, dtype, window):
        t = 530
        q, k, v = qkv(t, dtype=dtype)
        out, logsumexp = attend(q, k, v, window)
        # Decode, a chunk, and a prefix.
        for start, end in ((0, 1), (63, 64), (256, 257), (529, 530), (250, 515), (0, 300)):
            part = attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], window)
            assert torch.equal(part[0], out[:, start:end])
            assert torch.equal(part[1], logsumexp[:, :, start:end])
        # A longer cache, in which anything may lie behind the query.
        longer = [F.pad(x, (0, 0, 0, 400), value=math.nan) for x in (k, v)]
        part = attend(q[:, :, 500:], *longer, window, [[0, 500]])
        assert torch.equal(part[0], out[:, 500:])
        # Another batch, with padding of both kinds.
        others = qkv(t + 301, b=3, dtype=dtype)
        for x, whole in zip((q, k, v), others, strict=True):
            whole[1, :, 101 : 101 + t] = x[0]
        first = [[0, 0], [101, 0], [260, 0]]
        part = attend(*others, window, first)
        assert torch.equal(part[0][1, 101 : 101 + t], out[0])
        assert torch.equal(part[1][1, :, 101 : 101 + t], logsumexp[0])
        assert not part[0][1, :101].any()
        assert (part[1][1, :, :101] == -math.inf).all()
        # Other layouts.
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(attend(*strided, window)[0], out)

    def test_a_cache_of_a_window_has_dropped_keys(self):
        window, t = 70, 530
        q, k, v = qkv(t)
        out, _ = attend(q, k, v, window)
        kept = 100
        part, _ = attend(q[:, :, -1:], k[:, :, -kept:], v[:, :, -kept:], window, [[kept - t, kept - 1]])
        assert torch.equal(part, out[:, -1:])

    @pytest.mark.parametrize("window", [0, 70])
    def test_backward_is_that_of_softmax(self, window):
        q, k, v = (x.double().requires_grad_() for x in qkv(90, b=2))
        expected, _ = plain(q, k, v, window)
        grad = normal(*expected.shape, seed=5, dtype=torch.float64)
        out, logsumexp = attend(q.detach(), k.detach(), v.detach(), window)
        found = reference.exact_attention_backward(grad, q, k, v, out, logsumexp, 24**-0.5, window)
        for x, y in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)

    def test_backward_leaves_out_padding(self):
        q, k, v = (x.double() for x in qkv(90))
        padded = [F.pad(x, (0, 0, 7, 0), value=3.0) for x in (q, k, v)]
        grads = []
        for tensors, places in (((q, k, v), None), (padded, torch.tensor([[7, 0]], dtype=torch.int32))):
            out, logsumexp = reference.exact_attention(*tensors, 0.2, 0, places)
            grads.append(
                reference.exact_attention_backward(torch.ones_like(out), *tensors, out, logsumexp, 0.2, 0, places)
            )
        for x, whole in zip(*grads, strict=True):
            torch.testing.assert_close(whole[:, :, 7:], x)
            assert not whole[:, :, :7].any()

    def test_errors_name_what_came(self):
        q, k, v = qkv(8)
        for args, text in (
            ((q[:, :3], k, v), "multiple of Hkv"),
            ((q, k.double(), v), "one dtype"),
            ((q, k[:, :, :4], v[:, :, :4]), "8 queries and 4 keys"),
        ):
            with pytest.raises(ValueError, match=text):
                attend(*args)
        with pytest.raises(ValueError, match="got -1"):
            attend(q, k, v, -1)
        with pytest.raises(ValueError, match="places must be int32"):
            reference.exact_attention(q, k, v, 1.0, 0, torch.zeros(1, 2))


def same_in_other_shapes(function, x):
    """Whether ``function`` of rows has the bits of each row by itself, in other batches and in other memory."""
    whole = function(x)
    for rows in (slice(0, 1), slice(3, 4), slice(5, 12), slice(len(x) - 1, len(x))):
        assert torch.equal(function(x[rows].clone()), whole[rows])
    padded = torch.cat((x[:3], x, x[:1]))
    assert torch.equal(function(padded)[3:-1], whole)
    spread = torch.zeros(len(x), x.shape[1] + 3, dtype=x.dtype)[:, 1 : 1 + x.shape[1]].copy_(x)
    assert torch.equal(function(spread), whole)
    assert torch.equal(function(x.view(1, *x.shape)).view(whole.shape), whole)
    return whole


class TestRows:
    @each_dtype
    @pytest.mark.parametrize("n", [1, 24, 77, 1000])
    @pytest.mark.parametrize("unit_offset", [False, True])
    def test_rms_norm(self, dtype, n, unit_offset):
        x, weight = normal(131, n, dtype=dtype), normal(n, seed=1, dtype=dtype)
        out = same_in_other_shapes(lambda x: reference.rms_norm(x, weight, 1e-5, unit_offset)[0], x)
        factor = weight.double() + unit_offset
        expected = F.rms_norm(x.double(), (n,), factor, 1e-5)
        tolerance = 1e-6 if dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.parametrize("unit_offset", [False, True])
    def test_rms_norm_backward(self, unit_offset):
        x, weight, grad = (normal(*shape, dtype=torch.float64) for shape in ((2, 9, 33), (33,), (2, 9, 33)))
        x.requires_grad_()
        weight.requires_grad_()
        expected = F.rms_norm(x, (33,), weight + unit_offset, 1e-5)
        rstd = reference.rms_norm(x.detach(), weight.detach(), 1e-5, unit_offset)[1]
        found = reference.rms_norm_backward(grad, x.detach(), weight.detach(), rstd, unit_offset)
        for got, want in zip(found, torch.autograd.grad(expected, (x, weight), grad), strict=True):
            torch.testing.assert_close(got, want)

    @each_dtype
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_row_logsumexp(self, dtype, temperature):
        x = normal(131, 1003, dtype=dtype) * 4
        x[2, 5:] = -math.inf
        x[4] = -math.inf
        found = same_in_other_shapes(lambda x: reference.row_logsumexp(x, temperature), x)
        torch.testing.assert_close(found, (x.double() / temperature).logsumexp(-1).float(), rtol=1e-6, atol=1e-6)

    @each_dtype
    @pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
    def test_gated(self, dtype, activation):
        x = normal(131, 78, dtype=dtype) * 3
        plain = {
            "silu": F.silu,
            "gelu": F.gelu,
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "relu": F.relu,
        }[activation]
        out = same_in_other_shapes(lambda x: reference.gated(*x.chunk(2, -1), activation), x)
        gate, up = (part.double().requires_grad_() for part in x.chunk(2, -1))
        expected = plain(gate) * up
        tolerance = 1e-6 if dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(out.double(), expected.detach(), rtol=tolerance, atol=tolerance)
        found = reference.gated_backward(gate.detach(), gate.detach(), up.detach(), activation)
        for got, want in zip(found, torch.autograd.grad(expected, (gate, up), gate.detach()), strict=True):
            torch.testing.assert_close(got, want)

    @each_dtype
    def test_swiglu(self, dtype):
        same_in_other_shapes(
            lambda x: reference.swiglu(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1), normal(131, 78, dtype=dtype)
        )

    def test_rotary_tables(self):
        positions, inv_freq = torch.arange(700).view(2, 350), 1e4 ** -(torch.arange(9) / 9)
        cos, sin = reference.rotary_tables(positions, inv_freq, 1.25)
        angles = positions[..., None].double() * inv_freq.double()
        torch.testing.assert_close(cos[..., 9:].double(), angles.cos() * 1.25, rtol=1e-4, atol=1e-4)
        for column in (0, 17, 349):
            found = reference.rotary_tables(positions[1:, column : column + 1], inv_freq, 1.25)
            assert torch.equal(found[0], cos[1:, column : column + 1])
            assert torch.equal(found[1], sin[1:, column : column + 1])

    def test_errors_name_what_came(self):
        x = normal(4, 8)
        with pytest.raises(ValueError, match=r"\(4, 8\) and weight of shape \(4,\)"):
            reference.rms_norm(x, x[:, 0], 1e-5)
        with pytest.raises(ValueError, match="got 0"):
            reference.row_logsumexp(x, 0.0)
        with pytest.raises(ValueError, match="got 'tanh'"):
            reference.gated(x, x, "tanh")
        with pytest.raises(ValueError, match="one shape and dtype"):
            reference.gated(x, x[:2], "silu")


@each_dtype
@pytest.mark.parametrize(("n", "k"), [(40, 77), (3, 4100)])
def test_matmul_of_rows(dtype, n, k):
    b, bias = normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
    x = normal(131, k, dtype=dtype) * torch.logspace(-6, 6, k).to(dtype)
    out = same_in_other_shapes(lambda x: reference.matmul(x.view(-1, k), b, bias, True).view(*x.shape[:-1], n), x)
    # The sums are exact, up to products that are too small to reach most results.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.double(), x.double() @ b.double().t() + bias.double(), rtol=0.501 * eps, atol=1e-12 * x.abs().max().item()
    )
