"""One recommendation from the times of steps."""

from __future__ import annotations

from collections.abc import Sequence

from tritonfp8.advice.contenders import Contender
from tritonfp8.advice.result import BF16, GRAPH, Recommendation, StepTime
from tritonfp8.advice.steps import Timing

# Smaller gains are within the noise of a measurement.
LEAST_GAIN = 1.02
# Fractions and multiples of the measured batch that the recommendation looks at, in order.
BATCHES = tuple(2.0 ** (n / 2) for n in range(-14, 15))


def recommend(
    steps: Sequence[StepTime], contenders: dict[str, Contender], tokens: int, weight_seconds: float
) -> Recommendation | None:
    """The fastest way to run the model; bf16 unless a recipe is faster by 2 %.

    Args:
        steps: of the uncut model.
        contenders: by name.
        tokens: of the step.
        weight_seconds: of a step, in casts of weights: they do not grow with the batch.

    Returns:
        None without a step in bf16 and one in a recipe.
    """
    plain = [step for step in steps if step.contender == BF16]
    others = [step for step in steps if step.contender != BF16 and step.speed_up is not None]
    if not (plain and others):
        return None
    best, bf16 = (min(found, key=lambda step: step.timing.seconds) for found in (others, plain))
    pair = next(step for step in plain if step.mode == best.mode)
    least = _least_tokens(pair, best, tokens, weight_seconds)
    if best.timing.seconds * LEAST_GAIN > bf16.timing.seconds:
        return Recommendation(BF16, None, bf16.mode, 1.0, least)
    assert best.speed_up is not None
    return Recommendation(best.contender, contenders[best.contender].layers, best.mode, best.speed_up, least)


def _least_tokens(plain: StepTime, quantized: StepTime, tokens: int, weight_seconds: float) -> int | None:
    """The fewest tokens from which the recipe is faster, at every larger batch too, or None."""
    least = None
    for batch in reversed(BATCHES):
        before = _scaled(plain.timing, batch, 0.0, plain.mode)
        after = _scaled(quantized.timing, batch, weight_seconds, quantized.mode)
        if after * LEAST_GAIN > before:
            break
        least = max(1, round(tokens * batch))
    return least


def _scaled(timing: Timing, batch: float, fixed: float, mode: str) -> float:
    """Seconds of a step with another batch: the GPU's time grows with it, the host's and ``fixed`` do not."""
    gpu = timing.gpu_seconds or timing.seconds
    grown = fixed + max(0.0, gpu - fixed) * batch
    return grown if mode == GRAPH else max(timing.host_seconds, grown)
