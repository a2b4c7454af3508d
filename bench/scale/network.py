"""Seconds of a collective by NCCL's own model: latency and bandwidth of rings and trees (alpha and beta)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.scale.sources import CONSTANTS, PAT, RING, SINGLE_NET, TREE, Protocol
from tritonfp8.specs.checks import require


@dataclass(frozen=True)
class Group:
    """The ranks of a collective.

    Attributes:
        ranks: of the group.
        a_machine: ranks of the group in one machine.
    """

    ranks: int
    a_machine: int

    @classmethod
    def strided(cls, ranks: int, stride: int, machine: int) -> "Group":
        """Every ``stride``-th rank of consecutive ones, ``machine`` GPUs a machine."""
        return cls(ranks, max(1, min(ranks, machine // stride)))

    @property
    def machines(self) -> int:
        """Machines of the group."""
        return math.ceil(self.ranks / self.a_machine)


@dataclass(frozen=True)
class Network:
    """Links of a cluster.

    Attributes:
        nvlink: bytes a second of a GPU to the others of its machine, in one direction.
        nic: bytes a second of a GPU to other machines, in one direction.
        machine: GPUs of a machine.
        latency: factor of NCCL's latencies; 0 leaves the bandwidth only.
    """

    nvlink: float = CONSTANTS["NVLink, one direction"].value
    nic: float = CONSTANTS["network of a GPU"].value
    machine: int = int(CONSTANTS["GPUs of a machine"].value)
    latency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("nvlink", "nic", "machine"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency is a factor of at least 0; got {self.latency}")

    def seconds(self, kind: str, size: float, group: Group) -> float:
        """Seconds of one collective.

        Args:
            kind: a kind of :class:`tritonfp8.distributed.count_collective_bytes`.
            size: bytes of the larger side on one rank, as it counts them.
            group: the ranks.
        """
        require("kind", kind, tuple(KINDS))
        if group.ranks == 1 or not size:
            return 0.0
        return min(self.latency * latency + size / rate for latency, rate in KINDS[kind](self, group))

    def bus(self, group: Group) -> float:
        """Bytes a second of a ring: each machine's part of it goes through the adapters of its ranks at once."""
        return self.nvlink if group.machines == 1 else min(self.nvlink, group.a_machine * self.nic)


Choices = Iterator[tuple[float, float]]
"""Latency in seconds, and bytes a second of the larger side, of each algorithm and protocol."""


def _rate(bus: float, protocol: Protocol, group: Group) -> float:
    return min(bus * protocol.share, protocol.caps[min(group.machines, 3) - 1])


def _ring(network: Network, group: Group, rounds: int) -> Choices:
    machines = group.machines
    for name, each in RING.items():
        inside = max(each.nvlink, each.overhead) if machines > 1 else each.nvlink
        net = SINGLE_NET[name] if group.a_machine == 1 else each.net
        steps = (group.ranks - machines) * inside + (machines - 1) * net
        rate = _rate(network.bus(group), each, group) * group.ranks / (rounds * (group.ranks - 1))
        yield each.base + rounds * steps, rate


def _gather(network: Network, group: Group) -> Choices:
    yield from _ring(network, group, 1)
    if group.a_machine == 1:
        latency = PAT.base + math.log2(group.machines) * PAT.net + group.ranks * PAT.nvlink
        yield latency, _rate(network.bus(group), PAT, group) * group.ranks / (group.ranks - 1)


def _reduce(network: Network, group: Group) -> Choices:
    yield from _ring(network, group, 2)
    for each in TREE.values():
        steps = (group.a_machine - 1) * each.nvlink + math.log2(group.machines) * each.net
        yield each.base + 2 * steps, _rate(network.bus(group), each, group) / 2


def _exchange(network: Network, group: Group) -> Choices:
    """Each rank sends to all others at once; NCCL has no model of it, so the steps have a ring's latency."""
    simple, machines = RING["Simple"], group.machines
    inside = (group.a_machine - 1) / group.ranks / network.nvlink
    between = (group.ranks - group.a_machine) / group.ranks / network.nic
    steps = (group.ranks - machines) * simple.nvlink + (machines - 1) * simple.net
    slowest = max(inside, between)
    yield simple.base + steps, 1 / slowest if slowest else math.inf


KINDS = {
    "all_gather": _gather,
    "reduce_scatter": _gather,
    "all_reduce": _reduce,
    "broadcast": _gather,
    "all_to_all": _exchange,
}
"""The algorithms of each kind of collective."""
