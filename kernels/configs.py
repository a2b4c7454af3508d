"""Launch configurations of the matrix products: search spaces as data, and what each one needs.

``rate`` is the throughput of a full machine relative to the others of the same space, as measured on one H200 at
8192 x 8192 x 8192; with the number of waves it predicts which configuration suits a shape.
"""

from dataclasses import dataclass

SPECIALIZED_WAVE_ROWS = 64
BARRIER_BYTES = 1024


@dataclass(frozen=True)
class MatmulConfig:
    """Tile ``[block_m, block_n]`` in steps of ``block_k``, and how Triton compiles it.

    ``specialized`` is the warp-specialized Hopper kernel; ``halves`` stores a tile in two halves of its columns;
    ``flatten`` joins the loop over tiles with the loop over K; ``group_m`` rows of tiles are walked together.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    rate: float = 1.0
    halves: bool = False
    flatten: bool = False
    group_m: int = 8
    blocks_per_sm: int = 1
    specialized: bool = False


SPACES = {
    "epilogue": {
        "fast": (
            MatmulConfig(128, 256, 128, 8, 3, 1.00),
            MatmulConfig(128, 128, 128, 8, 4, 0.85),
            MatmulConfig(64, 128, 128, 4, 4, 0.70),
            MatmulConfig(64, 64, 128, 4, 3, 0.50),
        ),
        "precise": (
            MatmulConfig(256, 128, 128, 4, 4, 1.30, specialized=True),
            MatmulConfig(256, 128, 128, 4, 3, 1.29, specialized=True),
            MatmulConfig(128, 128, 128, 8, 4, 1.00),
            MatmulConfig(64, 128, 128, 4, 4, 0.80),
            MatmulConfig(64, 64, 128, 4, 3, 0.50),
        ),
    },
    "blockwise": {
        "precise": (
            MatmulConfig(128, 128, 128, 4, 5, 1.30, specialized=True),
            MatmulConfig(128, 128, 128, 4, 4, 1.29, specialized=True),
            MatmulConfig(128, 128, 128, 8, 4, 1.00),
            MatmulConfig(64, 128, 128, 4, 4, 0.90),
            MatmulConfig(64, 64, 128, 4, 3, 0.50),
        ),
    },
    "mx": {
        "precise": (
            MatmulConfig(128, 128, 128, 8, 3, 1.00),
            MatmulConfig(64, 128, 128, 4, 3, 0.80),
            MatmulConfig(64, 64, 128, 4, 2, 0.50),
        ),
    },
}


def shared_bytes(config: MatmulConfig, out_itemsize: int) -> int:
    """Upper bound of the shared memory of a block: the stages of both operands and the tile on its way out."""
    scales = 4 if config.specialized else 0
    operands = config.num_stages * (config.block_m + config.block_n) * (config.block_k + scales)
    rows = 2 * SPECIALIZED_WAVE_ROWS if config.specialized else config.block_m
    out = rows * config.block_n * out_itemsize // (2 if config.halves else 1)
    return operands + out + BARRIER_BYTES


def supports(config: MatmulConfig, max_shared_bytes: int, out_itemsize: int, specialized: bool) -> bool:
    """Whether ``config`` runs on a device with this much shared memory a block.

    ``specialized`` says whether the device has warpgroup MMA and the copy engine can address all three matrices.
    """
    return shared_bytes(config, out_itemsize) <= max_shared_bytes and (specialized or not config.specialized)


def predicted_time(config: MatmulConfig, m: int, n: int, num_sms: int) -> float:
    """Relative time of ``[m, n]``: whole waves of tiles, each as long as its area over the rate."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    waves = -(-tiles // (num_sms * config.blocks_per_sm))
    return waves * config.blocks_per_sm * config.block_m * config.block_n / config.rate
