"""Ranks that gather one weight must agree on how. All of them check it when a forward of the model begins."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tritonfp8.distributed.torch_private import default_store
from tritonfp8.specs.naming import reasons

_made = itertools.count()


def _number_of(text: str) -> int:
    """63 bits of a hash: a positive int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _differences(told: Iterable[Mapping[str, str]], ranks: list[int]) -> str:
    """The layers that ranks describe differently: a line for each, with the ranks of each description."""
    told = list(told)
    differences = []
    for name in dict.fromkeys(name for each in told for name in each):
        by_text: dict[str, list[int]] = {}
        for rank, each in zip(ranks, told, strict=True):
            by_text.setdefault(each.get(name, "not gathered"), []).append(rank)
        if len(by_text) > 1:
            found = "; ".join(f"{text} on ranks {', '.join(map(str, on))}" for text, on in by_text.items())
            differences.append((name, found))
    return "\n".join(f"  {line}" for line in reasons(differences))


def _ranks(mesh: DeviceMesh) -> list[int]:
    found: list[int] = mesh.mesh.flatten().tolist()
    return found


def _largest(mesh: DeviceMesh, numbers: Tensor) -> Tensor:
    """The largest of each number over all ranks of a mesh, in place."""
    for group in mesh.get_all_groups():
        if dist.get_world_size(group) > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return numbers


class _Shared(NamedTuple):
    """The weights of one mesh.

    Attributes:
        key: under it each rank keeps its words in the store.
        numbers: the hash of this rank's words, and its negative.
        words: how this rank gathers, with the number of checks before: the last ones, and those before them.
    """

    key: str
    numbers: Tensor
    words: list[tuple[int, dict[str, str]]]


class Agreement:
    """Whether all ranks gather the weights of one model alike, asked in each forward of the model.

    Ranks whose recipes differ only in a rounding or a format send equally many bytes: each would read the bytes of the
    others by its own recipe. Other recipes send other numbers of bytes, and their collectives would hang. A rank that
    changed its recipes cannot know whether the others did, nor they, so each forward begins with a MAX of 16 bytes
    over each dim of a mesh. Of each rank it has a hash of how that rank gathers, and its negative.

    On a GPU the host does not wait for the result before the gathers are launched. It waits when the model's forward
    has been launched, for the beginning of that forward. A rank whose own plan is new waits at once.
    """

    def __init__(self) -> None:
        self._number = next(_made)
        self._shared: dict[DeviceMesh, _Shared] = {}
        self._checks = 0
        self._is_new = False
        self._later: list[tuple[DeviceMesh, Tensor, torch.cuda.Event]] = []

    def describe(self, described: Mapping[DeviceMesh, Mapping[str, str]]) -> None:
        """Note how this rank gathers from now on.

        Args:
            described: how each weight is gathered, by the name of its layer, for the mesh that shares it. A mesh that
                is missing shares none from now on; its ranks are still asked.
        """
        for mesh in (mesh for mesh in described if mesh not in self._shared):
            # Ranks may have made different numbers of models; the ranks of one mesh agree on the largest.
            [number] = _largest(mesh, torch.tensor([self._number], device=mesh.device_type)).tolist()
            key = f"tritonfp8/gather/{_number_of(repr(_ranks(mesh)))}/{number}"
            self._shared[mesh] = _Shared(key, torch.empty(0), [])
        for mesh, shared in self._shared.items():
            mine = dict(described.get(mesh, {}))
            number = _number_of(repr(sorted(mine.items())))
            numbers = torch.tensor([number, -number], device=mesh.device_type)
            # Before any collective: a rank that learns of a difference finds the words of all ranks. The previous words
            # too: a rank may have raised, and changed its recipes again, when another one reads them.
            words = [*shared.words[-1:], (self._checks, mine)]
            default_store().set(f"{shared.key}/{dist.get_rank()}", json.dumps(words))
            self._shared[mesh] = shared._replace(numbers=numbers, words=words)
        self._is_new = True

    def check(self) -> None:
        """Called by all ranks before they gather.

        Raises:
            RuntimeError: ranks disagree; the message names the layers and the ranks.
        """
        self.finish()
        self._checks += 1
        # All before any is compared: ranks of one mesh may belong to several others.
        found = {mesh: _largest(mesh, shared.numbers.clone()) for mesh, shared in self._shared.items()}
        for mesh, both in found.items():
            if self._is_new or not both.is_cuda:
                self._compare(mesh, both)
            elif not torch.cuda.is_current_stream_capturing():
                copy = torch.empty(2, dtype=torch.int64, pin_memory=True)
                copy.copy_(both, non_blocking=True)
                self._later.append((mesh, copy, torch.cuda.current_stream().record_event()))
        self._is_new = False

    def finish(self) -> None:
        """Called when the forward has been launched: the device still has work while the host waits for its beginning.

        Raises:
            RuntimeError: see :meth:`check`.
        """
        later, self._later = self._later, []
        for mesh, both, event in later:
            event.synchronize()
            self._compare(mesh, both)

    def _compare(self, mesh: DeviceMesh, both: Tensor) -> None:
        largest, negative = both.tolist()
        if largest == -negative:
            return
        ranks, key = _ranks(mesh), self._shared[mesh].key
        words = [json.loads(default_store().get(f"{key}/{rank}")) for rank in ranks]
        told: list[dict[str, str]] = [
            next((mine for since, mine in reversed(each) if since < self._checks), {}) for each in words
        ]
        raise RuntimeError(
            "ranks disagree on how weights are gathered in 8 bits. Convert the model, and swap its recipes, alike on "
            f"all ranks:\n{_differences(told, ranks)}"
        )
