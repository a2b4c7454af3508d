"""Reinforcement learning in 8 bits: a generator that shares a trainer's codes, and new weights for an inference engine.

    rollout = tritonfp8.rollout.Rollout(model)
    generated = rollout.generate(ids, max_new_tokens=64)

    receiver = tritonfp8.rollout.Receiver(dict(engine.named_parameters()), "fine_grained")
    receiver.load(tritonfp8.export.tensors(model, "fine_grained"))

generator  Rollout: generates with the codes that the trainer's forward reads
sharing    which tensors both models have in common, and which the generator owns
scoring    log_probs: the log-probs of tokens by the trainer's forward
exact      make_exact: the same bits of each token in training and in generation
checking   check: the largest difference of log-probs, and the first module that differs
names      which tensors of a stream lie in which tensor of an engine, as a table
shards     which part of them a rank has, and where in the engine's tensor it lies
receiver   Receiver: checks everything, then writes
transfer   send, and what an engine's ranks receive: the bytes of their shards, in buckets
"""

from tritonfp8.rollout.checking import Checked, check
from tritonfp8.rollout.exact import make_exact, why_inexact
from tritonfp8.rollout.generator import Generated, Rollout
from tritonfp8.rollout.names import ENGINE_NAMES, EngineName
from tritonfp8.rollout.receiver import Receiver
from tritonfp8.rollout.scoring import log_probs
from tritonfp8.rollout.transfer import send

__all__ = [
    "ENGINE_NAMES",
    "Checked",
    "EngineName",
    "Generated",
    "Receiver",
    "Rollout",
    "check",
    "log_probs",
    "make_exact",
    "send",
    "why_inexact",
]
