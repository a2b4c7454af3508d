"""Log-probs of tokens: one function for the tokens that a model generates and for the tokens that it trains on; and how
logits are seen while a model generates."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from tritonfp8.conversion import bare
from tritonfp8.rollout.exact import row_logsumexp
from tritonfp8.specs.checks import require_type


def inside(model: nn.Module) -> Any:
    """The model of transformers inside of ``torch.compile``, DistributedDataParallel and adapters of peft."""
    found: Any = bare(model)
    # peft puts its layers into the model that it wraps.
    return found.get_base_model() if hasattr(found, "get_base_model") else found


def chosen_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """``log_softmax(logits / temperature)`` at ``tokens``.

    Args:
        logits: ``[..., vocabulary]``, any floating dtype.
        tokens: int64 ``[...]``.
        temperature: above 0.

    Returns:
        float32 ``[...]``, with the gradient of ``logits``.
    """
    # The sum over the vocabulary has one order; what follows is element by element.
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen.float() / temperature - row_logsumexp(logits, temperature)


def log_probs(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor, new: int, temperature: float = 1.0
) -> Tensor:
    """The log-probs of the last ``new`` tokens of each sequence by the model's forward, with its gradient.

    The distribution is the model's own at this temperature, before top-k, top-p and all else that ``generate`` makes of
    it. Positions are counted from the first token that the mask does not hide, as ``generate`` counts them.

    Args:
        model: a causal model of transformers; it may be compiled, wrapped by DistributedDataParallel, or sharded.
        sequences: int64 ``[B, T]``, such as :attr:`Generated.sequences`.
        attention_mask: ``[B, T]``, 0 at padding, such as :attr:`Generated.attention_mask`.
        new: the number of tokens to score, below T.
        temperature: above 0.

    Returns:
        float32 ``[B, new]``; 0 where the mask is 0.

    Raises:
        ValueError: another shape, or ``new`` or ``temperature`` out of range.
        TypeError: ``new`` is no int.
    """
    require_type("new", new, int, "an int")
    if sequences.ndim != 2 or attention_mask.shape != sequences.shape:
        shapes = f"{tuple(sequences.shape)} and {tuple(attention_mask.shape)}"
        raise ValueError(f"sequences and attention_mask must both be [B, T]; got {shapes}")
    if not 0 < new < sequences.shape[1]:
        raise ValueError(f"new must be between 1 and T - 1 = {sequences.shape[1] - 1}; got {new}")
    check_temperature(temperature)
    mask = attention_mask.long()
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    options: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(inside(model).forward).parameters:
        # Only these logits are computed; the last one predicts what nobody has chosen.
        options["logits_to_keep"] = new + 1
    out = model(input_ids=sequences, attention_mask=mask, position_ids=positions, use_cache=False, **options)
    found = chosen_log_probs(out.logits[:, -new - 1 : -1], sequences[:, -new:], temperature)
    return found.masked_fill(mask[:, -new:] == 0, 0.0)


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless a temperature is a positive number."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 (greedy decoding is do_sample=False); got {temperature}")


class RawLogits:
    """A processor of transformers that sees the logits of a step before they are changed."""

    supports_continuous_batching = True
    logits: Any = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` float32 ``[n, vocabulary]`` of the tokens behind ``input_ids``."""
        # Processors behind this one may write to it.
        self.logits = scores.clone()
        return scores


@contextmanager
def processing(model: Any, first: RawLogits, *last: Any) -> Iterator[None]:
    """Put processors before and behind the processors that a caller, or the generation config, asks for."""

    def processors(*args: Any, **options: Any) -> Any:
        found = type(model)._get_logits_processor(model, *args, **options)
        found.insert(0, first)
        found.extend(last)
        return found

    model._get_logits_processor = processors
    try:
        yield
    finally:
        del model._get_logits_processor
