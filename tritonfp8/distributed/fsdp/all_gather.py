"""What gathers a model's weights in 8 bits: finds their scales, says what is sent, takes what came."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tritonfp8.distributed.fsdp.agreement import check_agreement
from tritonfp8.distributed.fsdp.byte_layout import (
    ByteLayout,
    WeightOrientation,
    weight_orientations,
    write_rank_segment,
)
from tritonfp8.distributed.fsdp.gather_plan import Batch, GatherPlan, Reduction, scale_kind
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight, ShardToGather, read_operand, register_source
from tritonfp8.distributed.fsdp.grouped import fill_amaxes, segments_to_send
from tritonfp8.distributed.fsdp.shard_casts import one_nan, quantize_shard, scale_of_orientation, scales_of_amaxes
from tritonfp8.distributed.fsdp.torch_fsdp import Managed, forget_inference_memory, managed_above, managed_parameters
from tritonfp8.distributed.global_scales import Grid, reduce_grids
from tritonfp8.distributed.shard_layout import DimLayout, Mesh, aligned_to, flattened, largest_blocks, plain_mesh
from tritonfp8.distributed.torch_private import all_gather_single, disable_dynamo
from tritonfp8.distributed.traffic import counted_inside_ops
from tritonfp8.layers.linear import Float8Linear
from tritonfp8.recipes import Recipe


class _Sent(NamedTuple):
    """What the receiving hook must know of a gather."""

    plan: GatherPlan
    reduction: Reduction
    content: int | None
    """Which one orientation the bytes are, or None for all."""


class _Settings(NamedTuple):
    """What decides how a weight is gathered."""

    recipe: Recipe
    together: bool
    compute_dtype: torch.dtype | None

    def description(self, cast: bool) -> str:
        """In words that are equal on ranks that gather alike."""
        read = (
            ", ".join(str(orientation.spec) for orientation in weight_orientations(self.recipe)) or "in high precision"
        )
        source = self.compute_dtype if cast and self.compute_dtype is not None else "the master weight"
        detail = hashlib.sha256(self.recipe.args[0].encode()).hexdigest()[:8]
        return f"recipe {self.recipe.name!r} ({detail}), weight {read}, from {source}"


class Float8AllGather:
    """The weights of one model that are gathered in 8 bits.

    Nothing is done to a parameter, before ``fully_shard`` or after: the first forward finds the weights that FSDP
    manages, and has FSDP ask this object what to gather for them.

    Args:
        model: the module whose forward begins a step.
        layers: those that share each weight, by the first one's name.
        cast: whether a weight is rounded to the dtype that the layers compute in before it is quantized.
    """

    def __init__(self, model: nn.Module, layers: dict[str, list[Float8Linear]], cast: bool) -> None:
        self.model = model
        self.layers = layers
        self.cast = cast
        self._names = list(layers)
        self._found: dict[str, Managed] = {}
        self._how: dict[str, _Settings] = {}
        self._gathers: dict[str, tuple[Recipe, bool]] = {}
        self._plans: dict[str, GatherPlan] = {}
        self._batches: list[Batch] = []
        self._reductions: dict[str, Reduction] = {}
        # Cast together with another weight, and not sent yet.
        self._ready: dict[str, tuple[Reduction, int | None, Tensor]] = {}
        self._fresh: set[str] = set()
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
        layers = {layer for tied in self.layers.values() for layer in tied}
        return {m for m in self.model.modules() if m is not self.model and not layers.isdisjoint(m.modules())}

    # The forward of the model.

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        hooks = module._forward_pre_hooks
        if next(iter(hooks)) != self._hook_id:
            # fully_shard put its hook, which gathers, before this one.
            hooks.move_to_end(self._hook_id, last=False)  # type: ignore[attr-defined]
        self._remove_first_hooks()
        if torch.is_inference_mode_enabled():
            self._was_in_inference_mode = True
        elif self._was_in_inference_mode:
            self._was_in_inference_mode = False
            forget_inference_memory(self.model)
        in_values = self._plan()
        self._ready.clear()
        for batch in self._batches:
            self._reduce(batch)
        if self._batches and torch.cuda.is_available():
            self._reduced = torch.cuda.current_stream().record_event()
        self._in_forward = bool(self._batches)
        for managed in in_values:
            managed.gather_again()

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _before_first_forward(self, module: nn.Module, args: Any) -> None:
        """The first forward does not go through the model: FSDP must know of the hooks here, too."""
        if self._managed():
            self._remove_first_hooks()
            for managed in self._plan():
                managed.gather_again()

    def _remove_first_hooks(self) -> None:
        for module, hook in self._first_hooks.items():
            module._forward_pre_hooks.pop(hook, None)
        self._first_hooks.clear()

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _after_forward(self, *args: Any) -> None:
        self._in_forward = False
        self._fresh.clear()

    def release(self, layer: Float8Linear) -> Callable[[], None] | None:
        """Gather the plain weight again: what :func:`tritonfp8.revert` does first.

        Returns:
            What undoes it: the next forward then gathers the weight in 8 bits again. None if nothing was done.
        """
        name = next((name for name, layers in self.layers.items() if layer in layers), None)
        if name is None:
            # Tied, and released with another layer.
            return None
        managed, before = self._managed().get(name), dict(self.layers)
        del self.layers[name]
        for reduction in (self._found, self._how, self._gathers, self._plans, self._reductions):
            reduction.pop(name, None)
        self._batches = self._batches_of(self._plans)
        if managed is not None:
            managed.gather_values()

        def undo() -> None:
            self.layers = before

        return undo

    # What is gathered how.

    def _managed(self) -> dict[str, Managed]:
        if len(self._found) < len(self.layers):
            found = managed_parameters(self.model)
            modules = {name: (layers[0], "weight") for name, layers in self.layers.items()}
            self._found = {name: found[module] for name, module in modules.items() if module in found}
            missing = [name for name in self.layers if name not in self._found]
            if above := managed_above([self.layers[name][0] for name in missing]):
                names = [name for name in missing if self.layers[name][0] in above]
                raise RuntimeError(
                    f"{', '.join(f'{name}.weight' for name in names)} is sharded by a fully_shard above the model that "
                    "enable_float8_all_gather was given: give it the outermost module that fully_shard is applied to"
                )
        return self._found

    def _plan(self) -> list[Managed]:
        """Find out how each sharded weight is gathered; where that changed, have FSDP start over with it.

        Returns:
            Of each group whose values FSDP had gathered before it knew of the hooks, one weight: the group is to be
            gathered again.
        """
        plans: dict[str, GatherPlan] = {}
        changed: set[str] = set()
        gathered: dict[int, Managed] = {}
        for name, managed in self._managed().items():
            how = _Settings(self.layers[name][0].recipe, not managed.gathers_again, self._compute_dtype(managed))
            before = self._how.get(name)
            # Bytes that are gathered already stay, where they only hold fewer orientations or more than they now would.
            keeps_bytes = before is not None and before._replace(together=how.together) == how
            if before == how or (keeps_bytes and not managed.is_sharded):
                plan = self._plans.get(name)
            else:
                plan = self._plan_of(name, managed, how)
                if before is not None:
                    managed.forget_gathered()
                self._how[name] = how
                changed.add(name)
            if plan is not None:
                plans[name] = plan
                hooks_of = functools.partial(ShardToGather, self, name)
                if not managed.gathers_by_hooks and managed.gather_by_hooks(hooks_of):
                    gathered[id(managed.group)] = managed
        if changed:
            self._check_agreement()
        if plans != self._plans:
            self._key = register_source(self, self._key)
            self._plans = plans
            self._batches = self._batches_of(plans)
        return list(gathered.values())

    def _check_agreement(self) -> None:
        by_mesh: dict[DeviceMesh, dict[str, str]] = {}
        for name, managed in self._managed().items():
            mesh = managed.param.sharded_param.device_mesh
            by_mesh.setdefault(mesh, {})[name] = self._how[name].description(self.cast)
        for mesh, described in by_mesh.items():
            check_agreement(described, mesh, next(iter(self._managed().values())).device)

    def _compute_dtype(self, managed: Managed) -> torch.dtype | None:
        """The dtype in which layers compute with a weight, where that is not the parameter's own."""
        if managed.param_dtype is not None:
            return managed.param_dtype
        device = managed.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def _plan_of(self, name: str, managed: Managed, how: _Settings) -> GatherPlan | None:
        weight = managed.param.sharded_param
        recipe = how.recipe
        if not weight_orientations(recipe):
            return None
        managed.require_mesh()
        if managed.shard_dim != 0:
            raise ValueError(
                f"the FP8 all-gather shards weights along dim 0; {name}.weight is along {managed.shard_dim}: have "
                "shard_placement_fn return None for it"
            )
        layout = ByteLayout(
            *managed.size, managed.shards, weight_orientations(recipe), how.together, _within(managed, recipe)
        )
        quantized = how.compute_dtype if self.cast and how.compute_dtype is not None else weight.dtype
        grids = tuple(
            (len(layout.reduced(orientation)), layout.grid(orientation)[1]) for orientation in layout.orientations
        )
        split = tuple(i for i, f in enumerate(layout.orientations) if layout.is_split(f, 0) or layout.is_split(f, 1))
        return GatherPlan(
            managed,
            layout,
            dtype=managed.param_dtype or weight.dtype,
            quantized_dtype=quantized,
            rounded=quantized if self.cast else None,
            grids=grids,
            split=split,
        )

    def _plan_for(self, name: str) -> GatherPlan:
        if name not in self._plans:
            self._plan()
        return self._plans[name]

    # Scales.

    @staticmethod
    def _batches_of(plans: dict[str, GatherPlan]) -> list[Batch]:
        by_group: dict[dist.ProcessGroup, dict[str, GatherPlan]] = {}
        for name, plan in plans.items():
            by_group.setdefault(plan.managed.process_group, {})[name] = plan
        return [Batch(members) for members in by_group.values()]

    @torch.no_grad()
    def _reduce(self, batch: Batch) -> None:
        """Find the scales of these weights, by one collective."""
        first = next(iter(batch.plans.values()))
        amaxes = torch.zeros(sum(batch.sizes), device=first.managed.device)
        fill_amaxes(batch, amaxes)
        if amaxes.numel():
            # Bits of non-negative floats are ordered as integers, NaN on top. A MAX of floats may drop it.
            amaxes = one_nan(amaxes)
            dist.all_reduce(amaxes.view(torch.int32), dist.ReduceOp.MAX, group=first.managed.process_group)
        if batch.shares:
            _reduce_over_tensor_parallel(batch, amaxes)
        rounded = {dtype: one_nan(amaxes.to(dtype).float()) for dtype in batch.dtypes}
        reduced = {dtype: batch.split(values) for dtype, values in rounded.items()}
        found = {
            (dtype, kind): batch.split(scales_of_amaxes(values, *kind))
            for dtype, values in rounded.items() for kind in batch.kinds
        }  # fmt: skip
        for name, plan in batch.plans.items():
            dtype = plan.quantized_dtype
            held = [
                None
                if orientation.sends_scales
                else scale_of_orientation(found[dtype, scale_kind(orientation)][name][i], plan.layout, orientation)
                for i, orientation in enumerate(plan.layout.orientations)
            ]
            self._reductions[name] = Reduction(
                batch, plan.stamp, rounded[dtype], tuple(reduced[dtype][name]), tuple(held)
            )

    # What ShardToGather asks.

    def can_gather(self, name: str) -> bool:
        """See :class:`~Source`."""
        plan = self._plans.get(name)
        if plan is None or not plan.managed.is_resharded_to_fewer:
            return True
        plan.managed.send_bytes()
        return False

    def is_gathered(self, name: str) -> bool:
        """Whether the recipe of the weight has it in 8 bits."""
        layers = self.layers.get(name)
        if layers is None:
            return False
        recipe = layers[0].recipe
        found = self._gathers.get(name)
        if found is None or found[0] is not recipe:
            found = self._gathers[name] = recipe, bool(weight_orientations(recipe))
        return found[1]

    @torch.no_grad()
    def segment_to_send(self, name: str, shard: Tensor, mesh: Any) -> tuple[Tensor, _Sent]:
        """See :class:`~Source`."""
        plan = self._plan_for(name)
        backward = plan.managed.in_backward
        if not (self._is_current(name, plan) and (backward or self._in_forward or name in self._fresh)):
            # A forward that did not come through the model, or a weight that changed since the model's forward began,
            # which may have been interrupted: its groups find their scales one by one.
            group = {k: other for k, other in self._plans.items() if other.managed.group is plan.managed.group}
            self._reduce(Batch(group))
            self._fresh.update(group)
        self._fresh.discard(name)
        content = None
        if len(plan.layout.orientations) > 1 and not plan.layout.together:
            content = int(backward)
        reduction = self._reductions[name]
        ready = self._ready.pop(name, None)
        if ready is not None and ready[0] is reduction and ready[1] == content:
            return ready[2], _Sent(plan, reduction, content)
        if self._reduced is not None:
            # FSDP calls this on a stream of its own, which may not have waited for the stream of forward.
            torch.cuda.current_stream().wait_event(self._reduced)
        wanted = range(len(plan.layout.orientations)) if content is None else (content,)
        found = segments_to_send(reduction.batch.groups[id(plan.managed.group)], reduction, wanted)
        for other, segment in found.items():
            self._ready[other] = self._reductions[other], content, segment
        if found:
            return self._ready.pop(name)[2], _Sent(plan, reduction, content)
        return _rank_segment(plan, reduction, shard, [plan.layout.orientations[i] for i in wanted]), _Sent(
            plan, reduction, content
        )

    def _is_current(self, name: str, plan: GatherPlan) -> bool:
        reduction = self._reductions.get(name)
        return reduction is not None and reduction.stamp == plan.stamp

    def receive(self, name: str, buffer: Tensor | None, sent: _Sent | None, out: Tensor | None) -> Tensor | None:
        """See :class:`~Source`."""
        if isinstance(out, DTensor):
            out = out._local_tensor
        if sent is None:
            # Gathered again from fewer ranks, the bytes of the forward, into its memory.
            assert isinstance(out, GatheredWeight)
            return None
        assert buffer is not None
        if sent.plan.managed.reshards_to_fewer:
            sent.plan.managed.keep_bytes()
        buffer = buffer.view(torch.uint8)
        layout = sent.plan.layout
        own = sent.reduction.scales
        held = (own[0], own[1] if len(own) > 1 else None)
        if out is None:
            tag = (
                None
                if sent.content is None
                else torch.tensor([self._key, self._index(name), sent.content], device="cpu")
            )
            gathered = GatheredWeight(buffer, *held, tag, layout, sent.plan.dtype, rounded=sent.plan.rounded)
            gathered.gather_values = functools.partial(self.values, name)
            return gathered
        assert isinstance(out, GatheredWeight)
        out.refill(buffer, *held, layout)
        if out._tag is not None:
            assert sent.content is not None
            # Through data: a graph that saved it for backward is to see the write, and no error for it.
            out._tag.data.select(0, -1).fill_(sent.content)
        return None

    @torch.no_grad()
    def values(self, name: str) -> Tensor:
        """The weight ``[N, K]`` (with tensor parallelism, the part of it here) as FSDP would gather it without this."""
        plan = self._plans[name]
        layout, shard = plan.layout, plan.shard().to(plan.dtype)
        padded = shard.new_zeros(layout.shard_rows, layout.cols)
        padded[: shard.shape[0]] = shard
        whole = padded.new_empty(layout.shards * layout.shard_rows, layout.cols)
        with counted_inside_ops():
            all_gather_single(whole, padded, group=plan.managed.process_group)
        return whole[: layout.rows]

    def _index(self, name: str) -> int:
        return self._names.index(name)

    def byte_layout(self, index: int) -> ByteLayout:
        """See :class:`~Source`."""
        return self._plans[self._names[index]].layout

    @torch.no_grad()
    def gather_now(self, index: int, orientation: WeightOrientation) -> tuple[Tensor, Tensor]:
        """See :class:`~Source`."""
        name = self._names[index]
        plan, reduction = self._plans[name], self._reductions[name]
        layout = plan.layout
        segment = _rank_segment(plan, reduction, plan.shard(), (orientation,))
        buffer = segment.new_empty(layout.shards * layout.rank_segment_size)
        with counted_inside_ops():
            all_gather_single(buffer, segment, group=plan.managed.process_group)
        return read_operand(buffer, reduction.scales[layout.orientations.index(orientation)], layout, orientation)


def _within(managed: Managed, recipe: Recipe) -> tuple[DimLayout, DimLayout] | None:
    """How N and K lie in the weight of all ranks of tensor parallelism; None without."""
    spec = managed.tensor_parallel
    if spec is None:
        return None
    mesh = Mesh(*plain_mesh(spec.mesh))
    _, n, k = largest_blocks(recipe)
    rows = [Replicate() if p == Shard(1) else p for p in spec.placements]
    cols = [Shard(0) if p == Shard(1) else Replicate() for p in spec.placements]
    return aligned_to(flattened(spec.shape[:1], mesh, rows), n), aligned_to(flattened(spec.shape[1:], mesh, cols), k)


def _reduce_over_tensor_parallel(batch: Batch, amaxes: Tensor) -> None:
    """Make the amaxes, each of a whole shard of tensor parallelism, those of blocks that lie on several."""
    bits = batch.split(amaxes.view(torch.int32))
    grids, places = [], []
    for name, plan in batch.plans.items():
        layout = plan.layout
        for i in plan.split:
            orientation = layout.orientations[i]
            assert layout.within is not None
            first_row, first_col = (layout.start(dim) // orientation.block[dim] for dim in (0, 1))
            held = (
                [first_row + row for row in layout.reduced(orientation)],
                [first_col + col for col in range(plan.grids[i][1])],
            )
            grids.append(Grid(bits[name][i], orientation.block, layout.within, held))
            places.append(bits[name][i])
    for place, grid in zip(places, reduce_grids(grids), strict=True):
        place.copy_(grid.bits)


def _rank_segment(plan: GatherPlan, reduction: Reduction, shard: Tensor, wanted: Sequence[WeightOrientation]) -> Tensor:
    """The bytes that this rank sends."""
    layout = plan.layout
    parts = []
    if shard.shape[0]:
        x = shard.to(plan.quantized_dtype)
        for orientation in wanted:
            reduced = reduction.reduced[layout.orientations.index(orientation)]
            parts.append((orientation, *quantize_shard(x, layout, orientation, plan.managed.rank, reduced)))
    if len(parts) == 1 and parts[0][1].numel() == layout.rank_segment_size:
        return parts[0][1].view(torch.uint8).reshape(-1)
    segment = torch.zeros(layout.rank_segment_size, dtype=torch.uint8, device=shard.device)
    for part in parts:
        write_rank_segment(segment, layout, *part)
    return segment
