"""``convert``, ``swap_recipe``, ``revert`` and ``quantized_init``; what they decide, and what they report.

model        convert, swap_recipe, revert: change how a model's layers compute, in place
stored_init  quantized_init: store the weight of each layer in 8 bits as the layer is made
selection    which layers are converted, and by which recipe
shares       the parameters that no converted layer has, with their share of the FLOPs
report       ConversionReport
sharing      layers that quantize a common input once
wrapped      a model without torch.compile and other wrappers
others       FLOP counters, which learn of converted layers, and FP8 libraries, which must not replace one
"""

from tritonfp8.conversion.model import convert, revert, swap_recipe
from tritonfp8.conversion.report import ConversionReport
from tritonfp8.conversion.selection import Recipes, cost, linears, sizes_of
from tritonfp8.conversion.shares import fp8_share
from tritonfp8.conversion.sharing import share_inputs, unshare_inputs
from tritonfp8.conversion.wrapped import bare, is_fsdp, reshard
