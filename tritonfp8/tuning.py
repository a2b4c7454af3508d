"""Which configuration a matrix product is launched with. Nothing is benchmarked at call time."""

from __future__ import annotations

import functools

from tritonfp8.hardware import Abilities
from tritonfp8.kernels.configs import SPACES, MatmulConfig, predicted_time, supports


def space(family: str, accumulation: str) -> tuple[MatmulConfig, ...]:
    """The configurations of a family of products; a family that is always promoted has one space for both."""
    by_accumulation = SPACES[family]
    return by_accumulation.get(accumulation, by_accumulation["precise"])


@functools.lru_cache(maxsize=4096)
def choose(
    family: str,
    accumulation: str,
    m: int,
    n: int,
    k: int,
    out_itemsize: int,
    bare: bool,
    copy_engine: bool,
    device: Abilities,
) -> MatmulConfig:
    """The configuration with the least predicted time for an output ``[m, n]`` over ``k`` among those that can run.

    ``bare`` says that the product has no activation and no residual, ``copy_engine`` that TMA can address all three
    matrices.
    """
    specialized = copy_engine and device.has_warpgroup_mma
    runnable = [
        config
        for config in space(family, accumulation)
        if (config.max_m is None or m <= config.max_m)
        and supports(
            config, family, out_itemsize, bare, specialized, device.max_shared_bytes, native_mx=device.has_native_mx
        )
    ]
    if not runnable:
        raise RuntimeError(
            f"{device.name} has {device.max_shared_bytes} bytes of shared memory a block, too little for every "
            f"{family} configuration"
        )
    return min(runnable, key=lambda config: predicted_time(config, m, n, k, out_itemsize, device.num_sms))
