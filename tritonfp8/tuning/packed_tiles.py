"""Which configuration the GEMM on a weight of 4-bit codes is launched with, as measured on an H200.

A tile has rows of the weight, ``block_n``, and tokens, ``block_m``. Figures are microseconds, or the speed over the FP8
GEMM on codes that are expanded already.
"""

from __future__ import annotations

from typing import Any

from tritonfp8.tuning.matmul_space import MatmulConfig

# Beyond it a cast of the weight and an FP8 GEMM are as fast: 0.78 and 0.72 of FP8 at 1024 tokens for 4096x14336, but
# 0.69 and 0.75 for 28672x4096, 0.52 and 0.70 for 5760x2880.
MOST_TOKENS = 512
# Tiles of 256 tokens need so many pieces of work: with 90 0.68 of FP8, and tiles of 128 tokens 0.52; with 64
# 0.41 and 0.62.
_LARGE_PIECES = 88


def _swapped(block_m: int, block_n: int, stages: int, **options: Any) -> MatmulConfig:
    return MatmulConfig(block_m, block_n, 128, 4, stages, swap=True, specialized=True, **options)


# Tokens of an expert, on average, up to which its codes are read where they are multiplied.
MOST_TOKENS_OF_EXPERT = 256


def choose_packed_groups(tokens: int, groups: int) -> MatmulConfig | None:
    """The configuration for groups of tokens, by their average; None where the weights should be expanded first."""
    average = -(-tokens // max(1, groups))
    if average > MOST_TOKENS_OF_EXPERT:
        return None
    # Most experts have fewer tokens than a tile, some have more: these take several.
    block_m = next(size for size in (8, 16, 32, 64, 128) if 2 * average <= size or size == 128)
    return _few(block_m) if block_m <= 64 else _swapped(128, 64, 4, blocks_per_sm=2)


def _few(block_m: int, split_k: int = 1) -> MatmulConfig:
    """Tiles of up to 64 tokens: as many programs on a multiprocessor, and stages, as its shared memory holds."""
    programs = 4 if block_m < 64 else 2
    return _swapped(block_m, 64, {32: 5, 64: 6}.get(block_m, 8), blocks_per_sm=programs, split_k=split_k)


def choose_packed(m: int, n: int, num_sms: int, bare: bool = True) -> MatmulConfig | None:
    """The configuration for ``m`` tokens and a weight of ``n`` rows; None where the weight should be expanded first.

    ``bare``: without activation and residual, for which a thread with two waves of sums has no registers left.

    For few tokens several programs share a multiprocessor, and split K where there are too few tiles for all.
    """
    if m > MOST_TOKENS:
        return None
    rows = -(-n // 64)
    if m <= 64:
        block_m = next(size for size in (8, 16, 32, 64) if m <= size)
        # 28672x4096, 1 token: 26.9 us with four programs, 30.7 with three, 30.8 with two.
        programs = _few(block_m).blocks_per_sm
        # 4096x14336, 1 token: 37.0 us in one part, 21.9 in two, 15.7 in four.
        split_k = next(parts for parts in (4, 2, 1) if parts == 1 or rows * parts <= num_sms * programs)
        return _few(block_m, split_k)
    if bare and -(-m // 256) * -(-n // 128) >= _LARGE_PIECES and m > 128:
        return _swapped(256, 128, 4, group_m=64)
    return _swapped(128, 64, 4, blocks_per_sm=2)
