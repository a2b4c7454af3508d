"""The experts of each token in plain torch, by softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8.reference.exact import ordered_sum


def routed(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits of each token, and their shares of a softmax over all experts.

    It runs on a GPU, too: as an op, so that compiled code does not compute exponentials by itself. Sums have one order.

    Args:
        logits: ``[T, E]``, any floating dtype.
        top_k: how many experts a token has.
        normalize: whether the shares of the chosen experts add up to 1.

    Returns:
        The shares, float32 ``[T, top_k]``, the largest first, and the experts, int64 ``[T, top_k]``. Of equal logits
        the lower index comes first.
    """
    x = logits.float()
    highest, order = torch.sort(x, dim=-1, descending=True, stable=True)
    chosen = (highest[:, :top_k] - highest[:, :1]).exp()
    # Of exponentials in the order of the experts, so that their sum does not depend on how a library adds.
    summands = chosen if normalize else (x - highest[:, :1]).exp()
    return chosen / ordered_sum(summands), order[:, :top_k].contiguous()
