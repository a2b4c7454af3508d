"""Which tile each GEMM of groups works in.

No configuration splits K, and all promote their sums at the same places: the bits of a row do not depend on which one
is chosen, so every GEMM of groups is batch-invariant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tritonfp8.hardware import Abilities
from tritonfp8.tuning.matmul_space import MatmulConfig, supports

# Of plain Triton, by the family of the scales; None has none, and reads 16-bit operands.
PORTABLE: Mapping[str | None, MatmulConfig] = {
    "epilogue": MatmulConfig(128, 128, 128, 8, 3),
    "blockwise": MatmulConfig(128, 128, 128, 8, 3),
    "mx": MatmulConfig(128, 128, 64, 8, 3),
    None: MatmulConfig(128, 128, 64, 8, 3),
}
FLOAT32 = MatmulConfig(64, 64, 32, 4, 3, blocks_per_sm=2)


# Of the warp-specialized kernel, by family and accumulation; the best for groups of many tokens first.
_LARGEST = MatmulConfig(256, 128, 128, 4, 4, halves=True, group_m=16, specialized=True, stagger=True, tight=True)
SPECIALIZED: Mapping[tuple[str, str], tuple[MatmulConfig, ...]] = {
    ("epilogue", "fast"): (
        MatmulConfig(128, 256, 128, 4, 4, halves=True, group_m=16, specialized=True),
        MatmulConfig(128, 128, 128, 4, 5, specialized=True),
    ),
    ("epilogue", "precise"): (
        _LARGEST,
        MatmulConfig(128, 128, 128, 4, 5, group_m=16, specialized=True, overlap=2),
    ),
    ("blockwise", "precise"): (
        MatmulConfig(128, 128, 128, 4, 5, group_m=16, specialized=True, overlap=4, column_scales=False),
        _LARGEST,
        MatmulConfig(128, 128, 128, 4, 4, specialized=True),
    ),
}
# From so many tokens a group on, tiles of 256 rows: of tokens, or, where tokens are summed, of the result.
MANY_TOKENS = 512
MANY_SUMMED_TOKENS = 1024


class GroupedGemm(NamedTuple):
    """What decides the configuration of a GEMM of groups.

    Attributes:
        family: of the scales (:func:`tritonfp8.specs.matmul_family`), or None.
        accumulation: ``"fast"`` or ``"precise"``.
        rows: rows of each operand that share a scale.
        groups: how many there are.
        tokens: of all groups.
        shape: M, N and K of a group, 0 for the one that tokens are.
        itemsize: bytes of an element of the operands.
        out_itemsize: bytes of an element of the output.
    """

    family: str | None
    accumulation: str
    rows: tuple[int, int]
    groups: int
    tokens: int
    shape: tuple[int, int, int]
    itemsize: int
    out_itemsize: int

    @property
    def sums_tokens(self) -> bool:
        """Whether the sums run over the tokens of each group."""
        return self.shape[2] == 0


def serves(config: MatmulConfig, gemm: GroupedGemm, max_shared_bytes: int) -> bool:
    """Whether a configuration of the warp-specialized kernel serves a GEMM, on a device that can run any."""
    family = str(gemm.family)
    fits = supports(config, family, gemm.out_itemsize, True, True, max_shared_bytes, column_scales=gemm.rows[1] == 1)
    # Without its turns, which need the same steps of every tile, the largest tile spills with scales of columns.
    return fits and not (config.stagger and family == "blockwise" and gemm.sums_tokens)


def specialized_space(gemm: GroupedGemm, max_shared_bytes: int) -> list[MatmulConfig]:
    """The configurations of the warp-specialized kernel that serve a GEMM, the best first."""
    assert gemm.family is not None
    configs = SPECIALIZED[gemm.family, "precise" if gemm.family == "blockwise" else gemm.accumulation]
    are_few = gemm.tokens < gemm.groups * (MANY_SUMMED_TOKENS if gemm.sums_tokens else MANY_TOKENS)
    runnable = [config for config in configs if serves(config, gemm, max_shared_bytes)]
    return sorted(runnable, key=lambda config: are_few and config == _LARGEST)


def choose(gemm: GroupedGemm, device: Abilities, specialized: bool) -> MatmulConfig:
    """The configuration of a GEMM of groups.

    Args:
        gemm: the GEMM.
        device: what it runs on.
        specialized: whether the warp-specialized kernel can run it.
    """
    if specialized and (found := specialized_space(gemm, device.max_shared_bytes)):
        return found[0]
    return FLOAT32 if gemm.itemsize == 4 else PORTABLE[gemm.family]
