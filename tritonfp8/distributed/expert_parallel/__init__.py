"""Expert parallelism: each rank has some of the experts, and tokens travel to them and back, in 8 bits where it can be.

Exports the function that shards the experts of a model.
"""

from tritonfp8.distributed.expert_parallel.shard import shard_experts

__all__ = ["shard_experts"]
