"""Launch configurations of the GEMMs: search spaces as data, and the needs of each configuration.

``rate`` is the throughput of a full machine in PFLOP/s of one H200 at 8192 x 8192 x 8192; with the number of waves it
predicts which configuration suits a shape. Where scales are in the epilogue, ``rate`` and ``idle_steps`` of what the
model chooses for large M on Hopper fit times of ``bench.contest.ranking``. For small M, and of 64 x 64 tiles outside
MX, they are estimates.

A configuration is known by its name wherever it is written down: a name is looked up here, and nothing else makes a
:class:`MatmulConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tritonfp8.compat import triton_since
from tritonfp8.kernels.gemm.sizes import SCALE_VECTOR, SPECIALIZED_WAVE_ROWS

BARRIER_BYTES = 1024
SCALE_BYTES = 4
WIDENED_BYTES = 2
NATIVE_MX_ROWS = 128
PARTIAL_BYTES = 4
RATE_UNIT = 1e15
# Of an H200, bytes a second and seconds: a copy's reads and writes, reads from L2 by all SMs and by one; how long a
# load takes while the memory is busy, what a dependent launch adds.
COPY_BANDWIDTH, L2_BANDWIDTH, SM_BANDWIDTH = 4.27e12, 1.0e13, 8.0e10
LOAD_LATENCY, LAUNCH_LATENCY = 1.5e-6, 2.0e-6
# The part of the shorter of two overlapping times that adds to the longer one.
OVERHANG = 0.1
# Of the reduce that adds up the partial sums of a split K.
REDUCE_TILE = {"BLOCK_M": 4, "BLOCK_N": 128}
REDUCE_WARPS = 4
# Small M: the bytes of the weight decide. Tiles of as many tokens, in as many parts of K.
SMALL_M = 256
# GEMMs that are batch-invariant run in the configuration for this M, whatever theirs is. It is beyond SMALL_M, so it
# does not split K, and training has about as many rows: both passes then sum in one order.
INVARIANT_M = 4096
# Up to this M a kernel reads MX codes and makes them bf16 in registers, if no tensor core takes them. From there on it
# pays to write the operands as bf16 first, five bytes of traffic an element, and to call the GEMM in bf16.
MAX_M_OF_CODES = 64


@dataclass(frozen=True)
class MatmulConfig:
    """Tile ``[block_m, block_n]`` in steps of ``block_k``, and how Triton compiles it.

    ``halves`` stores a tile in two halves of its columns; ``flatten`` joins the loop over tiles with the loop over K;
    ``group_m`` rows of tiles are walked together. ``swap`` multiplies the transposed operands: the columns of the tile
    become the rows of the tensor core's instruction, whose number is fixed. ``split_k`` programs share the K of a tile;
    a second launch adds up their float32 partial sums in order. ``max_m`` is the largest M that this serves.

    ``idle_steps``: the prologue and epilogue of a tile take as many more steps of K than the shortest ones of any tile,
    with ``pingpong`` only of a program's last tile; ``rate`` counts without them.

    ``specialized`` is the warp-specialized Hopper kernel, whose two groups of warps each multiply 64 rows at a time; a
    tile of 64 rows, of the transposed operands if swapped, has one group. ``bare`` says that its registers hold no
    activation or residual besides the accumulator, ``column_scales`` that they hold scales of every column along K.
    ``stagger`` keeps the groups half a step apart; ``tight`` lets them promote before they start the next MMA, in
    fewer registers; ``overlap`` lets them start it before, that many steps in a row, if a group has only one MMA
    a step. ``side_by_side`` gives a group the left and the right half of its rows of the tile, one MMA each.
    ``pingpong`` gives the groups whole tiles in turn: one stores its tile while the other multiplies.
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
    side_by_side: bool = False
    pingpong: bool = False
    overlap: int = 1
    column_scales: bool = True
    idle_steps: float = 0.0

    @property
    def name(self) -> str:
        """The name in files: stable, readable, unique in its space.

        It is made of the fields that decide how the kernel runs. A field at its default adds nothing, so a new field
        keeps old names valid. ``rate``, ``idle_steps``, ``bare``, ``column_scales`` and ``max_m`` decide when to choose
        it, and are left out.
        """
        default = type(self)
        parts = [f"{self.block_m}x{self.block_n}x{self.block_k}", f"w{self.num_warps}", f"s{self.num_stages}"]
        parts += [
            f"{letter}{value}"
            for letter, value, usual in (
                ("g", self.group_m, default.group_m),
                ("b", self.blocks_per_sm, default.blocks_per_sm),
                ("k", self.split_k, default.split_k),
                ("o", self.overlap, default.overlap),
            )
            if value != usual
        ]
        flags = ("halves", "flatten", "specialized", "swap", "stagger", "tight", "side_by_side", "pingpong")
        parts += [flag.replace("_", "") for flag in flags if getattr(self, flag)]
        return "-".join(parts)

    @property
    def stored_columns(self) -> int:
        """Columns of the tile that a block, or a group of warps of the specialized kernel, stores at a time."""
        return self.block_n // (2 if self.side_by_side else 1) // (2 if self.halves else 1)


def _few_rows(
    splits: tuple[int, ...], *tiles: tuple[int, int, float], block_n: int = 128, **options: Any
) -> tuple[MatmulConfig, ...]:
    """Each tile ``(block_m, num_stages, rate)`` in each number of parts of K."""
    return tuple(
        MatmulConfig(block_m, block_n, 128, 4, stages, rate, swap=True, split_k=split, max_m=SMALL_M, **options)
        for block_m, stages, rate in tiles
        for split in splits
    )


def _half_tiles(splits: tuple[int, ...], *tiles: tuple[int, int, float], **options: Any) -> tuple[MatmulConfig, ...]:
    """Tiles of 64 rows of the weight: twice as many programs read it, and fewer partial sums have to be added up."""
    return _few_rows(splits, *tiles, block_n=SPECIALIZED_WAVE_ROWS, specialized=True, **options)


FEW_ROWS_HOPPER = _few_rows((1, 2, 4, 8), (16, 8, 0.30), (32, 8, 0.55), (64, 6, 0.80), (128, 4, 1.10), specialized=True)
HALF_TILES = _half_tiles((1,), (8, 16, 0.15), (16, 16, 0.30), (32, 16, 0.50), (64, 12, 0.80))
HALF_TILES_OVERLAPPED = _half_tiles((1,), (8, 16, 0.15), (16, 16, 0.30), (32, 16, 0.50), (64, 12, 0.75), overlap=4)
# With scales along K, what 128 tokens keep in flight besides their sum would take more registers than there are.
HALF_TILES_128 = _half_tiles((1, 2), (128, 8, 1.00))
HALF_TILES_128_OVERLAPPED = _half_tiles((1, 2), (128, 8, 1.00), overlap=4)
LARGEST_FAST = MatmulConfig(128, 256, 128, 4, 4, 1.535, halves=True, specialized=True, bare=True, idle_steps=1.2)
LARGEST_PROMOTED = MatmulConfig(
    256, 128, 128, 4, 4, 1.20, halves=True, group_m=16, specialized=True, bare=True, stagger=True, tight=True
)
FEW_ROWS = _few_rows((1, 4), (16, 4, 0.25), (64, 4, 0.70), blocks_per_sm=2)
# MX codes that become bf16 in registers: conversions limit the rate, which is an estimate.
FEW_ROWS_MX = (
    *_few_rows((1, 2, 4, 8), (16, 4, 0.10), (32, 4, 0.20), blocks_per_sm=2),
    *_few_rows((1, 2, 4), (16, 6, 0.08), block_n=64, blocks_per_sm=3),
    *_few_rows((1, 2, 4), (32, 6, 0.16), (64, 5, 0.30), block_n=64, blocks_per_sm=2),
)

# As many steps in a row as triton 3.9 has registers for.
OVERLAP_SINCE_3_9 = 4

SPACES: Mapping[str, Mapping[str, tuple[MatmulConfig, ...]]] = {
    "epilogue": {
        "fast": (
            LARGEST_FAST,  # Larger tiles take less power for each step. Smaller ones in turn gain where K is small.
            MatmulConfig(128, 128, 128, 4, 6, 1.45, specialized=True, bare=True, pingpong=True, idle_steps=5.4),
            MatmulConfig(128, 128, 128, 4, 5, 1.44, specialized=True, idle_steps=1.1),
            replace(LARGEST_FAST, rate=1.505, group_m=16),  # For tuned tables: see the orders of "precise".
            MatmulConfig(128, 256, 128, 8, 4, 1.535, halves=True, idle_steps=3.3),
            MatmulConfig(128, 256, 128, 8, 3, 1.525, halves=True, idle_steps=3.0),
            MatmulConfig(128, 128, 128, 8, 4, 1.20, idle_steps=1.1),
            MatmulConfig(64, 128, 128, 4, 4, 1.00, blocks_per_sm=2, idle_steps=1.1),
            *FEW_ROWS_HOPPER,
            *HALF_TILES,
            *HALF_TILES_128,
            *FEW_ROWS,
            MatmulConfig(64, 64, 128, 4, 3, 0.50, idle_steps=1.1),
        ),
        "precise": (
            MatmulConfig(128, 128, 128, 4, 5, 1.39, group_m=16, specialized=True, overlap=2),
            # More steps in a row take less power for each step: they gain where K is large.
            MatmulConfig(128, 128, 128, 4, 5, 1.445, group_m=16, specialized=True, overlap=4, idle_steps=0.25),
            replace(LARGEST_PROMOTED, rate=1.425, idle_steps=1.0),
            # On an H100 these are the fastest for some sizes. Only tuned tables choose them. Where K is large, the
            # operands of fewer rows of tiles stay in the L2 cache from one column of tiles to the next.
            MatmulConfig(128, 128, 128, 4, 5, 1.37, group_m=16, specialized=True, overlap=16),
            MatmulConfig(128, 128, 128, 4, 5, 1.37, specialized=True, overlap=4),
            replace(LARGEST_PROMOTED, rate=1.37, group_m=8),
            MatmulConfig(256, 64, 128, 4, 5, 1.20, specialized=True, stagger=True),
            MatmulConfig(256, 128, 128, 8, 3, 1.11, halves=True),
            MatmulConfig(128, 128, 128, 8, 4, 0.97),
            MatmulConfig(64, 128, 128, 4, 4, 0.94, blocks_per_sm=2),
            *FEW_ROWS_HOPPER,
            *HALF_TILES_OVERLAPPED,
            *HALF_TILES_128_OVERLAPPED,
            *FEW_ROWS,
            MatmulConfig(64, 64, 128, 4, 3, 0.50),
        ),
    },
    "blockwise": {
        "precise": (
            MatmulConfig(128, 128, 128, 4, 5, 1.33, group_m=16, specialized=True, overlap=4, column_scales=False),
            LARGEST_PROMOTED,
            MatmulConfig(256, 64, 128, 4, 5, 1.06, specialized=True, stagger=True),
            MatmulConfig(128, 128, 128, 4, 4, 1.10, specialized=True),
            MatmulConfig(128, 128, 128, 8, 4, 0.82),
            MatmulConfig(64, 128, 128, 4, 4, 0.82, blocks_per_sm=2),
            *FEW_ROWS_HOPPER,
            *HALF_TILES_OVERLAPPED,
            *FEW_ROWS,
            MatmulConfig(64, 64, 128, 4, 3, 0.50),
        ),
    },
    "mx": {
        "precise": (
            MatmulConfig(128, 128, 64, 8, 4, 0.25),
            *FEW_ROWS_MX,
            MatmulConfig(64, 64, 64, 4, 3, 0.21, blocks_per_sm=4),
        ),
    },
}


def shared_bytes(config: MatmulConfig, family: str, out_itemsize: int) -> int:
    """Upper bound of the shared memory of a block: the stages of both operands and the tile on its way out."""
    operands = config.num_stages * (config.block_m + config.block_n) * config.block_k
    if config.specialized and family == "blockwise":
        scales = max(config.block_m, SCALE_VECTOR) + max(config.block_n, SCALE_VECTOR)
        operands += config.num_stages * SCALE_BYTES * scales
    # Without an MX instruction the right operand is written back in bf16; if swapped, the left one changes its layout.
    rows = config.block_n + (config.block_m if config.swap else 0)
    widened = WIDENED_BYTES * rows * config.block_k if family == "mx" else 0
    out = config.block_m * config.block_n
    vectors = 0
    if config.specialized:
        rows, columns = (config.block_n, config.block_m) if config.swap else (config.block_m, config.block_n)
        groups = min(2, rows // SPECIALIZED_WAVE_ROWS)
        out = groups * SPECIALIZED_WAVE_ROWS * columns
        # Each group's scales or bias of the columns, on their way between layouts.
        vectors = groups * SCALE_BYTES * columns
    out *= PARTIAL_BYTES if config.split_k > 1 else out_itemsize
    return operands + widened + out // (config.block_n // config.stored_columns) + vectors + BARRIER_BYTES


def has_registers(config: MatmulConfig) -> bool:
    """Whether the installed triton finds registers for so many steps in a row. Without them, each step spills."""
    return config.overlap <= OVERLAP_SINCE_3_9 or not triton_since("3.9")


def supports(
    config: MatmulConfig,
    family: str,
    out_itemsize: int,
    bare: bool,
    specialized: bool,
    max_shared_bytes: int,
    native_mx: bool = False,
    column_scales: bool = False,
) -> bool:
    """Whether ``config`` serves a GEMM.

    Args:
        config: the configuration.
        family: of the GEMM.
        out_itemsize: bytes of an output element.
        bare: the GEMM has no activation and no residual.
        specialized: the device has warpgroup MMA and TMA can address all three matrices.
        max_shared_bytes: what the device gives a block.
        native_mx: the device has an MX instruction. It takes 128 rows; of a smaller tile Triton would make bf16.
        column_scales: every column of the output has a scale of its own for every step of K.
    """
    fits = shared_bytes(config, family, out_itemsize) <= max_shared_bytes
    native = not native_mx or family != "mx" or config.block_m >= NATIVE_MX_ROWS
    # Partial sums have no epilogue.
    holds = (bare or not config.bare or config.split_k > 1) and (config.column_scales or not column_scales)
    return fits and native and holds and (specialized or not config.specialized) and has_registers(config)


def is_widened(m: int, native_mx: bool, batch_invariant: bool = False) -> bool:
    """Whether an MX GEMM of ``m`` rows multiplies operands that were written as bf16, by torch's GEMM.

    The one place where that is decided. Otherwise a kernel of the space ``"mx"`` reads the codes: also where the GEMM
    is batch-invariant, as the order in which torch's GEMM sums depends on M.
    """
    return not native_mx and m > MAX_M_OF_CODES and not batch_invariant


def predicted_time(config: MatmulConfig, m: int, n: int, k: int, out_itemsize: int, num_sms: int) -> float:
    """Seconds of a GEMM by the figures of an H200; on another GPU in units of its own, whose order counts.

    Whole waves of tiles are paid for, however few of the last one are used, each as long as its area over the rate. To
    that the bytes of the matrices over the bandwidth are added, as if neither hid any of the other: they are the same
    for every configuration. At small M (SMALL_M) they take longest, and the configuration decides how they are read:
    what the programs have in flight must make up for the memory's latency, tiles read operands again from L2, one SM
    can read only so much, and partial sums have to be written and added up.

    Args:
        config: the configuration.
        m, n, k: sizes of ``[m, k] @ [n, k].T``.
        out_itemsize: bytes of an output element.
        num_sms: streaming multiprocessors of the device.
    """
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    pieces = tiles * config.split_k
    slots = num_sms * config.blocks_per_sm
    waves = -(-pieces // slots)
    paid_k = waves * max(k, 1) + (1 if config.pingpong else waves) * config.idle_steps * config.block_k
    multiply = 2 * slots * config.block_m * config.block_n * paid_k / (config.split_k * config.rate * RATE_UNIT)
    bytes_moved = (m + n) * k + m * n * out_itemsize
    if m > SMALL_M:
        return multiply + bytes_moved / COPY_BANDWIDTH
    rows = min(m, config.block_m) + config.block_n
    in_flight = min(pieces, slots) * config.num_stages * rows * config.block_k
    share = min(1.0, in_flight / (LOAD_LATENCY * COPY_BANDWIDTH))
    read = max(bytes_moved / COPY_BANDWIDTH, tiles * rows * k / L2_BANDWIDTH) / share
    read = max(read, waves * rows * k / config.split_k / SM_BANDWIDTH)
    seconds = max(multiply, read) + OVERHANG * min(multiply, read)
    if config.split_k > 1:
        seconds += LAUNCH_LATENCY + 2 * PARTIAL_BYTES * config.split_k * m * n / L2_BANDWIDTH
    return seconds


def space(family: str, accumulation: str) -> tuple[MatmulConfig, ...]:
    """The configurations of a family of GEMMs; a family that is always promoted has one space for both."""
    return SPACES[family][space_accumulation(family, accumulation)]


def space_accumulation(family: str, accumulation: str) -> str:
    """The accumulation under which the space of these GEMMs is listed."""
    return accumulation if accumulation in SPACES[family] else "precise"
