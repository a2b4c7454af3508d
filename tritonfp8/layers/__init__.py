"""Layers that compute by a recipe: linear layers, experts, and weights that are stored in 8 bits, in a folder each.

Exports what they share: changing modules in place, joined classes, decisions that a recompute repeats, the table of
functions by tensor type, the door to ``tritonfp8.distributed``, the names of converted layers, and how they refuse
codes as weights.
"""

from tritonfp8.layers import extensions
from tritonfp8.layers.changes import Fingerprints, Watch, sample_of, stamp, versions
from tritonfp8.layers.codes import check_not_torchao, refuse_codes
from tritonfp8.layers.converted import forget_names, record_names, recorded_modules
from tritonfp8.layers.in_place import all_or_nothing, change_class, is_own_forward, rebase
from tritonfp8.layers.joined import class_before, joined_class, joined_of, register_computing
from tritonfp8.layers.parameter_hooks import ParameterHooks
from tritonfp8.layers.recompute import decided, swapping
from tritonfp8.layers.tensor_types import PLAIN, handler_of
