"""Expert parallelism: each rank has some of the experts, and tokens travel to them and back, in 8 bits where it can be.

Exports the function that shards the experts of a model, and the all-to-all for programs that shard them by themselves.
"""

from tritonfp8.distributed.expert_parallel.all_to_all import exchange, payload_of
from tritonfp8.distributed.expert_parallel.shard import PAYLOADS, shard_experts

__all__ = ["PAYLOADS", "exchange", "payload_of", "shard_experts"]
