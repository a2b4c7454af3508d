"""The constants of the model that this repository did not measure, each with its source, and published speeds."""

from typing import NamedTuple

NCCL = "https://github.com/NVIDIA/nccl/blob/v2.30.7-1/src/graph"
TITAN = "https://github.com/pytorch/torchtitan/blob/main"
TORCHAO = "https://github.com/pytorch/ao/tree/main/torchao/float8#training-benchmarks"


class Constant(NamedTuple):
    """A value with its unit, and the publication or file that states it."""

    value: float
    unit: str
    source: str


class Protocol(NamedTuple):
    """An algorithm and a protocol of NCCL: latencies in seconds, and the share of the link that carries data.

    Attributes:
        base: of any call.
        nvlink, net: of a step inside a machine and between machines.
        share: bandwidth over the link's.
        caps: most bandwidth on one machine, two and more, bytes a second.
        overhead: least time of a step inside a machine while a ring spans machines.
    """

    base: float
    nvlink: float
    net: float
    share: float
    caps: tuple[float, float, float]
    overhead: float = 0.0


INFINITE = float("inf")
FREE = (INFINITE, INFINITE, INFINITE)
RING = {
    "LL": Protocol(6.6e-6, 0.6e-6, 2.7e-6, 0.5, (141e9, 39e9, 20.4e9), 1e-6),
    "LL128": Protocol(14e-6, 1.9e-6, 4e-6, 0.92, FREE, 1e-6),
    "Simple": Protocol(8.4e-6, 3.4e-6, 14e-6, 1.0, FREE, 3e-6),
}
# A ring with one rank a machine has the network's latencies of a tree, which no step inside a machine hides.
SINGLE_NET = {"LL": 5e-6, "LL128": 8.5e-6, "Simple": 14e-6}
TREE = {
    "LL": Protocol(6.8e-6, 0.6e-6, 5e-6, 0.92 / 3.8, (141e9, 39e9, 20.4e9)),
    "LL128": Protocol(14e-6, 1.25e-6, 8.5e-6, 0.92 * 0.9375, FREE),
    "Simple": Protocol(8.4e-6, 4e-6, 14e-6, 0.92, FREE),
}
# Gathers and reduce-scatters of one rank a machine. A part of their latency grows with the ranks.
PAT = Protocol(8e-6, 2.8e-6, 14e-6 / 3.5, 0.75, FREE)

CONSTANTS = {
    "GPUs of a machine": Constant(8, "", f"{TITAN}/benchmarks/llama3_h100_202412_torchtitan.md"),
    "NVLink, one direction": Constant(18 * 20.6e9, "bytes/s", f"{NCCL}/topo.h, SM90_NVLINK_BW, 18 links"),
    "network of a GPU": Constant(400e9 / 8, "bytes/s", f"{TITAN}/benchmarks/llama3_h100_202412_torchtitan.md"),
    "memory of a GPU": Constant(141e9, "bytes", "https://www.nvidia.com/en-us/data-center/h200/"),
}
LATENCIES = f"{NCCL}/tuning.cc, ncclTunerConstantsDefaults and ncclTopoTuneModel (Hopper, Intel hosts)"


class Published(NamedTuple):
    """Measured by others: tokens a second and GPU.

    Attributes:
        model, recipe, gpus, tp, gather: as in a prediction.
        batch, sequence: sequences of a data-parallel rank, and tokens of a sequence.
        recompute: what backward computes again.
        speed: tokens a second and GPU.
        gpu, source: of the measurement.
        software: what trained.
    """

    model: str
    recipe: str
    gpus: int
    tp: int
    gather: bool
    batch: int
    sequence: int
    recompute: str
    speed: float
    gpu: str
    source: str
    software: str = "torchao"


_ASYNC = f"{TITAN}/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
_LARGE = f"{TITAN}/benchmarks/llama3_h100_202412_torchtitan.md"
_H200 = f"{TITAN}/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
PUBLISHED = (
    Published("llama3-8b", "bf16", 8, 1, False, 1, 8192, "selective", 6150, "H100", TORCHAO),
    Published("llama3-8b", "tensorwise", 8, 1, True, 1, 8192, "selective", 7689.5, "H100", TORCHAO),
    Published("llama3-8b", "rowwise", 8, 1, False, 1, 8192, "selective", 6768, "H100", TORCHAO),
    Published("llama3-8b", "bf16", 64, 8, False, 12, 8192, "selective", 4378, "H100", _ASYNC),
    Published("llama3-8b", "tensorwise", 64, 8, False, 12, 8192, "selective", 5078.1, "H100", _ASYNC),
    Published("llama3-8b", "rowwise", 64, 8, False, 12, 8192, "selective", 3708.5, "H100", _ASYNC),
    Published("llama3-70b", "bf16", 256, 8, False, 16, 8192, "full", 597.3, "H100", _ASYNC),
    Published("llama3-70b", "tensorwise", 256, 8, False, 16, 8192, "full", 809.8, "H100", _ASYNC),
    Published("llama3-8b", "bf16", 8, 1, False, 2, 8192, "selective", 6667, "H100", _LARGE),
    Published("llama3-8b", "bf16", 128, 1, False, 2, 8192, "selective", 6514, "H100", _LARGE),
    Published("llama3-8b", "tensorwise", 8, 1, True, 2, 8192, "selective", 8532, "H100", _LARGE),
    Published("llama3-8b", "tensorwise", 128, 1, True, 2, 8192, "selective", 8380, "H100", _LARGE),
    Published("llama3-8b", "tensorwise", 32, 1, True, 2, 8192, "selective", 10938, "H200", _H200),
    Published("llama3-8b", "tensorwise", 64, 1, True, 2, 8192, "selective", 10753, "H200", _H200),
)
