"""sensitivity(): the error that each recipe causes in the GEMMs of each layer, and a recipe for each layer."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.conversion import swap_recipe
from tritonfp8.conversion.selection import converted, converted_experts, select
from tritonfp8.functional import quantize, scaled_matmul
from tritonfp8.layers.linear import is_conv1d, is_converted, require_module, rounded
from tritonfp8.layers.moe import (
    ConvertedExperts,
    computing_class,
    convert_experts,
    experts_before,
    is_converted_experts,
    revert_experts,
)
from tritonfp8.recipes import OPERANDS, Gemm, Recipe, get
from tritonfp8.recipes import save as save_recipes
from tritonfp8.specs.checks import require_type
from tritonfp8.specs.naming import listed, repeated
from tritonfp8.workflow.health.observer import input_of
from tritonfp8.workflow.health.statistics import local_matrices, local_matrix
from tritonfp8.workflow.outputs import floating_tensors, keywords, own_loss, total
from tritonfp8.workflow.unchanged import unchanged

MAX_ERROR_DB = -20.0
"""The error that :meth:`Sensitivity.mapping` allows by default: noise of a tenth of the result's amplitude. Of normal
data the built-in recipes have about -28 dB, and GEMMs with an e5m2 operand about -24 dB."""

Errors = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Sensitivity:
    """What :func:`sensitivity` returns; ``str()`` is a table of the layers, the most sensitive first; repeated
    layers that get the same recipe from :meth:`mapping` are one line.

    Attributes:
        recipes: in the order that was given.
        errors: by layer, name of a recipe, and GEMM: noise over signal in dB. -30 is better than -20.
    """

    recipes: tuple[Recipe, ...]
    errors: Errors

    def error(self, layer: str, recipe: str | Recipe) -> float:
        """The largest error of the layer's GEMMs by a recipe, in dB."""
        return max(self.errors[layer][recipe if isinstance(recipe, str) else recipe.name].values())

    def ranking(self, recipe: str | Recipe | None = None) -> list[str]:
        """The layers, the largest error first: with ``recipe``, or by default with the recipe that hurts each most."""
        asked = self.recipes if recipe is None else (recipe,)
        return sorted(self.errors, key=lambda layer: max(self.error(layer, each) for each in asked), reverse=True)

    def mapping(self, max_error_db: float = MAX_ERROR_DB, budget: int | None = None) -> dict[str, Recipe]:
        """A recipe for each layer, as :func:`tritonfp8.convert` and :func:`tritonfp8.swap_recipe` take them.

        A layer gets the first recipe, in the order that was given, whose error is within ``max_error_db``. Give the
        fastest recipe first. A layer that no recipe serves gets ``bf16``.

        Args:
            max_error_db: the largest error of a GEMM, in dB.
            budget: how many layers, from the largest error on, may get another recipe than the first. Default: all.

        Raises:
            ValueError: a negative budget.
        """
        first = self.recipes[0]
        order = self.ranking(first)
        if budget is not None and budget < 0:
            raise ValueError(f"budget must be at least 0; got {budget}")
        free = order if budget is None else order[:budget]
        found = {}
        for layer in self.errors:
            within = (each for each in self.recipes if self.error(layer, each) <= max_error_db)
            # A name is a pattern in a mapping.
            found[glob.escape(layer)] = next(within, get("bf16")) if layer in free else first
        return found

    def save(self, path: str | Path, max_error_db: float = MAX_ERROR_DB, budget: int | None = None) -> None:
        """Write :meth:`mapping` to a TOML file, which :func:`tritonfp8.convert` and the command take as a recipe.

        Replaces the file.

        Args:
            path: ends in ``.toml``.
            max_error_db, budget: as for :meth:`mapping`.

        Raises:
            ValueError: another ending, by which the file would not be read; a negative budget; or two recipes of one
                name.
            TypeError: ``path`` is neither a str nor a Path.
            OSError: the file cannot be written.
        """
        require_type("path", path, str | Path, "a str or a Path")
        if not str(path).endswith(".toml"):
            raise ValueError(f"the path of a file of recipes must end in .toml; got {str(path)!r}")
        save_recipes(self.mapping(max_error_db, budget), path)

    def __str__(self) -> str:
        mapping, first = self.mapping(), self.recipes[0]
        kept = sum(recipe is first for recipe in mapping.values())
        chosen = {layer: mapping[glob.escape(layer)].name for layer in self.errors}
        groups = repeated((layer, chosen[layer]) for layer in self.ranking())
        width = max(map(len, ("layer", *(each.label for each in groups))))
        lines = [
            f"{kept} of {len(self.errors)} layers are within {MAX_ERROR_DB:.0f} dB by {first.name!r} in each GEMM",
            f"{'layer':<{width}}  {'  '.join(each.name for each in self.recipes)}  choice",
        ]
        for each in groups:
            worst = {r.name: max(self.error(layer, r) for layer in each.names) for r in self.recipes}
            cells = (f"{error:>{len(name)}.1f}" for name, error in worst.items())
            lines.append(f"{each.label:<{width}}  {'  '.join(cells)}  {each.verdict}")
        return "\n".join([*lines, "tritonfp8.convert(model, sensitivity.mapping()) gives each layer its choice"])

    def __repr__(self) -> str:
        return f"<Sensitivity: {str(self).partition(chr(10))[0]}>"


def sensitivity(
    model: nn.Module,
    batch: Any,
    recipes: Sequence[str | Recipe] = ("rowwise", "blockwise", "mxfp8"),
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Sensitivity:
    """Rank the linear layers of a model by the error that each recipe causes in them, by one forward and backward.

    The model runs in high precision. From the operands of each layer its three GEMMs are computed once more by each
    recipe, and compared with float32. So the error of a layer is its own, without errors of the layers before it. The
    error is the mean of noise over signal of the rows of a result, or of its columns if that is worse, so one large row
    hides no other. Of a layer that runs more than once, the first call counts. The experts of a module are a layer,
    with the error of the worst GEMM of an expert; each rank measures its own experts.

    Parameters, gradients, buffers, recipes, training flags and torch's random numbers are afterwards as they were.

    Args:
        model: converted or not. In an unconverted model, the layers that ``convert`` would take are measured.
        batch: what the model takes: a mapping of keywords of its forward, a tuple or list of arguments, or one of them.
        recipes: names or :class:`~tritonfp8.Recipe`, the fastest first.
        loss: ``loss(model, batch)`` returns a scalar. Default: the ``loss`` of the model's output, or the sum of the
            mean squares of its floating tensors.

    Raises:
        ValueError: no recipe, two of one name, no layer, no layer that ran, or a weight of an unknown type.
        TypeError: an argument of another type, or an output without a loss and without floating tensors.
    """
    require_module(model)
    found = tuple(get(recipe) for recipe in recipes)
    if not found or len({recipe.name for recipe in found}) < len(found):
        raise ValueError(f"recipes must be one or more of different names; got {[recipe.name for recipe in found]}")
    selected = select(model, "bf16", None, 8192)
    layers: dict[str, nn.Module] = {**selected.already, **selected.modules}
    if not layers:
        raise ValueError("the model has no linear layer and no experts that convert takes")
    trial = _Trial(found)
    with _in_high_precision(model, selected.modules), ExitStack() as stack:
        experts = converted_experts(model)
        for name, module in model.named_modules():
            if name in experts:
                experts[name].observer = _ExpertsTrial(trial, name, experts[name])
                stack.callback(module.__dict__.pop, "observer", None)
            elif name in layers:
                stack.callback(module.register_forward_hook(trial.hook(name), with_kwargs=True).remove)
        with torch.enable_grad():
            scalar = (loss or _default_loss)(model, batch)
            # A frozen model has an error of its output only.
            if scalar.requires_grad:
                scalar.backward()
    if not trial.errors:
        raise ValueError(f"no layer ran on plain tensors: {listed(layers)}")
    names = [name for name, _ in model.named_modules() if name in layers and name in trial.errors]
    return Sensitivity(found, {name: trial.figures(name) for name in names})


class _Trial:
    """Computes the GEMMs of layers by each recipe, while the model runs."""

    def __init__(self, recipes: tuple[Recipe, ...]) -> None:
        self._recipes = recipes
        self.errors: dict[str, dict[str, dict[str, Tensor]]] = {}

    def figures(self, name: str) -> dict[str, dict[str, float]]:
        """The errors of a layer by recipe and GEMM. Waits for the device."""
        return {
            recipe: {gemm: error.item() for gemm, error in gemms.items()} for recipe, gemms in self.errors[name].items()
        }

    def hook(self, name: str) -> Callable[..., None]:
        def after_forward(module: Any, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            x = input_of(args, options)
            if x is None or not x.numel() or name in self.errors:
                return
            x = local_matrix(x)
            self.compare(name, ("output",), {"input": x, "weight": _weight(name, module)})
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda grad: after_backward(module, x, local_matrix(grad)))

        def after_backward(module: Any, x: Tensor, grad: Tensor) -> None:
            if "grad_input" not in next(iter(self.errors[name].values())):
                # FSDP2 gathers the weight once more for backward.
                operands = {"input": x, "weight": _weight(name, module), "grad_output": grad}
                self.compare(name, ("grad_input", "grad_weight"), operands)

        return after_forward

    @torch.no_grad()
    def compare(self, name: str, gemms: Sequence[str], operands: Mapping[str, Tensor]) -> None:
        """Note the errors of these GEMMs of a layer; of several GEMMs of one name, the largest."""
        errors = self.errors.setdefault(name, {recipe.name: {} for recipe in self._recipes})
        device = operands["input"].device.type
        for gemm in gemms:
            names = OPERANDS[gemm]
            lhs, rhs = (_operand(each, operands) for each in names)
            with torch.autocast(device, enabled=False):
                expected = lhs.float() @ rhs.float().t()
                for recipe in self._recipes:
                    weights = recipe.weights if names[1].startswith("weight") else None
                    seen = operands if weights is None else {"weight": rounded(operands["weight"], weights)}
                    actual = _product(getattr(recipe, gemm), lhs, _operand(names[1], seen))
                    error, before = relative_noise(actual - expected, lhs, rhs), errors[recipe.name].get(gemm)
                    errors[recipe.name][gemm] = error if before is None else torch.maximum(error, before)


class _ExpertsTrial:
    """Compares the GEMMs of converted experts: see :class:`tritonfp8.layers.moe.ExpertsObserver`.

    The host reads how many tokens each expert has. Experts without any have no error.
    """

    def __init__(self, trial: _Trial, name: str, module: ConvertedExperts) -> None:
        self._trial, self._name, self._module = trial, name, module
        self._read: dict[str, tuple[Tensor, list[int]]] = {}
        self._ran: set[str] = set()

    def saw_input(self, weight: str, rows: Tensor, offsets: Tensor) -> None:
        if weight not in self._ran:
            self._read[weight] = local_matrix(rows), offsets.tolist()

    def saw_output(self, weight: str, out: Tensor) -> None:
        if weight in self._ran:
            return
        self._ran.add(weight)
        self._compare(weight, ("output",), {})
        if out.requires_grad:
            gemms = ("grad_input", "grad_weight")
            out.register_hook(lambda grad: self._compare(weight, gemms, {"grad_output": local_matrix(grad)}))

    def _compare(self, weight: str, gemms: Sequence[str], gradient: Mapping[str, Tensor]) -> None:
        rows, ends = self._read[weight]
        matrices = self._module.weights(local_matrices)[weight]
        for begin, end, matrix in zip([0, *ends[:-1]], ends, matrices, strict=True):
            if end > begin:
                tokens = {name: x[begin:end] for name, x in (("input", rows), *gradient.items())}
                self._trial.compare(self._name, gemms, {**tokens, "weight": matrix})


def _weight(name: str, module: Any) -> Tensor:
    weight = module.weight
    if type(weight) not in (Tensor, nn.Parameter) and not hasattr(weight, "to_local"):
        raise ValueError(
            f"the weight of {name!r} must be a plain or a sharded tensor; got {type(weight).__name__}: call "
            "sensitivity before the weights become such tensors"
        )
    weight = local_matrix(weight)
    return weight.t() if is_conv1d(module) or (is_converted(module) and hasattr(module, "conv1d")) else weight


def _operand(name: str, operands: Mapping[str, Tensor]) -> Tensor:
    found = operands[name.removesuffix(".T")]
    return found.t() if name.endswith(".T") else found


def _product(gemm: Gemm, lhs: Tensor, rhs: Tensor) -> Tensor:
    """``lhs @ rhs.T`` as a recipe computes it, in float32."""
    if gemm.lhs is None or gemm.rhs is None:
        dtype = torch.promote_types(lhs.dtype, rhs.dtype)
        return (lhs.to(dtype) @ rhs.to(dtype).t()).float()
    a, b = quantize(lhs.contiguous(), gemm.lhs), quantize(rhs.contiguous(), gemm.rhs)
    return scaled_matmul(a, b, out_dtype=torch.float32, accumulation=gemm.accumulation)


def relative_noise(error: Tensor, lhs: Tensor, rhs: Tensor) -> Tensor:
    """The noise over the signal of ``lhs @ rhs.T``: the mean of its rows, or of its columns if that is larger.

    The signal of a row is the sum of the squares of its products ``lhs[m, k] rhs[n, k]``. That is what the squares of
    the result add up to if the signs are random. The result itself may be next to nothing, where large terms cancel,
    and one such row would outweigh all others.

    Args:
        error: the result minus the exact one, ``[M, N]``.
        lhs: ``[M, K]``.
        rhs: ``[N, K]``.

    Returns:
        dB, as a scalar on the device; minus infinity without noise, infinity if a value is not finite. Rows and columns
        that are zero do not count.
    """
    noise, a, b = (x.double().square() for x in (error, lhs, rhs))
    means = []
    for lost, signal in ((noise.sum(1), a @ b.sum(0)), (noise.sum(0), b @ a.sum(0))):
        means.append((lost / signal).where(signal != 0, math.nan).nanmean())
    worst = torch.stack(means).amax().where(noise.isfinite().all(), math.inf)
    return (10 * torch.log10(worst)).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def _default_loss(model: nn.Module, batch: Any) -> Tensor:
    if (named := keywords(model, batch)) is not None:
        output = model(**named)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = own_loss(output)
    if loss is not None:
        return loss
    found = floating_tensors(output)
    if not found:
        raise TypeError(
            f"the model's output must have a loss or floating tensors; got {type(output).__name__}: give loss="
        )
    return total(x.float().square().mean() for x in found)


@contextmanager
def _in_high_precision(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Run the block in high precision and without gradients from before; afterwards the model is as it was.

    Of ``others``, which are not converted, experts are in the block: only converted experts have observers.
    """
    layers = converted(model)
    recipes = {glob.escape(name): module.recipe for name, module in layers.items()}
    experts = [module for module in others.values() if computing_class(module) is not None]
    try:
        if recipes:
            swap_recipe(model, "bf16")
        for module in experts:
            convert_experts(module, get("bf16"))
        with unchanged(model):
            yield
    finally:
        for module in experts:
            if is_converted_experts(module):
                revert_experts(module, experts_before(module))
        if recipes:
            swap_recipe(model, recipes)
