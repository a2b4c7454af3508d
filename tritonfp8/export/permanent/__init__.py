"""Weights that a model computes, as they are once that is made permanent: engines know no other names.

computed    the weights that torch's parametrizations, norms and pruning compute
adapters    the weights that adapters of peft add to
stand_in    permanent: a stand-in of a model whose layers have such weights under their plain names

The model is not changed. A weight is computed when it is written, so one of them is in memory at a time.
"""

from tritonfp8.export.permanent.adapters import check_adapters
from tritonfp8.export.permanent.stand_in import permanent, value_of

__all__ = ["check_adapters", "permanent", "value_of"]
