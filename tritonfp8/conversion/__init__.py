"""What ``convert`` decides and reports: the recipe of each layer, the layers that stay as they are, and their FLOPs.

choice     recipes by patterns of names
heads      what a model tells of its output heads
roles      layers that stay in high precision unless a pattern names them, such as output heads
filters    the argument ``filter``: a function, patterns, or "auto"
cost       whether a layer would get slower, for "auto"
select     all of this together: the layers to convert, and the reasons for the others
coverage   the parameters that no converted layer has, with their share of the FLOPs
report     ConversionReport
sharing    layers that quantize a common input once
wrapped    a model and its names without torch.compile and other wrappers
others     FLOP counters, which learn of converted layers, and FP8 libraries, which must not replace one
"""

from tritonfp8.conversion.choice import Choice, Recipes
from tritonfp8.conversion.coverage import coverage
from tritonfp8.conversion.filters import Filter, Selection
from tritonfp8.conversion.others import keep_layers, teach_counters
from tritonfp8.conversion.report import ConversionReport, columns
from tritonfp8.conversion.roles import Roles
from tritonfp8.conversion.select import (
    NO_PATTERN,
    Selected,
    converted_experts,
    converted_layers,
    linears,
    select,
    sizes_of,
    why_unfit,
)
from tritonfp8.conversion.sharing import share_inputs, unshare_inputs
from tritonfp8.conversion.wrapped import bare, reshard, unwrapped
