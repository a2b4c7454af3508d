"""Generation by continuous batching of transformers: sequences of any lengths over a cache in pages.

A sequence that ends makes room for one that waits. Two processors of logits do what ``generate`` does: the first sees
the model's own logits, the last chooses each token and keeps its log-prob, at a place of the sequence and the step. So
neither the order in which sequences run nor their number at a time decides anything.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from tritonfp8.rollout.exact import PAGED_NAME
from tritonfp8.rollout.scoring import RawLogits, chosen_log_probs, processing

# Tokens of a block of pages, and the most tokens of a step, unless a caller's config says otherwise.
_BLOCK, _STEP = 32, 8192
_SECONDS = 0.1


@functools.cache
def _chooser() -> Any:
    """The class of the last processor; transformers is imported on demand."""
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

    class Chooser(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
        """Leaves each row the token that it chose, and keeps its log-prob.

        Args:
            seen: the first processor.
            lengths: the number of tokens of each prompt, by the name of its request.
            new: the most tokens of a sequence.
            temperature: of the log-probs.
            noise: float64 in [0, 1) by sequence and step, ``[B * new + 1]``; None for the most probable token.

        Attributes:
            found: float32 ``[B * new + 1]``, log-probs. The last entry is of rows without a sequence.
        """

        supported_kwargs: ClassVar[dict[str, type]] = {}
        ignored_kwargs: ClassVar[tuple[str, ...]] = ()

        def __init__(
            self,
            seen: RawLogits,
            lengths: Sequence[int],
            new: int,
            temperature: float,
            noise: Tensor | None,
            device: Any,
        ) -> None:
            self._seen, self._lengths, self._new, self._most = seen, lengths, new, 0
            self._temperature, self._noise = temperature, noise
            self.found = torch.zeros(len(lengths) * new + 1, device=device)

        def fill_defaults(self, int32_tensor: Tensor) -> None:
            """The place of a row without a sequence."""
            int32_tensor.fill_(len(self.found) - 1)

        def prepare_tensor_args(self, given: list[Any]) -> Tensor:
            """The place of each row: the position of a new token says its step, also after a request began again."""
            places = [self._place(int(each.state.request_id), each.state.position_offset) for each in given]
            self._most = max(self._most, len(places))
            # A step has a row for each sequence, and behind these places transformers leaves others of a step before.
            places += [len(self.found) - 1] * (self._most - len(places))
            return torch.tensor(places, dtype=torch.int32)

        def _place(self, row: int, position: int) -> int:
            step = position - self._lengths[row]
            # transformers drops a token behind the last one.
            return row * self._new + step if 0 <= step < self._new else len(self.found) - 1

        def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
            """``scores`` float32 ``[n, vocabulary]``, 0 at the chosen tokens and -inf elsewhere."""
            places = tensor_arg[: len(scores)].long()
            tokens = scores.argmax(-1) if self._noise is None else _drawn(scores, self._noise[places])
            self.found.index_copy_(0, places, chosen_log_probs(self._seen.logits, tokens, self._temperature))
            return torch.full_like(scores, -torch.inf).scatter(-1, tokens[:, None], 0.0)

    return Chooser


def _drawn(scores: Tensor, noise: Tensor) -> Tensor:
    """The token of each row at which the sum of probabilities passes ``noise``, int64 ``[n]``."""
    sums = torch.softmax(scores.double(), -1).cumsum(-1)
    found = torch.searchsorted(sums, noise[:, None] * sums[:, -1:], right=True)[:, 0]
    return found.clamp(max=scores.shape[-1] - 1)


def generate_paged(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new: int,
    temperature: float,
    do_sample: bool,
    options: dict[str, Any],
    computing: Any,
) -> tuple[list[list[int]], Tensor]:
    """Generate from prompts of any lengths.

    Args:
        model: an exact model of transformers in eval mode.
        prompts: the tokens of each.
        new: the most tokens of a sequence.
        temperature, do_sample: as for :meth:`Rollout.generate`.
        options: of the generation config, and ``continuous_batching_config``.
        computing: makes the autocast in which the model computes.

    Returns:
        The new tokens of each prompt, and their log-probs, float32 ``[B, new]``, 0 behind the last one.

    Raises:
        RuntimeError: a sequence failed, with the text of its error.
        ValueError: an option that the generation config does not have.
    """
    from transformers import ContinuousBatchingConfig

    settings = options.pop("continuous_batching_config", None) or ContinuousBatchingConfig(
        block_size=_BLOCK, num_blocks=_blocks(model, prompts, new), max_batch_tokens=_STEP
    )
    config = copy.deepcopy(model.generation_config)
    if unknown := config.update(**options, do_sample=do_sample):
        raise ValueError(f"continuous batching takes options of the generation config; got {', '.join(unknown)}")
    end = config.eos_token_id = -1 if config.eos_token_id is None else config.eos_token_id
    seen, places = RawLogits(), len(prompts) * new + 1
    noise = torch.rand(places, dtype=torch.float64, device=model.device) if do_sample else None
    chooser = _chooser()(seen, [len(each) for each in prompts], new, temperature, noise, model.device)
    if model.device.type == "cuda":
        # The steps run on another stream.
        torch.cuda.synchronize(model.device)
    with processing(model, seen, chooser), _paged(model, computing):
        manager = model.init_continuous_batching(config, settings)
        # The list counts the processors that it converts only.
        manager.logit_processor.tensors_required += 1
        manager.start()
        try:
            for row, ids in enumerate(prompts):
                manager.add_request(list(ids), str(row), max_new_tokens=new, eos_token_id=end)
            results = _results(manager, len(prompts))
        finally:
            # Without waiting for what still runs, if it was interrupted.
            manager.stop(block=True, hard_stop=True)
            manager.destroy()
    tokens = [results[row] for row in range(len(prompts))]
    found = chooser.found[:-1].view(len(prompts), new)
    behind = torch.arange(new, device=found.device) >= torch.tensor([[len(row)] for row in tokens], device=found.device)
    return tokens, found.masked_fill(behind, 0.0)


def _results(manager: Any, count: int) -> dict[int, list[int]]:
    results: dict[int, list[int]] = {}
    while len(results) < count:
        found = manager.get_result(timeout=_SECONDS)
        if found is None:
            if not manager.is_running() or manager.background_thread_status.fatal_error is not None:
                error = manager.background_thread_status.fatal_error
                raise RuntimeError(f"continuous batching ended early: {error}") from error
        elif found.error is not None:
            raise RuntimeError(f"sequence {found.request_id} was not generated: {found.error}")
        elif found.is_finished():
            results[int(found.request_id)] = found.generated_tokens
    return results


def _blocks(model: Any, prompts: Sequence[Sequence[int]], new: int) -> int:
    """Blocks for all tokens, of each group of layers: transformers lets as many layers of a kind share a block."""
    config = model.config.get_text_config(decoder=True)
    kinds = Counter(getattr(config, "layer_types", None) or ["one"] * config.num_hidden_layers).values()
    groups = sum(kinds) // math.gcd(*kinds)
    # A sequence begins only while some are free, beside what others may still need.
    return groups * sum(-(-(len(ids) + new) // _BLOCK) + 1 for ids in prompts) + groups * 4


@contextmanager
def _paged(model: Any, computing: Any) -> Iterator[None]:
    """Let the model read pages, in the autocast of the caller also in another thread."""
    before, forward = model.config._attn_implementation, model.forward

    @functools.wraps(forward)
    def computed(*args: Any, **options: Any) -> Any:
        with computing():
            return forward(*args, **options)

    own = vars(model).get("forward")
    model.set_attn_implementation(PAGED_NAME)
    model.forward = computed
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own
        model.set_attn_implementation(before)
