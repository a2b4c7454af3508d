"""Weights of a model that trains, in the engine that generates for it.

    receiver = tritonfp8.rollout.Receiver(dict(engine.named_parameters()), "fine_grained")
    receiver.load(tritonfp8.export.tensors(model, "fine_grained"))

names      which tensors of a stream lie in which tensor of an engine, as a table
shards     which part of them a rank has, and where in the engine's tensor it lies
receiver   Receiver: checks everything, then writes
transfer   send, and what an engine's ranks receive: the bytes of their shards, in buckets
"""

from tritonfp8.rollout.names import ENGINE_NAMES, EngineName
from tritonfp8.rollout.receiver import Receiver
from tritonfp8.rollout.transfer import send

__all__ = ["ENGINE_NAMES", "EngineName", "Receiver", "send"]
