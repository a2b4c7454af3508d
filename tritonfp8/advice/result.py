"""What :func:`tritonfp8.advise` returns: tables, one recommendation, and both as files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonfp8 import recipes
from tritonfp8.advice.steps import Timing
from tritonfp8.compat.machine import MISSING
from tritonfp8.recipes import Recipe
from tritonfp8.specs.checks import require_type
from tritonfp8.specs.naming import columns

BF16 = "bf16"
NONE, BLOCK, MODEL, GRAPH = "none", "block", "model", "graph"
MODES: Mapping[str, str] = {
    NONE: "eager",
    BLOCK: "compiled by block",
    MODEL: "compiled as one",
    GRAPH: "compiled by block, as a CUDA graph",
}
"""The ways to run a step, and what tables call them."""


@dataclass(frozen=True)
class LayerTime:
    """GPU time of a layer, forward and backward, in one recipe.

    Attributes:
        layer: its name, with a star for numbers that repeat.
        sizes: rows of its input, M; in features, K; out features, N. Of experts: tokens, experts, features outside and
            inside.
        count: how many of these layers the model has.
        contender: ``"bf16"`` or a recipe.
        seconds: of one layer.
        gemm_seconds, cast_seconds: of its GEMMs and casts; None if they were not told apart.
    """

    layer: str
    sizes: tuple[int, ...]
    count: int
    contender: str
    seconds: float
    gemm_seconds: float | None = None
    cast_seconds: float | None = None


@dataclass(frozen=True)
class BlockTime:
    """Time of a block of one kind, forward and backward.

    Attributes:
        block: the names of these blocks, with a star for numbers that repeat.
        count: how many the model has.
        contender: ``"bf16"`` or a recipe.
        mode: of :data:`MODES`.
        timing: of one block.
    """

    block: str
    count: int
    contender: str
    mode: str
    timing: Timing


@dataclass(frozen=True)
class StepTime:
    """Time of forward and backward of the model, predicted from its blocks.

    Attributes:
        contender: ``"bf16"`` or a recipe.
        mode: of :data:`MODES`.
        timing: of the step.
        speed_up: over bf16 in the same mode; None for a mode in which bf16 has no time.
    """

    contender: str
    mode: str
    timing: Timing
    speed_up: float | None

    @property
    def bound(self) -> str:
        """What the step waits for: ``"GPU, host 0.4"`` says that the host needs 0.4 of the GPU's time."""
        share = self.timing.host_share
        if self.mode == GRAPH or share is None:
            return "GPU" if self.mode == GRAPH else MISSING
        return f"{'host' if share > 1 else 'GPU'}, host {share:.2f}"


@dataclass(frozen=True)
class Recommendation:
    """What to do with the model.

    Attributes:
        contender: the recipe, or ``"bf16"``: convert nothing.
        layers: patterns of layers with their recipes, for :func:`tritonfp8.convert`; None for bf16.
        mode: of :data:`MODES`.
        speed_up: over bf16 in that mode.
        from_tokens: the fewest tokens in a step from which the recipe pays, as predicted from this run; None if none
            were found.
    """

    contender: str
    layers: Mapping[str, Recipe] | None
    mode: str
    speed_up: float
    from_tokens: int | None

    def __str__(self) -> str:
        how = MODES[self.mode]
        pays = "" if self.from_tokens is None else f"; it pays from about {self.from_tokens} tokens a step"
        if self.layers is None:
            return f"stay in bf16, {how}: no recipe is faster by 2 %{pays}"
        return f"{self.contender}, {how}: {self.speed_up:.2f} of bf16's speed{pays}"

    def save(self, path: str | Path) -> None:
        """Write the layers and their recipes to a TOML file, which :func:`tritonfp8.convert` reads.

        Raises:
            ValueError: the recommendation is bf16.
            OSError: the file cannot be written.
        """
        if self.layers is None:
            raise ValueError("the recommendation is bf16: there is no mapping of layers to save")
        recipes.save(self.layers, path)


@dataclass(frozen=True)
class WholeStep:
    """Forward and backward of the uncut model, measured to check the prediction.

    Attributes:
        contender: ``"bf16"`` or a recipe.
        mode: of :data:`MODES`.
        timing: as measured.
        predicted_seconds: of the step.
    """

    contender: str
    mode: str
    timing: Timing
    predicted_seconds: float


@dataclass(frozen=True)
class Advice:
    """Times of a model in bf16 and in recipes, and a recommendation; ``str(advice)`` is a report.

    A step is forward and backward. The optimizer's time, which does not depend on the recipe, is not in it.

    Attributes:
        machine: what was measured on; for a prediction the name of the machine that it is for.
        measured: False for a prediction.
        tokens: rows of the largest input of a layer.
        layers, blocks, steps: the times.
        recommendation: None if not enough was measured before Ctrl-C.
        checks: times of the uncut model, if they were asked for.
        notes: what a reader must know, such as why a step could not be captured.
        interrupted: whether Ctrl-C ended the measurement.
    """

    machine: Mapping[str, Any]
    measured: bool
    tokens: int
    layers: tuple[LayerTime, ...]
    blocks: tuple[BlockTime, ...]
    steps: tuple[StepTime, ...]
    recommendation: Recommendation | None
    checks: tuple[WholeStep, ...] = ()
    notes: tuple[str, ...] = field(default=())
    interrupted: bool = False

    def __str__(self) -> str:
        how = "measured on" if self.measured else "PREDICTED, not measured, for"
        lines = [f"{how} {self.machine['name']}, {self.tokens} tokens; times of forward and backward"]
        lines += _titled("layers, us on the GPU", _LAYERS, _layer_rows(self.layers))
        lines += _titled("blocks, ms", _BLOCKS, _block_rows(self.blocks))
        lines += _titled("step, ms", _STEPS, _step_rows(self.steps))
        lines += _titled("whole model, measured, ms", _CHECKS, _check_rows(self.checks))
        lines += [""]
        lines += [f"note: {note}" for note in self.notes]
        lines += ["interrupted: what was finished before is shown"] if self.interrupted else []
        lines += [f"recommendation: {self.recommendation or 'none, too little was measured'}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Advice: {self.recommendation or 'interrupted'}>"

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        found = dataclasses.asdict(dataclasses.replace(self, recommendation=None))
        recommended = self.recommendation
        if recommended is not None:
            layers = None if recommended.layers is None else {p: r.name for p, r in recommended.layers.items()}
            found["recommendation"] = {**vars(recommended), "layers": layers, "text": str(recommended)}
        return found

    def save(self, path: str | Path) -> None:
        """Write it as JSON; replaces the file."""
        require_type("path", path, str | Path, "a str or a Path")
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")


_LAYERS = ("layer", "sizes", "count", "in", "time", "GEMMs", "casts", "over bf16")
_BLOCKS = ("block", "in", "mode", "time", "host", "GPU", "over bf16")
_STEPS = ("in", "mode", "time", "over bf16", "bound by", "peak GiB", "first step, s")
_CHECKS = ("in", "mode", "time", "predicted", "predicted / measured", "peak GiB")
Rows = list[tuple[str, ...]]


def _titled(title: str, head: tuple[str, ...], rows: Rows) -> list[str]:
    return ["", title, *columns([head, *rows])] if rows else []


def _us(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{1e6 * seconds:.0f}"


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{1e3 * seconds:.2f}"


def _gib(size: int | None) -> str:
    return MISSING if size is None else f"{size / 2**30:.2f}"


def _over(seconds: float, plain: float | None) -> str:
    return MISSING if not plain else f"{plain / seconds:.2f}"


def _layer_rows(layers: tuple[LayerTime, ...]) -> Rows:
    plain = {(each.layer, each.sizes): each.seconds for each in layers if each.contender == BF16}
    return [
        (
            each.layer,
            " x ".join(map(str, each.sizes)),
            str(each.count),
            each.contender,
            _us(each.seconds),
            _us(each.gemm_seconds),
            _us(each.cast_seconds),
            _over(each.seconds, plain.get((each.layer, each.sizes))),
        )
        for each in layers
    ]


def _block_rows(blocks: tuple[BlockTime, ...]) -> Rows:
    plain = {(each.block, each.mode): each.timing.seconds for each in blocks if each.contender == BF16}
    return [
        (
            each.block,
            each.contender,
            MODES[each.mode],
            _ms(each.timing.seconds),
            _ms(each.timing.host_seconds),
            _ms(each.timing.gpu_seconds),
            _over(each.timing.seconds, plain.get((each.block, each.mode))),
        )
        for each in blocks
    ]


def _step_rows(steps: tuple[StepTime, ...]) -> Rows:
    return [
        (
            each.contender,
            MODES[each.mode],
            _ms(each.timing.seconds),
            MISSING if each.speed_up is None else f"{each.speed_up:.2f}",
            each.bound,
            _gib(each.timing.peak_bytes),
            f"{each.timing.first_seconds:.1f}" if each.timing.first_seconds else MISSING,
        )
        for each in steps
    ]


def _check_rows(checks: tuple[WholeStep, ...]) -> Rows:
    return [
        (
            each.contender,
            MODES[each.mode],
            _ms(each.timing.seconds),
            _ms(each.predicted_seconds),
            f"{each.predicted_seconds / each.timing.seconds:.2f}",
            _gib(each.timing.peak_bytes),
        )
        for each in checks
    ]
