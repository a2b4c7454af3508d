"""Sharding rules and FP8 collectives. The core never imports this subpackage."""

from tritonfp8.distributed.fsdp import enable_float8_all_gather
from tritonfp8.distributed.traffic import count_collective_bytes

__all__ = ["count_collective_bytes", "enable_float8_all_gather"]
