"""Root and quotient of the optimizer step equal float32's, for all numbers: on a GPU an assembly computes them."""

import pytest
import torch
import triton
import triton.language as tl
from cases import generator

from tritonfp8.kernels.optim.exact import root_and_quotient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TILE = 1024
TILES = 512 if DEVICE == "cuda" else 4


@triton.jit
def exact_kernel(v_ptr, m_ptr, scalars_ptr, root_ptr, quotient_ptr, TILE: tl.constexpr, COMPILED: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    root, quotient = root_and_quotient(
        tl.load(v_ptr + at), tl.load(m_ptr + at), tl.load(scalars_ptr), tl.load(scalars_ptr + 1), COMPILED
    )
    tl.store(root_ptr + at, root)
    tl.store(quotient_ptr + at, quotient)


def between(low, high, seed):
    """float32 whose logarithms are uniform."""
    exponents = low + (high - low) * torch.rand(TILE * TILES, generator=generator(seed), dtype=torch.float64)
    return torch.exp2(exponents).float()


def of_any_bits(seed):
    return (
        torch.randint(-(2**31), 2**31, (TILE * TILES,), generator=generator(seed)).to(torch.int32).view(torch.float32)
    )


def squares_and_means(which):
    if which == "usual":
        squares, means = between(-101, 80, 0), between(-60, 30.5, 1)
    elif which == "beyond the ends":
        squares, means = between(-149, 128, 0), between(-149, 128, 1)
    else:
        squares, means = of_any_bits(0), of_any_bits(1)
    means = torch.where(torch.rand(means.shape, generator=generator(2)) < 0.5, means, -means)
    if which == "some are zero":
        squares, means = between(-101, 80, 0), between(-60, 30.5, 1)
        squares[::31], means[::17], means[::51] = 0, 0, -0.0
    return squares, means


@pytest.mark.parametrize("scalars", [(1, 1e-8), (31.6, 1e-8), (1, 0), (2**16, 2**57), (2**20, 0), (0.5, 1e30)], ids=str)
@pytest.mark.parametrize("which", ["usual", "beyond the ends", "any bits", "some are zero"])
def test_root_and_quotient(which, scalars):
    squares, means = squares_and_means(which)
    c, eps = torch.tensor(scalars, dtype=torch.float32)
    found = [torch.empty(TILE * TILES, device=DEVICE) for _ in range(2)]
    given = [x.to(DEVICE) for x in (squares, means, torch.stack([c, eps]))]
    exact_kernel[TILES,](*given, *found, TILE, DEVICE == "cuda", num_warps=4, enable_fp_fusion=False)
    root = squares.double().sqrt().float()
    for got, wanted in zip(found, (root, means / (root * c + eps)), strict=True):
        got = got.cpu()
        same = got.view(torch.int32) == wanted.view(torch.int32)
        assert (same | (got.isnan() & wanted.isnan())).all(), f"{(~same).sum()} of {same.numel()}"
