"""Modules of experts that follow a recipe: one of our own, and classes for the experts of transformers and torchtitan.

The two linear layers of an expert, and an activation between them, are two grouped GEMMs over all experts. Routers,
which choose the experts of a token, are other modules, and stay in high precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from tritonfp8.compat import counting
from tritonfp8.layers.linear import CachedWeight, Weights, autocast_all, register_finder, source_of
from tritonfp8.layers.moe.activation import swiglu
from tritonfp8.layers.moe.checks import check_routed
from tritonfp8.layers.moe.grouped import GroupedOperands, grouped_linear, quantize_weights
from tritonfp8.layers.moe.routed_linear import Layer, can_route, combined_linear, gathered_linear, routed_swiglu
from tritonfp8.layers.moe.routing import Routing, Way, combine, gather, in_dtype
from tritonfp8.layers.parameter_hooks import ParameterHooks
from tritonfp8.layers.unsupported import refuse_script
from tritonfp8.recipes import Recipe, get

Of = Callable[[Tensor], Tensor]


class ExpertsObserver(Protocol):
    """Is told what the linear layers of experts read, by the name of the weight. The first call in a pass counts."""

    def saw_input(self, weight: str, rows: Tensor, offsets: Tensor) -> None:
        """The layer reads ``rows``; the rows of each expert end at ``offsets``."""

    def saw_output(self, weight: str, out: Tensor) -> None:
        """``out`` came of the layer, which reads its gradient."""


class ConvertedExperts(ParameterHooks):
    """What all modules of experts that follow a recipe have."""

    # Set in a sampled step of monitor, and in sensitivity.
    observer: ExpertsObserver | None = None
    # The dtype to which the experts cast their weights themselves; None if they compute in the dtype of their input.
    casts_to: torch.dtype | None = None

    def weights(self, of: Of | None = None) -> dict[str, Tensor]:
        """``of`` the weights of all experts, ``[E, N, K]`` each, by the names of their parameters."""
        raise NotImplementedError

    def grouped(
        self,
        input: Tensor,
        weight: Tensor,
        offsets: Tensor,
        bias: Tensor | None = None,
        quantized_weight: GroupedOperands | None = None,
    ) -> Tensor:
        """:func:`grouped_linear` by the recipe; its GEMMs count for this module."""
        self._resume()
        return grouped_linear(input, weight, offsets, bias, self.recipe, quantized_weight=quantized_weight)

    def _resume(self) -> None:
        """Count the next GEMMs for this module."""
        if counting.is_logging:
            counting.resume(self)

    def extra_repr(self) -> str:
        """The number and the features of the experts, the recipe, and the format of stored weights."""
        (experts, _, hidden), (_, _, inside) = [tuple(weight.shape) for weight in self.weights().values()][:2]
        return f"{experts} experts, {hidden} -> {inside} -> {hidden}, {self._recipe_and_storage()}"

    def __repr__(self) -> str:
        # One line: the only child of experts is the activation, unless a parametrization computes their weights.
        has_weights = any(list(child.parameters()) for child in self.children())
        return super().__repr__() if has_weights else f"{type(self).__name__}({self.extra_repr()})"

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script(self)


class Dispatch(Protocol):
    """How ``tritonfp8.distributed`` computes experts that are sharded over ranks."""

    def forward(self, module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As :meth:`RoutedExperts.forward`."""

    def parts(self, weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """This rank's part of each weight; None if it has them only during a forward."""


class RoutedExperts(ConvertedExperts):
    """Experts that are called with tokens and the experts of each token, like the experts of transformers."""

    # What computes experts that are sharded over ranks; None if all of them are here.
    dispatch: Dispatch | None = None
    # Inside quantize_weights_once: the quantized weights by name.
    cached_weights: Mapping[str, CachedWeight] = MappingProxyType({})
    # Whether the parameters are [E, K, N], as some of transformers are.
    is_transposed: bool = False

    @property
    def is_swiglu(self) -> bool:
        """Whether ``activation`` is :func:`swiglu`, which the casts can compute."""
        return False

    def activation(self, rows: Tensor) -> Tensor:
        """What lies between the two linear layers, ``[rows, N]`` to ``[rows, intermediate]``."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum of the experts of each token, each by its weight.

        Args:
            hidden_states: ``[T, hidden]``.
            top_k_index: ``[T, top_k]``, integers: the experts of each token. Indices from E on stand for no expert.
            top_k_weights: ``[T, top_k]``.

        Returns:
            ``[T, hidden]`` in the dtype of ``hidden_states``. Where autocast is on, it is computed in autocast's:
            tokens are cast before they go to their experts, and so is the gradient of the result.

        Raises:
            ValueError: shapes that do not fit.
        """
        if counting.is_logging:
            counting.calling(self)
        check_routed(hidden_states, top_k_index, top_k_weights)
        (hidden,) = autocast_all(hidden_states.device.type, hidden_states)
        assert hidden is not None
        return in_dtype(self._of_tokens(hidden, top_k_index, top_k_weights), hidden_states.dtype)

    def _of_tokens(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As :meth:`forward`, of tokens in the dtype of autocast, here or on the ranks that have their experts."""
        if self.dispatch is not None:
            return self.dispatch.forward(self, hidden, top_k_index, top_k_weights)
        weights = self.weights()
        routing = Routing.of(top_k_index, next(iter(weights.values())).shape[0])
        # An observer sees the rows of each expert, which are nowhere together otherwise. Both ways have the same bits.
        biases = {name: self.bias_of(name) for name in weights}
        if self.observer is None and can_route(hidden, top_k_weights):
            return self.routed(hidden, weights, biases, Way(routing, routing), top_k_weights)
        rows = self.compute(gather(hidden, routing), routing.offsets, list(weights.values()), list(biases.values()))
        return combine(rows, routing, top_k_weights, hidden.dtype)

    def routed(
        self,
        hidden: Tensor,
        weights: Mapping[str, Tensor],
        biases: Mapping[str, Tensor | None],
        way: Way,
        top_k_weights: Tensor,
    ) -> Tensor:
        """What :func:`gather`, :meth:`compute` and :func:`combine` return, without copies of the tokens.

        ``weights`` and ``biases`` are of the experts of this rank.
        """
        up, down = (Layer(weight, biases[name], self._cached(name, weight)) for name, weight in weights.items())
        self._resume()
        if self.is_swiglu:
            return routed_swiglu(hidden, up, down, way, top_k_weights, self.recipe)
        inside = self.activation(gathered_linear(hidden, up, way, self.recipe))
        self._resume()
        return combined_linear(inside, down, way, top_k_weights, self.recipe)

    def compute(
        self, rows: Tensor, offsets: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Tensor:
        """Both linear layers of experts and what lies between them, on rows that are sorted by expert."""
        names = tuple(self.weights())
        up, down = (self._cached(name, weight) for name, weight in zip(names, weights, strict=True))
        inner = self.grouped(rows, weights[0], offsets, biases[0], up)
        inside = self.activation(inner)
        out = self.grouped(inside, weights[1], offsets, biases[1], down)
        if self.observer is not None:
            for name, x, y in zip(names, (rows, inside), (inner, out), strict=True):
                self.observer.saw_input(name, x, offsets)
                self.observer.saw_output(name, y)
        return out

    def _cached(self, name: str, weight: Tensor) -> GroupedOperands | None:
        # Dynamo breaks a graph that reads the empty mapping of the class.
        cached = self.cached_weights.get(name) if "cached_weights" in self.__dict__ else None
        # A shallow copy of the module may outlive the scope.
        if cached is None or not cached.open:
            return None
        cached.check(self, weight)
        return cached.operands

    def bias_of(self, name: str) -> Tensor | None:
        """The bias beside the weight of this name, ``[E, N]``, or None."""
        return getattr(self, f"{name}_bias", None)


class Float8Experts(RoutedExperts):
    """The experts of a mixture: a SwiGLU MLP each, all in two grouped GEMMs that follow a recipe.

    Args:
        num_experts: how many there are.
        hidden_size, intermediate_size: features of a token outside and inside of an expert.
        recipe: a name or a :class:`~tritonfp8.Recipe`.
        bias: whether both layers of an expert have a bias.
        device, dtype: of the parameters.

    Parameters ``gate_up_proj [E, 2 intermediate, hidden]``, the gate first, and ``down_proj [E, hidden, intermediate]``
    (and ``gate_up_proj_bias``, ``down_proj_bias``): transformers has the same names and shapes.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: str | Recipe,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} must be a positive int; got {size!r}")
        self.recipe = get(recipe)
        shapes = {"gate_up_proj": (2 * intermediate_size, hidden_size), "down_proj": (hidden_size, intermediate_size)}
        for name, (n, k) in shapes.items():
            weight, vector = (torch.empty(num_experts, *rest, device=device, dtype=dtype) for rest in ((n, k), (n,)))
            self.register_parameter(name, nn.Parameter(weight))
            self.register_parameter(f"{name}_bias", nn.Parameter(vector) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each expert as ``nn.Linear`` initializes its layers."""
        with nullcontext() if self.on_reset is None else self.on_reset(self):
            for name, weight in self.weights().items():
                bound = 1 / math.sqrt(weight.shape[2])
                for parameter in (weight, self.bias_of(name)):
                    if parameter is not None:
                        nn.init.uniform_(parameter, -bound, bound)

    def weights(self, of: Of | None = None) -> dict[str, Tensor]:
        """See :class:`ConvertedExperts`."""
        found = {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}
        return found if of is None else {name: of(weight) for name, weight in found.items()}  # type: ignore[return-value]

    @property
    def is_swiglu(self) -> bool:
        """See :class:`RoutedExperts`."""
        return True

    def activation(self, rows: Tensor) -> Tensor:
        """SwiGLU."""
        return swiglu(rows)


# The classes of transformers and of torch for it.
_SILU = ("SiLUActivation", "SiLU")


class TransformersExperts(RoutedExperts):
    """The part of converted experts of transformers that computes; joined with their class.

    Their class says which parameters there are, and how they lie: ``has_gate``, ``is_transposed``, ``_apply_gate``.
    """

    def weights(self, of: Of | None = None) -> dict[str, Tensor]:
        """See :class:`ConvertedExperts`."""
        names = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
        found = {name: getattr(self, name) if of is None else of(getattr(self, name)) for name in names}
        return {name: w.transpose(1, 2) for name, w in found.items()} if self.is_transposed else found

    @property
    def is_swiglu(self) -> bool:
        """See :class:`RoutedExperts`: the gate of transformers itself, with SiLU."""
        default = getattr(self._apply_gate, "__name__", "") == "_default_apply_gate"
        if not self.has_gate or not default:
            return False
        return self.act_fn is nn.functional.silu or type(self.act_fn).__name__ in _SILU

    def activation(self, rows: Tensor) -> Tensor:
        """The gate of the model, with its clamps and its order of features; without a gate, the activation."""
        if self.is_swiglu:
            return swiglu(rows)
        found: Tensor = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)  # type: ignore[operator]
        return found


class TitanExperts(ConvertedExperts):
    """The part of converted experts of torchtitan that computes: its grouped GEMM; joined with their class."""

    casts_to = torch.bfloat16

    def weights(self, of: Of | None = None) -> dict[str, Tensor]:
        """See :class:`ConvertedExperts`."""
        found = {name: getattr(self, name) for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
        return found if of is None else {name: of(weight) for name, weight in found.items()}

    def forward(self, *args: Tensor) -> Tensor:
        """The forward of torchtitan."""
        if counting.is_logging:
            counting.calling(self)
        if self.observer is not None:
            self.__dict__["order"] = iter(("w1_EFD", "w3_EFD", "w2_EDF"))
        out: Tensor = super().forward(*args)
        if self.observer is not None:
            del self.__dict__["order"]
        return out

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        out = self.grouped(A, B_t.transpose(-2, -1), offs)
        if self.observer is not None:
            # Torchtitan does not say which weight this is.
            weight = next(self.__dict__["order"])
            self.observer.saw_input(weight, A, offs)
            self.observer.saw_output(weight, out)
        return out


def is_converted_experts(module: nn.Module) -> TypeGuard[ConvertedExperts]:
    """Whether these are experts that follow a recipe."""
    return isinstance(module, ConvertedExperts)


# What the decorator of transformers writes on experts, so that its own implementations know them.
_OF_TRANSFORMERS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def computing_class(module: nn.Module) -> type[ConvertedExperts] | None:
    """The class that computes experts like these by a recipe; None if these are no experts, or of an unknown kind.

    Experts are known by what their classes have, so that their libraries need not be imported.
    """
    if isinstance(module, ConvertedExperts):
        return None
    if all(name in module.__dict__ for name in _OF_TRANSFORMERS) and hasattr(type(module), "_apply_gate"):
        return TransformersExperts
    if type(module).__name__ == "GroupedExperts" and type(module).__module__ == "torchtitan.models.common.moe":
        return TitanExperts
    return None


def class_of_experts(module: nn.Module) -> type[ConvertedExperts] | None:
    """The class that computes these experts by a recipe, or would; None if they are no experts."""
    return type(module) if isinstance(module, ConvertedExperts) else computing_class(module)


def _parts(module: RoutedExperts) -> dict[str, Tensor]:
    """The weights of the experts on this rank; none if FSDP2 shards or a parametrization computes them."""
    weights = module.weights()
    if not all(name in module._parameters for name in weights):
        return {}
    if module.dispatch is not None:
        return module.dispatch.parts(weights) or {}
    shared = (hasattr(weight, "_local_tensor") or source_of(weight).has_codes for weight in weights.values())
    return {} if any(shared) else weights


def _weights_to_cache(model: nn.Module) -> Iterator[Weights]:
    """The weights that :func:`tritonfp8.quantize_weights_once` quantizes once; of each module, also if it has none."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield Weights(name, module, _parts(module), quantize_weights)


register_finder(_weights_to_cache)
