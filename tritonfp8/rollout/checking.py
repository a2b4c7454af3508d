"""check: whether a generator and the trainer's forward give the same log-probs, and if not, where they part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.conversion import bare
from tritonfp8.layers import Fingerprints
from tritonfp8.layers.linear import quantize_weights_once
from tritonfp8.rollout.generator import Generated, Rollout
from tritonfp8.rollout.scoring import inside, log_probs
from tritonfp8.rollout.sharing import OwnWeight
from tritonfp8.specs.checks import require_type
from tritonfp8.specs.naming import listed

_Seen = dict[tuple[str, int, str], list[Tensor]]


@dataclass(frozen=True)
class Checked:
    """What :func:`check` found.

    Attributes:
        max_difference: the largest \\|difference\\| of the log-probs of a token; NaN if one is NaN.
        module: the first module, in the order of execution, that gives another output for the same input, or that hands
            another input to a module inside of it. None if there is no difference, or no module shows it.
        reads: the module inside of ``module`` whose input differs, so that ``module`` itself computed it otherwise;
            None if the output of ``module`` differs.
        codes: the weights whose codes are others than the trainer's forward makes now.
        tokens: how many tokens were compared.
        generated: what the generator gave.
    """

    max_difference: float
    module: str | None
    reads: str | None
    codes: tuple[str, ...]
    tokens: int
    generated: Generated

    def __str__(self) -> str:
        lines = [f"largest difference of the log-probs of {self.tokens} tokens: {self.max_difference:.3g}"]
        if self.codes:
            lines.append(f"codes that the trainer's forward does not make: {listed(self.codes)}")
        if self.module is not None and self.reads is not None:
            lines.append(f"first difference: {self.module or 'the model'} computes other input for {self.reads}")
        elif self.module is not None:
            lines.append(f"first difference: {self.module} computes another output from the same input")
        elif self.max_difference != 0:
            lines.append(
                "no module differs in single calls with a cache of transformers' generate: the difference comes from "
                "compiled code, or from the cache that was asked for"
            )
        return "\n".join(lines)


def check(
    model: nn.Module, rollout: Rollout, prompts: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> Checked:
    """Generate, score the same tokens by the trainer's forward, and compare.

    The trainer's forward runs as it trains: in the mode that the model is in, with gradients recorded, in the autocast
    of the rollout, on all T tokens at once. If log-probs differ, both models run the same tokens again, without
    compiled code: the generator as it generates, with a cache, token by token. A checksum of what each module reads and
    returns for each token is compared, of the first floating tensor of each.

    Args:
        model: the model that ``rollout`` was made of. Under FSDP2 all ranks call this together.
        rollout: refreshed.
        prompts, attention_mask, options: as for :meth:`Rollout.generate`.

    Returns:
        :class:`Checked`; ``str`` of it says what was found.

    Raises:
        ValueError: the rollout was made of another model; and as :meth:`Rollout.generate`.
        RuntimeError: as :meth:`Rollout.generate`.
    """
    require_type("rollout", rollout, Rollout, "a tritonfp8.rollout.Rollout")
    if inside(model) is not rollout.trainer:
        raise ValueError("the rollout was made of another model than the one that is checked")
    temperature = options.get("temperature", 1.0)
    generated = rollout.generate(prompts, attention_mask, **options)
    new = generated.mask.shape[1]

    def score(by: nn.Module) -> Tensor:
        with rollout.computing(), torch.enable_grad():
            return log_probs(by, generated.sequences, generated.attention_mask, new, temperature).detach()

    differences = (score(model) - generated.log_probs).abs()[generated.mask]
    found = float(differences.max()) if differences.numel() else 0.0
    codes = tuple(each.name for each in rollout.own if each.stored and not _has_codes_of_training(each, rollout))
    place: tuple[str | None, str | None] = (None, None)
    # Of a sharded model every rank takes part in each forward, whatever it found itself.
    if found != 0 or any(each.gathers is not None for each in rollout.own):
        trained = _seen(rollout.trainer, generated, lambda: score(bare(model)))
        replayed = _seen(rollout.model, generated, lambda: _generate_again(rollout, generated, options))
        if found != 0:
            place = _first_difference(trained, replayed, generated.attention_mask)
    return Checked(found, *place, codes, int(generated.mask.sum()), generated)


@torch.no_grad()
def _has_codes_of_training(own: OwnWeight, rollout: Rollout) -> bool:
    """Whether the codes are what the layer itself quantizes its weight to, as far as it does so on this rank."""
    layer: Any = own.source
    with quantize_weights_once(layer, rollout.autocast):
        cached = (getattr(layer, "cached_weights", None) or {}).get(own.key) or getattr(layer, "cached_weight", None)
        operand = None if cached is None else cached.operands[0]
        if operand is None:
            return True
        tensor: Any = own.tensor
        read = (tensor.mT if tensor.is_transposed else tensor).read_operand(operand.spec, False)
        pairs = zip((operand.qdata, operand.scale), read, strict=True)
        return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


class _Forced:
    """A processor of transformers that leaves each row one token: the one that it generated before."""

    def __init__(self, sequences: Tensor) -> None:
        self._sequences = sequences

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` float32 ``[B, vocabulary]`` of the token behind ``input_ids``."""
        chosen = self._sequences[:, input_ids.shape[1], None]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def _generate_again(rollout: Rollout, generated: Generated, options: dict[str, Any]) -> None:
    """Generate the same tokens, by the same calls of the model without compiled code."""
    start = generated.sequences.shape[1] - generated.mask.shape[1]
    prompts, mask = generated.sequences[:, :start], generated.attention_mask[:, :start]
    same = {"do_sample": False, "compile": False, "num_return_sequences": 1}
    if options.get("cache_implementation") == "paged":
        # There, tokens of all sequences are one row, in another order each time.
        options = {k: x for k, x in options.items() if k not in ("cache_implementation", "continuous_batching_config")}
    rollout.generate(prompts, mask, **{**options, **same, "logits_processor": [_Forced(generated.sequences)]})


def _seen(model: nn.Module, generated: Generated, run: Callable[[], object]) -> _Seen:
    """Checksums of what each module reads and returns, while ``run`` runs: int64 ``[B, tokens of a call]`` by name,
    number of the call in a forward, and side. Every module that runs has an entry.
    """
    seen: _Seen = {}
    calls: Counter[str] = Counter()
    # Until a call of the model says otherwise: peft calls the forward of the model inside, and not the model.
    sums, (batch, tokens) = Fingerprints(), generated.sequences.shape
    # A head may leave out the tokens whose logits nobody reads.
    of_head = (1, generated.mask.shape[1] + 1)

    def note(name: str, side: str, values: Iterable[Any]) -> None:
        columns = seen.setdefault((name, calls[name], side), [])
        x = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
        if x is None or x.ndim < 2:
            return
        # Rows are tokens: [B, tokens, ...], or [B * tokens, ...] in mixtures of experts.
        rows = x.flatten(0, 1).flatten(1) if x.ndim > 2 else x
        if rows.shape[0] in [batch * n for n in (tokens, *of_head)]:
            columns.append(sums.of_rows(rows).view(batch, -1))

    def before(name: str, module: Any, args: Any, options: Any) -> None:
        nonlocal tokens
        if not name:
            calls.clear()
            tokens = options["input_ids"].shape[1]
        note(name, "input", (*args, *options.values()))

    def after(name: str, module: Any, args: Any, out: Any) -> None:
        note(name, "output", out if isinstance(out, tuple | list) else (out,))
        calls[name] += 1

    with ExitStack() as stack:
        for name, module in model.named_modules():
            handles = (
                module.register_forward_pre_hook(partial(before, name), with_kwargs=True),
                module.register_forward_hook(partial(after, name)),
            )
            for handle in handles:
                stack.callback(handle.remove)
        run()
    return seen


def _first_difference(trained: _Seen, replayed: _Seen, mask: Tensor) -> tuple[str | None, str | None]:
    """The module at fault, and the module inside of it that reads the difference; see :class:`Checked`.

    The last token of a sequence is only in the trainer's forward, and an output head may compute the last tokens only.
    """
    ran = {name for name, _, _ in trained}
    for key, columns in trained.items():
        name, _, side = key
        if not columns or not replayed.get(key):
            continue
        one, two = torch.cat(columns, 1)[:, :-1], torch.cat(replayed[key], 1)
        n = min(one.shape[1], two.shape[1])
        if n and bool(((one[:, -n:] != two[:, -n:]) & (mask[:, -n - 1 : -1] == 1)).any()):
            if side == "output":
                return name, None
            # A list of modules is no module that runs.
            above = (name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
            return next((found for found in above if found in ran), ""), name
    return None, None
