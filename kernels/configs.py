"""Launch configurations of the matrix products: search spaces as data, and what each one needs.

``rate`` is the throughput of a full machine relative to the others of the same family, near the PFLOP/s of one H200 at
8192 x 8192 x 8192; with the number of waves it predicts which configuration suits a shape. Measured for all but the
128 x 128 and smaller tiles of fast accumulation and the 64 x 64 ones outside MX, which are estimates.
"""

from dataclasses import dataclass

SPECIALIZED_WAVE_ROWS = 64
# The copy engine writes to multiples of 128 bytes of shared memory: that many scales at least.
SCALE_VECTOR = 32
BARRIER_BYTES = 1024
SCALE_BYTES = 4
WIDENED_BYTES = 2
NATIVE_MX_ROWS = 128


@dataclass(frozen=True)
class MatmulConfig:
    """Tile ``[block_m, block_n]`` in steps of ``block_k``, and how Triton compiles it.

    ``halves`` stores a tile in two halves of its columns; ``flatten`` joins the loop over tiles with the loop over K;
    ``group_m`` rows of tiles are walked together. ``specialized`` is the warp-specialized Hopper kernel, and ``bare``
    says that its registers hold no activation or residual besides the product.
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
    bare: bool = False
    swap: bool = False
    split_k: int = 1
    max_m: int | None = None
    stagger: bool = False
    tight: bool = False


SPACES = {
    "epilogue": {
        "fast": (
            MatmulConfig(128, 256, 128, 8, 4, 1.50, halves=True),
            MatmulConfig(128, 256, 128, 8, 3, 1.48, halves=True),
            MatmulConfig(128, 128, 128, 8, 4, 1.20),
            MatmulConfig(64, 128, 128, 4, 4, 1.00, blocks_per_sm=2),
            MatmulConfig(64, 64, 128, 4, 3, 0.50),
        ),
        "precise": (
            MatmulConfig(256, 128, 128, 4, 4, 1.35, specialized=True, bare=True),
            MatmulConfig(128, 128, 128, 4, 4, 1.28, specialized=True),
            MatmulConfig(256, 128, 128, 8, 3, 1.11, halves=True),
            MatmulConfig(128, 128, 128, 8, 4, 0.97),
            MatmulConfig(64, 128, 128, 4, 4, 0.94, blocks_per_sm=2),
            MatmulConfig(64, 64, 128, 4, 3, 0.50),
        ),
    },
    "blockwise": {
        "precise": (
            MatmulConfig(128, 128, 128, 4, 4, 1.10, specialized=True),
            MatmulConfig(128, 128, 128, 8, 4, 0.82),
            MatmulConfig(64, 128, 128, 4, 4, 0.82, blocks_per_sm=2),
            MatmulConfig(64, 64, 128, 4, 3, 0.50),
        ),
    },
    "mx": {
        "precise": (
            MatmulConfig(128, 128, 64, 8, 4, 0.25),
            MatmulConfig(64, 64, 64, 4, 3, 0.21, blocks_per_sm=4),
        ),
    },
}


def shared_bytes(config: MatmulConfig, family: str, out_itemsize: int) -> int:
    """Upper bound of the shared memory of a block: the stages of both operands and the tile on its way out."""
    scales = SCALE_BYTES if config.specialized and family == "blockwise" else 0
    operands = config.num_stages * (config.block_m + config.block_n) * (config.block_k + scales)
    # Without an MX instruction the right operand is written back in bf16.
    widened = WIDENED_BYTES * config.block_n * config.block_k if family == "mx" else 0
    rows = 2 * SPECIALIZED_WAVE_ROWS if config.specialized else config.block_m
    out = rows * config.block_n * out_itemsize // (2 if config.halves else 1)
    return operands + widened + out + BARRIER_BYTES


def supports(
    config: MatmulConfig,
    family: str,
    out_itemsize: int,
    bare: bool,
    specialized: bool,
    max_shared_bytes: int,
    native_mx: bool = False,
) -> bool:
    """Whether ``config`` serves a product.

    Args:
        config: the configuration.
        family: of the product.
        out_itemsize: bytes of an output element.
        bare: the product has no activation and no residual.
        specialized: the device has warpgroup MMA and the copy engine can address all three matrices.
        max_shared_bytes: what the device gives a block.
        native_mx: the device has an MX instruction. It takes 128 rows; of a smaller tile Triton would make bf16.
    """
    fits = shared_bytes(config, family, out_itemsize) <= max_shared_bytes
    native = not native_mx or family != "mx" or config.block_m >= NATIVE_MX_ROWS
    return fits and native and (bare or not config.bare) and (specialized or not config.specialized)


def predicted_time(config: MatmulConfig, m: int, n: int, num_sms: int) -> float:
    """Relative time of ``[m, n]``: whole waves of tiles, each as long as its area over the rate."""
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    waves = -(-tiles // (num_sms * config.blocks_per_sm))
    return waves * config.blocks_per_sm * config.block_m * config.block_n / config.rate
