"""The sum of the gradients of a step in one order, whatever the number of ranks: a balanced tree over its units.

A unit is what one forward takes, such as one sequence. Of ``units`` a step, rank r of W takes r, r + W, r + 2 W ...:

    unit        0   1   2   3   4   5   6   7
    2 ranks     0   1 | 0   1 | 0   1 | 0   1      four backwards; the reduce-scatter of each adds a pair
    level 1       01      23      45      67
    level 2          0123            4567          joined here as soon as two neighbours are there
    level 3                01234567

With W ranks the reduce-scatter makes the first log2(W) levels (:mod:`tritonfp8.distributed.gradients.reduce_scatter`),
and the sharded sums are joined like the digits of a binary counter: log2(units / W) of them wait at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tritonfp8.distributed.fsdp import managed_parameters
from tritonfp8.distributed.gradients.reduce_scatter import reduce_in_pairs
from tritonfp8.layers.linear import require_module
from tritonfp8.specs.checks import shown
from tritonfp8.specs.naming import listed

Gradients = list[Tensor | None]


class OrderedGradients:
    """Add the gradients of a step's units in an order that does not depend on the number of ranks.

    With the same units, a step then has the same bits on 1, 2, 4 ... ranks::

        gradients = OrderedGradients(model, units=8)  # after fully_shard, or of a model on one rank
        for step in range(steps):
            for i in range(gradients.backwards):
                unit = 8 * step + i * ranks + rank
                (loss(model, data[unit]) / 8).backward()
                gradients.add()
            gradients.finish()  # the sums are in .grad
            tritonfp8.distributed.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    Gradients are added and not averaged: divide the loss of each unit by a constant, not by what a rank has, such as
    its number of tokens. When this gives equal bits, and what it costs: ``docs/distributed.md``.

    Args:
        model: on one rank, or sharded by ``fully_shard``; its parameters are float32, and reduced in float32.
        units: a step has so many on all ranks together; a power of two.

    Attributes:
        backwards: a step of this rank has so many.

    Raises:
        TypeError: ``model`` is no module, or ``units`` no int.
        ValueError: ``units`` or the number of ranks is no power of two, more ranks than units; HSDP, parameters that
            are not float32, are reduced in another dtype, or that FSDP2 does not shard.
    """

    def __init__(self, model: nn.Module, units: int) -> None:
        require_module(model)
        if not isinstance(units, int) or isinstance(units, bool):
            raise TypeError(f"units must be an int, the number of forwards of a step on all ranks; got {shown(units)}")
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        ranks = self._take_over(model)
        if units < ranks or units & (units - 1) or ranks & (ranks - 1):
            raise ValueError(
                "units and ranks must be powers of two, and no fewer units than ranks, as other trees depend on the "
                f"ranks; got {units} units on {ranks} ranks"
            )
        self.backwards = units // ranks
        self._count = 0
        self._levels: list[Gradients | None] = [None] * self.backwards.bit_length()
        # The sums of the step before, without their memory.
        self._given: list[weakref.ref[Tensor]] = []

    def _take_over(self, model: nn.Module) -> int:
        """Have FSDP2 reduce in pairs of ranks, and return the number of ranks."""
        self._check("float32", [p.dtype for p in self._parameters], torch.float32)
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            return 1
        managed = managed_parameters(model.modules())
        if any(each.copies > 1 for each in managed.values()):
            raise ValueError(
                "OrderedGradients does not take HSDP, whose all-reduce adds in another order: shard over all ranks"
            )
        of = {id(each.param.sharded_param): each for each in managed.values()}
        self._check("sharded by fully_shard", [id(p) in of for p in self._parameters], True)
        found = [of[id(p)] for p in self._parameters]
        self._check("reduced in float32", [each.reduce_dtype for each in found], torch.float32)
        self._check("sharded over the ranks of the others", [each.shards for each in found], found[0].shards)
        for module in reduce_in_pairs("OrderedGradients", model, False):
            # A sum of what each rank has, also by FSDP2 on one rank.
            module.set_gradient_divide_factor(1.0)
        return found[0].shards

    def _check(self, what: str, values: Sequence[object], wanted: object) -> None:
        wrong = [name for name, value in zip(self._names, values, strict=True) if value != wanted]
        if wrong or not values:
            raise ValueError(f"OrderedGradients needs parameters that are {what}; got {listed(wrong) or 'none'}")

    def add(self) -> None:
        """Take the gradients of one backward out of ``.grad``.

        Raises:
            RuntimeError: there are none, as after a backward without reduction; all units of the step were added;
            or the sums of the step before are still in ``.grad``.
        """
        grads: Gradients = [p.grad for p in self._parameters]
        if self._count == self.backwards:
            raise RuntimeError(f"all {self.backwards} backwards of this rank were added: call finish() before the next")
        if all(grad is None for grad in grads):
            raise RuntimeError(
                "no parameter has a gradient: call add() after each backward, with FSDP2's gradient synchronization on"
            )
        before = {id(given) for ref in self._given if (given := ref()) is not None}
        if any(id(grad) in before for grad in grads if grad is not None):
            raise RuntimeError(
                "backward added to the sums of the step before: call optimizer.zero_grad() after each step, which sets "
                "gradients to None"
            )
        self._given = []
        for parameter in self._parameters:
            parameter.grad = None
        level = 0
        while (first := self._levels[level]) is not None:
            self._levels[level] = None
            grads = _joined(first, grads)
            level += 1
        self._levels[level] = grads
        self._count += 1

    def finish(self) -> None:
        """Put the sums over all units of the step into ``.grad``.

        Raises:
            RuntimeError: units are missing.
        """
        if self._count != self.backwards:
            raise RuntimeError(
                f"{self._count} of the {self.backwards} backwards of this rank were added: call add() after each"
            )
        sums = self._levels[-1]
        assert sums is not None
        for parameter, grad in zip(self._parameters, sums, strict=True):
            parameter.grad = grad
        self._given = [weakref.ref(grad) for grad in sums if grad is not None]
        self._levels[-1] = None
        self._count = 0


def _joined(first: Gradients, second: Gradients) -> Gradients:
    """The sums of two neighbours, in the memory of the first; a missing gradient is left out."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if pairs:
        torch._foreach_add_([_local(a) for a, _ in pairs], [_local(b) for _, b in pairs])
    return [b if a is None else a for a, b in zip(first, second, strict=True)]


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad
