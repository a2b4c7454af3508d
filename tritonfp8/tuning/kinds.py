"""What the configuration of a GEMM is chosen by: its kind and its sizes; and the configurations of each kind."""

from __future__ import annotations

from typing import NamedTuple

from tritonfp8.tuning import grouped_tiles, matmul_space
from tritonfp8.tuning.matmul_space import MatmulConfig

SINGLE, ROWS, COLUMNS = "single", "rows", "columns"
"""One GEMM; one for each group of rows; one for each group of columns, over which it sums."""


class Kind(NamedTuple):
    """The properties of a GEMM besides its sizes.

    ``a_rows`` and ``b_rows`` are the rows that share a scale if scales lie along K, else 0. Output dtypes with
    the same ``out_itemsize`` (bytes) cost the same. ``bare``: neither activation nor residual. ``copy_engine``: TMA can
    address all three matrices. ``groups``: :data:`SINGLE`, :data:`ROWS` or :data:`COLUMNS`.
    """

    family: str
    accumulation: str
    a_rows: int
    b_rows: int
    out_itemsize: int
    bare: bool
    copy_engine: bool
    groups: str = SINGLE


class Key(NamedTuple):
    """A GEMM ``[m, k] @ [n, k].T`` of a kind; ``m`` is the M of its bucket.

    For GEMMs of groups ``n`` and ``k`` are the sizes of the weight of one of ``experts``, and ``m`` is the bucket of
    the mean number of tokens in a group.
    """

    kind: Kind
    n: int
    k: int
    m: int
    experts: int = 0


def space(kind: Kind) -> tuple[MatmulConfig, ...]:
    """The configurations of a kind of GEMMs; empty if this version has no such kind."""
    if kind.groups in (ROWS, COLUMNS):
        return grouped_tiles.space(kind.family, kind.accumulation)
    known = kind.groups == SINGLE and kind.family in matmul_space.SPACES
    return matmul_space.space(kind.family, kind.accumulation) if known else ()


def find(kind: Kind, name: str) -> MatmulConfig | None:
    """The configuration of this name and kind; None where this version has none."""
    return next((config for config in space(kind) if config.name == name), None)
