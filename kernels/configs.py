"""Launch configurations of the matrix products: search spaces as data, and what each one needs.

``rate`` is the throughput of a full machine relative to the others of the same family, near the PFLOP/s of one H200 at
8192 x 8192 x 8192; with the number of waves it predicts which configuration suits a shape. Measured for all but the
128 x 128 and smaller tiles of fast accumulation and the 64 x 64 ones outside MX, which are estimates.

A configuration is known by its name wherever it is written down: a name is looked up here, and nothing else makes a
:class:`MatmulConfig`.
"""

from dataclasses import dataclass

SPECIALIZED_WAVE_ROWS = 64
BARRIER_BYTES = 1024
SCALE_BYTES = 4
WIDENED_BYTES = 2
NATIVE_MX_ROWS = 128
RATE_UNIT = 1e15
COPY_BANDWIDTH = 4.27e12


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

    @property
    def name(self) -> str:
        """What it is stored under: stable, readable, unique in its space.

        Of what decides how it runs; a field at its default adds nothing, so a new field leaves old names alone. Not of
        ``rate`` and ``bare``, which say when to choose it.
        """
        default = type(self)
        parts = [f"{self.block_m}x{self.block_n}x{self.block_k}", f"w{self.num_warps}", f"s{self.num_stages}"]
        parts += [
            f"{letter}{value}"
            for letter, value, usual in (
                ("g", self.group_m, default.group_m),
                ("b", self.blocks_per_sm, default.blocks_per_sm),
            )
            if value != usual
        ]
        parts += [flag for flag in ("halves", "flatten", "specialized") if getattr(self, flag)]
        return "-".join(parts)


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


def predicted_time(config: MatmulConfig, m: int, n: int, k: int, out_itemsize: int, num_sms: int) -> float:
    """Seconds of a product by the figures of an H200: FLOPs over rate and wave efficiency, bytes over bandwidth.

    Whole waves of tiles are paid for, however few of the last one are used. Both terms are added, as if neither hid any
    of the other: the bytes are the same for every configuration, so they change the time and not the order. On another
    GPU the time is in units of its own, and the order is what it is for.

    Args:
        config: the configuration.
        m, n, k: sizes of the product ``[m, k] @ [n, k].T``.
        out_itemsize: bytes of an output element.
        num_sms: streaming multiprocessors of the device.
    """
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    waves = -(-tiles // (num_sms * config.blocks_per_sm))
    paid_elements = waves * num_sms * config.blocks_per_sm * config.block_m * config.block_n
    flops_seconds = 2 * paid_elements * max(k, 1) / (config.rate * RATE_UNIT)
    return flops_seconds + ((m + n) * k + m * n * out_itemsize) / COPY_BANDWIDTH


def space(family: str, accumulation: str) -> tuple[MatmulConfig, ...]:
    """The configurations of a family of products; a family that is always promoted has one space for both."""
    return SPACES[family][space_accumulation(family, accumulation)]


def space_accumulation(family: str, accumulation: str) -> str:
    """The accumulation under which the space of these products is listed."""
    return accumulation if accumulation in SPACES[family] else "precise"


def find(family: str, accumulation: str, name: str) -> MatmulConfig | None:
    """The configuration of this name, None where this version has none: in the space, or no such space."""
    configs = space(family, accumulation) if family in SPACES else ()
    return next((config for config in configs if config.name == name), None)
