"""Whether a tensor changed: by what torch counts, by samples and sums of its bits, or by a checksum.

versions, stamp    what torch counts; the host reads it at no cost
Watch              torch's counts, a sample at each use, and sums at the end, for a weight that must not change
Fingerprints       a checksum, for tensors that are compared later, without a copy of them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8.layers.tensor_types import TENSORS

SAMPLES = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_BYTES = 1 << 22
_WORD = 4


def versions(x: Tensor) -> int | tuple[Any, ...] | None:
    """A value that every counted write to ``x`` changes; None if ``x``, or a tensor inside it, counts no writes."""
    if x.is_inference():
        return None
    if type(x) in TENSORS or not hasattr(x, "__tensor_flatten__"):
        return x._version
    # A write to a DTensor's local tensor is counted there only. Flattening a DTensor also returns its mesh.
    parts = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    inner = tuple([versions(part) for part in parts if isinstance(part, Tensor)])
    return None if None in inner else (x._version, *inner)


def _local(x: Tensor) -> Tensor:
    local: Tensor = getattr(x, "_local_tensor", x)
    return local


def stamp(x: Tensor) -> tuple[object, ...]:
    """Address and counts of writes of ``x``, of the part on this rank if it is a DTensor: a value to compare."""
    # A write to a DTensor may be counted there only, a write to its local tensor is.
    local = getattr(x, "_local_tensor", x)
    return local.data_ptr(), *(None if each.is_inference() else each._version for each in (x, local))


def _bits(x: Tensor) -> Tensor:
    """The values of ``x`` as a matrix of integers, without a copy if ``x`` has two dims."""
    matrix = x.detach()
    # A rank without experts has a shard without rows, whose columns a reshape could not tell.
    matrix = matrix.flatten(1) if x.ndim > 2 else matrix.reshape(1, -1) if x.ndim < 2 else matrix
    return matrix.view(_INTEGERS[x.element_size()])


def sample_of(x: Tensor) -> Tensor:
    """Some elements as integers; a view if ``x`` has two dims and a dense layout.

    It has all elements of a small tensor; else about :data:`SAMPLES`, at least one of each row and of each column.
    """
    bits = _bits(x)
    if not bits.is_contiguous():
        bits = bits.t()
    rows, columns = bits.shape
    step = max(1, min(bits.numel() // SAMPLES, rows, columns))
    if not bits.is_contiguous():
        return bits[:: math.isqrt(step), :: math.isqrt(step)]
    # A step that shares no factor with the number of columns visits all of them.
    while math.gcd(step, columns) > 1:
        step -= 1
    return bits.view(-1)[::step]


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    bits = _bits(x)
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


class Watch:
    """Notices whether tensors change.

    The host sees a change that torch counts. For any other change a sample is compared at each use, and at the end the
    sums of the bits of each row and of each column.

    Args:
        find: returns the tensors; called at each check, since others may have taken their place. Of a DTensor this
            rank's part is watched.

    Attributes:
        differences: for each tensor, the bits in which each element of its sample differed at any use.
    """

    def __init__(self, find: Callable[[], Sequence[Tensor]]) -> None:
        self._find = find
        # They stay alive, so no others can take their memory.
        self._tensors = list(find())
        self._seen = [stamp(x) for x in self._tensors]
        # A tensor that is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._samples = [sample_of(_local(x)) for x in self._tensors]
            self._bits = [x.clone() for x in self._samples]
            self._sums = [_sums(_local(x)) for x in self._tensors]
            self.differences = [torch.zeros_like(x) for x in self._bits]

    def is_written(self) -> bool:
        """Whether torch counted a write, or other tensors took the place of these."""
        return self._is_replaced() or [stamp(x) for x in self._tensors] != self._seen

    def _is_replaced(self) -> bool:
        now = self._find()
        return len(now) != len(self._tensors) or any(x is not y for x, y in zip(now, self._tensors, strict=True))

    def note(self, now: Sequence[Tensor] | None = None) -> None:
        """Compare the samples on the device: of the tensors, or of ``now``, which stands for them.

        :meth:`has_changed` reads the notes; reading them here would make the host wait. If threads or streams do this
        at the same time, a difference may be lost, but none is invented.
        """
        samples = self._samples if now is None else [sample_of(x) for x in now]
        for sample, bits, differences in zip(samples, self._bits, self.differences, strict=True):
            differences.bitwise_or_(sample ^ bits)

    def has_changed(self) -> bool:
        """Whether some tensor has other values now, or had them at some use. The host waits for the device."""
        if self._is_replaced():
            return True
        flags = [x.any() for x in self.differences]
        for x, sums in zip(self._tensors, self._sums, strict=True):
            flags += [(a != b).any() for a, b in zip(_sums(_local(x)), sums, strict=True)]
        return any(flag.item() for flag in flags)


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

    def of_rows(self, x: Tensor) -> Tensor:
        """A checksum of each row of a plain tensor ``x [rows, n]``: int64 ``[rows]``. One word is one element."""
        factors = self._factors_on(x.device)[0, : x.shape[1]]
        # The words of a chunk take as much memory as the words of a chunk of a whole tensor.
        chunks = x.detach().split(max(1, CHUNK_BYTES // _WORD // max(1, x.shape[1])))
        return torch.cat([(_bits(chunk.contiguous()).long() * factors).sum(1) for chunk in chunks])

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
    # A chunk that does not begin at the address of a word cannot be viewed as words.
    if missing or chunk.storage_offset() % _WORD:
        chunk = torch.cat([chunk, chunk.new_zeros(missing)])
    return chunk.view(torch.int32).to(torch.int64)


def _parts(x: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold the data of ``x`` on this rank."""
    local: Any = x.to_local() if hasattr(x, "to_local") else x.detach()
    if type(local) in (Tensor, torch.nn.Parameter) or not hasattr(local, "__tensor_flatten__"):
        yield local
        return
    for name in local.__tensor_flatten__()[0]:
        yield from _parts(getattr(local, name))
