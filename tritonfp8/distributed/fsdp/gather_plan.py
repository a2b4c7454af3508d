"""How the weights of a model are gathered in 8 bits: worked out once, and again when a recipe or a dtype changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from tritonfp8.distributed.fsdp.byte_layout import ByteLayout, MatricesLayout
from tritonfp8.distributed.fsdp.orientations import WeightOrientation, weight_orientations
from tritonfp8.distributed.fsdp.torch_fsdp import Managed
from tritonfp8.distributed.shard_layout import (
    DimLayout,
    Mesh,
    aligned_to,
    flattened,
    largest_blocks,
    plain_mesh,
    splits_rounding,
)
from tritonfp8.layers.linear import rounded
from tritonfp8.ops import ALIGNMENT, GridPlace, casts_shards
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec


class GatherSettings(NamedTuple):
    """The properties that decide how a weight is gathered.

    Attributes:
        recipe: of its layer.
        together: whether one gather serves forward and backward, so that it carries all orientations.
        compute_dtype: the dtype in which layers compute with the weight; None for the parameter's own.
    """

    recipe: Recipe
    together: bool
    compute_dtype: torch.dtype | None

    @classmethod
    def of(cls, recipe: Recipe, managed: Managed) -> GatherSettings:
        """The settings of a weight now, under the autocast that is on now."""
        group = managed.group
        dtype = managed.param_dtype
        if dtype is None and torch.is_autocast_enabled(group.device.type):
            dtype = torch.get_autocast_dtype(group.device.type)
        again = group.post_forward_mesh_info is not None and group.post_forward_mesh_info == group.mesh_info
        return cls(recipe, not again, dtype)

    def description(self, cast: bool) -> str:
        """Text that is equal on two ranks exactly if they gather alike."""
        specs = ", ".join(str(orientation.spec) for orientation in weight_orientations(self.recipe))
        source = self.compute_dtype if cast and self.compute_dtype is not None else "the master weight"
        detail = hashlib.sha256(self.recipe.args[0].encode()).hexdigest()[:8]
        return f"recipe {self.recipe.name!r} ({detail}), weight {specs or 'in high precision'}, from {source}"


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """How one weight is gathered.

    Attributes:
        managed: the weight, as FSDP has it.
        layout: of the gathered bytes.
        dtype: of the gathered weight, in which FSDP hands it to the layer.
        quantized_dtype: from which the weight is quantized.
        rounded: the dtype that the values are rounded to before they are quantized; None if they are not.
    """

    managed: Managed
    layout: ByteLayout | MatricesLayout
    dtype: torch.dtype
    quantized_dtype: torch.dtype
    rounded: torch.dtype | None

    @cached_property
    def rank(self) -> int:
        """The index of this rank's shard."""
        return self.managed.rank

    @cached_property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.managed.device

    @cached_property
    def sends_one(self) -> bool:
        """Whether the bytes of a gather hold one of two orientations."""
        return len(self.layout.orientations) > 1 and not self.layout.together

    @cached_property
    def weights(self) -> QuantSpec | None:
        """The format that the values are rounded to before they are quantized; None if they are not."""
        return self.layout.orientations[0].weights

    def shard(self, local: Tensor | None = None) -> Tensor:
        """This rank's rows or experts, on the device that computes, the values that are quantized.

        ``local``: the shard where FSDP moved it; None for where it lies.
        """
        shard = (self.managed.local if local is None else local).detach().to(self.device, self.quantized_dtype)
        if self.weights is None or not shard.numel():
            return shard
        # Of a parameter [E, K, N] the operand of output, the first one, is the transpose.
        flipped = self.layout.orientations[0].transposed
        return rounded(shard.mT, self.weights).mT if flipped else rounded(shard, self.weights)


@dataclass(frozen=True, eq=False)
class RowsPlan(GatherPlan):
    """How a weight ``[N, K]`` is gathered, whose amaxes ranks reduce."""

    layout: ByteLayout

    @cached_property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """The shape of the amaxes to reduce, for each orientation."""
        layout = self.layout
        return tuple((len(layout.reduced(o)), layout.grid(o)[1]) for o in layout.orientations)

    @cached_property
    def split(self) -> tuple[int, ...]:
        """The indices of orientations with a block that several ranks of tensor parallelism share."""
        layout = self.layout
        return tuple(i for i, o in enumerate(layout.orientations) if layout.is_split(o, 0) or layout.is_split(o, 1))

    @cached_property
    def scales(self) -> tuple[tuple[WeightOrientation, tuple[int, int], tuple[int, int]] | None, ...]:
        """How this rank makes the scales of each orientation of amaxes; None where they come with the bytes."""
        layout = self.layout
        return tuple(None if o.sends_scales else (o, layout.grid(o), layout.extent(o)) for o in layout.orientations)

    @cached_property
    def places(self) -> tuple[GridPlace, ...]:
        """Where this rank's rows begin in the grid of amaxes of each orientation; the first amax has index 0."""
        return tuple(
            GridPlace(0, self.layout.grid(place.orientation)[1], place.lead[0] + place.start, place.lead[1])
            for place in self.layout.places(self.rank)
        )

    @cached_property
    def is_groupable(self) -> bool:
        """Whether the ops that cast many shards at once take every orientation."""
        orientations = zip(self.layout.orientations, self.places, strict=True)
        return self.weights is None and all(
            casts_shards(orientation.spec) and place.fits(orientation.block) for orientation, place in orientations
        )


@dataclass(frozen=True, eq=False)
class GatherGroup:
    """Weights that FSDP gathers together.

    Attributes:
        key: the identity of their parameter group.
        plans: by the weight's name.
    """

    key: int
    plans: dict[str, RowsPlan]

    @cached_property
    def is_groupable(self) -> bool:
        """Whether one launch can cast all of them in each orientation."""
        kinds = {(plan.layout.orientations, plan.quantized_dtype) for plan in self.plans.values()}
        return len(kinds) == 1 and all(plan.is_groupable for plan in self.plans.values())

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The offset of each weight's rank segment in one buffer; last, the size of the buffer."""
        sizes = [-(-plan.layout.rank_segment_size // ALIGNMENT) * ALIGNMENT for plan in self.plans.values()]
        return tuple(accumulate(sizes, initial=0))


@dataclass(frozen=True, eq=False)
class Batch:
    """Weights whose amaxes one collective reduces: all that are sharded over one process group, or some of them.

    Attributes:
        plans: by the weight's name.
        places: a cache of :mod:`.grouped`: for each purpose, the weights and the places of their shards.
    """

    plans: dict[str, RowsPlan]
    places: dict[object, tuple[list[str], Tensor]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> list[int]:
        """Number of amaxes, for each orientation of each weight."""
        return [rows * cols for plan in self.plans.values() for rows, cols in plan.grids]

    @cached_property
    def offsets(self) -> dict[str, tuple[int, ...]]:
        """The index of the first amax of each orientation of a weight, among all."""
        starts = iter(accumulate(self.sizes, initial=0))
        return {name: tuple(next(starts) for _ in plan.grids) for name, plan in self.plans.items()}

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes that the weights are quantized from."""
        return {plan.quantized_dtype for plan in self.plans.values()}

    @cached_property
    def kinds(self) -> set[tuple[str, str]]:
        """Format and scale rounding of all orientations whose scales each rank computes from the amaxes."""
        found = [each for plan in self.plans.values() for each in plan.scales if each is not None]
        return {(orientation.spec.format, orientation.spec.scale_rounding) for orientation, *_ in found}

    @cached_property
    def shares(self) -> bool:
        """Whether some block lies on several ranks of tensor parallelism."""
        return any(plan.split for plan in self.plans.values())

    @cached_property
    def groups(self) -> dict[int, GatherGroup]:
        """The weights that FSDP gathers together, by the identity of its parameter group."""
        found: dict[int, dict[str, RowsPlan]] = {}
        for name, plan in self.plans.items():
            found.setdefault(id(plan.managed.group), {})[name] = plan
        return {key: GatherGroup(key, members) for key, members in found.items()}

    def split(self, flat: Tensor) -> dict[str, list[Tensor]]:
        """``flat``, with one value for each amax, as grids: a list for each weight, by its name."""
        parts = iter(flat.split(self.sizes))
        return {name: [next(parts).view(grid) for grid in plan.grids] for name, plan in self.plans.items()}


def batches_of(plans: Iterable[tuple[str, GatherPlan]]) -> list[Batch]:
    """The weights whose amaxes are reduced, by the process group over which they are sharded."""
    by_group: dict[Any, dict[str, RowsPlan]] = {}
    for name, plan in plans:
        if isinstance(plan, RowsPlan):
            by_group.setdefault(plan.managed.process_group, {})[name] = plan
    return [Batch(members) for members in by_group.values()]


class Reduction(NamedTuple):
    """The result of the last reduction of amaxes for one weight.

    Attributes:
        batch: the weights whose amaxes were reduced together.
        stamp: of the shard that was read.
        amaxes: flat, of all weights of the batch; rounded to the dtype that this weight is quantized from.
        reduced: the amaxes of this weight, a grid for each orientation.
        scales: of the whole weight for each orientation; None where scales come with the bytes.
    """

    batch: Batch
    stamp: tuple[object, ...]
    amaxes: Tensor
    reduced: tuple[Tensor, ...]
    scales: tuple[Tensor | None, ...]


class Sent(NamedTuple):
    """Facts of a gather that its receiving hook needs.

    Attributes:
        plan: of the weight.
        scales: of the whole weight for each orientation, see :class:`Reduction`; of experts, none.
        content: the index of the one orientation that the bytes hold; None if they hold all.
    """

    plan: GatherPlan
    scales: tuple[Tensor | None, ...]
    content: int | None


def plan_of(name: str, module: Any, managed: Managed, settings: GatherSettings, cast: bool) -> GatherPlan | None:
    """How a weight is gathered in 8 bits.

    None if its recipe reads it in high precision, or rounds it in blocks that ranks of tensor parallelism share.

    Args:
        name: of its layer, for messages.
        module: the layer, or the module of experts, that owns it.
        managed: the weight, as FSDP has it.
        settings: see :class:`GatherSettings`.
        cast: whether the weight is rounded to the compute dtype before it is quantized.

    Raises:
        ValueError: FSDP shards the rows of a weight along another dim than 0.
    """
    own, orientations = managed.param.sharded_param.dtype, weight_orientations(settings.recipe)
    if not orientations:
        return None
    managed.require_mesh()
    is_rows = len(managed.shape) == 2
    if is_rows and managed.shard_dim != 0:
        raise ValueError(
            f"the FP8 all-gather needs weights that are sharded along dim 0; {name}.weight is sharded along "
            f"{managed.shard_dim}: have shard_placement_fn return None for it"
        )
    computed = settings.compute_dtype or own
    layout: Any
    if is_rows:
        rows, cols = managed.shape
        within = _within(managed, settings.recipe)
        if within is not None and splits_rounding(settings.recipe, within[1]):
            return None
        layout = ByteLayout(rows, cols, managed.shards, orientations, settings.together, within)
    else:
        # Of gpt-oss the parameter is [E, K, N], whose matrices the GEMMs read transposed.
        flipped = bool(getattr(module, "is_transposed", False))
        read = tuple(replace(o, transposed=o.transposed != flipped) for o in orientations)
        experts, rows, cols = managed.shape
        layout = MatricesLayout(experts, rows, cols, managed.shards, read, settings.together)
        computed = module.casts_to or computed
    quantized = computed if cast else own
    kind = RowsPlan if is_rows else GatherPlan
    return kind(managed, layout, managed.param_dtype or own, quantized, quantized if cast else None)


def _within(managed: Managed, recipe: Recipe) -> tuple[DimLayout, DimLayout] | None:
    """The layouts of N and K in the weight that tensor parallelism shards; None without tensor parallelism."""
    spec = managed.tensor_parallel
    if spec is None:
        return None
    mesh = Mesh(*plain_mesh(spec.mesh))
    _, n, k = largest_blocks(recipe)
    rows = [Replicate() if p == Shard(1) else p for p in spec.placements]
    cols = [Shard(0) if p == Shard(1) else Replicate() for p in spec.placements]
    return aligned_to(flattened(spec.shape[:1], mesh, rows), n), aligned_to(flattened(spec.shape[1:], mesh, cols), k)
