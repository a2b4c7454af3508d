"""Tune and compile before a run: record a model's ops, measure configurations, share them between ranks.

Exports the steps of ``tritonfp8 warmup``.
"""

from tritonfp8.warmup import ranks, record, run, workers
from tritonfp8.warmup.gemms import GROUPED_MATMUL, MATMUL, gemm_of
from tritonfp8.warmup.measure import settled_seconds, tune
from tritonfp8.warmup.record import Call, record_grouped_linear, record_linear
from tritonfp8.warmup.run import warm_up

__all__ = [
    "GROUPED_MATMUL",
    "MATMUL",
    "Call",
    "gemm_of",
    "ranks",
    "record",
    "record_grouped_linear",
    "record_linear",
    "run",
    "settled_seconds",
    "tune",
    "warm_up",
    "workers",
]
