"""Which tiles the GEMMs of groups can work in, the most promising first.

No configuration splits K, and all promote their sums at the same places: the bits of a row do not depend on which one
is chosen. So every GEMM of groups is batch-invariant, except with MX operands (:func:`.matmul_space.is_widened`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tritonfp8.compat.hardware import Abilities
from tritonfp8.tuning.matmul_space import MatmulConfig, shared_bytes, supports

# Of plain Triton, by the family of the scales. The last fit any device.
_STEPS_OF_128 = (
    MatmulConfig(128, 128, 128, 8, 3),
    MatmulConfig(64, 128, 128, 4, 3, blocks_per_sm=2),
    MatmulConfig(64, 64, 128, 4, 3, blocks_per_sm=2),
)
PORTABLE: Mapping[str, tuple[MatmulConfig, ...]] = {
    "epilogue": _STEPS_OF_128,
    "blockwise": _STEPS_OF_128,
    "mx": (MatmulConfig(128, 128, 64, 8, 3), MatmulConfig(64, 64, 64, 4, 3, blocks_per_sm=4)),
}
# Of operands without scales, by bytes of an element.
UNSCALED: Mapping[int, MatmulConfig] = {
    2: MatmulConfig(128, 128, 64, 8, 3),
    4: MatmulConfig(64, 64, 32, 4, 3, blocks_per_sm=2),
}

# Of the warp-specialized kernel, by family and accumulation; usually the fastest first.
_PAIR = MatmulConfig(128, 256, 128, 4, 4, specialized=True, stagger=True, tight=True, side_by_side=True)
# Half of a wave is stored at a time: for scales along K and outputs of four bytes there is no more shared memory.
_PAIR_IN_HALVES = dataclasses.replace(_PAIR, halves=True)
SPECIALIZED: Mapping[tuple[str, str], tuple[MatmulConfig, ...]] = {
    ("epilogue", "fast"): (
        MatmulConfig(128, 256, 128, 4, 4, halves=True, group_m=16, specialized=True),
        MatmulConfig(128, 128, 128, 4, 5, specialized=True),
        MatmulConfig(64, 128, 128, 4, 8, specialized=True),
    ),
    ("epilogue", "precise"): (
        _PAIR,
        _PAIR_IN_HALVES,
        MatmulConfig(128, 128, 128, 4, 5, specialized=True, overlap=4),
        MatmulConfig(64, 128, 128, 4, 8, specialized=True, overlap=4),
    ),
    ("blockwise", "precise"): (
        # Only for sums over tokens, whose columns all have a scale: both MMAs of a warp group use the same ones.
        MatmulConfig(256, 128, 128, 4, 4, halves=True, specialized=True, stagger=True, tight=True),
        _PAIR_IN_HALVES,
        MatmulConfig(128, 128, 128, 4, 5, specialized=True, overlap=4, column_scales=False),
        MatmulConfig(128, 128, 128, 4, 4, specialized=True),
        MatmulConfig(64, 128, 128, 4, 8, specialized=True, overlap=4, column_scales=False),
    ),
}
# The same kernel for operands of two bytes without scales. Their sums need no promotion.
WIDE = (
    MatmulConfig(128, 256, 64, 4, 4, halves=True, group_m=16, specialized=True),
    MatmulConfig(128, 128, 64, 4, 5, specialized=True),
    MatmulConfig(64, 128, 64, 4, 8, specialized=True),
)
SMALLEST_ROWS = 64
TALL_ROWS = 256
# Up to so many tokens a group, the smallest tiles of tokens: the weights' bytes decide, and more programs read them.
FEW_TOKENS = 32
# From so many on, wide tiles: they read less for each FLOP. Fewer leave most of a group's last tile empty, and of two
# such tiles there are more programs.
WIDE_TOKENS = 256
WIDE_COLUMNS = 256
# Sums over so many tokens of a group are promoted by narrow tiles: their beginning and end take less time. Shorter sums
# are limited by writing the result, longer ones by reading the operands.
NARROW_SUMS = (512, 2048)


class GroupedGemm(NamedTuple):
    """What decides the configuration of a GEMM of groups.

    Attributes:
        family: of the scales (:func:`tritonfp8.specs.matmul_family`).
        accumulation: ``"fast"`` or ``"precise"``.
        rows: rows of each operand that share a scale.
        groups: how many there are.
        tokens: of all groups.
        sizes: rows and columns of the matrix of each group: of ``b``, or, if tokens are summed, of the result.
        sums_tokens: whether the sums run over the tokens of each group.
        out_itemsize: bytes of an element of the output.
    """

    family: str
    accumulation: str
    rows: tuple[int, int]
    groups: int
    tokens: int
    sizes: tuple[int, int]
    sums_tokens: bool
    out_itemsize: int


def space_accumulation(family: str, accumulation: str) -> str:
    """The accumulation under which the specialized configurations of a family are listed."""
    return accumulation if (family, accumulation) in SPECIALIZED else "precise"


def space(family: str, accumulation: str) -> tuple[MatmulConfig, ...]:
    """All configurations of a family of GEMMs; empty if there is no such family."""
    specialized = SPECIALIZED.get((family, space_accumulation(family, accumulation)), ())
    return (*specialized, *PORTABLE.get(family, ()))


def serves(config: MatmulConfig, gemm: GroupedGemm, device: Abilities, specialized: bool) -> bool:
    """Whether a configuration serves a GEMM; ``specialized`` as for :func:`candidates`."""
    return supports(
        config,
        gemm.family,
        gemm.out_itemsize,
        True,
        specialized,
        device.max_shared_bytes,
        native_mx=device.has_native_mx,
        column_scales=gemm.rows[1] == 1,
    )


def candidates(gemm: GroupedGemm, device: Abilities, specialized: bool) -> list[MatmulConfig]:
    """The configurations worth running a GEMM in, the most promising first: specialized ones where any can run it.

    Args:
        gemm: the GEMM.
        device: what it runs on.
        specialized: whether the warp-specialized kernel can run it.

    Raises:
        RuntimeError: the device has too little shared memory for any.
    """
    found = [
        config for config in space(gemm.family, gemm.accumulation) if serves(config, gemm, device, specialized)
    ]  # fmt: skip
    if not found:
        raise RuntimeError(
            f"{device.name} has {device.max_shared_bytes} bytes of shared memory a block, too little for every "
            f"{gemm.family} configuration of groups"
        )

    return _by_tokens(found, gemm.tokens, gemm.groups, gemm.sums_tokens)


def _by_tokens(found: Iterable[MatmulConfig], tokens: int, groups: int, sums_tokens: bool) -> list[MatmulConfig]:
    """The most promising for so many tokens first. The sort is stable: others keep their order."""
    are_few = not sums_tokens and tokens <= groups * FEW_TOKENS
    narrow_sums = range(*(groups * limit for limit in NARROW_SUMS))

    def place(config: MatmulConfig) -> tuple[bool, bool]:
        if sums_tokens:
            later = config.side_by_side and tokens in narrow_sums
        else:
            too_few = config.block_n >= WIDE_COLUMNS and tokens < groups * WIDE_TOKENS
            later = too_few or config.block_m >= TALL_ROWS
        return are_few != (config.block_m <= SMALLEST_ROWS), later

    return sorted(found, key=place)


def wide(tokens: int, groups: int, sums_tokens: bool, out_itemsize: int, device: Abilities) -> MatmulConfig | None:
    """The configuration of the warp-specialized kernel for operands of two bytes; None if none fits the device.

    The arguments are as the attributes of :class:`GroupedGemm`.
    """
    found = [config for config in WIDE if _bytes_of_wide(config, out_itemsize) <= device.max_shared_bytes]
    return next(iter(_by_tokens(found, tokens, groups, sums_tokens)), None)


def _bytes_of_wide(config: MatmulConfig, out_itemsize: int) -> int:
    # As many bytes as operands of one byte and twice the columns.
    return shared_bytes(dataclasses.replace(config, block_k=2 * config.block_k), "epilogue", out_itemsize)
