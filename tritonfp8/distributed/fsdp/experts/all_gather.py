"""The 8-bit all-gather of the experts of one model: sends codes and scales of this rank's experts, takes what came."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tritonfp8.distributed.fsdp.byte_layout import WeightOrientation, weight_orientations
from tritonfp8.distributed.fsdp.experts.gathered import GatheredExperts
from tritonfp8.distributed.fsdp.experts.layout import MatricesLayout
from tritonfp8.distributed.fsdp.gather_plan import GatherSettings
from tritonfp8.distributed.fsdp.gathered_weight import register_source
from tritonfp8.distributed.fsdp.sharded_weight import ShardToGather
from tritonfp8.distributed.fsdp.torch_fsdp import Managed, managed_parameters
from tritonfp8.distributed.torch_private import all_gather_single
from tritonfp8.distributed.traffic import counted_inside_ops
from tritonfp8.layers.moe import ConvertedExperts, is_converted_experts
from tritonfp8.layers.stored import is_stored

OTHER_DIM = "it is sharded along another dim than that of the experts"
FEWER = "it is resharded to fewer ranks after forward (reshard_after_forward=int)"


class ExpertsOwner(NamedTuple):
    """The module of experts that a parameter belongs to, and the parameter's name there."""

    module: ConvertedExperts
    parameter: str


def experts_to_gather(model: nn.Module) -> dict[str, list[ExpertsOwner]]:
    """The weights of experts that can be gathered in 8 bits, by the name of their module."""
    found = {}
    for name, module in model.named_modules():
        if is_converted_experts(module) and weight_orientations(module.recipe) and not is_stored(module):
            found[name] = [ExpertsOwner(module, parameter) for parameter in module.weights()]
    return found


class _Plan(NamedTuple):
    """How one weight is gathered; ``rounded`` as of :class:`GatheredExperts`."""

    managed: Managed
    layout: MatricesLayout
    dtype: torch.dtype
    quantized_dtype: torch.dtype
    rounded: torch.dtype | None

    def shard(self) -> Tensor:
        """This rank's experts, on the device that computes, in the dtype that is quantized."""
        return self.managed.local.detach().to(self.managed.device, self.quantized_dtype)


class _Sent(NamedTuple):
    """What the receiving hook must know of a gather; ``content`` as of :meth:`MatricesLayout.contents`."""

    plan: _Plan
    content: int | None


class _ExpertsToGather(ShardToGather):
    """The hooks of a weight of experts: several tensors are gathered together."""

    def to(self, *args: Any, **kwargs: Any) -> _ExpertsToGather:
        """As of :class:`ShardToGather`."""
        return _ExpertsToGather(self.source, self.fqn, self.data.to(*args, **kwargs))

    def _post_all_gather(
        self, outputs: tuple[Tensor, ...], sent: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert isinstance(self.source, ExpertsAllGather)
        gathered = self.source.receive_all(self.fqn, outputs, sent, out)
        # The empty tuple names no tensor for FSDP to free: it frees what it gathered anyway.
        return None if out is not None else (gathered, ())


class ExpertsAllGather:
    """Gathers the weights of the experts of one model in 8 bits.

    Scales are those of one expert, and a rank holds whole experts, so nothing is reduced. :meth:`plan` is called when a
    forward begins; it finds the weights that FSDP manages, and makes FSDP ask this object what to gather for them.

    Args:
        model: the module whose forward begins a step.
        cast: whether a weight is rounded to the dtype that the experts compute in before it is quantized.
    """

    def __init__(self, model: nn.Module, cast: bool) -> None:
        self.model, self.cast = model, cast
        self.owners = {
            f"{name}.{owner.parameter}" if name else owner.parameter: owner
            for name, owners in experts_to_gather(model).items()
            for owner in owners
        }
        self._names = list(self.owners)
        self._found: dict[str, Managed] = {}
        self._settings: dict[str, GatherSettings] = {}
        self._plans: dict[str, _Plan] = {}
        self._told: set[str] = set()
        # Whether the last call of plan() changed how a weight is gathered.
        self.changed = False
        self._key = register_source(self)

    @property
    def are_converted(self) -> bool:
        """Whether some of the experts still follow a recipe."""
        return any(is_converted_experts(owner.module) for owner in self.owners.values())

    def managed(self) -> Mapping[str, Managed]:
        """The weights that FSDP manages, as far as it does already."""
        if len(self._found) < len(self.owners):
            found = managed_parameters(self.model)
            self._found = {name: found[owner] for name, owner in self.owners.items() if owner in found}
        return self._found

    def plan(self) -> list[Managed]:
        """Plan the gather of each sharded weight. Where a plan changed, FSDP starts over with new memory.

        Returns:
            One weight of each group that FSDP gathered in high precision before it knew of the hooks. The caller must
            gather these groups again.
        """
        gathered: dict[int, Managed] = {}
        changed = False
        for name, managed in self.managed().items():
            if not self._serves(name, managed):
                changed |= self._settings.pop(name, None) is not None
                self._plans.pop(name, None)
                if managed.gathers_by_hooks:
                    managed.gather_values()
                continue
            settings, before = GatherSettings.of(self.owners[name].module.recipe, managed), self._settings.get(name)
            if settings != before:
                if before is not None:
                    managed.forget_gathered()
                self._plans[name], self._settings[name] = self._plan_of(name, managed, settings), settings
                changed = True
            hooks_of = functools.partial(_ExpertsToGather, self, name)
            if not managed.gathers_by_hooks and managed.gather_by_hooks(hooks_of):
                gathered[id(managed.group)] = managed
        self.changed = changed
        return list(gathered.values())

    def _serves(self, name: str, managed: Managed) -> bool:
        """Whether the weight is gathered in 8 bits now; if the way it is sharded forbids that, a warning says so."""
        module = self.owners[name].module
        if not is_converted_experts(module) or not weight_orientations(module.recipe) or not managed.shape[0]:
            return False
        if managed.is_replicated or managed.shards == 1:
            # Nothing is gathered, and FSDP takes a shard for the whole.
            return False
        managed.require_mesh()
        reason = OTHER_DIM if managed.shard_dim != 0 else FEWER if managed.reshards_to_fewer else None
        if reason is not None and name not in self._told:
            self._told.add(name)
            warnings.warn(f"{name} is gathered in high precision, not in 8 bits: {reason}", stacklevel=2)
        return reason is None

    def _plan_of(self, name: str, managed: Managed, settings: GatherSettings) -> _Plan:
        module = self.owners[name].module
        # Of gpt-oss the parameter is [E, K, N], whose matrices the GEMMs read transposed.
        flipped = bool(getattr(module, "is_transposed", False))
        orientations = tuple(
            WeightOrientation(o.spec, o.transposed != flipped) for o in weight_orientations(settings.recipe)
        )
        experts, rows, cols = managed.shape
        layout = MatricesLayout(experts, rows, cols, managed.shards, orientations, settings.together)
        own = managed.param.sharded_param.dtype
        computed_in = module.casts_to or settings.compute_dtype or own
        quantized = computed_in if self.cast else own
        return _Plan(managed, layout, managed.param_dtype or own, quantized, quantized if self.cast else None)

    def settings(self) -> Iterator[tuple[str, Managed, GatherSettings]]:
        """How each weight is gathered that is gathered in 8 bits now."""
        yield from ((name, self._found[name], settings) for name, settings in self._settings.items())

    # What the hooks of a shard and a gathered weight ask.

    def is_gathered(self, name: str) -> bool:
        """See :class:`~..sharded_weight.ShardSource`."""
        return name in self._plans

    def can_gather(self, name: str) -> bool:
        """See :class:`~..sharded_weight.ShardSource`."""
        return True

    @torch.no_grad()
    def segment_to_send(self, name: str, shard: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], _Sent]:
        """See :class:`~..sharded_weight.ShardSource`."""
        plan = self._plans[name]
        one = len(plan.layout.orientations) > 1 and not plan.layout.together
        content = int(plan.managed.in_backward) if one else None
        return plan.layout.pack(shard.to(plan.quantized_dtype), plan.layout.contents(content)), _Sent(plan, content)

    def receive_all(self, name: str, outputs: Sequence[Tensor], sent: _Sent, out: Any) -> GatheredExperts | None:
        """The gathered weight over the bytes of all ranks; or None, with ``out`` refilled."""
        gathered = [x.view(torch.uint8) for x in outputs]
        if out is None:
            plan, tag = sent.plan, None
            if sent.content is not None:
                tag = torch.tensor([self._key, self._names.index(name), sent.content], device="cpu")
            *codes, scales = gathered
            return GatheredExperts(
                codes[0], codes[1] if len(codes) > 1 else None, scales, tag, plan.layout, plan.dtype, plan.rounded
            )
        held = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(held, GatheredExperts)
        held.refill(gathered)
        if held._tag is not None:
            assert sent.content is not None
            # Through .data: a graph that saved the tag for backward must see the write, and must not raise for it.
            held._tag.data.select(0, -1).fill_(sent.content)
        return None

    def receive(self, name: str, buffer: Tensor, sent: Any, out: Tensor | None) -> Tensor | None:
        """Never called: see :meth:`receive_all`."""
        raise NotImplementedError

    def layout_of(self, index: int) -> MatricesLayout:
        """See :class:`~.gathered.ExpertsSource`."""
        return self._plans[self._names[index]].layout

    @torch.no_grad()
    def gather_now(self, index: int, orientation: int) -> tuple[Tensor, Tensor]:
        """See :class:`~.gathered.ExpertsSource`."""
        plan = self._plans[self._names[index]]
        gathered = []
        for sent in plan.layout.pack(plan.shard(), (orientation,)):
            buffer = sent.new_empty(plan.layout.shards * len(sent))
            with counted_inside_ops():
                all_gather_single(buffer, sent, group=plan.managed.process_group)
            gathered.append(buffer)
        return plan.layout.read(gathered[0], gathered[1], orientation, orientation)
