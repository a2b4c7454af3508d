"""The 8-bit all-gather of one model: finds the weights' scales, sends this rank's bytes, takes what came."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tritonfp8.distributed.fsdp.agreement import Agreement
from tritonfp8.distributed.fsdp.byte_layout import ByteLayout, WeightOrientation, weight_orientations
from tritonfp8.distributed.fsdp.experts import ExpertsAllGather
from tritonfp8.distributed.fsdp.gather_plan import Batch, GatherPlan, GatherSettings, Reduction, Sent, plan_of
from tritonfp8.distributed.fsdp.gathered_weight import (
    GatheredWeight,
    HighPrecisionValues,
    read_operand,
    register_source,
)
from tritonfp8.distributed.fsdp.grouped import segments_to_send
from tritonfp8.distributed.fsdp.reduce_amaxes import batches_of, reduce_amaxes
from tritonfp8.distributed.fsdp.shard_casts import rank_segment
from tritonfp8.distributed.fsdp.sharded_weight import Assignments, GatheredInEvaluation, KeptSegments, ShardToGather
from tritonfp8.distributed.fsdp.torch_fsdp import (
    Managed,
    by_group,
    forget_inference_memory,
    managed_parameters,
    require_none_above,
)
from tritonfp8.distributed.torch_private import all_gather_single, disable_dynamo
from tritonfp8.distributed.traffic import counted_inside_ops
from tritonfp8.layers.linear import Float8Linear, raise_changed
from tritonfp8.recipes import Recipe


class Float8AllGather:
    """Gathers the weights of one model in 8 bits.

    Parameters are not touched, neither before ``fully_shard`` nor after. The first forward finds the weights that FSDP
    manages, and makes FSDP ask this object what to gather for them.

    Args:
        model: the module whose forward begins a step.
        layers: the layers that share each weight, by the name of the first one.
        cast: whether a weight is rounded to the dtype that the layers compute in before it is quantized.
        experts: gathers the weights of experts.
    """

    def __init__(
        self, model: nn.Module, layers: dict[str, list[Float8Linear]], cast: bool, experts: ExpertsAllGather
    ) -> None:
        self.model = model
        self.layers = layers
        self.cast = cast
        self.experts = experts
        self._names = list(layers)
        self._found: dict[str, Managed] = {}
        # The weights that each rank has all of, by torch's replicate: they are not gathered.
        self._replicated: set[str] = set()
        # All that FSDP manages in the model.
        self._groups: list[list[Managed]] = []
        self._settings: dict[str, GatherSettings] = {}
        self._gathers: dict[str, tuple[Recipe, bool]] = {}
        self._plans: dict[str, GatherPlan] = {}
        self._batches: list[Batch] = []
        self._reductions: dict[str, Reduction] = {}
        # Rank segments that were made together with another one, and are not sent yet.
        self._ready: dict[str, tuple[Reduction, int | None, Tensor]] = {}
        # Weights whose amaxes were reduced outside of the model's forward, and are not gathered yet.
        self._fresh: set[str] = set()
        self._kept: KeptSegments | None = None
        self._agreement = Agreement()
        self._released = False
        self._assignments = Assignments()
        self._evaluated: GatheredInEvaluation | None = None
        self._reduced: torch.cuda.Event | None = None
        self._in_forward = False
        self._was_in_inference_mode = False
        self._key = 0
        self._hook_id = model.register_forward_pre_hook(self._before_forward, prepend=True).id
        model.register_forward_hook(self._after_forward, always_call=True)
        self._first_hooks = {
            module: module.register_forward_pre_hook(self._before_first_forward).id for module in self._parents()
        }

    def _parents(self) -> set[nn.Module]:
        """The modules below the model that ``fully_shard`` may be applied to."""
        layers: set[nn.Module] = {layer for tied in self.layers.values() for layer in tied}
        layers |= {owner.module for owner in self.experts.owners.values()}
        return {m for m in self.model.modules() if m is not self.model and not layers.isdisjoint(m.modules())}

    # Hooks of the model's forward.

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        hooks = module._forward_pre_hooks
        if next(iter(hooks)) != self._hook_id:
            # fully_shard put its own hook first, and that one gathers.
            hooks.move_to_end(self._hook_id, last=False)  # type: ignore[attr-defined]
        self._remove_first_hooks()
        if torch.is_inference_mode_enabled():
            self._was_in_inference_mode = True
        elif self._was_in_inference_mode:
            self._was_in_inference_mode = False
            forget_inference_memory(self.model)
        if self._evaluated is not None:
            self._evaluated.gather_changed()
            self._evaluated = None
        in_values = self._plan()
        self._assignments.check({**self._found, **self.experts.managed()})
        self._ready.clear()
        for batch in self._batches:
            if self._kept is None or not all(self._is_current(name, plan) for name, plan in batch.plans.items()):
                self._reductions.update(reduce_amaxes(batch))
        if self._batches and torch.cuda.is_available():
            self._reduced = torch.cuda.current_stream().record_event()
        self._in_forward = bool(self._batches)
        for managed in in_values:
            managed.gather_again()

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _before_first_forward(self, module: nn.Module, args: Any) -> None:
        """Make FSDP ask for the 8-bit gather, if the first forward does not go through the model."""
        if self._managed() or self.experts.managed():
            self._remove_first_hooks()
            for managed in self._plan():
                managed.gather_again()

    def _remove_first_hooks(self) -> None:
        for module, hook in self._first_hooks.items():
            module._forward_pre_hooks.pop(hook, None)
        self._first_hooks.clear()

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _after_forward(self, *args: Any) -> None:
        self._agreement.finish()
        self._in_forward = False
        self._fresh.clear()
        if self._plans and not torch.is_grad_enabled():
            self._evaluated = GatheredInEvaluation(self._groups)

    def release(self, layer: Float8Linear) -> Callable[[], None] | None:
        """Gather the layer's weight in its own dtype again; :func:`tritonfp8.revert` calls this first.

        Returns:
            A function that undoes it: the next forward then gathers in 8 bits again. None if nothing was done.
        """
        name = next((name for name, layers in self.layers.items() if layer in layers), None)
        if self._kept is not None:
            raise ValueError(f"quantize_weights_once is open on {name}: revert after the block")
        if name is None:
            # The layer shares its weight with one that was released already.
            return None
        self._released = True
        managed, before = self._managed().get(name), dict(self.layers)
        del self.layers[name]
        for by_name in (self._found, self._settings, self._gathers, self._plans, self._reductions):
            by_name.pop(name, None)
        self._replicated.discard(name)
        self._batches = batches_of(self._plans)
        if managed is not None:
            managed.gather_values()

        def undo() -> None:
            self.layers = before

        return undo

    # Segments that are made once for several gathers.

    def gathers(self, layer: nn.Module) -> bool:
        """Whether the weight of ``layer`` is gathered in 8 bits once FSDP2 shards it."""
        name = next((name for name, layers in self.layers.items() if layer in layers), None)
        return name is not None and name not in self._replicated and self.is_gathered(name)

    @contextmanager
    def keeping_segments(self, layers: Iterable[str]) -> Iterator[None]:
        """Keep each rank segment, and the reduced amaxes, until the block ends or a shard is written to.

        Args:
            layers: names of the layers, for messages.

        Raises:
            ValueError: a block is open already.
            RuntimeError: at the end of the block, a shard changed by a write that torch does not count.
        """
        if self._kept is not None:
            raise ValueError(f"blocks do not nest, and one is open on {', '.join(layers)}")
        kept = self._kept = KeptSegments()
        try:
            yield
            if names := kept.changed():
                raise_changed(names)
        finally:
            self._kept = None

    # Plans.

    def _managed(self) -> dict[str, Managed]:
        """The weights that FSDP manages, as far as it does already."""
        if len(self._found) + len(self._replicated) < len(self.layers):
            managed = managed_parameters(self.model)
            found = {owner: each for owner, each in managed.items() if not each.is_replicated}
            self._groups = by_group(found.values())
            modules = {name: (layers[0], "weight") for name, layers in self.layers.items()}
            self._found = {name: found[module] for name, module in modules.items() if module in found}
            self._replicated = {name for name, module in modules.items() if module in managed} - self._found.keys()
            require_none_above({name: layers[0] for name, layers in self.layers.items() if name not in self._found})
        return self._found

    def _plan(self) -> list[Managed]:
        """Plan the gather of each sharded weight. Where a plan changed, FSDP starts over with new memory.

        Returns:
            One weight of each group that FSDP gathered in high precision before it knew of the hooks. The caller must
            gather these groups again.
        """
        plans: dict[str, GatherPlan] = {}
        changed: set[str] = set()
        gathered: dict[int, Managed] = {}
        for name, managed in self._managed().items():
            settings, before = GatherSettings.of(self.layers[name][0].recipe, managed), self._settings.get(name)
            # Bytes that are gathered already serve on, even if the next gather will carry fewer orientations or more.
            keeps_bytes = before is not None and before._replace(together=settings.together) == settings
            if before == settings or (keeps_bytes and not managed.is_sharded):
                plan = self._plans.get(name)
            else:
                plan = plan_of(name, managed, settings, self.cast)
                if before is not None:
                    managed.forget_gathered()
                self._settings[name] = settings
                changed.add(name)
            if plan is not None:
                plans[name] = plan
                hooks_of = functools.partial(ShardToGather, self, name)
                if not managed.gathers_by_hooks and managed.gather_by_hooks(hooks_of):
                    gathered[id(managed.group)] = managed
        if plans != self._plans:
            self._key = register_source(self, self._key)
            self._plans = plans
            self._batches = batches_of(plans)
        found = [*gathered.values(), *self.experts.plan()]
        if changed or self._released or self.experts.changed:
            self._describe()
        self._agreement.check()
        return found

    def _describe(self) -> None:
        """Prepare for the check that all ranks gather alike, which every rank makes in each forward."""
        by_mesh: dict[DeviceMesh, dict[str, str]] = {}
        linears = ((name, managed, self._settings[name]) for name, managed in self._managed().items())
        for name, managed, settings in itertools.chain(linears, self.experts.settings()):
            mesh = managed.param.sharded_param.device_mesh
            by_mesh.setdefault(mesh, {})[name] = settings.description(self.cast)
        self._agreement.describe(by_mesh)
        self._released = False

    # What the hooks of a shard and a gathered weight ask.

    def can_gather(self, name: str) -> bool:
        """See :class:`~.sharded_weight.ShardSource`."""
        plan = self._plans.get(name)
        if plan is None or not plan.managed.is_resharded_to_fewer:
            return True
        plan.managed.send_bytes()
        return False

    def is_gathered(self, name: str) -> bool:
        """See :class:`~.sharded_weight.ShardSource`."""
        layers = self.layers.get(name)
        if layers is None:
            return False
        recipe = layers[0].recipe
        found = self._gathers.get(name)
        if found is None or found[0] is not recipe:
            found = self._gathers[name] = recipe, bool(weight_orientations(recipe))
        return found[1]

    @torch.no_grad()
    def segment_to_send(self, name: str, shard: Tensor, mesh: Any) -> tuple[Tensor, Sent]:
        """See :class:`~.sharded_weight.ShardSource`."""
        if name not in self._plans:
            self._plan()
        plan = self._plans[name]
        backward = plan.managed.in_backward
        self._require_reduction(name, plan, backward)
        orientations = plan.layout.orientations
        content = int(backward) if len(orientations) > 1 and not plan.layout.together else None
        reduction = self._reductions[name]
        sent = Sent(plan, reduction, content)
        wanted = tuple(range(len(orientations))) if content is None else (content,)
        ready = self._ready.pop(name, None)
        if ready is not None and ready[0] is reduction and ready[1] == content:
            return ready[2], sent
        if self._kept is not None and (segment := self._kept.find(name, wanted, reduction)) is not None:
            return segment, sent
        if self._reduced is not None:
            # FSDP calls this on a stream of its own, which may not have waited for the stream of forward.
            torch.cuda.current_stream().wait_event(self._reduced)
        found = segments_to_send(reduction.batch.groups[id(plan.managed.group)], reduction, wanted)
        found = found or {name: self._segment(name, shard, wanted)}
        for other, segment in found.items():
            self._ready[other] = self._reductions[other], content, segment
            if self._kept is not None:
                self._kept.keep(other, wanted, self._reductions[other], segment, self._plans[other].parameter)
        return self._ready.pop(name)[2], sent

    def _require_reduction(self, name: str, plan: GatherPlan, backward: bool) -> None:
        """Reduce the amaxes of the weight's group, unless those of the model's forward are still valid.

        They are not in a forward that did not come through the model, and where a weight changed since the model's
        forward began: that forward may have been interrupted.
        """
        serves = backward or self._in_forward or name in self._fresh or self._kept is not None
        if not (serves and self._is_current(name, plan)):
            group = {k: other for k, other in self._plans.items() if other.managed.group is plan.managed.group}
            self._reductions.update(reduce_amaxes(Batch(group)))
            self._fresh.update(group)
        self._fresh.discard(name)

    def _is_current(self, name: str, plan: GatherPlan) -> bool:
        """Whether the amaxes of a weight were reduced since its shard was last written to."""
        reduction = self._reductions.get(name)
        return reduction is not None and reduction.stamp == plan.stamp

    def _segment(self, name: str, shard: Tensor, wanted: tuple[int, ...]) -> Tensor:
        """The bytes that this rank sends of one weight, in the orientations of these indices."""
        plan, reduction = self._plans[name], self._reductions[name]
        reduced = {plan.layout.orientations[i]: reduction.reduced[i] for i in wanted}
        return rank_segment(plan.layout, plan.managed.rank, shard.to(plan.quantized_dtype), reduced)

    def receive(self, name: str, buffer: Tensor | None, sent: Sent | None, out: Tensor | None) -> Tensor | None:
        """See :class:`~.sharded_weight.ShardSource`."""
        if isinstance(out, DTensor):
            out = out._local_tensor
        if sent is None:
            # Gathered again from fewer ranks: the bytes of the forward, into their memory.
            assert isinstance(out, GatheredWeight)
            return None
        assert buffer is not None
        plan, content = sent.plan, sent.content
        if plan.managed.reshards_to_fewer:
            plan.managed.keep_bytes()
        buffer = buffer.view(torch.uint8)
        scales = sent.reduction.scales
        both = (scales[0], scales[1] if len(scales) > 1 else None)
        if out is None:
            tag = None
            if content is not None:
                tag = torch.tensor([self._key, self._names.index(name), content], device="cpu")
            gathered = GatheredWeight(buffer, *both, tag, plan.layout, plan.dtype, rounded=plan.rounded)
            gathered.high_precision = HighPrecisionValues(name, functools.partial(self.values, name))
            return gathered
        assert isinstance(out, GatheredWeight)
        out.refill(buffer, *both, plan.layout)
        if out._tag is not None:
            assert content is not None
            # Through .data: a graph that saved the tag for backward must see the write, and must not raise for it.
            out._tag.data.select(0, -1).fill_(content)
        return None

    @torch.no_grad()
    def values(self, name: str) -> Tensor:
        """The weight ``[N, K]`` as FSDP would gather it without this; with tensor parallelism, this rank's part."""
        plan = self._plans[name]
        layout, shard = plan.layout, plan.shard().to(plan.dtype)
        padded = shard.new_zeros(layout.shard_rows, layout.cols)
        padded[: shard.shape[0]] = shard
        whole = padded.new_empty(layout.shards * layout.shard_rows, layout.cols)
        with counted_inside_ops():
            all_gather_single(whole, padded, group=plan.managed.process_group)
        return whole[: layout.rows]

    def byte_layout(self, index: int) -> ByteLayout:
        """See :class:`~.gathered_weight.GatheredSource`."""
        return self._plans[self._names[index]].layout

    @torch.no_grad()
    def gather_now(self, index: int, orientation: WeightOrientation) -> tuple[Tensor, Tensor]:
        """See :class:`~.gathered_weight.GatheredSource`."""
        name = self._names[index]
        plan, reduction = self._plans[name], self._reductions[name]
        layout = plan.layout
        i = layout.orientations.index(orientation)
        segment = None if self._kept is None else self._kept.find(name, (i,), reduction)
        if segment is None:
            segment = self._segment(name, plan.shard(), (i,))
            if self._kept is not None:
                self._kept.keep(name, (i,), reduction, segment, plan.parameter)
        buffer = segment.new_empty(layout.shards * layout.rank_segment_size)
        with counted_inside_ops():
            all_gather_single(buffer, segment, group=plan.managed.process_group)
        return read_operand(buffer, reduction.scales[i], layout, orientation)
