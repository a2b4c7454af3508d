"""Abilities of a device, such as FP8 tensor cores and TMA: code asks for these and not for a device's name."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Abilities:
    """The abilities of a device that the package asks for.

    Attributes:
        name: the device's own name.
        capability: CUDA compute capability, None on a CPU.
        has_fp8_mma: FP8 tensor cores and FP8 conversions (sm_89 and later). Without them the reference runs.
        has_direct_cast: conversions from float32 to FP8 that round once (sm_90 and later, as Triton compiles them).
        has_tma: the tensor memory accelerator (sm_90 and later).
        has_dependent_launch: programmatic dependent launch: a kernel starts before the previous one ends (sm_90 and
            later).
        has_warpgroup_mma: the asynchronous tensor cores of Hopper (sm_90 only).
        has_native_mx: tensor cores whose MX instruction Triton uses (sm_100 and sm_103).
        num_sms: streaming multiprocessors.
        max_shared_bytes: shared memory that a block may use, in bytes.
    """

    name: str
    capability: tuple[int, int] | None
    has_fp8_mma: bool
    has_direct_cast: bool
    has_tma: bool
    has_dependent_launch: bool
    has_warpgroup_mma: bool
    has_native_mx: bool
    num_sms: int
    max_shared_bytes: int


def machine_key(abilities: Abilities) -> str:
    """The key of a machine's tuned configurations: name, capability and SM count of its GPU, usable as a file name.

    An H200 is ``nvidia-h200-sm90-132``. A GPU of the same name with fewer SMs (a MIG slice, another board) has another
    key: the size of a wave is the number of SMs, so other configurations are fastest.
    """
    name = re.sub("[^a-z0-9]+", "-", abilities.name.lower()).strip("-")[:80]
    capability = "" if abilities.capability is None else "-sm{}{}".format(*abilities.capability)
    return f"{name}{capability}-{abilities.num_sms}"


# Triton's interpreter runs with these on a CPU: few programs, and the shared memory of a Hopper block.
CPU = Abilities("cpu", None, False, True, False, False, False, False, 4, 232448)


def abilities(device: torch.device | str | int) -> Abilities:
    """Abilities of ``device``; warns once for a CUDA device too old for FP8."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU
    return _cuda_abilities(torch.cuda.current_device() if device.index is None else device.index)


def with_index(device: torch.device | str) -> torch.device:
    """``device`` with an explicit index: ``"cuda"`` becomes the current GPU, so another process can use the name."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@functools.cache
def _cuda_abilities(index: int) -> Abilities:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability < (8, 9):
        warnings.warn(
            f"{properties.name} (sm_{capability[0]}{capability[1]}) has no FP8 tensor cores (sm_89 or later is "
            "needed): tritonfp8 runs its float32 reference there, which is correct but slow.",
            stacklevel=3,
        )
    return Abilities(
        name=properties.name,
        capability=capability,
        has_fp8_mma=capability >= (8, 9),
        has_direct_cast=capability >= (9, 0),
        has_tma=capability >= (9, 0),
        has_dependent_launch=capability >= (9, 0),
        has_warpgroup_mma=capability[0] == 9,
        has_native_mx=capability[0] == 10,
        num_sms=properties.multi_processor_count,
        max_shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
    )
