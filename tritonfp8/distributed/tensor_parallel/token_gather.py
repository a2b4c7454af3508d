"""Gather sharded tokens in 8 bits: each rank quantizes by the scales of the global tensor, then sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.collectives import all_gather_each, reduce_scatter_sum
from tritonfp8.distributed.global_scales import global_amax, quantize_by_amaxes
from tritonfp8.distributed.shard_layout import DimLayout, align, local_blocks, unalign
from tritonfp8.layers.linear import NO_PAIR, Pair, Specs
from tritonfp8.ops import sealed
from tritonfp8.specs import QuantSpec, empty_scale, transposed
from tritonfp8.specs.formats import FORMATS


@dataclass(frozen=True)
class TokenGather:
    """How the rows ``[outer, tokens]`` are put together from the ranks of a group.

    Attributes:
        outer: the product of the dims before the sharded one: each rank's tokens are interleaved that often.
        counts: the tokens of each rank, in each of the ``outer`` parts.
        rank: of this process in the group.
        group: its name.
        sources: the layout of the rows of each rank.
        target: the layout of the gathered rows.
    """

    outer: int
    counts: tuple[int, ...]
    rank: int
    group: str
    sources: tuple[DimLayout, ...]
    target: DimLayout


def _join(gather: TokenGather, parts: Tensor | Sequence[Tensor], dim: int) -> Tensor:
    """The rows of all ranks in the order of the gathered tensor, of the result of :func:`all_gather_each`."""
    if isinstance(parts, Tensor):
        # Before ``dim`` the ranks, then each of the outer parts: as they lie in memory if there is one.
        split = parts.unflatten(1 + dim, (gather.outer, gather.counts[0]))
        return split.movedim(0, dim + 1).flatten(dim, dim + 2)
    if gather.outer == 1:
        return torch.cat(list(parts), dim)
    split = [p.unflatten(dim, (gather.outer, count)) for p, count in zip(parts, gather.counts, strict=True)]
    return torch.cat(split, dim + 1).flatten(dim, dim + 1)


class _Whole(torch.autograd.Function):
    """A placeholder of the gathered rows: only its shape is read; its gradient is scattered to each rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: TokenGather, k: DimLayout) -> Tensor:
        ctx.layouts = gather, k
        return sealed(rows.new_zeros(()).expand(gather.target.aligned_size, k.aligned_size), rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gather, k = ctx.layouts
        return own_sum(unalign(k, unalign(gather.target, grad, 0), 1), gather), None, None


class _Exchanged(torch.autograd.Function):
    """The rows of all ranks, or this rank's of their sum, in their own dtype. Each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: TokenGather, gathers: bool) -> Tensor:
        ctx.args = gather, gathers
        return sealed(_all_rows(rows, gather) if gathers else own_sum(rows, gather), rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gather, gathers = ctx.args
        return own_sum(grad, gather) if gathers else _all_rows(grad, gather), None, None


def _all_rows(rows: Tensor, gather: TokenGather) -> Tensor:
    shapes = [(gather.outer * count, rows.shape[1]) for count in gather.counts]
    return _join(gather, all_gather_each(rows, shapes, gather.group), 0)


def own_sum(rows: Tensor, gather: TokenGather) -> Tensor:
    """The sum over ranks of all rows, for the rows of this rank."""
    parts: Tensor | list[Tensor]
    if len(set(gather.counts)) == 1:
        parts = rows.unflatten(0, (gather.outer, len(gather.counts), gather.counts[0])).movedim(1, 0).flatten(1, 2)
    else:
        split = rows.unflatten(0, (gather.outer, sum(gather.counts))).split(list(gather.counts), 1)
        parts = [part.flatten(0, 1) for part in split]
    return reduce_scatter_sum(parts, gather.rank, gather.group)


def gathered_rows(rows: Tensor, gather: TokenGather) -> Tensor:
    """The rows of all ranks in their own dtype, for recipes with a GEMM in high precision."""
    return _Exchanged.apply(rows, gather, True)  # type: ignore[no-untyped-call]


def scattered_rows(rows: Tensor, scatter: TokenGather) -> Tensor:
    """This rank's rows of the sum over ranks, for recipes whose gradient is not gathered in 8 bits."""
    return _Exchanged.apply(rows, scatter, False)  # type: ignore[no-untyped-call]


def gathered_placeholder(rows: Tensor, gather: TokenGather, k: DimLayout) -> Tensor:
    """A tensor of the shape of the aligned gathered rows, without memory; its gradient is the rows' gradient."""
    return _Whole.apply(rows, gather, k)  # type: ignore[no-untyped-call]


def _bits(scale: Tensor) -> Tensor:
    """A scale in a dtype that every op takes; few ops take 1-byte floats."""
    return scale.view(torch.uint8) if scale.itemsize == 1 else scale


def _to_send(pair: tuple[Tensor, Tensor], spec: QuantSpec, dim: int, source: DimLayout) -> list[Tensor]:
    """The tensors that other ranks need of a quantized shard whose tokens lie along ``dim``."""
    qdata, scale = pair
    parts = [unalign(source, qdata.view(torch.uint8), dim)]
    if spec.block[dim] == 1:
        parts.append(unalign(source, _bits(scale), dim))
    elif spec.block[dim] > 1:
        parts.append(_bits(scale))
    return parts


def _shapes(spec: QuantSpec, dim: int, source: DimLayout, width: int) -> list[tuple[int, ...]]:
    """The shapes of the tensors of :func:`_to_send` on the rank with this layout."""

    def oriented(tokens: int, others: int) -> tuple[int, int]:
        return (others, tokens) if dim else (tokens, others)

    found: list[tuple[int, ...]] = [oriented(source.local_size, width)]
    block = spec.block[dim]
    if block != -1:
        tokens = source.local_size if block == 1 else -(-source.aligned_size // block)
        across = spec.block[1 - dim]
        others = 1 if across == -1 else -(-width // across)
        found.append(oriented(tokens, others))
    return found


def _join_scales(parts: Tensor | Sequence[Tensor], block: int, dim: int, gather: TokenGather) -> Tensor:
    if block == 1:
        return align(gather.target, _join(gather, parts, dim), dim)
    first: dict[int, int] = {}
    position = 0
    for source in gather.sources:
        for b in local_blocks(source, block):
            first.setdefault(b, position)
            position += 1
    joined = torch.cat(list(parts), dim)
    order = [first[b] for b in local_blocks(gather.target, block)]
    if order == list(range(position)):
        return joined
    return joined.index_select(dim, torch.tensor(order, device=joined.device))


def _received(
    parts: Sequence[Tensor | Sequence[Tensor]],
    own_scale: Tensor,
    spec: QuantSpec,
    dim: int,
    gather: TokenGather,
    width: int,
) -> tuple[Tensor, Tensor]:
    """The operand of the tensors of :func:`_to_send` from all ranks."""
    codes = align(gather.target, _join(gather, parts[0], dim), dim)
    qdata = codes.contiguous().view(FORMATS[spec.format].dtype)
    if spec.block[dim] == -1:
        return qdata, own_scale
    joined = _join_scales(parts[1], spec.block[dim], dim, gather)
    scale = empty_scale(qdata.shape, spec.block, spec.scale_format, qdata.device)
    return qdata, scale.copy_(joined.view(scale.dtype))


def is_own_transpose(spec: QuantSpec, spec_t: QuantSpec | None) -> bool:
    """Whether codes by ``spec`` are, transposed, the codes of the transpose by ``spec_t``."""
    return spec == spec_t and spec.block == transposed(spec.block)


def quantize_and_gather(x: Tensor, specs: Specs, gather: TokenGather, k: DimLayout) -> tuple[Pair, Pair]:
    """Quantize this rank's tokens and gather all ranks' codes: the same bits as quantizing the gathered tensor.

    ``M K`` bytes of codes and their scales are sent for ``output``. A transpose that is made from codes is made of what
    arrived. One that is made from values takes as many bytes again, where the weight needs a gradient. Tensorwise, one
    qdata serves both.

    Args:
        x: ``[tokens, K]``, this rank's rows.
        specs: of the gathered rows and of their transpose.
        gather: how the rows of the ranks are put together.
        k: the layout of K.

    Returns:
        ``(qdata, scale)`` of the gathered rows, and of their transpose.
    """
    spec, spec_t, codes = specs
    if codes is not None and spec_t is not None:
        pair, _ = _quantize_and_gather(x, codes, None, gather, k)
        return NO_PAIR if spec is None else pair, ops.transpose_codes(*pair, *codes.args, *spec_t.args)
    return _quantize_and_gather(x, spec, spec_t, gather, k)


def _quantize_and_gather(
    x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None, gather: TokenGather, k: DimLayout
) -> tuple[Pair, Pair]:
    """:func:`quantize_and_gather` of transposes that are made from values."""
    source = gather.sources[gather.rank]
    x = align(k, align(source, x, 0), 1)
    one_serves_both = spec is not None and is_own_transpose(spec, spec_t)
    wanted = [(spec, 0), (None if one_serves_both else spec_t, 1)]
    specs = wanted[0][0], wanted[1][0]
    pairs = quantize_by_amaxes(x, *specs, global_amax(x, *specs, (source, k)))
    width = k.aligned_size
    found: list[Pair] = []
    for (s, dim), (qdata, scale) in zip(wanted, pairs, strict=True):
        if s is None or qdata is None or scale is None:
            found.append(NO_PAIR)
            continue
        # Each part in a collective of its own: codes of equal numbers of tokens then arrive where they are read.
        parts = [
            all_gather_each(part, [_shapes(s, dim, layout, width)[i] for layout in gather.sources], gather.group)
            for i, part in enumerate(_to_send((qdata, scale), s, dim, source))
        ]
        found.append(_received(parts, scale, s, dim, gather, width))
    if one_serves_both:
        qdata, scale = found[0]
        assert qdata is not None
        assert scale is not None
        found[1] = (qdata.t().contiguous(), scale.t().contiguous())
    return found[0], found[1]
