"""Whether a converted layer, or block, would be slower than in bf16, for ``convert(..., filter="auto")``.

The times of FP8 GEMMs come from the tuned table, or are predicted as the launch predicts them. The other figures are of
an H200, from ``bench/results/nvidia-h200/linear.json`` (rows "layer kernels", 2026): a bf16 GEMM reaches 0.71 PFLOP/s,
casts in both orientations move 2.4 TB/s. A launch takes at least as long as a short kernel.

A block takes as long as its kernels, or as long as the host needs to launch them, whichever is longer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.distributed as dist

from tritonfp8.compat.hardware import Abilities, abilities, machine_key
from tritonfp8.recipes import GEMMS, Gemm, Recipe
from tritonfp8.specs import QuantSpec, matmul_family
from tritonfp8.tuning import COPY_BANDWIDTH, choose, is_widened, key, kind, predicted_time, table

BF16_RATE = 7.1e14
CAST_BANDWIDTH = 2.4e12
LAUNCH_SECONDS = 5e-6
ITEMSIZE = 2
# A model on the CPU or on the meta device, where no GPU is: the machine of the shipped table.
H200 = Abilities("NVIDIA H200", (9, 0), True, True, True, True, True, False, 132, 232448)
MACHINES = {"h200": H200, "h100": replace(H200, name="NVIDIA H100 80GB HBM3")}
"""Machines whose tuned tables ship, by the name that a prediction is asked for."""
# Host seconds of a launch of torch (``Tensor.zero_``) where ``HOST_LAUNCHES`` were measured, for a host without a GPU.
TORCH_LAUNCH = 8e-6
# Host time of a layer, forward and backward, eager, in launches of torch: in bf16; and in a recipe for the layer, each
# GEMM and each cast of an operand. And what surrounds the layers of a block: host time, too, and the GPU's time as
# passes over its input. An FP8 layer took 0.7 ms (bench/results/nvidia-h200/advice, blocks, mode "none").
HOST_LAUNCHES = {"bf16": 9.0, "layer": 15.0, "gemm": 10.0, "cast": 8.0}
BLOCK_LAUNCHES, BLOCK_PASSES = 250, 120
LAUNCHES_TIMED = 200


def why_slower(recipe: Recipe, tokens: int, sizes: tuple[int, int], device: torch.device) -> str | None:
    """The reason why a training step of a layer gets slower by ``recipe``, or None if it does not.

    Args:
        recipe: of the layer.
        tokens: rows of its input, M.
        sizes: its in features, K, and out features, N.
        device: of its weight; a GPU is assumed for weights elsewhere.
    """
    machine = machine_of(device)
    plain, quantized = layer_seconds(None, tokens, sizes, machine), layer_seconds(recipe, tokens, sizes, machine)
    if quantized <= plain:
        return None
    return (
        f"it would take {quantized * 1e6:.0f} us a step and {plain * 1e6:.0f} us in bf16, with {tokens} tokens on "
        f"{machine.name}"
    )


def layer_seconds(recipe: Recipe | None, tokens: int, sizes: tuple[int, int], machine: Abilities) -> float:
    """Predicted seconds of forward and backward of a layer; None stands for bf16."""
    k, n = sizes
    shapes = {"output": (tokens, n, k), "grad_input": (tokens, k, n), "grad_weight": (n, k, tokens)}
    gemms = {gemm: Gemm() if recipe is None else getattr(recipe, gemm) for gemm in GEMMS}
    seconds = sum(_gemm_seconds(gemms[gemm], shapes[gemm], machine) for gemm in GEMMS)
    operands = {"input": (tokens, k), "weight": (n, k), "grad_output": (tokens, n)}
    return seconds + sum(cast_seconds(casts, *operands[operand]) for operand, casts in _casts(gemms).items())


def why_slower_block(layers: Iterable[tuple[Recipe, tuple[int, int]]], tokens: int, device: torch.device) -> str | None:
    """The reason why a block of layers gets slower, because the host cannot launch it fast enough, or None.

    Args:
        layers: the recipe of each layer, with its in and out features.
        tokens: rows of their input.
        device: of their weights.
    """
    found, machine = list(layers), machine_of(device)
    launch = launch_seconds(machine.name) if torch.cuda.is_available() and not _among_ranks() else TORCH_LAUNCH
    passed = BLOCK_PASSES * ITEMSIZE * tokens * min(sizes[0] for _, sizes in found) / COPY_BANDWIDTH

    def seconds(layers: list[tuple[Recipe | None, tuple[int, int]]]) -> tuple[float, float]:
        host = launch * (BLOCK_LAUNCHES + sum(host_launches(recipe) for recipe, _ in layers))
        return passed + sum(layer_seconds(recipe, tokens, sizes, machine) for recipe, sizes in layers), host

    plain, quantized = seconds([(None, sizes) for _, sizes in found]), seconds([*found])
    if max(quantized) <= max(plain):
        return None
    return (
        f"the host would need {quantized[1] * 1e6:.0f} us a step to launch its block, which takes "
        f"{max(plain) * 1e6:.0f} us in bf16, with {tokens} tokens on {machine.name}"
    )


def host_launches(recipe: Recipe | None) -> float:
    """Host time of a layer, forward and backward, eager, in launches of torch; None stands for bf16."""
    gemms = [getattr(recipe, gemm) for gemm in GEMMS] if recipe is not None else []
    if not any(gemm.quantized for gemm in gemms):
        return HOST_LAUNCHES["bf16"]
    casts = sum(_casts(dict(zip(GEMMS, gemms, strict=True))).values())
    return HOST_LAUNCHES["layer"] + HOST_LAUNCHES["gemm"] * len(gemms) + HOST_LAUNCHES["cast"] * casts


def _among_ranks() -> bool:
    """Whether other processes convert the same model: their own measurements would take other layers."""
    return dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())


@functools.cache
def launch_seconds(name: str) -> float:
    """Host seconds of a launch of torch on the current GPU, whose name is the key of what was measured before."""
    x = torch.zeros(1, device="cuda")
    x.zero_()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(LAUNCHES_TIMED):
        x.zero_()
    found = (time.perf_counter() - begin) / LAUNCHES_TIMED
    torch.cuda.synchronize()
    return found


def _casts(gemms: dict[str, Gemm]) -> dict[str, int]:
    """How many orientations of each tensor are cast."""
    readers = {
        "input": (gemms["output"], gemms["grad_weight"]),
        "weight": (gemms["output"], gemms["grad_input"]),
        "grad_output": (gemms["grad_input"], gemms["grad_weight"]),
    }
    return {operand: sum(gemm.quantized for gemm in of) for operand, of in readers.items()}


def cast_seconds(orientations: int, rows: int, columns: int) -> float:
    """Predicted seconds of a cast of a bf16 tensor into so many orientations."""
    if not orientations:
        return 0.0
    # Read once, and a byte an element written for each orientation.
    return max(LAUNCH_SECONDS, rows * columns * (ITEMSIZE + orientations) / CAST_BANDWIDTH)


def _gemm_seconds(gemm: Gemm, mnk: tuple[int, int, int], machine: Abilities) -> float:
    m, n, k = mnk
    if gemm.lhs is None or gemm.rhs is None:
        moved = ITEMSIZE * (m * k + n * k + m * n)
        return max(LAUNCH_SECONDS, 2 * m * n * k / BF16_RATE, moved / COPY_BANDWIDTH)
    return max(LAUNCH_SECONDS, _fp8_seconds(gemm.lhs, gemm.rhs, gemm.accumulation, mnk, machine))


def _fp8_seconds(
    lhs: QuantSpec, rhs: QuantSpec, accumulation: str, mnk: tuple[int, int, int], machine: Abilities
) -> float:
    family = matmul_family(lhs.block, rhs.block)
    m, n, k = mnk
    if family == "mx" and is_widened(m, machine.has_native_mx):
        # Codes are read and bf16 is written, and a GEMM in bf16 follows.
        return 2 * m * n * k / BF16_RATE + (m + n) * k * (1 + ITEMSIZE) / COPY_BANDWIDTH
    rows = (lhs.block[0], rhs.block[0])
    # TMA addresses rows of whole 16 bytes.
    tma = machine.has_tma and all(size % 16 == 0 for size in mnk)
    product = kind(family, accumulation, rows, ITEMSIZE, True, tma)
    tuned = table(machine_key(machine)).get(product, {}).get(key(product, *mnk))
    if tuned is not None:
        return tuned.microseconds * 1e-6 * mnk[0] / key(product, *mnk).m
    config = choose(family, accumulation, rows, *mnk, ITEMSIZE, True, tma, machine)
    return predicted_time(config, *mnk, ITEMSIZE, machine.num_sms)


def machine_of(device: torch.device) -> Abilities:
    """The machine of a device: without a GPU, an H200."""
    if device.type == "cuda":
        return abilities(device)
    return abilities("cuda") if torch.cuda.is_available() else H200
