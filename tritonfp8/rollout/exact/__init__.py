"""Models whose tokens have the same bits in training and in generation.

functions   the ops with their gradients
modules     classes of modules that compute by these ops
attention   the attention of transformers by this name, and where each sequence begins
paged       the same over a cache in pages
families    which module of transformers gets which class
coverage    why_inexact: what is not covered
make        make_exact: changes a model in place
"""

from tritonfp8.rollout.exact.attention import PAGED_NAME, checked_masks
from tritonfp8.rollout.exact.coverage import why_inexact
from tritonfp8.rollout.exact.functions import row_logsumexp
from tritonfp8.rollout.exact.make import EXACT_OPTIONS, is_exact, make_exact
