"""Shared helpers of the tests of tuned configurations."""

import dataclasses

import torch

from tritonfp8.compat.hardware import CPU, Abilities, machine_key
from tritonfp8.tuning.matmul_space import space
from tritonfp8.tuning.store import Entry, Key, Kind, read_user
from tritonfp8.warmup.measure import distinct_gemms
from tritonfp8.warmup.record import record_linear

H200 = Abilities("NVIDIA H200", (9, 0), True, True, True, True, True, False, 132, 232448)
ADA = dataclasses.replace(
    H200, name="NVIDIA L40S", capability=(8, 9), has_tma=False, has_warpgroup_mma=False, num_sms=142,
    max_shared_bytes=101376,
)  # fmt: skip
MACHINE = "nvidia-h200-sm90-132"
CPU_MACHINE = machine_key(CPU)
ROWWISE = Kind("epilogue", "precise", 0, 0, 2, True, True)


def fastest(k, bare=True):
    """The configuration with the highest rate in full waves of tiles, where a tile sums ``k`` and more at its ends."""
    configs = [config for config in space("epilogue", "precise") if bare or not config.bare]
    return max(configs, key=lambda config: config.rate * k / (k + config.idle_steps * config.block_k)).name


WIDE = fastest(8192)
SMALL, PLAIN = "64x64x128-w4-s3", "128x128x128-w8-s4"


def entry(config=WIDE, microseconds=10.0, triton="3.6.0", tritonfp8="0.1.0"):
    return Entry(config, microseconds, triton, tritonfp8)


def key(n=4096, k=4096, m=4096, kind=ROWWISE, **fields):
    return Key(kind._replace(**fields), n, k, m)


def stored():
    """The entries of the user's file for the CPU."""
    return read_user(CPU_MACHINE)


def layer_products(*shapes, recipe="rowwise"):
    calls = [call for mnk in shapes for call in record_linear(mnk, recipe, "bfloat16")]
    return calls, distinct_gemms(calls, torch.device("cpu"))
