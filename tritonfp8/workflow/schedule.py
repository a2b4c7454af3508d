"""RecipeSchedule: change the recipe of a model at given training steps, such as bf16, then FP8, then bf16."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tritonfp8.compat import counting
from tritonfp8.conversion import ConversionReport, convert, swap_recipe
from tritonfp8.layers.linear import is_converted, require_module
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs.checks import require_type, shown

MAX_RECIPES = 7
"""Dynamo compiles a function at most eight times by default, and one more may be needed for another shape."""

log = logging.getLogger("tritonfp8")
Start = int | str


class _Stage(NamedTuple):
    start: int
    recipe: Recipe


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _tell_of_step() -> None:
    # Dynamo calls it while it traces, so that a compiled model is told of, too, and its graph does not break.
    log.warning(
        "the model ran a training forward before the first schedule.step(): call step() before the forward of each "
        "step, or the model keeps the recipe of the first step. Called after the forward, each change is a step late"
    )


class _FirstForward:
    """A hook until the first step of a schedule. It has no reference to the schedule: models are copied and pickled."""

    def __init__(self) -> None:
        self.has_told = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # tritonfp8.verify, which logs GEMMs, looks at a model before it trains.
        if not module.training or not torch.is_grad_enabled() or counting.is_logging or self.has_told:
            return
        if not torch.compiler.is_compiling():
            self.has_told = True
        _tell_of_step()


class RecipeSchedule:
    """The recipe of each training step, as stages that begin at given steps.

    A stage is ``(start, recipe)``. ``start`` is a step, counted from 0, or a share of ``total_steps`` such as
    ``"90%"``. ``recipe`` is a name or a :class:`~tritonfp8.Recipe`. The first stage starts at step 0::

        schedule = RecipeSchedule([(0, "bf16"), (1000, "rowwise"), ("90%", "bf16")], total_steps=10_000)
        schedule.convert(model)
        for batch in batches:
            schedule.step()
            loss = model(batch)
            ...

    :meth:`step` comes before the forward of a training step; a training forward before the first one is warned of.
    Parameters, the state of the optimizer and of random numbers stay. ``torch.compile`` compiles once for each recipe,
    and not again when the schedule returns to a recipe; a forward that is compiled before the first step is compiled
    once more after it.
    Only the step number decides, so all ranks of a distributed run change the recipe in the same step.

    Args:
        stages: ``(start, recipe)`` in ascending order of start.
        total_steps: number of steps in the training; needed for shares only.

    Raises:
        ValueError: no stage, a first stage that does not start at 0, starts that do not ascend, a share without
            ``total_steps`` or outside of 0 to 100 %, an unknown recipe, more than 7 different recipes, or no recipe
            that quantizes.
        TypeError: an argument of another type.
    """

    def __init__(self, stages: Sequence[tuple[Start, str | Recipe]], total_steps: int | None = None) -> None:
        if total_steps is not None:
            require_type("total_steps", total_steps, int, "an int or None")
        self.total_steps = total_steps
        self.stages = tuple(_Stage(self._step_of(start), get(recipe)) for start, recipe in stages)
        self._check()
        self.next_step = 0
        self._model: nn.Module | None = None
        self._applied: Recipe | None = None
        self._first_forward: RemovableHandle | None = None

    def _step_of(self, start: Start) -> int:
        if isinstance(start, int) and not isinstance(start, bool):
            return start
        if not isinstance(start, str) or not start.endswith("%"):
            raise TypeError(f"a stage starts at a step (an int) or at a share such as '90%'; got {start!r}")
        try:
            share = Fraction(start[:-1].strip()) / 100
        except ValueError as error:
            raise ValueError(f"a share needs a number before the percent sign, such as '90%'; got {start!r}") from error
        if not 0 <= share <= 1:
            raise ValueError(f"a share must lie between 0% and 100%; got {start!r}")
        if self.total_steps is None:
            raise ValueError(f"a stage that starts at {start!r} needs total_steps")
        return int(share * self.total_steps)

    def _check(self) -> None:
        starts = [stage.start for stage in self.stages]
        if not starts or starts[0] != 0:
            raise ValueError(f"the first stage must start at step 0; got starts {starts}")
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"each stage must start later than the one before; got starts {starts}")
        recipes = {stage.recipe for stage in self.stages}
        if len(recipes) > MAX_RECIPES:
            raise ValueError(
                f"a schedule may have {MAX_RECIPES} different recipes, because torch.compile stops compiling a "
                f"function after 8 times; got {len(recipes)}"
            )
        if not any(_quantizes(recipe) for recipe in recipes):
            raise ValueError(f"no stage quantizes: name one of FP8, not only {sorted(r.name for r in recipes)}")

    def __repr__(self) -> str:
        stages = [f"{stage.start}: {shown(stage.recipe.name, 24)}" for stage in self.stages]
        # The first stages, and the last one: 120 characters.
        shortened = [*stages[:2], f"{len(stages) - 3} more", stages[-1]] if len(", ".join(stages)) > 85 else stages
        return f"RecipeSchedule({', '.join(shortened)}, next_step={self.next_step})"

    @property
    def first_quantized(self) -> Recipe:
        """The recipe of the first stage in FP8, in which a model is converted."""
        return next(stage.recipe for stage in self.stages if _quantizes(stage.recipe))

    def recipe_at(self, step: int) -> Recipe:
        """The recipe of a step, counted from 0."""
        return [stage for stage in self.stages if stage.start <= step][-1].recipe

    def convert(self, model: nn.Module, *, all_gather: bool = False, **options: Any) -> ConversionReport:
        """Convert a model, and have it follow this schedule from the next step on.

        The model is first converted to the first recipe in FP8, and the FP8 all-gather is enabled, which needs such a
        recipe. Then it takes the recipe of the next step.

        Args:
            model: as for :func:`tritonfp8.convert`, or converted already.
            all_gather: also call :func:`tritonfp8.distributed.enable_float8_all_gather`.
            options: further arguments of :func:`tritonfp8.convert`.

        Returns:
            The report of :func:`tritonfp8.convert`.
        """
        require_module(model)
        report = convert(model, self.first_quantized, **options)
        if report.is_empty:
            # By filter="auto": there is no layer whose recipe could change.
            self._model = model
            return report
        if all_gather:
            from tritonfp8.distributed import enable_float8_all_gather

            enable_float8_all_gather(model)
        self.attach(model)
        return report

    def attach(self, model: nn.Module) -> None:
        """Have a converted model follow this schedule from the next step on."""
        require_module(model)
        if not _follows_recipes(model):
            raise ValueError("the model has no converted layer: use RecipeSchedule.convert")
        self._model = model
        self._apply(self.recipe_at(self.next_step))
        self._forget_first_forward()
        self._first_forward = model.register_forward_pre_hook(_FirstForward())

    def step(self, step: int | None = None) -> Recipe:
        """Give the model the recipe of the next training step; call it before the forward of that step.

        Args:
            step: the step, counted from 0. Default: one after the last.

        Returns:
            The recipe of this step.

        Raises:
            RuntimeError: the schedule has no model yet.
        """
        if self._model is None:
            raise RuntimeError("the schedule has no model: call RecipeSchedule.convert(model) first")
        self._forget_first_forward()
        step = self.next_step if step is None else step
        self.next_step = step + 1
        recipe = self.recipe_at(step)
        if recipe != self._applied:
            self._apply(recipe)
            log.info("step %d: recipe %s", step, recipe.name)
        return recipe

    def _forget_first_forward(self) -> None:
        if self._first_forward is not None:
            self._first_forward.remove()
            self._first_forward = None

    def _apply(self, recipe: Recipe) -> None:
        assert self._model is not None
        self._applied = recipe
        if not _follows_recipes(self._model):
            return
        # Layers that already follow an equal recipe keep its object, so nothing is compiled again.
        swap_recipe(self._model, recipe)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: the next step."""
        return {"next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved step; the model takes the recipe of that step."""
        self.next_step = int(state["next_step"])
        if self._model is not None:
            self._apply(self.recipe_at(self.next_step))


def _follows_recipes(model: nn.Module) -> bool:
    return any(is_converted(module) or is_converted_experts(module) for module in model.modules())


def _quantizes(recipe: Recipe) -> bool:
    return any(gemm.quantized for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight))
