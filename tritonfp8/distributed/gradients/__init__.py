"""Gradients across ranks: reduced in 8 bits, or in an order that does not depend on the number of ranks.

reduce_scatter  FSDP2's reduce-scatter by an all-to-all, and a sum in pairs of ranks
ordered         the sum of the gradients of a step's units, in one order on 1, 2, 4 ... ranks
norm            clipping by a norm whose bits do not depend on the shards
"""

from tritonfp8.distributed.gradients.norm import clip_grad_norm_
from tritonfp8.distributed.gradients.ordered import OrderedGradients
from tritonfp8.distributed.gradients.reduce_scatter import enable_float8_reduce_scatter

__all__ = ["OrderedGradients", "clip_grad_norm_", "enable_float8_reduce_scatter"]
