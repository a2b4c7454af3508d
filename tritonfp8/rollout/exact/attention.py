"""Attention of exact models, as transformers calls it: one name for the function and for its masks.

A mask here is no table of scores but two indices a sequence: int32 ``[B, 1, 1, 2]``, as transformers hands on what has
four dims as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.compat.torch_private import assert_later
from tritonfp8.layers.linear import autocast_all
from tritonfp8.rollout.exact.functions import attention

NAME = "tritonfp8_exact"
# As transformers names what continuous batching calls.
PAGED_NAME = f"paged|{NAME}"
NAMES = (NAME, PAGED_NAME)
_REFUSED = ("softcap", "s_aux", "head_mask", "position_bias")


def exact_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, ``[B, T, Hq, D]``.

    Args:
        module: the layer, which has a scaling if the call has none.
        query: ``[B, Hq, T, D]``.
        key, value: ``[B, Hkv, S, D]``.
        attention_mask: of :func:`places_of_tokens`.
        dropout, scaling, sliding_window, options: as transformers passes them.

    Raises:
        ValueError: dropout, a mask that was made otherwise, or an option that changes scores.
    """
    if attention_mask is not None and (attention_mask.dtype != torch.int32 or attention_mask.shape[1:] != (1, 1, 2)):
        raise ValueError(
            "exact attention takes a mask of tokens [B, T], 0 at padding; got one of scores, "
            f"{attention_mask.dtype} {tuple(attention_mask.shape)}"
        )
    places = None if attention_mask is None else attention_mask.reshape(-1, 2)
    return computed(module, query, key, value, places, dropout, scaling, sliding_window, options), None


def computed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor | None,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    options: Mapping[str, Any],
) -> Tensor:
    """The attention of a layer, ``[B, T, Hq, D]``: :func:`exact_attention_forward`, once the mask is read."""
    if dropout:
        raise ValueError(f"exact attention has no dropout: set attention_dropout of the config to 0; got {dropout}")
    if used := [name for name in _REFUSED if options.get(name) is not None]:
        raise ValueError(f"exact attention does not take {', '.join(used)}: use another attention for this model")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"exact attention is causal; {type(module).__name__} has is_causal=False")
    # Under autocast rotary embeddings make queries and keys float32.
    query, key, value = (x.to(query.dtype) for x in autocast_all(query.device.type, query, key, value))  # type: ignore[union-attr]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return attention(query, key, value, scale, sliding_window or 0, places)


def places_of_tokens(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **options: Any,
) -> Tensor | None:
    """Where among the keys each sequence begins, and its first query lies, int32 ``[B, 1, 1, 2]``.

    Args:
        batch_size, q_length, kv_length: B, T and S.
        q_offset: how many tokens came before the queries.
        kv_offset: how many tokens came before the first key: a sliding window's cache drops keys.
        mask_function: the pattern, by index.
        attention_mask: bool ``[B, tokens]``, False at padding; None if no token is padding.
        local_size: the sliding window, None without one.
        use_vmap: whether the caller changed the pattern.
        device: of the result.
        options: more that transformers passes.

    Returns:
        None if each sequence begins at key 0 and the queries are the last keys.

    Raises:
        ValueError: another pattern than a causal one, such as several sequences in a row, or padding between tokens.
    """
    if use_vmap:
        raise ValueError(_PATTERN)
    _check_causal(mask_function, batch_size, q_length, q_offset, local_size, device)
    last = isinstance(q_offset, int) and kv_offset == 0 and q_offset + q_length == kv_length
    first = torch.zeros(batch_size, dtype=torch.int64, device=device)
    if attention_mask is not None:
        seen = attention_mask.to(device=device, dtype=torch.bool)
        first = (seen.cumsum(-1) == 0).sum(-1)
        # To read what is known would wait for the GPU at each token.
        last = not (q_length == 1 and _are_checked) and not _is_padded(seen, first) and last
    if last:
        return None
    # Not by as_tensor: a copy of a number to a GPU waits for it.
    query = torch.full_like(first, q_offset) if isinstance(q_offset, int) else q_offset.to(first).expand(batch_size)
    places = torch.stack([first, query], -1) - kv_offset
    return places.to(torch.int32).view(batch_size, 1, 1, 2)


def _is_padded(seen: Tensor, first: Tensor) -> bool:
    """Whether a token is hidden; True if that cannot be read now. Raises ValueError for padding between tokens."""
    # A token whose predecessor is hidden, behind the first token.
    holes = (seen[:, 1:] & ~seen[:, :-1] & (seen.cumsum(-1)[:, :-1] > 0)).any()
    if not _is_known(holes):
        assert_later(~holes, "exact attention takes no padding between tokens")
        return True
    has_holes, is_padded = torch.stack([holes, (first > 0).any()]).tolist()
    if has_holes:
        raise ValueError(
            "exact attention takes padding on the left, and on the right only behind the last token that is "
            "generated; got a mask with padding between tokens: pad prompts on the left"
        )
    return bool(is_padded)


_are_checked = False


@contextmanager
def checked_masks() -> Iterator[None]:
    """Masks of single tokens are not read inside: the caller knows that prompts are padded on the left."""
    global _are_checked
    before, _are_checked = _are_checked, True
    try:
        yield
    finally:
        _are_checked = before


_PATTERN = (
    "exact attention is causal, over one sequence in a row: it takes no packed sequences (positions that begin again), "
    "chunks, blocks or other patterns of masks"
)


def _check_causal(
    pattern: Callable[..., Any] | None,
    batch_size: int,
    q_length: int,
    q_offset: int | Tensor,
    window: int | None,
    device: Any,
) -> None:
    """Raise ValueError unless each query sees its own key and the first one that its window reaches, and no later one.

    A pattern of packed sequences, of chunks or of blocks differs at one of these keys.
    """
    from transformers.masking_utils import causal_mask_function

    if pattern is None or pattern is causal_mask_function:
        return
    batch = torch.arange(batch_size, device=device)[:, None]
    queries = (torch.arange(q_length, device=device) + q_offset)[None]
    begin = torch.zeros_like(queries) if window is None else (queries - window + 1).clamp(min=0)
    head = torch.zeros_like(batch)
    right = pattern(batch, head, queries, begin) & pattern(batch, head, queries, queries)
    # A pattern of tokens may have no entry behind the last one.
    later = (queries + 1).clamp(max=queries[:, -1:])
    right = right & ~(pattern(batch, head, queries, later) & (later > queries))
    if window is not None:
        before = (begin - 1).clamp(min=0)
        right = right & ~(pattern(batch, head, queries, before) & (before < begin))
    if _is_known(right):
        if not bool(right.all()):
            raise ValueError(_PATTERN)
    else:
        assert_later(right.all(), _PATTERN)


def _is_known(x: Tensor) -> bool:
    """Whether the values of ``x`` can be read now."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
