"""The FP8 all-gather of the weights of experts, which FSDP2 shards over experts.

Exports what gathers the experts of a model, and what it finds in a model.
"""

from tritonfp8.distributed.fsdp.experts.all_gather import ExpertsAllGather, experts_to_gather
from tritonfp8.distributed.fsdp.experts.gathered import GatheredExperts

__all__ = ["ExpertsAllGather", "GatheredExperts", "experts_to_gather"]
