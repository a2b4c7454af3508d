"""Experts: the linear layers of all experts of a model as grouped GEMMs that follow a recipe.

Exports the layer as a function and as modules, and how the experts of other packages are converted.
"""

from tritonfp8.layers.moe.checks import check_offsets, check_recipe
from tritonfp8.layers.moe.conversion import convert_experts, experts_before, revert_experts, why_unfit_experts
from tritonfp8.layers.moe.experts import (
    ConvertedExperts,
    Float8Experts,
    RoutedExperts,
    class_of_experts,
    computing_class,
    is_converted_experts,
)
from tritonfp8.layers.moe.grouped import grouped_linear
from tritonfp8.layers.moe.routed_linear import can_route
from tritonfp8.layers.moe.routing import Routing, Way, combine, gather, permute
