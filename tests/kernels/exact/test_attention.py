"""Attention by kernels: a row has the same bits whole and in parts, in every batch, cache, chunk and tile."""

import math

import pytest
import torch
import torch.nn.functional as F
from cases import CUDA, INTERPRETER, each_device, normal

from tritonfp8 import reference
from tritonfp8.launch.exact import attention
from tritonfp8.launch.exact.attention import AttentionTile
from tritonfp8.launch.executor import planned

# Device, dtype, head size, tokens, window.
CASES = [
    pytest.param("cpu", torch.bfloat16, 16, 530, 0, id="interpreter", marks=INTERPRETER.marks),
    pytest.param("cpu", torch.float32, 24, 330, 70, id="interpreter window", marks=INTERPRETER.marks),
    *(
        pytest.param("cuda", dtype, d, t, window, id=f"{dtype}-{d}-{t}-{window}", marks=CUDA.marks)
        for dtype, d, t, window in (
            (torch.bfloat16, 128, 1500, 0),
            (torch.float16, 64, 1100, 0),
            (torch.bfloat16, 80, 700, 300),
            (torch.bfloat16, 96, 700, 0),
            (torch.bfloat16, 192, 700, 0),
            (torch.bfloat16, 256, 700, 100),
            (torch.float32, 64, 600, 0),
        )
    ),
]
each_case = pytest.mark.parametrize(("device", "dtype", "d", "t", "window"), CASES)


def qkv(t, b=1, heads=4, kv_heads=2, d=16, dtype=torch.float32, device="cpu", s=None):
    shapes = ((b, heads, t, d), (b, kv_heads, s or t, d), (b, kv_heads, s or t, d))
    return [normal(*shape, seed=i, dtype=dtype, device=device) for i, shape in enumerate(shapes)]


def attend(q, k, v, window=0, places=None, **options):
    """The result and the logsumexp; ``options`` replace what would be chosen."""
    if places is not None:
        places = torch.tensor(places, dtype=torch.int32, device=q.device)
    scale = q.shape[-1] ** -0.5
    if not options:
        return attention.exact_attention(q, k, v, scale, window, places)
    chosen = [options.get(name) for name in ("tile", "in_parts", "tma")]
    return planned(attention.plan_tiles, (q, k, v, places), (scale, window, *chosen))


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def rows_of(results, start, end):
    out, logsumexp = results
    return out[:, start:end], logsumexp[:, :, start:end]


@each_case
def test_is_softmax(device, dtype, d, t, window):
    q, k, v = qkv(t, b=2, d=d, dtype=dtype, device=device)
    out, logsumexp = attend(q, k, v, window)
    expected, expected_logsumexp = reference.exact_attention(q.double(), k.double(), v.double(), d**-0.5, window)
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1.6e-2, "atol": 1e-2}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=1e-5, atol=1e-5)


@each_case
def test_in_parts_is_whole(device, dtype, d, t, window):
    q, k, v = qkv(t, d=d, dtype=dtype, device=device)
    whole = attend(q, k, v, window, in_parts=False)
    chunks = [(t - 1, t), (255, 257), (t - 32, t)]
    for start, end in chunks[: 2 if device == "cpu" else None]:
        tensors = q[:, :, start:end], k[:, :, :end], v[:, :, :end]
        assert_equal(attend(*tensors, window, in_parts=True), rows_of(whole, start, end))
    assert_equal(attend(q[:, :, -1:], k, v, window), rows_of(whole, t - 1, t))


@each_case
def test_a_row_has_bits_of_its_own(device, dtype, d, t, window):
    q, k, v = qkv(t, d=d, dtype=dtype, device=device)
    whole = attend(q, k, v, window)
    # A prefix and a chunk; on the interpreter tiles of another shape may be summed in another order by a BLAS.
    for start, end in ((0, 300), (200, 300)):
        assert_equal(attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], window), rows_of(whole, start, end))
    # Two sequences of a batch that is padded on the left, in a longer cache with anything behind the queries.
    others = qkv(t, b=2, d=d, dtype=dtype, device=device)
    padded = [F.pad(x, (0, 0, 37, 0)) for x in (q, k, v)]
    batch = [torch.cat((x, F.pad(y, (0, 0, 0, 37)))) for x, y in zip(padded, [x[:1] for x in others], strict=True)]
    cache = [F.pad(x, (0, 0, 0, 300), value=math.nan) for x in batch[1:]]
    found = attend(batch[0], *cache, window, [[37, 0], [0, 0]])
    assert_equal([x[:1] for x in rows_of(found, 37, 37 + t)], whole)
    assert not found[0][0, :37].any()
    assert (found[1][0, :, :37] == -math.inf).all()
    # Decode from that cache.
    last = attend(batch[0][:, :, 36 + t : 37 + t], *cache, window, [[37, 36 + t], [0, 36 + t]])
    assert_equal([x[:1] for x in last], rows_of(whole, t - 1, t))
    # Other layouts.
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert_equal(attend(*strided, window), whole)


@each_device
def test_a_cache_of_a_window_has_dropped_keys(device):
    window, t, kept = 70, 330, 100
    q, k, v = qkv(t, device=device)
    whole = attend(q, k, v, window)
    tensors = q[:, :, -1:], k[:, :, -kept:], v[:, :, -kept:]
    for in_parts in (False, True):
        found = attend(*tensors, window, [[kept - t, kept - 1]], in_parts=in_parts)
        assert_equal(found, rows_of(whole, t - 1, t))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_every_tile_and_tma(d):
    q, k, v = qkv(1000, b=2, heads=8, d=d, dtype=torch.bfloat16, device="cuda")
    whole = attend(q, k, v)
    for tile in (AttentionTile(64, 4, 2), AttentionTile(128, 8, 2), AttentionTile(128, 8, 3)):
        for tma in (False, True):
            assert_equal(attend(q, k, v, tile=tile, in_parts=False, tma=tma), whole)
            tensors = q[:, :, -1:], k, v
            assert_equal(
                attend(*tensors, tile=AttentionTile(64, 4, 2), in_parts=True, tma=tma), rows_of(whole, 999, 1000)
            )


def close_gradients(found, tensors, grad, window=0, places=None, tolerance=None):
    """Check gradients against float64."""
    wide = [x.double() for x in tensors]
    scale = tensors[0].shape[-1] ** -0.5
    out, logsumexp = reference.exact_attention(*wide, scale, window, places)
    expected = reference.exact_attention_backward(grad.double(), *wide, out, logsumexp, scale, window, places)
    for x, y, z in zip(found, expected, tensors, strict=True):
        assert x.stride() == torch.empty_like(z).stride()
        torch.testing.assert_close(x.double(), y, **tolerance)


@pytest.mark.parametrize(
    ("device", "dtype", "d", "t"),
    [
        pytest.param("cpu", torch.bfloat16, 16, 150, id="interpreter", marks=INTERPRETER.marks),
        pytest.param("cpu", torch.float32, 24, 70, id="interpreter fp32", marks=INTERPRETER.marks),
        *(
            pytest.param("cuda", dtype, d, 300, id=f"{dtype}-{d}", marks=CUDA.marks)
            for dtype, d in (
                (torch.bfloat16, 128), (torch.float16, 80), (torch.bfloat16, 256), (torch.float32, 64),
                (torch.float32, 256),
            )
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [(0, None), (40, None), (0, [[7, 0], [0, 0]])], ids=["all", "window", "padded"])
def test_backward(device, dtype, d, t, options):
    window, places = options
    places = None if places is None else torch.tensor(places, dtype=torch.int32, device=device)
    tensors = qkv(t, b=2, d=d, dtype=dtype, device=device)
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)
    scale = d**-0.5
    out, logsumexp = attention.exact_attention(*tensors, scale, window, places)
    grad = normal(*out.shape, seed=5, dtype=dtype, device=device)
    found = attention._by_kernels(grad, *tensors, out, logsumexp, scale, window, places)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    close_gradients(found, tensors, grad, window, places, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 8])
def test_backward_by_cudnn(heads):
    tensors = qkv(700, b=2, heads=heads, d=128, dtype=torch.bfloat16, device="cuda")
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    out, logsumexp = attention.exact_attention(*tensors, 128**-0.5)
    grad = normal(*out.shape, seed=5, dtype=torch.bfloat16, device="cuda")
    assert attention._serves_cudnn(*tensors[:2], 0)
    found = attention.exact_attention_backward(grad, *tensors, out, logsumexp, 128**-0.5)
    close_gradients(found, tensors, grad, tolerance={"rtol": 2e-2, "atol": 4e-2})


def test_errors_name_what_came():
    q, k, v = qkv(8)
    with pytest.raises(ValueError, match="multiple of Hkv"):
        attend(q[:, :3], k, v)
    with pytest.raises(ValueError, match="scale must be above 0; got -1"):
        attention.exact_attention(q, k, v, -1.0)
