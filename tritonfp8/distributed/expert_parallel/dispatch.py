"""The forward of experts that are sharded over ranks: tokens go to the rank of their expert, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tritonfp8.distributed.collectives import all_to_all_rows
from tritonfp8.distributed.expert_parallel.all_to_all import CodesTravel, exchange, part, payload_of
from tritonfp8.distributed.torch_private import disable_dynamo_of_torch_before
from tritonfp8.layers.linear import source_of
from tritonfp8.layers.moe import RoutedExperts, Routing, Way, can_route, combine, gather, permute


class _Trip(NamedTuple):
    """The way of the rows that this rank sends, sorted by expert, and of the rows that it receives.

    Attributes:
        send, receive: the rows to and from each rank.
        local: the routing of the received rows to the experts of this rank.
    """

    send: list[int]
    receive: list[int]
    local: Routing


class ExpertDispatch:
    """Computes a module of experts whose weights are sharded over a mesh of one dim.

    Args:
        mesh: over which the experts are sharded.
        payload: ``"float8"`` or ``"high_precision"``.
        divisor: gradients of the experts are divided by it.
    """

    def __init__(self, mesh: DeviceMesh, payload: str, divisor: int) -> None:
        self.mesh = mesh
        self.payload = payload
        self.divisor = divisor
        self.ranks = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group: str = mesh.get_group().group_name

    def __deepcopy__(self, memo: object) -> ExpertDispatch:
        return self

    def experts_of(self, rank: int, experts: int) -> int:
        """How many of the experts a rank has, as DTensor shards a dim."""
        each = -(-experts // self.ranks)
        return max(0, min(each, experts - rank * each))

    def local(self, weight: Any) -> Tensor:
        """This rank's part of a parameter.

        Raises:
            TypeError: it is not sharded any more.
        """
        if not isinstance(weight, DTensor):
            raise TypeError(
                f"the weights of sharded experts must be DTensors; got a {type(weight).__name__}. Load checkpoints "
                "into the sharded parameters, or call shard_experts after the model has its final parameters"
            )
        return part(weight, self.divisor) if weight.requires_grad else weight.to_local()

    def parts(self, weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """This rank's part of each weight; None if FSDP2 shards them further, or if they are stored in 8 bits."""
        found = {}
        for name, weight in weights.items():
            if not isinstance(weight, DTensor) or weight.device_mesh != self.mesh:
                return None
            found[name] = weight.to_local()
            if not found[name].numel() or source_of(found[name]).has_codes:
                return None
        return found

    def trip(self, ends: Tensor) -> _Trip:
        """The way of rows whose experts end at ``ends [E]``, over all experts. The host waits for the counts."""
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        of_rank = [self.experts_of(rank, len(ends)) for rank in range(self.ranks)]
        mine = of_rank[self.rank]
        theirs = all_to_all_rows(counts[:, None], of_rank, [mine] * self.ranks, self.group).view(self.ranks, mine)
        send = torch.stack([part.sum() for part in counts.split(of_rank)])
        both = torch.stack([send, theirs.sum(1)]).tolist()
        # Rows arrive by rank and then by expert, so that a stable sort by expert keeps the order of ranks.
        experts = torch.arange(mine, device=ends.device).repeat(self.ranks)
        ids = torch.repeat_interleave(experts, theirs.flatten(), output_size=sum(both[1]))
        return _Trip(both[0], both[1], Routing.of(ids[:, None], mine))

    def forward(self, module: RoutedExperts, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As :meth:`RoutedExperts.forward`; the tokens of each rank are its own."""
        names = module.weights()
        routing = Routing.of(top_k_index, next(iter(names.values())).shape[0])
        trip = self.trip(routing.offsets)
        recipe, float8 = module.recipe, self.payload == "float8"
        there = payload_of(recipe.output.lhs, hidden.dtype) if float8 else None
        back = payload_of(recipe.grad_input.lhs, hidden.dtype) if float8 else None
        travel = self._travel(module, hidden, top_k_weights, trip, (there, back))
        if travel is not None:
            return self._routed(module, hidden, top_k_weights, Way(routing, trip.local, travel))
        sent = sum(trip.send)
        rows = gather(hidden, routing)
        # Rows of no expert stay here.
        rows, rest = rows[:sent], rows[sent:]
        up, down = names
        if module.observer is not None:
            # Rows that arrived as codes are what their codes stand for: their cast would seem to lose nothing.
            module.observer.saw_input(up, rows, routing.offsets)
        rows = exchange(rows, trip.send, trip.receive, self.group, there)
        rows = permute(rows, trip.local.order, trip.local.inverse)
        weights = list(module.weights(self.local).values())
        biases = [None if bias is None else self.local(bias) for bias in map(module.bias_of, names)]
        if len(trip.local.offsets):
            rows = module.compute(rows, trip.local.offsets, weights, biases)
        else:
            # A rank without experts receives no rows. It takes part in the collectives of backward nevertheless, and
            # its empty shards get gradients: other ranks would wait for it in the norm of all gradients.
            rows = rows + sum(x.sum() for x in (*weights, *biases) if x is not None and x.requires_grad)
        rows = permute(rows, trip.local.inverse, trip.local.order)
        rows = exchange(rows, trip.receive, trip.send, self.group, None, back)
        if module.observer is not None:
            module.observer.saw_output(down, rows)
        rows = torch.cat([rows, torch.zeros_like(rest)]) if len(rest) else rows
        return combine(rows, routing, top_k_weights, hidden.dtype)

    def _travel(
        self, module: RoutedExperts, hidden: Tensor, top_k_weights: Tensor, trip: _Trip, specs: Sequence[Any]
    ) -> CodesTravel | None:
        """The way of codes that GEMMs read as they arrive; None if rows arrive in high precision.

        Args:
            module, hidden, top_k_weights: of this forward.
            trip: of its rows.
            specs: in which rows, and the gradients of results, travel.
        """
        codes = module.recipe.codes
        trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in module.weights().values())
        both = not trains or (codes["input"] is not None and codes["grad_output"] is not None)
        # An observer sees the rows of each expert. A rank without experts takes part in the collectives by itself.
        sees = module.observer is not None or not len(trip.local.offsets)
        if None in specs or sees or not both or not can_route(hidden, top_k_weights):
            return None
        return CodesTravel(trip.send, trip.receive, self.group)

    # Its autograd functions keep numbers of rows, which Dynamo of torch 2.11 takes for tensors: an AssertionError.
    @disable_dynamo_of_torch_before("2.13")  # type: ignore[untyped-decorator]
    def _routed(self, module: RoutedExperts, hidden: Tensor, top_k_weights: Tensor, way: Way) -> Tensor:
        weights = module.weights(self.local)
        found = {name: module.bias_of(name) for name in weights}
        biases = {name: None if bias is None else self.local(bias) for name, bias in found.items()}
        return module.routed(hidden, weights, biases, way, top_k_weights)
