"""The 8-bit all-gather of one model: finds the weights' scales, sends this rank's bytes, takes what came."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tritonfp8.distributed.fsdp.agreement import Agreement
from tritonfp8.distributed.fsdp.byte_layout import ByteLayout, MatricesLayout
from tritonfp8.distributed.fsdp.gather_plan import Batch, GatherSettings, RowsPlan, batches_of, plan_of
from tritonfp8.distributed.fsdp.gathered_weight import register_source
from tritonfp8.distributed.fsdp.grouped import reduce_amaxes
from tritonfp8.distributed.fsdp.orientations import weight_orientations
from tritonfp8.distributed.fsdp.sharded_weight import (
    GatheredInEvaluation,
    KeptSegments,
    WeightToGather,
)
from tritonfp8.distributed.fsdp.torch_fsdp import (
    Managed,
    by_group,
    forget_inference_memory,
    managed_parameters,
    require_none_above,
)
from tritonfp8.distributed.torch_private import disable_dynamo
from tritonfp8.layers.linear import Float8Linear, raise_changed
from tritonfp8.layers.moe import ConvertedExperts, is_converted_experts
from tritonfp8.specs.naming import listed, reasons

OTHER_DIM = "it is sharded along another dim than the expert dim"
SPLIT = "its recipe rounds it in blocks of in features, and ranks of tensor parallelism share one"
FEWER = "it is resharded to fewer ranks after forward (reshard_after_forward=int)"


class Float8AllGather:
    """Gathers the weights of one model in 8 bits.

    Parameters are not touched, neither before ``fully_shard`` nor after. The first forward finds the weights that FSDP
    manages, and makes FSDP ask a :class:`~.sharded_weight.WeightToGather` what to gather for each.

    Amaxes of linear layers are reduced when the model's forward begins. An expert has scales of its own, and a rank
    holds whole experts, so nothing is reduced for them.

    Args:
        model: the module whose forward begins a step.
        layers: the layers that share each weight, by the name of the first one.
        experts: modules of experts, by name.
        cast: whether a weight is rounded to the dtype that the layers compute in before it is quantized.

    Attributes:
        weights: by name.
        kept: what serves several gathers, while :func:`tritonfp8.quantize_weights_once` is open.
        reduced: the end of the last reduction of amaxes, on a GPU.
        key: of this object in the tags of gathered weights.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, list[Float8Linear]],
        experts: Mapping[str, ConvertedExperts],
        cast: bool,
    ) -> None:
        self.model = model
        self.cast = cast
        owners: dict[str, list[tuple[Any, str]]] = {
            name: [(layer, "weight") for layer in tied] for name, tied in layers.items()
        }
        for name, module in experts.items():
            owners |= {f"{name}.{key}" if name else key: [(module, key)] for key in module.weights()}
        self._all = [
            WeightToGather(self, name, index, each, name not in layers)
            for index, (name, each) in enumerate(owners.items())
        ]
        self.weights = {weight.name: weight for weight in self._all}
        self.kept: KeptSegments | None = None
        self.reduced: torch.cuda.Event | None = None
        self.key = 0
        # All that FSDP manages in the model.
        self._groups: list[list[Managed]] = []
        self._batches: list[Batch] = []
        # Weights whose amaxes were reduced outside of the model's forward, and are not gathered yet.
        self._fresh: set[str] = set()
        # Weights that the user was told of, and reasons of others, for the next warning.
        self._told: set[str] = set()
        self._untold: dict[str, str] = {}
        self._agreement = Agreement()
        self._released = False
        self._evaluated: GatheredInEvaluation | None = None
        self._in_forward = False
        self._was_in_inference_mode = False
        self._hook_id = model.register_forward_pre_hook(self._before_forward, prepend=True).id
        model.register_forward_hook(self._after_forward, always_call=True)
        self._first_hooks = {
            module: module.register_forward_pre_hook(self._before_first_forward).id for module in self._parents()
        }

    @property
    def converts_experts(self) -> bool:
        """Whether some of the experts still follow a recipe."""
        return any(weight.of_experts and is_converted_experts(weight.module) for weight in self._all)

    def _parents(self) -> set[nn.Module]:
        """The modules below the model that ``fully_shard`` may be applied to."""
        owners = {module for weight in self._all for module, _ in weight.owners}
        return {m for m in self.model.modules() if m is not self.model and not owners.isdisjoint(m.modules())}

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
        for weight in self._all:
            weight.ready = None
        self._check_assigned()
        for batch in self._batches:
            if self.kept is None or not all(self._is_current(self.weights[name]) for name in batch.plans):
                self._reduce(batch)
        if self._batches and torch.cuda.is_available():
            self.reduced = torch.cuda.current_stream().record_event()
        self._in_forward = bool(self._batches)
        for managed in in_values:
            managed.gather_now()

    def _check_assigned(self) -> None:
        """Raise RuntimeError for weights that were assigned to since the last forward, and so have their old values."""
        # A list: each is asked, also after one that was assigned to.
        found = [name for name, weight in self.weights.items() if weight.is_sharded and weight.was_assigned()]
        if found:
            raise RuntimeError(
                f"the weight of {listed(found)} was assigned by param.data = ..., which torch ignores for a sharded "
                "parameter: it still has the old values. Copy instead: param.data.copy_(values), or "
                "model.load_state_dict"
            )

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _before_first_forward(self, module: nn.Module, args: Any) -> None:
        """Make FSDP ask for the 8-bit gather, if the first forward does not go through the model."""
        self._find()
        if any(weight.is_sharded for weight in self._all):
            self._remove_first_hooks()
            for managed in self._plan():
                managed.gather_now()

    def _remove_first_hooks(self) -> None:
        for module, hook in self._first_hooks.items():
            module._forward_pre_hooks.pop(hook, None)
        self._first_hooks.clear()

    @disable_dynamo  # type: ignore[untyped-decorator]
    def _after_forward(self, *args: Any) -> None:
        self._agreement.finish()
        self._in_forward = False
        self._fresh.clear()
        if not torch.is_grad_enabled() and any(weight.plan is not None for weight in self._all):
            self._evaluated = GatheredInEvaluation(self._groups)

    def _weight_of(self, layer: nn.Module) -> WeightToGather | None:
        owned = (w for w in self.weights.values() if not w.of_experts and any(layer is each for each, _ in w.owners))
        return next(owned, None)

    def release(self, layer: Float8Linear) -> Callable[[], None] | None:
        """Gather the layer's weight in its own dtype again; :func:`tritonfp8.revert` calls this first.

        Returns:
            A function that undoes it: the next forward then gathers in 8 bits again. None if nothing was done.
        """
        weight = self._weight_of(layer)
        if self.kept is not None:
            raise ValueError(
                f"quantize_weights_once is open on {weight.name if weight else None}: revert after the block"
            )
        if weight is None:
            # The layer shares its weight with one that was released already.
            return None
        self._released = True
        self._find()
        managed, before = weight.managed if weight.is_sharded else None, dict(self.weights)
        del self.weights[weight.name]
        weight.forget()
        self._batches = self._new_batches()
        if managed is not None:
            managed.gather_values()

        def undo() -> None:
            self.weights = before

        return undo

    # Segments that are made once for several gathers.

    def gathers(self, layer: nn.Module) -> bool:
        """Whether the weight of ``layer`` is gathered in 8 bits once FSDP2 shards it."""
        weight = self._weight_of(layer)
        if weight is None or (weight.managed is not None and not weight.is_sharded):
            return False
        return bool(weight_orientations(weight.module.recipe))

    @contextmanager
    def keeping_segments(self, layers: Iterable[str]) -> Iterator[None]:
        """Keep each rank segment, and the reduced amaxes, until the block ends or a shard is written to.

        Args:
            layers: names of the layers, for messages.

        Raises:
            ValueError: a block is open already.
            RuntimeError: at the end of the block, a shard changed by a write that torch does not count.
        """
        if self.kept is not None:
            raise ValueError(f"blocks do not nest, and one is open on {listed(layers)}")
        kept = self.kept = KeptSegments()
        try:
            yield
            if names := kept.changed():
                raise_changed(names)
        finally:
            self.kept = None

    # Plans.

    def _find(self) -> None:
        """Find the weights that FSDP manages, as far as it does already."""
        if all(weight.managed is not None for weight in self.weights.values()):
            return
        managed = managed_parameters(self.model.modules())
        self._groups = by_group(each for each in managed.values() if not each.is_replicated)
        others = {}
        for name, weight in self.weights.items():
            weight.managed = managed.get(weight.owners[0])
            weight.is_sharded = weight.managed is not None and not weight.managed.is_replicated
            if not weight.of_experts and not weight.is_sharded:
                others[name] = weight.module
        require_none_above(others)

    def _plan(self) -> list[Managed]:
        """Plan the gather of each sharded weight. Where a plan changed, FSDP starts over with new memory.

        Returns:
            One weight of each group that FSDP gathered in high precision before it knew of the hooks. The caller must
            gather these groups again.
        """
        self._find()
        changed = self._released
        gathered: dict[int, Managed] = {}
        for name, weight in self.weights.items():
            managed, before = weight.managed, weight.settings
            if managed is None or not weight.is_sharded:
                continue
            if weight.of_experts and not self._serves(weight, managed):
                weight.settings = weight.plan = None
                changed |= before is not None
            else:
                settings = GatherSettings.of(weight.module.recipe, managed)
                if settings != before and not self._keeps_bytes(managed, before, settings):
                    weight.plan = plan_of(name, weight.module, managed, settings, self.cast)
                    if weight.plan is None and settings.recipe.weights is not None and name not in self._told:
                        self._untold[name] = SPLIT
                    if before is not None:
                        managed.forget_gathered()
                    weight.settings, changed = settings, True
            if managed.gathers_by_hooks == (weight.plan is not None):
                continue
            if weight.plan is None:
                managed.gather_values()
            elif managed.gather_by_hooks(weight):
                gathered[id(managed.group)] = managed
        if self._untold:
            self._tell()
        if changed:
            self.key = register_source(self, self.key)
            self._batches = self._new_batches()
            self._describe()
        self._agreement.check()
        return list(gathered.values())

    @staticmethod
    def _keeps_bytes(managed: Managed, before: GatherSettings | None, settings: GatherSettings) -> bool:
        """Whether bytes that are gathered already serve on, though the next gather will carry other orientations."""
        same = before is not None and before._replace(together=settings.together) == settings
        return same and not managed.is_sharded

    def _new_batches(self) -> list[Batch]:
        return batches_of((name, weight.plan) for name, weight in self.weights.items() if weight.plan is not None)

    def _serves(self, weight: WeightToGather, managed: Managed) -> bool:
        """Whether experts are gathered in 8 bits now; the way they are sharded may forbid that."""
        module = weight.module
        if not is_converted_experts(module) or not weight_orientations(module.recipe) or not managed.shape[0]:
            return False
        if managed.shards == 1:
            # Nothing is gathered, and FSDP takes a shard for the whole.
            return False
        reason = OTHER_DIM if managed.shard_dim != 0 else FEWER if managed.reshards_to_fewer else None
        if reason is not None and weight.name not in self._told:
            self._untold[weight.name] = reason
        return reason is None

    def _tell(self) -> None:
        """Warn once of all weights that the way in which they are sharded keeps in high precision."""
        what = "weights are gathered in high precision, not in 8 bits"
        warnings.warn("\n  ".join([f"{what}:", *reasons(self._untold.items())]), stacklevel=2)
        self._told.update(self._untold)
        self._untold = {}

    def _describe(self) -> None:
        """Prepare for the check that all ranks gather alike, which every rank makes in each forward."""
        by_mesh: dict[DeviceMesh, dict[str, str]] = {}
        for name, weight in self.weights.items():
            if weight.managed is not None and weight.settings is not None:
                mesh = weight.managed.param.sharded_param.device_mesh
                by_mesh.setdefault(mesh, {})[name] = weight.settings.description(self.cast)
        self._agreement.describe(by_mesh)
        self._released = False

    # Amaxes.

    def _reduce(self, batch: Batch) -> None:
        for name, reduction in reduce_amaxes(batch).items():
            self.weights[name].reduction = reduction

    def require_reduction(self, weight: WeightToGather, plan: RowsPlan, backward: bool) -> None:
        """Reduce the amaxes of the weight's group, unless the amaxes of the model's forward are still valid.

        They are not in a forward that did not come through the model, and where a weight changed since the model's
        forward began: that forward may have been interrupted.
        """
        serves = backward or self._in_forward or weight.name in self._fresh or self.kept is not None
        if not (serves and self._is_current(weight)):
            plans = ((name, other.plan) for name, other in self.weights.items())
            group = plan.managed.group
            batch = {k: p for k, p in plans if isinstance(p, RowsPlan) and p.managed.group is group}
            self._reduce(Batch(batch))
            self._fresh.update(batch)
        self._fresh.discard(weight.name)

    @staticmethod
    def _is_current(weight: WeightToGather) -> bool:
        """Whether the amaxes of a weight were reduced since its shard was last written to."""
        reduction = weight.reduction
        return reduction is not None and weight.managed is not None and reduction.stamp == weight.managed.stamp

    # What a gathered weight asks.

    def layout_of(self, index: int) -> ByteLayout | MatricesLayout:
        """The layout of the gathered bytes of the weight with this index."""
        plan = self._all[index].plan
        assert plan is not None
        return plan.layout

    def gather_now(self, index: int, orientation: int) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of one orientation of the weight with this index, gathered by this call."""
        return self._all[index].gather_now(orientation)
