"""Layers with a recipe: Float8Linear for nn.Linear, and a class for each Conv1D, whose weight is transposed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn, TypeGuard

from torch import Tensor, nn

from tritonfp8.compat import counting
from tritonfp8.layers.joined import register_computing
from tritonfp8.layers.linear.dispatch import linear
from tritonfp8.layers.linear.input_cache import SharedInput
from tritonfp8.layers.linear.weight_cache import CachedWeight
from tritonfp8.layers.parameter_hooks import ParameterHooks
from tritonfp8.layers.unsupported import refuse_script
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs.checks import require_type

_NO_RECIPE = (
    "a Float8Linear needs recipe=. Its class does not carry the recipe of a layer, so code that copies a layer as "
    "type(layer)(in_features, out_features) would change it: give recipe=layer.recipe, or a name such as "
    "recipe='rowwise'"
)


def require_module(model: object) -> None:
    """Raise TypeError unless ``model`` is a module."""
    require_type("model", model, nn.Module, "an nn.Module")


class Float8Linear(ParameterHooks, nn.Linear):
    """``nn.Linear`` whose three GEMMs follow a recipe: same parameters, same state_dict keys, same initialization.

    Args:
        in_features, out_features, bias, device, dtype: as ``nn.Linear``.
        recipe: a name or a :class:`~tritonfp8.Recipe`. It has no default: code that copies a layer by
            ``type(layer)(in_features, out_features)`` would lose the recipe of that layer.

    Input ``[..., in_features]``; output
    ``[..., out_features]``. Saved for backward, for M rows of input and K in_features: ``input.T`` in 8 bits, M K bytes
    and scales, or 2 M K bytes (bf16) where the recipe keeps grad_weight in high precision; nothing if the weight needs
    no grad. See :func:`tritonfp8.functional.linear` for dtypes and errors.
    """

    shared_input: SharedInput | None = None
    cached_weight: CachedWeight | None = None
    # Of an output on a mesh, if a parallel style says so: see :func:`tritonfp8.functional.linear`.
    output_placements: tuple[Any, ...] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: str | Recipe | None = None,
    ) -> None:
        if recipe is None:
            raise TypeError(_NO_RECIPE)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = get(recipe)

    def reset_parameters(self) -> None:
        """As ``nn.Linear``; a weight that is stored in 8 bits is initialized in high precision and quantized."""
        with nullcontext() if self.on_reset is None else self.on_reset(self):
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias`` by the recipe."""
        if counting.is_logging:
            counting.calling(self)
        # Read once: a parametrization computes it each time.
        weight = self.weight
        cached = None if self.cached_weight is None else self.cached_weight.of(self, weight)
        return linear(
            input, weight, self.bias, self.recipe, quantized_weight=cached, shared_input=self.shared_input,
            output_placements=self.output_placements,
        )  # fmt: skip

    def __prepare_scriptable__(self) -> NoReturn:
        # torch.jit.script calls this before it reads the layer's annotations, in which it would fail.
        refuse_script(self)

    def extra_repr(self) -> str:
        """The fields of ``nn.Linear``, the recipe, and the format of a stored weight."""
        return f"{super().extra_repr()}, {self._recipe_and_storage()}"


# Subclasses of nn.Linear by module and name, so that their libraries need not be imported: they only add methods, or
# write the forward in other operations or another order of sums.
_SAME_FORWARD = {("torchtitan.models.common.linear", "Linear")}
_SAME_RESULT = {
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"),
    ("tritonfp8.rollout.exact.modules", "ExactLinear"),
}


register_computing(Float8Linear, nn.Linear)


def computes_linear(cls: type[nn.Module]) -> TypeGuard[type[nn.Linear]]:
    """Whether layers of this class compute what ``nn.Linear`` does, like the layers of torchtitan and Falcon."""
    if cls is nn.Linear or (cls.__module__, cls.__name__) in _SAME_RESULT:
        return True
    return (cls.__module__, cls.__name__) in _SAME_FORWARD and getattr(cls, "forward", None) is nn.Linear.forward


class Float8Conv1D(ParameterHooks):
    """The part of a converted ``Conv1D`` of transformers that computes: a linear layer of weight ``[K, N]``.

    :func:`~tritonfp8.layers.joined.joined_class` joins it with the class of the layer. The weight stays the same
    Parameter with the same key.
    """

    weight: Tensor
    bias: Tensor
    shared_input: SharedInput | None = None
    cached_weight: CachedWeight | None = None

    def __init__(self, *args: object, **options: object) -> None:
        raise TypeError(
            "Float8Conv1D is the class of a converted layer and makes none: make a Conv1D and convert it by the recipe "
            "of the layer that is copied"
        )

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight + bias`` by the recipe; ``x [..., K]``, result ``[..., N]``."""
        if counting.is_logging:
            counting.calling(self)
        weight = self.weight
        cached = None if self.cached_weight is None else self.cached_weight.of(self, weight)
        return linear(x, weight.t(), self.bias, self.recipe, quantized_weight=cached, shared_input=self.shared_input)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script(self)

    @property
    def in_features(self) -> int:
        """K, like nn.Linear."""
        return int(self.weight.shape[0])

    @property
    def out_features(self) -> int:
        """N, like nn.Linear."""
        return int(self.weight.shape[1])

    def __repr__(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{type(self).__name__}({sizes}, {self._recipe_and_storage()})"


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is a ``Conv1D`` of transformers, by the name of its class: transformers need not be imported."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


ConvertedLayer = Float8Linear | Float8Conv1D
"""The classes of layers that follow a recipe."""


def is_converted(module: nn.Module) -> TypeGuard[ConvertedLayer]:
    """Whether a layer follows a recipe."""
    return isinstance(module, Float8Linear | Float8Conv1D)


def as_matrix(layer: Float8Linear | Float8Conv1D, weight: Tensor) -> Tensor:
    """The weight of ``layer`` as ``[N, K]``."""
    return weight.t() if isinstance(layer, Float8Conv1D) else weight
