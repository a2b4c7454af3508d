"""What gathers a model's weights in 8 bits: finds their scales, says what is sent, takes what came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tritonfp8.distributed.fsdp_internals import Managed, managed_parameters
from tritonfp8.distributed.gathered_weight import GatheredWeight, ShardedWeight, read_form, register_source
from tritonfp8.distributed.grouped import fill_amaxes, pieces
from tritonfp8.distributed.layout import DimLayout, Mesh, aligned_to, flattened, plain_mesh
from tritonfp8.distributed.placements import largest_blocks
from tritonfp8.distributed.plan import Batch, Known, Plan, kind_of
from tritonfp8.distributed.sharded_quantize import Grid, reduce_grids
from tritonfp8.distributed.shards import one_nan, quantize_shard, scale_of_form, scales
from tritonfp8.distributed.traffic import counted_inside_ops
from tritonfp8.distributed.wire import Form, Layout, forms, write_piece
from tritonfp8.modules import Float8Linear
from tritonfp8.recipes import Recipe

# torch.compiler.disable imports the compiler at once.
_disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]
# Its name since torch 2.13, and before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Sent(NamedTuple):
    """What the receiving hook must know of a gather."""

    plan: Plan
    known: Known
    content: int | None
    """Which one form the bytes are, or None for all."""


class Float8AllGather:
    """The weights of one model that are gathered in 8 bits.

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
        self._tensor_parallel: set[str] = set()
        self._found: dict[str, Managed] = {}
        self._how: dict[str, tuple[Recipe, bool]] = {}
        self._gathers: dict[str, tuple[Recipe, bool]] = {}
        self._plans: dict[str, Plan] = {}
        self._batches: list[Batch] = []
        self._known: dict[str, Known] = {}
        # Cast together with another weight, and not sent yet.
        self._pieces: dict[str, tuple[Known, int | None, Tensor]] = {}
        self._fresh: set[str] = set()
        self._reduced: torch.cuda.Event | None = None
        self._in_forward = False
        self._key = 0
        self._hook_id = model.register_forward_pre_hook(self._before_forward, prepend=True).id
        model.register_forward_hook(self._after_forward, always_call=True)
        model.register_load_state_dict_post_hook(self._after_load)

    # The forward of the model.

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def _before_forward(self, module: nn.Module, args: Any) -> None:
        hooks = module._forward_pre_hooks
        if next(iter(hooks)) != self._hook_id:
            # fully_shard put its hook, which gathers, before this one.
            hooks.move_to_end(self._hook_id, last=False)  # type: ignore[attr-defined]
        self._plan()
        self._pieces.clear()
        for batch in self._batches:
            self._reduce(batch)
        if self._batches and torch.cuda.is_available():
            self._reduced = torch.cuda.current_stream().record_event()
        self._in_forward = bool(self._batches)

    @_disable_dynamo  # type: ignore[untyped-decorator]
    def _after_forward(self, *args: Any) -> None:
        self._in_forward = False
        self._fresh.clear()

    def _after_load(self, module: nn.Module, keys: Any) -> None:
        """``load_state_dict(assign=True)`` put plain tensors in the place of ours."""
        for name in self.layers:
            managed = self._managed().get(name)
            if managed is None:
                self.prepare(name)
            else:
                _wrap_local(managed, self, name)

    def prepare(self, name: str) -> None:
        """Put a weight that is gathered in 8 bits in the place of a plain one, not sharded yet."""
        layers = self.layers[name]
        weight = layers[0].weight
        if is_prepared(weight):
            return
        data = weight.data
        new: Tensor
        if isinstance(data, DTensor):
            new = _of_local(data, ShardedWeight(data._local_tensor, self, name))
            self._tensor_parallel.add(name)
        else:
            new = ShardedWeight(data, self, name)
        parameter = nn.Parameter(new, weight.requires_grad)
        for layer in layers:
            layer.weight = parameter

    def release(self, layer: Float8Linear) -> None:
        """Put the plain weight back: what :func:`tritonfp8.revert` does first."""
        name = next((name for name, layers in self.layers.items() if layer in layers), None)
        if name is None:
            # Tied, and released with another layer.
            return
        managed, layers = self._managed().get(name), self.layers.pop(name)
        for known in (self._found, self._how, self._gathers, self._plans, self._known):
            known.pop(name, None)
        self._batches = self._batches_of(self._plans)
        if managed is not None:
            managed.forget_gathered()
            managed.param.sharded_param._local_tensor = plain(managed.local)
            return
        weight = nn.Parameter(plain(layer.weight), layer.weight.requires_grad)
        for tied in layers:
            tied.weight = weight

    # What is gathered how.

    def _managed(self) -> dict[str, Managed]:
        if len(self._found) < len(self.layers):
            found = managed_parameters(self.model)
            modules = {name: (layers[0], "weight") for name, layers in self.layers.items()}
            self._found = {name: found[module] for name, module in modules.items() if module in found}
        return self._found

    def _plan(self) -> None:
        """Find out how each sharded weight is gathered; where that changed, have FSDP start over with it."""
        plans: dict[str, Plan] = {}
        for name, managed in self._managed().items():
            how = self.layers[name][0].recipe, not managed.gathers_again
            before = self._how.get(name)
            # Bytes that are gathered already stay, where they only hold fewer forms or more than they now would.
            if before == how or (before is not None and before[0] == how[0] and not managed.is_sharded):
                plan = self._plans.get(name)
            else:
                plan = self._plan_of(name, managed, *how)
                if before is not None:
                    managed.forget_gathered()
                self._how[name] = how
            if plan is not None:
                _wrap_local(managed, self, name)
                plans[name] = plan
        if plans != self._plans:
            self._key = register_source(self, self._key)
            self._plans = plans
            self._batches = self._batches_of(plans)

    def _plan_of(self, name: str, managed: Managed, recipe: Recipe, together: bool) -> Plan | None:
        weight = managed.param.sharded_param
        if not forms(recipe):
            return None
        within = _within(managed, recipe)
        if within is not None and name not in self._tensor_parallel:
            raise ValueError(
                f"{name}.weight became a DTensor before fully_shard: call parallelize_module before "
                "enable_float8_all_gather, and that before fully_shard"
            )
        if managed.shard_dim != 0:
            raise ValueError(
                f"the FP8 all-gather shards weights along dim 0; {name}.weight is along {managed.shard_dim}: have "
                "shard_placement_fn return None for it"
            )
        layout = Layout(*managed.size, managed.shards, forms(recipe), together, within)
        dtype = managed.param_dtype or weight.dtype
        quantized = dtype if self.cast else weight.dtype
        grids = tuple((len(layout.reduced(form)), layout.grid(form)[1]) for form in layout.forms)
        split = tuple(i for i, f in enumerate(layout.forms) if layout.is_split(f, 0) or layout.is_split(f, 1))
        return Plan(managed, layout, dtype, quantized, grids, split)

    def _plan_for(self, name: str) -> Plan:
        if name not in self._plans:
            self._plan()
        if name not in self._plans:
            raise RuntimeError(
                f"{name}.weight is sharded by a fully_shard above the model that enable_float8_all_gather was given: "
                "give it the outermost module that fully_shard is applied to"
            )
        return self._plans[name]

    # Scales.

    @staticmethod
    def _batches_of(plans: dict[str, Plan]) -> list[Batch]:
        by_group: dict[dist.ProcessGroup, dict[str, Plan]] = {}
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
            (dtype, kind): batch.split(scales(values, *kind))
            for dtype, values in rounded.items() for kind in batch.kinds
        }  # fmt: skip
        for name, plan in batch.plans.items():
            dtype = plan.quantized_dtype
            held = [
                None if form.sends_scales else scale_of_form(found[dtype, kind_of(form)][name][i], plan.layout, form)
                for i, form in enumerate(plan.layout.forms)
            ]
            self._known[name] = Known(batch, rounded[dtype], tuple(reduced[dtype][name]), tuple(held))

    # What ShardedWeight asks.

    def can_gather(self, name: str) -> bool:
        """See :class:`~tritonfp8.distributed.gathered_weight.Source`."""
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
            found = self._gathers[name] = recipe, bool(forms(recipe))
        return found[1]

    @torch.no_grad()
    def pieces_to_send(self, name: str, shard: Tensor, mesh: Any) -> tuple[Tensor, _Sent]:
        """See :class:`~tritonfp8.distributed.gathered_weight.Source`."""
        plan = self._plan_for(name)
        backward = plan.managed.in_backward
        if name not in self._known or not (backward or self._in_forward or name in self._fresh):
            # A forward that did not come through the model: its groups find their scales one by one.
            group = {k: other for k, other in self._plans.items() if other.managed.group is plan.managed.group}
            self._reduce(Batch(group))
            self._fresh.update(group)
        self._fresh.discard(name)
        content = None
        if len(plan.layout.forms) > 1 and not plan.layout.together:
            content = int(backward)
        known = self._known[name]
        ready = self._pieces.pop(name, None)
        if ready is not None and ready[0] is known and ready[1] == content:
            return ready[2], _Sent(plan, known, content)
        if self._reduced is not None:
            # FSDP calls this on a stream of its own, which may not have waited for the stream of forward.
            torch.cuda.current_stream().wait_event(self._reduced)
        wanted = range(len(plan.layout.forms)) if content is None else (content,)
        found = pieces(known.batch.groups[id(plan.managed.group)], known, wanted)
        for other, piece in found.items():
            self._pieces[other] = self._known[other], content, piece
        if found:
            return self._pieces.pop(name)[2], _Sent(plan, known, content)
        return _piece(plan, known, shard, [plan.layout.forms[i] for i in wanted]), _Sent(plan, known, content)

    def receive(self, name: str, buffer: Tensor | None, sent: _Sent | None, out: Tensor | None) -> Tensor | None:
        """See :class:`~tritonfp8.distributed.gathered_weight.Source`."""
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
        own = sent.known.scales
        held = (own[0], own[1] if len(own) > 1 else None)
        if out is None:
            tag = (
                None
                if sent.content is None
                else torch.tensor([self._key, self._index(name), sent.content], device="cpu")
            )
            return GatheredWeight(buffer, *held, tag, layout, sent.plan.dtype)
        assert isinstance(out, GatheredWeight)
        out.refill(buffer, *held, layout)
        if out._tag is not None:
            assert sent.content is not None
            # Through data: a graph that saved it for backward is to see the write, and no error for it.
            out._tag.data.select(0, -1).fill_(sent.content)
        return None

    def _index(self, name: str) -> int:
        return self._names.index(name)

    def wire(self, index: int) -> Layout:
        """See :class:`~tritonfp8.distributed.gathered_weight.Source`."""
        return self._plans[self._names[index]].layout

    @torch.no_grad()
    def gather_now(self, index: int, form: Form) -> tuple[Tensor, Tensor]:
        """See :class:`~tritonfp8.distributed.gathered_weight.Source`."""
        name = self._names[index]
        plan, known = self._plans[name], self._known[name]
        layout = plan.layout
        piece = _piece(plan, known, plan.shard(), (form,))
        buffer = piece.new_empty(layout.shards * layout.piece_size)
        with counted_inside_ops():
            _all_gather(buffer, piece, group=plan.managed.process_group)
        return read_form(buffer, known.scales[layout.forms.index(form)], layout, form)


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
            form = layout.forms[i]
            assert layout.within is not None
            first_row, first_col = (layout.start(dim) // form.block[dim] for dim in (0, 1))
            held = (
                [first_row + row for row in layout.reduced(form)],
                [first_col + col for col in range(plan.grids[i][1])],
            )
            grids.append(Grid(bits[name][i], form.block, layout.within, held))
            places.append(bits[name][i])
    for place, grid in zip(places, reduce_grids(grids), strict=True):
        place.copy_(grid.bits)


def _piece(plan: Plan, known: Known, shard: Tensor, wanted: Sequence[Form]) -> Tensor:
    """The bytes that this rank sends."""
    layout = plan.layout
    parts = []
    if shard.shape[0]:
        x = shard.to(plan.quantized_dtype)
        for form in wanted:
            reduced = known.reduced[layout.forms.index(form)]
            parts.append((form, *quantize_shard(x, layout, form, plan.managed.rank, reduced)))
    if len(parts) == 1 and parts[0][1].numel() == layout.piece_size:
        return parts[0][1].view(torch.uint8).reshape(-1)
    piece = torch.zeros(layout.piece_size, dtype=torch.uint8, device=shard.device)
    for part in parts:
        write_piece(piece, layout, *part)
    return piece


def _wrap_local(managed: Managed, source: Float8AllGather, name: str) -> None:
    local = managed.local
    if not isinstance(local, ShardedWeight):
        managed.param.sharded_param._local_tensor = ShardedWeight(local, source, name)


def plain(x: Tensor) -> Tensor:
    """A weight of ours, or a DTensor of one, as plain tensors over the same memory."""
    if isinstance(x, ShardedWeight):
        return x._data
    if isinstance(x, DTensor) and isinstance(x._local_tensor, ShardedWeight):
        return _of_local(x, x._local_tensor._data)
    return x


def is_prepared(weight: Tensor) -> bool:
    """Whether it is gathered in 8 bits, or will be."""
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    return isinstance(local, ShardedWeight | GatheredWeight)


def _of_local(like: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
