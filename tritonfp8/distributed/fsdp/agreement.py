"""Ranks that gather one weight must agree on how. Each rank checks it when a plan is new."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# More lines would hide the first ones.
_MOST_LAYERS_NAMED = 8


def _number_of(text: str) -> int:
    """63 bits of a hash: a positive int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _differences(told: Iterable[Mapping[str, str]], ranks: list[int]) -> str:
    """The layers that ranks describe differently: one line each, with the ranks of each description."""
    told = list(told)
    lines = []
    for name in dict.fromkeys(name for each in told for name in each):
        by_text: dict[str, list[int]] = {}
        for rank, each in zip(ranks, told, strict=True):
            by_text.setdefault(each.get(name, "not gathered"), []).append(rank)
        if len(by_text) > 1:
            found = "; ".join(f"{text} on ranks {', '.join(map(str, on))}" for text, on in by_text.items())
            lines.append(f"  {name}: {found}")
    more = len(lines) - _MOST_LAYERS_NAMED
    return "\n".join([*lines[:_MOST_LAYERS_NAMED], *([f"  and {more} more layers"] if more > 0 else [])])


def check_agreement(described: Mapping[str, str], mesh: DeviceMesh, device: torch.device) -> None:
    """Raise on all ranks of a mesh unless they describe the same layers in the same words.

    Ranks whose recipes differ only in a rounding or a format send equally many bytes. Nothing else would fail then, and
    each rank would read the bytes of the others by its own recipe. The check is one collective of 8 bytes a rank for
    each mesh dim, and the host waits for it.

    Args:
        described: how each weight is gathered, by the name of its layer.
        mesh: the ranks that gather them.
        device: the device of the collectives.

    Raises:
        RuntimeError: ranks disagree; the message names the layers and the ranks.
    """
    number = _number_of(repr(sorted(described.items())))
    for group in mesh.get_all_groups():
        size = dist.get_world_size(group)
        if size == 1:
            continue
        numbers = torch.zeros(size, dtype=torch.int64, device=device)
        numbers[dist.get_rank(group)] = number
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
        if numbers.eq(numbers[0]).all():
            continue
        told: list[Mapping[str, str]] = [{}] * size
        dist.all_gather_object(told, dict(described), group=group)
        raise RuntimeError(
            "ranks disagree on how weights are gathered in 8 bits. Convert the model, and swap its recipes, alike on "
            f"all ranks:\n{_differences(told, dist.get_process_group_ranks(group))}"
        )
