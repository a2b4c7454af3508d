"""Kernels of attention: whole, in parts, by any tile and in any batch a row has one set of bits; its gradient."""

from typing import NamedTuple

import pytest
import torch
from cases import CUDA, INTERPRETER, normal

from tritonfp8 import reference
from tritonfp8.launch.exact import attention
from tritonfp8.launch.executor import planned


class Heads(NamedTuple):
    """Sizes: batch, heads of queries and of keys, queries, keys, elements of a head, window."""

    b: int
    hq: int
    hkv: int
    t: int
    s: int
    d: int
    window: int = 0


SMALL = [Heads(1, 2, 1, 70, 330, 16), Heads(2, 4, 2, 5, 600, 24), Heads(1, 2, 2, 300, 300, 64, 100)]
LARGE = [
    Heads(2, 8, 2, 1500, 1500, 128), Heads(2, 4, 4, 700, 1300, 64), Heads(1, 4, 2, 900, 900, 128, 300),
    Heads(3, 8, 1, 1, 2048, 128), Heads(1, 4, 1, 300, 600, 256), Heads(1, 4, 2, 400, 400, 80),
    Heads(1, 2, 1, 260, 520, 96),
]  # fmt: skip
WHOLE, PARTS, LARGER = (False, (64, 4)), (True, (64, 4)), (False, (128, 8))


def cases(small, large):
    found = [(INTERPRETER, sizes) for sizes in small] + [(CUDA, sizes) for sizes in large]
    return pytest.mark.parametrize(
        ("device", "sizes"),
        [pytest.param(*p.values, sizes, id=f"{p.id}-{'-'.join(map(str, sizes))}", marks=p.marks) for p, sizes in found],
    )


each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def heads(sizes, dtype, device):
    """Queries, keys and values, laid out as models have them: heads side by side."""
    shapes = [(sizes.b, n, count, sizes.d) for count, n in ((sizes.hq, sizes.t), *[(sizes.hkv, sizes.s)] * 2)]
    return [normal(*shape, seed=i, dtype=dtype, device=device).transpose(1, 2) for i, shape in enumerate(shapes)]


def run(q, k, v, window=0, places=None, way=(None, None), tma=None):
    found = planned(attention.plan_parts, (q, k, v, places), (q.shape[3] ** -0.5, window, *way, tma))
    assert found is not None
    return found


def tolerance(dtype):
    return {"rtol": 2e-2, "atol": 8e-3} if dtype == torch.bfloat16 else {"rtol": 2e-5, "atol": 5e-6}


def assert_equal(some, others):
    assert all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


@cases(SMALL, LARGE)
@each_dtype
def test_every_way_has_one_set_of_bits_and_the_right_values(device, sizes, dtype):
    q, k, v = heads(sizes, dtype, device)
    # Other heads have one tile.
    has_tiles = dtype != torch.float32 and sizes.d <= 128
    found = run(q, k, v, sizes.window, way=WHOLE if has_tiles else (False, None))
    expected = reference.exact_attention(q.double(), k.double(), v.double(), sizes.d**-0.5, sizes.window)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, **tolerance(dtype))
    ways = [PARTS, LARGER] if has_tiles else [(True, None)]
    for way in (*ways, (None, None)):
        for tma in (False, True):
            assert_equal(run(q, k, v, sizes.window, way=way, tma=tma), found)


@cases(SMALL[:1], LARGE[:3])
@each_dtype
def test_a_row_has_the_same_bits_in_another_batch_cache_and_chunk(device, sizes, dtype):
    q, k, v = heads(sizes, dtype, device)
    out, logsumexp = run(q, k, v, sizes.window)
    for count in (1, 7, 64, 65, sizes.t):
        part = run(q[:, :, sizes.t - count :], k, v, sizes.window)
        assert_equal(part, (out[:, sizes.t - count :], logsumexp[:, :, sizes.t - count :]))
    before, pad, spare = sizes.s - sizes.t, 37, 91
    # In a static cache, behind padding. Nothing else may be read, so it has NaN.
    cache = [torch.full((sizes.b, sizes.hkv, pad + sizes.s + spare, sizes.d), torch.nan, dtype=dtype, device=device)
             for _ in range(2)]  # fmt: skip
    for x, y in zip(cache, (k, v), strict=True):
        x[:, :, pad : pad + sizes.s] = y
    for count in (1, 3, sizes.t):
        first = pad + before + sizes.t - count
        places = torch.tensor([[pad, first]] * sizes.b, dtype=torch.int32, device=device)
        found = run(q[:, :, sizes.t - count :], *cache, sizes.window, places)
        assert_equal(found, (out[:, sizes.t - count :], logsumexp[:, :, sizes.t - count :]))
    alone = run(q[-1:], k[-1:], v[-1:], sizes.window)
    assert_equal(alone, (out[-1:], logsumexp[-1:]))


@cases(SMALL[2:], LARGE[2:3])
def test_a_cache_that_dropped_keys_behind_the_window(device, sizes):
    q, k, v = heads(sizes, torch.bfloat16, device)
    out, logsumexp = run(q, k, v, sizes.window)
    dropped = sizes.s - sizes.window - 10
    places = torch.tensor([[-dropped, sizes.s - 1 - dropped]], dtype=torch.int32, device=device)
    found = run(q[:, :, -1:], k[:, :, dropped:], v[:, :, dropped:], sizes.window, places)
    assert_equal(found, (out[:, -1:], logsumexp[:, :, -1:]))


@cases(SMALL[:1], LARGE[:1])
def test_rows_of_padding_are_zero(device, sizes):
    q, k, v = heads(sizes, torch.bfloat16, device)
    places = torch.tensor([[sizes.s - 3, sizes.s - sizes.t]] * sizes.b, dtype=torch.int32, device=device)
    out, logsumexp = run(q, k, v, places=places)
    assert not out[:, :-3].any()
    assert (logsumexp[:, :, :-3] == -torch.inf).all()
    assert torch.isfinite(logsumexp[:, :, -3:]).all()


@cases(SMALL, [*LARGE[:3], *LARGE[4:]])
@each_dtype
@pytest.mark.parametrize("padded", [False, True])
def test_gradient(device, sizes, dtype, padded):
    q, k, v = heads(sizes, dtype, device)
    scale, grad = sizes.d**-0.5, normal(sizes.b, sizes.t, sizes.hq, sizes.d, seed=5, dtype=dtype, device=device)
    places = None
    if padded:
        places = torch.tensor([[7, sizes.s - sizes.t]] * sizes.b, dtype=torch.int32, device=device)
        # What is padding has no gradient in a loss.
        grad[:, : max(0, 7 - sizes.s + sizes.t)] = 0
    out = run(q, k, v, sizes.window, places)
    found = attention.exact_attention_backward(grad, q, k, v, *out, scale, sizes.window, places)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    exact = reference.exact_attention(*(x.detach() for x in wide), scale, sizes.window, places)
    expected = reference.exact_attention_backward(
        grad.double(), *(x.detach() for x in wide), *exact, scale, sizes.window, places
    )
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype
        error = (x.double() - y).norm() / y.norm()
        assert error < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("hkv", [1, 4])
def test_the_gradient_by_cudnn(hkv):
    sizes = Heads(2, 4, hkv, 512, 512, 128)
    q, k, v = heads(sizes, torch.bfloat16, "cuda")
    grad = normal(sizes.b, sizes.t, sizes.hq, sizes.d, seed=5, dtype=torch.bfloat16, device="cuda")
    args = (grad, q, k, v, *run(q, k, v), sizes.d**-0.5)
    assert attention._by_cudnn(*args, 0, None)
    for x, y in zip(attention.exact_attention_backward(*args), attention._by_kernels(*args), strict=True):
        assert (x.double() - y.double()).norm() / y.double().norm() < 1e-2
