"""Checksums of tensors on their device: whether a weight changed, without a copy of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonfp8.workflow.outputs import local_part

CHUNK_BYTES = 1 << 22
_WORD = 4


class Fingerprints:
    """Makes a checksum of the bytes of a tensor that this rank has.

    Equal bytes have equal checksums, to the sign of a zero and the bits of a NaN. Words of 32 bits are multiplied by
    random odd numbers and added modulo 2^64, twice. So a change of one word always changes the checksum, and a change
    of several words goes unnoticed with a probability below 2^-60.
    """

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def of(self, x: Tensor) -> Tensor:
        """The checksum of ``x``, int64 ``[2]`` on its device. Of a sharded tensor: of the local shard."""
        with torch.no_grad():
            total: Tensor | None = None
            for part in _parts(x):
                words = self._of_plain(part)
                total = words if total is None else total * 31 + words
        return torch.zeros(2, dtype=torch.int64) if total is None else total

    def _of_plain(self, x: Tensor) -> Tensor:
        data = x.detach().contiguous().reshape(-1).view(torch.uint8)
        factors = self._factors_on(x.device)
        total = torch.full((2,), data.numel(), dtype=torch.int64, device=x.device)
        for chunk in data.split(CHUNK_BYTES):
            words = _words(chunk)
            # An odd multiplier loses nothing modulo 2^64, and the order of chunks counts.
            total = total * factors[:, 0] + (words * factors[:, : words.numel()]).sum(1)
        return total

    def _factors_on(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            generator = torch.Generator().manual_seed(0)
            size = 2, CHUNK_BYTES // _WORD
            drawn = torch.randint(-(2**63), 2**63 - 1, size, dtype=torch.int64, generator=generator)
            self._factors[device] = (drawn | 1).to(device)
        return self._factors[device]


def _words(chunk: Tensor) -> Tensor:
    """The bytes as int64 ``[words]``, each of 32 bits; the last word is filled up with zeros."""
    missing = -chunk.numel() % _WORD
    # A chunk whose address is not that of a word cannot be viewed as words.
    if missing or chunk.storage_offset() % _WORD:
        chunk = torch.cat([chunk, chunk.new_zeros(missing)])
    return chunk.view(torch.int32).to(torch.int64)


def _parts(x: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold the data of ``x`` on this rank."""
    local = local_part(x)
    if type(local) in (Tensor, torch.nn.Parameter) or not hasattr(local, "__tensor_flatten__"):
        yield local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from _parts(getattr(local, name))
