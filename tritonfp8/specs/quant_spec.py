"""QuantSpec: how a tensor is quantized, and which pairs of specs a GEMM supports."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from tritonfp8.specs.checks import is_among, require
from tritonfp8.specs.formats import BYTE_FORMATS, FORMATS, SCALE_FORMATS

TENSORWISE = (-1, -1)
ROWWISE = (1, -1)
COLUMNWISE = (-1, 1)
"""Rowwise blocks of a transposed result, in the coordinates of its input. No spec has this block."""
BLOCK_1X128 = (1, 128)
BLOCK_128X128 = (128, 128)
BLOCK_1X32 = (1, 32)
BLOCK_1X16 = (1, 16)

GROUP_LAYOUTS = ("rows", "columns", "matrices")
"""Where the groups of :class:`~tritonfp8.specs.quantized.QuantizedGroups` lie."""
GROUP_ALIGNMENT = 128
"""Groups of columns begin at multiples of this, so that no block and no tile has columns of two groups."""

SCALE_ALIGNMENT = 4
"""Alignment, in scales, of each step of K where rows are contiguous: TMA needs multiples of 16 bytes."""


@dataclass(frozen=True)
class Block:
    """One supported block shape.

    Attributes:
        name: its usual name.
        scale_formats: the scale formats that it supports.
        family: the family of GEMM kernels that multiplies it.
        rows_contiguous: whether the scales of consecutive rows are adjacent in memory, because a tile of a GEMM reads
            one scale a row at each step of K. Shapes do not depend on it.
        formats: the element formats that it supports.
    """

    name: str
    scale_formats: tuple[str, ...]
    family: str
    rows_contiguous: bool = False
    formats: tuple[str, ...] = BYTE_FORMATS


BLOCKS: Mapping[tuple[int, int], Block] = MappingProxyType(
    {
        TENSORWISE: Block("tensorwise", ("fp32",), "epilogue"),
        ROWWISE: Block("rowwise", ("fp32",), "epilogue"),
        BLOCK_1X128: Block("1x128", ("fp32",), "blockwise", rows_contiguous=True),
        BLOCK_128X128: Block("128x128", ("fp32",), "blockwise"),
        BLOCK_1X32: Block("1x32", ("e8m0",), "mx", formats=(*BYTE_FORMATS, "e2m1")),
    }
)

READ_BLOCKS = MappingProxyType({BLOCK_1X16: Block("1x16", ("fp32",), "none", formats=("e2m1",))})
"""Blocks of codes that are only read, from checkpoints: nothing quantizes to them, and no GEMM multiplies them."""

ACCUMULATIONS = ("precise", "fast")
ACTIVATIONS = ("relu", "gelu", "silu")


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized to codes and scales. Immutable, hashable, comparable.

    Attributes:
        format: the element format: ``"e4m3"`` or ``"e5m2"``; or ``"e2m1"``, two codes a byte (MXFP4, ``(1, 32)`` only).
        block: ``(rows, cols)`` of the last two dims that share one scale; -1 is the whole dimension. One of
            ``(-1, -1)`` (tensorwise), ``(1, -1)`` (rowwise), ``(1, 128)``, ``(128, 128)`` and ``(1, 32)``; or
            ``(1, 16)``, of codes that were read (NVFP4).
        scale_format: ``"fp32"``, or ``"e8m0"`` (a power of two in one byte; MX, ``(1, 32)`` only).
        scale_rounding: ``"none"`` (fp32 only), ``"pow2"`` (a power of two that never saturates), or ``"floor"``
            (e8m0 only; the OCP MX rule, which may saturate the largest element).

    With a ``"pow2"`` scale, float32 values from 0.96875 x 2^128 on (3.30e38; e5m2: 0.9375 x 2^128, 3.19e38) dequantize
    and multiply to infinity: their code and scale are finite, but stand for 2^128, which is beyond float32. ``"none"``
    and ``"floor"`` keep them finite.

    Raises:
        ValueError: an unknown value, or a combination that no kernel supports.
        TypeError: ``block`` is not a pair of ints.

    Source of the MX rules: OCP "Microscaling Formats (MX) Specification", v1.0, section 6.3.
    """

    format: str = "e4m3"
    block: tuple[int, int] = TENSORWISE
    scale_format: str = "fp32"
    scale_rounding: str = "none"

    def __post_init__(self) -> None:
        if isinstance(self.block, list):
            object.__setattr__(self, "block", tuple(self.block))
        if not isinstance(self.block, tuple) or not all(type(b) is int for b in self.block):
            raise TypeError(f"block must be a pair of ints (rows, cols); got {self.block!r}")
        require("format", self.format, tuple(FORMATS))
        require("block", self.block, (*BLOCKS, *READ_BLOCKS))
        require("scale_format", self.scale_format, tuple(SCALE_FORMATS))
        block = block_of(self.block)
        if self.format not in block.formats:
            takes = [entry.name for entry in BLOCKS.values() if self.format in entry.formats]
            raise ValueError(
                f"format {self.format!r} takes block {' or '.join(takes)}; got {self.block} ({block.name})"
            )
        if self.scale_format not in block.scale_formats:
            raise ValueError(
                f"block {self.block} ({block.name}) takes scale_format {' or '.join(map(repr, block.scale_formats))}; "
                f"got {self.scale_format!r}"
            )
        roundings = SCALE_FORMATS[self.scale_format].roundings
        if not is_among(self.scale_rounding, roundings):
            raise ValueError(
                f"scale_format {self.scale_format!r} takes scale_rounding {' or '.join(map(repr, roundings))}; "
                f"got {self.scale_rounding!r}"
            )
        # Made once, here: each eager call reads it.
        text = f"{self.format}:{block.name}:{self.scale_format}:{self.scale_rounding}"
        object.__setattr__(self, "_args", (text,))

    def __str__(self) -> str:
        rounding = "" if self.scale_rounding == "none" else f" {self.scale_rounding}"
        return f"{self.format} {block_of(self.block).name} ({self.scale_format}{rounding})"

    def __deepcopy__(self, memo: object) -> QuantSpec:
        return self

    @property
    def args(self) -> tuple[str]:
        """The spec as the ops take it, one text such as ``"e4m3:1x128:fp32:pow2"``; :func:`spec_of` reads it."""
        return self._args  # type: ignore[attr-defined]

    def to_dict(self) -> dict[str, object]:
        """The spec as plain data (str and a list of two ints)."""
        return {
            "format": self.format,
            "block": list(self.block),
            "scale_format": self.scale_format,
            "scale_rounding": self.scale_rounding,
        }

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scale of a tensor of ``shape``: see :func:`scale_shape`."""
        return scale_shape(shape, self.block)

    def qdata_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the codes of a tensor of ``shape``: fewer columns where a byte holds several codes.

        Raises:
            ValueError: a number of columns that does not fill whole bytes.
        """
        count = FORMATS[self.format].codes_a_byte
        if count == 1:
            return tuple(shape)
        if not shape or shape[-1] % count:
            raise ValueError(
                f"{self.format} has {count} codes a byte, so the last dim must be a multiple of {count}; got shape "
                f"{tuple(shape)}. Pad it with zeros, or leave this tensor in another format"
            )
        return (*shape[:-1], shape[-1] // count)

    def shape_of(self, qdata_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor whose codes have ``qdata_shape``: the inverse of :meth:`qdata_shape`."""
        return (*qdata_shape[:-1], *(size * FORMATS[self.format].codes_a_byte for size in qdata_shape[-1:]))


def block_of(block: tuple[int, int]) -> Block:
    """The row of a block shape, also of codes that are only read."""
    return BLOCKS.get(block) or READ_BLOCKS[block]


def _valid_specs() -> Iterator[QuantSpec]:
    for format, (block, entry) in itertools.product(FORMATS, BLOCKS.items()):
        for scale_format in entry.scale_formats if format in entry.formats else ():
            for rounding in SCALE_FORMATS[scale_format].roundings:
                yield QuantSpec(format, block, scale_format, rounding)


EXPANDED = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
"""The spec in which GEMMs multiply codes of fewer than 8 bits: ``expand_codes`` makes it of them."""

MXFP4 = QuantSpec("e2m1", BLOCK_1X32, "e8m0", "floor")
"""MXFP4 with the scales of the OCP specification: 4.25 bits a value."""

NVFP4 = QuantSpec("e2m1", BLOCK_1X16, "fp32", "none")
"""NVFP4 of a checkpoint: its scale is the product, in float32, of the e4m3 scale of a block and the tensor's scale."""

SPECS: Mapping[str, QuantSpec] = MappingProxyType({spec.args[0]: spec for spec in _valid_specs()})
"""Every spec by which tensors are quantized, by its text."""

READ_SPECS: Mapping[str, QuantSpec] = MappingProxyType({NVFP4.args[0]: NVFP4})
"""Every spec of codes that are only read, by its text."""


def spec_of(text: str, packed: bool = False, read: bool = False) -> QuantSpec:
    """The spec whose text (:attr:`QuantSpec.args`) an op was called with.

    Args:
        text: of the spec.
        packed, read: whether the caller takes formats of several codes a byte; and codes that are only read.

    Raises:
        ValueError: ``text`` is not the text of a spec, or of a spec that the caller does not take.
    """
    spec = SPECS.get(text) or (READ_SPECS.get(text) if read else None)
    if spec is None and text in READ_SPECS:
        raise ValueError(f"codes of {READ_SPECS[text]} are only read: dequantize takes them, and no other op does")
    if spec is None:
        raise ValueError(
            "an op takes a spec as the text format:block:scale_format:scale_rounding, such as 'e4m3:1x128:fp32:pow2' "
            f"(QuantSpec.args has it); got {text!r}"
        )
    if not packed and spec.format not in BYTE_FORMATS:
        raise ValueError(
            f"this op takes codes of 8 bits ({', '.join(BYTE_FORMATS)}); got {spec}. quantize, quantize_into, "
            "dequantize and expand_codes take it: expand_codes makes e4m3 of its codes, for a GEMM"
        )
    return spec


def full_block(ndim: int, block: Sequence[int]) -> tuple[int, ...]:
    """``block`` with an entry for each dim of a tensor of ``ndim`` dims.

    The last two entries are ``block``. Leading dims get 1, or -1 (the whole dim) if the block takes every row. A 1-D
    tensor is one row.

    Raises:
        ValueError: a 0-D tensor, or a 1-D tensor with a block of several rows.
    """
    rows, cols = block
    if ndim == 0 or (ndim == 1 and rows > 1):
        raise ValueError(f"block {tuple(block)} needs a tensor of at least {1 + (rows > 1)} dims; got {ndim}")
    if ndim == 1:
        return (cols,)
    return (*([-1 if rows == -1 else 1] * (ndim - 2)), rows, cols)


def scale_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """``ceil(shape[i] / block[i])`` for each dim; 1 where the block is the whole dim, also if the dim is empty."""
    if len(shape) == 2:
        # The common case of the line below, with less host time in an eager call.
        (m, n), (rows, cols) = shape, block
        return 1 if rows == -1 else -(-m // rows), 1 if cols == -1 else -(-n // cols)
    return tuple(1 if b == -1 else -(-d // b) for d, b in zip(shape, full_block(len(shape), block), strict=True))


def amax_shape(shape: Sequence[int], block: Sequence[int], place: Sequence[int]) -> tuple[int, ...]:
    """How many blocks of a whole matrix the elements ``[n, k]`` lie in that begin at row and column ``place``."""
    return scale_shape([n + (0 if b == -1 else at % b) for n, at, b in zip(shape, place, block, strict=True)], block)


def empty_scale(shape: Sequence[int], block: Sequence[int], scale_format: str, device: torch.device) -> torch.Tensor:
    """Uninitialized scale of a tensor of ``shape``, in the physical order of its block shape."""
    sizes = scale_shape(shape, block)
    dtype = SCALE_FORMATS[scale_format].dtype
    if len(sizes) == 1 or not BLOCKS[block[0], block[1]].rows_contiguous:
        return torch.empty(sizes, dtype=dtype, device=device)
    strides = [1]
    for size in reversed(sizes[1:-1]):
        strides.insert(0, strides[0] * size)
    step = -(-strides[0] * sizes[0] // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    return torch.empty_strided(sizes, (*strides, step), dtype=dtype, device=device)


def group_amax_sizes(
    tokens: int, width: int, groups: int, blocks: Collection[tuple[int, int]]
) -> dict[tuple[int, int], int]:
    """How many amaxes the casts of groups of rows need: one for each block that spans a whole dim.

    Args:
        tokens, width: sizes of the rows.
        groups: number of groups.
        blocks: of the scales, in the coordinates of the rows.

    Returns:
        By block the sizes of the parts of one buffer, in their order; each is a multiple of 4, so that all are aligned.
    """
    sizes = {ROWWISE: tokens, COLUMNWISE: groups * width, TENSORWISE: groups}
    return {block: -(-size // 4) * 4 for block, size in sizes.items() if block in blocks}


def transposed(block: Sequence[int]) -> tuple[int, int]:
    """The block of ``x`` that becomes ``block`` in ``x.T``."""
    return block[1], block[0]


def moves_codes(spec: QuantSpec, spec_t: QuantSpec) -> bool:
    """Whether the transpose of a quantized tensor has the same codes and scales, transposed: in square blocks."""
    return spec == spec_t and spec.block[0] == spec.block[1]


def are_transposable(spec: QuantSpec, spec_t: QuantSpec) -> bool:
    """Whether codes by ``spec`` can become codes of the transpose by ``spec_t``; see :func:`check_transposable`."""
    rounded = "none" not in (spec.scale_rounding, spec_t.scale_rounding)
    return moves_codes(spec, spec_t) or (rounded and spec.format == spec_t.format)


def expands_to(spec: QuantSpec, to: QuantSpec) -> bool:
    """Whether codes of fewer than 8 bits, by ``spec``, become an operand of a GEMM by ``to``.

    ``to`` has a scale a row, as ``expand_codes`` makes it, which tells what it rounds; or the blocks of ``spec``, with
    which e4m3 holds every value.
    """
    if spec.format in BYTE_FORMATS or spec.block not in BLOCKS:
        return False
    return to in (EXPANDED, QuantSpec(EXPANDED.format, spec.block, spec.scale_format, "pow2"))


def check_transposable(spec: QuantSpec, spec_t: QuantSpec) -> None:
    """Raise ValueError unless codes by ``spec`` can become codes of the transpose by ``spec_t``.

    Between scales that are powers of two a code moves by its exponent. Its value stays, unless the new scale makes it
    subnormal.
    """
    if are_transposable(spec, spec_t):
        return
    if "none" in (spec.scale_rounding, spec_t.scale_rounding):
        raise ValueError(
            f"a transpose is made from codes only between scales that are powers of two, so that values stay as they "
            f"are; between other scales each value would be rounded a second time. Got {spec} and {spec_t}: use "
            "scale_rounding='pow2', or transposed_from='values'"
        )
    raise ValueError(
        f"a transpose is made from codes of its own format, or each value would be rounded a second time; got {spec} "
        f"and {spec_t}"
    )


def matmul_family(a_block: Sequence[int], b_block: Sequence[int]) -> str:
    """The family of GEMM kernels that multiplies these blocks: ``"epilogue"``, ``"blockwise"`` or ``"mx"``.

    Raises:
        ValueError: no kernel multiplies this pair, because one has blocks along the contraction that the other does
            not have.
    """
    a, b = BLOCKS[a_block[0], a_block[1]], BLOCKS[b_block[0], b_block[1]]
    if a.family != b.family:
        same = [block.name for block in BLOCKS.values() if block.family == a.family]
        raise ValueError(
            f"no kernel multiplies {a.name} by {b.name}: an operand scaled {a.name} goes with one scaled "
            f"{' or '.join(same)}"
        )
    return a.family


def grouped_columns(tokens: int, groups: int) -> int:
    """Columns of a tensor of ``tokens`` in groups along its columns.

    Group g, whose first token is ``start``, begins at column ``128 * (start // 128 + g)``: see :func:`group_column`.
    """
    return GROUP_ALIGNMENT * (tokens // GROUP_ALIGNMENT + groups)


def group_column(start: int, group: int) -> int:
    """The first column of a group whose first token is ``start``."""
    return GROUP_ALIGNMENT * (start // GROUP_ALIGNMENT + group)


def grouped_scale_shape(shape: Sequence[int], block: Sequence[int], layout: str, groups: int) -> tuple[int, ...]:
    """:func:`scale_shape`, but a block of all rows or all columns ends with its group.

    Args:
        shape: ``[tokens, K]`` (``"rows"``), ``[N, columns]`` (``"columns"``) or ``[groups, N, K]`` (``"matrices"``).
        block: ``(rows, cols)``.
        layout: one of :data:`GROUP_LAYOUTS`.
        groups: how many there are.
    """
    if layout == "matrices":
        return groups, *scale_shape(shape[1:], block)
    rows, cols = scale_shape(shape, block)
    if layout == "rows":
        return (groups if block[0] == -1 else rows), cols
    return rows, (groups if block[1] == -1 else cols)


def empty_grouped_scale(
    shape: Sequence[int], spec: QuantSpec, layout: str, groups: int, device: torch.device
) -> torch.Tensor:
    """Uninitialized scale of groups; see :func:`grouped_scale_shape`."""
    sizes = grouped_scale_shape(shape, spec.block, layout, groups)
    if sizes == scale_shape(shape, spec.block):
        return empty_scale(shape, spec.block, spec.scale_format, device)
    return torch.empty(sizes, dtype=SCALE_FORMATS[spec.scale_format].dtype, device=device)


def check_group_spec(spec: QuantSpec, layout: str) -> None:
    """Raise ValueError for a block of several rows of tokens: groups of any size begin in the middle of one."""
    if layout == "rows" and spec.block[0] > 1:
        raise ValueError(
            f"tokens in groups take scales for each token, or one for each group; got {spec}, whose blocks have "
            f"{spec.block[0]} tokens, perhaps of several groups. Use blocks of one row for the operands of tokens"
        )
