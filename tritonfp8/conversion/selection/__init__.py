"""Which layers of a model ``convert`` converts, and by which recipe.

choice   recipes by patterns of names
heads    what a model tells of its output heads
roles    layers that stay in high precision unless a pattern names them, such as output heads
filters  the argument ``filter``: a function, patterns, or "auto"
cost     whether a layer would get slower, for "auto"
selected all of this together: the layers to convert, and the reasons for the others
"""

from tritonfp8.conversion.selection import cost
from tritonfp8.conversion.selection.choice import Choice, Recipes
from tritonfp8.conversion.selection.filters import Filter, Selection
from tritonfp8.conversion.selection.roles import CONDITION, Roles
from tritonfp8.conversion.selection.selected import (
    NO_PATTERN,
    Selected,
    converted,
    converted_experts,
    converted_layers,
    linears,
    select,
    sizes_of,
    why_unfit,
)
