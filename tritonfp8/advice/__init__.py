"""Whether FP8 makes a model faster: measured on one block of each kind, or predicted, with a recommendation.

run        advise: the function of the package
blocks     blocks and layers of a model, and a shorter model with one block of each kind
contenders bf16, recipes, and recipes without the layers that they make slower
steps      forward and backward, and how long they take on the host and on the GPU
kernels    GPU time by kernel
measure    layers, blocks and steps of all contenders
predict    the same without a GPU
recommend  one recommendation
result     Advice: tables and files
figure     the blocks as bars
sources    models of configs, shapes and files, for ``tritonfp8 advise``
"""

from tritonfp8.advice.figure import plot
from tritonfp8.advice.kernels import is_own, kernel_seconds, profiled
from tritonfp8.advice.result import MODES, Advice, Recommendation
from tritonfp8.advice.run import DEFAULT_MODES, DEFAULT_RECIPES, advise
from tritonfp8.advice.sources import Source, from_config, from_file, from_shapes
from tritonfp8.advice.steps import captured

__all__ = [
    "Advice",
    "DEFAULT_MODES",
    "DEFAULT_RECIPES",
    "MODES",
    "Recommendation",
    "Source",
    "advise",
    "captured",
    "from_config",
    "from_file",
    "from_shapes",
    "is_own",
    "kernel_seconds",
    "plot",
    "profiled",
]
