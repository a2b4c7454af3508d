"""Attention of exact models over a cache in pages: continuous batching of transformers, where each call has tokens of
sequences of any lengths in one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8.rollout.exact.attention import computed


class Lengths(NamedTuple):
    """How the tokens of B sequences lie in a row, and in a batch with padding on the left.

    Attributes:
        ends: int64 ``[B]``, the index behind the last token of each sequence in the row.
        counts: int64 ``[B]``, its number of tokens.
        longest: the number of tokens of the batch.
    """

    ends: Tensor
    counts: Tensor
    longest: int

    @classmethod
    def of(cls, cumulative: Tensor, longest: int) -> Lengths:
        """Of cumulative lengths ``[B + 1]`` that begin with 0."""
        ends = cumulative.long()
        return cls(ends[1:], ends.diff(), longest)

    def padded(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """``row [N, ...]`` as ``[B, longest, ...]``; and bool ``[B, longest]``, False at padding."""
        at = torch.arange(-self.longest, 0, device=row.device) + self.ends[:, None]
        exists = at >= (self.ends - self.counts)[:, None]
        return row[at.clamp(min=0)], exists

    def row(self, batch: Tensor, size: int) -> Tensor:
        """The inverse: ``batch [B, longest, ...]`` as ``[size, ...]``; anything behind the last sequence."""
        at = torch.arange(size, device=batch.device)
        sequence = torch.bucketize(at, self.ends, right=True).clamp(max=len(self.ends) - 1)
        place = self.longest - self.ends[sequence] + at
        return batch[sequence, place.clamp(max=self.longest - 1)]


def exact_paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    *,
    cache: Any = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | Mapping[str, Tensor] | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int | Mapping[str, int] = 0,
    read_index: Any = None,
    write_index: Any = None,
    block_table: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of the N new tokens of B sequences, ``[1, N, Hq, D]``, as in a batch with padding on the left.

    Args:
        module, dropout, scaling, sliding_window, options: as transformers passes them.
        query, key, value: of the new tokens, ``[1, Hq, N, D]`` and ``[1, Hkv, N, D]``.
        cache: takes the new keys and values and returns all that the queries read.
        position_ids: int ``[1, N]``, the index of each token in its sequence.
        cu_seq_lens_q, cu_seq_lens_k: int ``[B + 1]``, cumulative numbers of queries and keys; the latter by kind of
            layer where a model has two.
        max_seqlen_q, max_seqlen_k: the largest numbers.
        read_index, write_index: where the cache reads and writes.
        attention_mask, block_table: None.

    Raises:
        ValueError: no cache in pages, a table of blocks, and as the attention without pages.
    """
    if cache is None or position_ids is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError("only continuous batching of transformers has pages: use the name without 'paged|' otherwise")
    if block_table is not None or attention_mask is not None:
        raise ValueError(
            "exact attention over pages takes no table of blocks and no mask: set max_blocks_per_request=0"
        )
    if isinstance(cu_seq_lens_k, Mapping):
        kind = "full_attention" if cache.sliding_windows[module.layer_idx] == 1 else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]  # type: ignore[index]
    assert isinstance(max_seqlen_k, int)
    # Under autocast the cache has the dtype of the weights, which holds the values exactly.
    given = {"key_states": key.to(cache.dtype), "value_states": value.to(cache.dtype), "layer_idx": module.layer_idx}
    keys, values = cache.update(**given, read_index=read_index, write_index=write_index)
    of_queries, of_keys = Lengths.of(cu_seq_lens_q, max_seqlen_q), Lengths.of(cu_seq_lens_k, max_seqlen_k)
    queries, _ = of_queries.padded(query[0].transpose(0, 1))
    keys, exists = of_keys.padded(keys)
    values, _ = of_keys.padded(values)
    # Keys of another sequence may be NaN, which a weight of 0 does not hide.
    keys, values = (x.masked_fill(~exists[..., None, None], 0).transpose(1, 2) for x in (keys, values))
    queries, places = queries.transpose(1, 2), _places(of_queries, of_keys, position_ids[0])
    out = computed(module, queries, keys, values, places, dropout, scaling, sliding_window, options)
    return of_queries.row(out, query.shape[2])[None], None


def _places(of_queries: Lengths, of_keys: Lengths, positions: Tensor) -> Tensor:
    """Where each sequence begins among the keys, also where a window's cache dropped this key, and its first query."""
    # A sequence without tokens begins anywhere: its rows are not read.
    starts = (of_queries.ends - of_queries.counts).clamp(max=len(positions) - 1)
    first = of_keys.longest - of_queries.counts - positions[starts].long()
    query = torch.full_like(first, of_keys.longest - of_queries.longest)
    return torch.stack([first, query], -1).to(torch.int32)
