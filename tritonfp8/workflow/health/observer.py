"""Hooks that measure the operands of one step. Between sampled steps a model has no hooks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tritonfp8.conversion.selection import converted_experts, converted_layers
from tritonfp8.layers import versions
from tritonfp8.layers.linear import Float8Conv1D, Float8Linear, rounded
from tritonfp8.layers.moe import ConvertedExperts
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.naming import unwrapped
from tritonfp8.workflow.health.groups import Key, StepOperands
from tritonfp8.workflow.health.statistics import local_matrices, local_matrix


def layer_names(model: nn.Module) -> dict[str, Float8Linear | Float8Conv1D]:
    """The converted layers by the names that ``convert`` gave them."""
    return {unwrapped(name): layer for name, layer in converted_layers(model).items()}


def expert_names(model: nn.Module) -> dict[str, ConvertedExperts]:
    """The converted experts by the names that ``convert`` gave them."""
    return {unwrapped(name): module for name, module in converted_experts(model).items()}


def spec_of_operand(recipe: Recipe, operand: str) -> QuantSpec | None:
    """How an operand is quantized, untransposed: for ``output``, or for ``grad_input`` if it is a gradient."""
    return {"input": recipe.output.lhs, "weight": recipe.output.rhs, "grad_output": recipe.grad_input.lhs}[operand]


def eager() -> Any:
    """A context in which compiled code runs eagerly, so that hooks see it. Nothing is compiled, or compiled again."""
    return torch.compiler.set_stance("force_eager")


def input_of(layer_input: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor | None:
    """The input in the arguments of a layer's forward; None if it is no tensor."""
    x = layer_input[0] if layer_input else next(iter(options.values()), None)
    return x if isinstance(x, Tensor) else None


def _matrix_of(layer: Float8Linear | Float8Conv1D) -> Tensor:
    weight = local_matrix(layer.weight)
    return weight.t() if isinstance(layer, Float8Conv1D) else weight


def _as_read(weight: Tensor, recipe: Recipe) -> Tensor:
    """A weight as it is quantized: rounded, if the recipe rounds it before."""
    return rounded(weight, recipe.weights) if recipe.weights is not None and _has_values(weight) else weight


def _has_values(x: Tensor) -> bool:
    """Whether there is anything to measure: an expert without tokens has an empty input."""
    return x.numel() > 0 and not x.is_meta


class _Seen(NamedTuple):
    """The last input that was measured. Layers that read one tensor, such as q, k and v, have equal figures."""

    tensor: weakref.ref[Tensor]
    versions: object
    spec: QuantSpec | None
    key: Key

    def serves(self, x: Tensor, spec: QuantSpec | None) -> bool:
        """Whether ``x`` is that tensor, not written to since, and quantized alike."""
        return self.tensor() is x and self.spec == spec and self.versions is not None and self.versions == versions(x)


class _ExpertsOfModel:
    """Notes what the layers of one module of experts read: see :class:`tritonfp8.layers.moe.ExpertsObserver`."""

    def __init__(self, observer: Observer, name: str, recipe: Recipe, groups: StepOperands) -> None:
        self._observer, self._name, self._recipe, self._groups = observer, name, recipe, groups

    def saw_input(self, weight: str, rows: Tensor, offsets: Tensor) -> None:
        self._observer.has_run = True
        self._observer.note(f"{self._name}.{weight}", "input", local_matrix(rows), self._recipe)

    def saw_output(self, weight: str, out: Tensor) -> None:
        name, recipe, groups = f"{self._name}.{weight}", self._recipe, self._groups
        if out.requires_grad:
            out.register_hook(lambda grad: self._observer.note_grad(name, grad, recipe, groups))


class Observer:
    """Measures the operands of the converted layers of a model, from :meth:`start` to :meth:`stop`.

    Weights are measured at the start, when FSDP2 has them in shards and in high precision. Of the other operands, the
    first one that a layer sees is measured: gradient accumulation and checkpointing call layers more than once. Each
    weight of experts counts as a layer.

    Attributes:
        groups: the operands so far.
        has_run: whether a layer has run since the start.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        self._model, self._rows = model, rows
        self._stack = ExitStack()
        self.groups = StepOperands(rows)
        self.has_run = False
        self._seen: _Seen | None = None

    def start(self) -> None:
        """Register the hooks, and measure the weights."""
        self.groups, self.has_run, self._seen = StepOperands(self._rows), False, None
        with ExitStack() as stack:
            stack.enter_context(eager())
            layers = layer_names(self._model)
            for name, layer in layers.items():
                stack.callback(self._hook(name, layer).remove)
            self.groups.measure_now(
                ((name, "weight"), weight, spec_of_operand(layer.recipe, "weight"))
                for name, layer in layers.items()
                if _has_values(weight := _as_read(_matrix_of(layer), layer.recipe))
            )
            for name, module in expert_names(self._model).items():
                self._observe_experts(name, module, stack)
            self._stack = stack.pop_all()

    def _observe_experts(self, name: str, module: ConvertedExperts, stack: ExitStack) -> None:
        """Measure the weights of experts, and have the module tell of its rows and outputs until ``stack`` closes."""
        recipe, groups = module.recipe, self.groups
        for key, weight in module.weights(local_matrices).items():
            if _has_values(weight := _as_read(weight, recipe)):
                groups.measure_matrices((f"{name}.{key}", "weight"), weight, spec_of_operand(recipe, "weight"))

        module.observer = _ExpertsOfModel(self, name, recipe, groups)
        stack.callback(module.__dict__.pop, "observer", None)

    def stop(self) -> dict[Key, Tensor]:
        """Remove the hooks. Returns the figures by layer and operand, on their devices."""
        self._stack.close()
        groups, self.groups = self.groups, StepOperands(self._rows)
        return groups.figures()

    def note(self, name: str, operand: str, x: Tensor, recipe: Recipe) -> bool:
        """Add an operand; returns whether it is measured."""
        if (name, operand) in self.groups or not _has_values(x):
            return False
        self.groups.add((name, operand), x, spec_of_operand(recipe, operand))
        return True

    def _note_input(self, name: str, x: Tensor, recipe: Recipe) -> None:
        key, spec = (name, "input"), spec_of_operand(recipe, "input")
        if self._seen is not None and key not in self.groups and self._seen.serves(x, spec):
            self.groups.add_equal(key, self._seen.key)
        else:
            added = self.note(name, "input", local_matrix(x), recipe)
            self._seen = _Seen(weakref.ref(x), versions(x), spec, key) if added else None

    def note_grad(self, name: str, grad: Tensor, recipe: Recipe, groups: StepOperands) -> None:
        """Add a gradient, if ``groups`` still belong to this step."""
        # A backward after the end of its step belongs to no sample.
        if groups is self.groups:
            self.note(name, "grad_output", local_matrix(grad), recipe)

    def _hook(self, name: str, layer: nn.Module) -> RemovableHandle:
        def after_forward(module: Any, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            self.has_run = True
            recipe, x, groups = module.recipe, input_of(args, options), self.groups
            if x is not None:
                self._note_input(name, x, recipe)
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda grad: self.note_grad(name, grad, recipe, groups))

        return layer.register_forward_hook(after_forward, with_kwargs=True)
