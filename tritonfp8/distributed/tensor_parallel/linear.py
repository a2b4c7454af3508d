"""A linear layer on DTensors: local tensors with explicit placements, and the scales of the global tensors.

The table in :mod:`.placements` lists the placements that a layer takes, and what each combination does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tritonfp8.distributed import options
from tritonfp8.distributed.fsdp import GatheredWeight
from tritonfp8.distributed.global_scales import global_amax
from tritonfp8.distributed.shard_layout import (
    DimLayout,
    align,
    distributed,
    largest_blocks,
    plain_mesh,
    splits_rounding,
    unalign,
)
from tritonfp8.distributed.tensor_parallel.placements import ShardedLayer, cached_layer_of, layer_of
from tritonfp8.distributed.tensor_parallel.sharded_operands import (
    GatheredShard,
    ShardedOperands,
    ShardedWeight,
    StoredShard,
)
from tritonfp8.distributed.tensor_parallel.token_gather import (
    gathered_placeholder,
    gathered_rows,
    is_own_transpose,
    scattered_rows,
)
from tritonfp8.layers.linear import Operands, SharedInput, WeightSource, local_linear, rounded, weight_operands
from tritonfp8.layers.stored import StoredRows, StoredWeight
from tritonfp8.ops import sealed
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.checks import shown

_STORED = (StoredRows, StoredWeight)
# Types of weights whose scales already belong to the global weight.
_HAVE_CODES = (GatheredWeight, *_STORED)


class _AddedOnce(torch.autograd.Function):
    """The bias on the rank that adds it, zeros on the others. Each rank computes the whole gradient by itself."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, here: bool) -> Tensor:
        return sealed(bias.clone() if here else torch.zeros_like(bias), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _FromShards(torch.autograd.Function):
    """The gathered rows of a DTensor whose tokens are sharded; its gradient is a DTensor that ranks sum later."""

    @staticmethod
    def forward(ctx: Any, input: DTensor, gathered: Tensor, layer: ShardedLayer) -> Tensor:
        ctx.layer = layer
        ctx.like = input.device_mesh, input.shape, input.stride()
        return sealed(gathered.view_as(gathered), input._local_tensor, gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layer: ShardedLayer = ctx.layer
        mesh, shape, stride = ctx.like
        grad = unalign(layer.k, unalign(layer.m, grad, 0), 1).reshape(*layer.lead, layer.k.local_size)
        placements = layer.placements.grad_input
        return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride), None, None


def _check(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, x in (("input", input), ("weight", weight), ("bias", bias)):
        if x is not None and not isinstance(x, DTensor):
            raise TypeError(
                f"linear got a plain {type(x).__name__} as {name} beside DTensors: nothing says how it lies on the "
                "mesh. Give the layer a parallel style (parallelize_module with ColwiseParallel, RowwiseParallel or "
                "PrepareModuleInput), or use DTensor.from_local."
            )
    meshes = {x.device_mesh for x in (input, weight, bias) if isinstance(x, DTensor)}
    if len(meshes) > 1:
        raise ValueError(f"the operands of a linear layer must be on one device mesh; got {len(meshes)} different ones")
    if weight.ndim != 2 or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear needs input [..., K] and weight [N, K]; got {tuple(input.shape)} and {tuple(weight.shape)}. "
            "Features that do not divide by the ranks need use_local_output=False in the style of the layer before: a "
            "local tensor does not say how many there are."
        )


def _tokens_are_sharded(input: DTensor) -> bool:
    return any(p.is_shard() and p.dim < input.ndim - 1 for p in input.placements)  # type: ignore[attr-defined]


def _cast(x: DTensor) -> DTensor:
    """``x`` in the dtype of autocast, in which it is quantized and sent."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))  # type: ignore[return-value]


class CachedShard(NamedTuple):
    """This rank's part of a weight that is quantized for more than one pass.

    Attributes:
        operands: see :func:`tritonfp8.functional.quantize_weight`.
        scales: the option ``tritonfp8.distributed.scales`` by which it was quantized.
    """

    operands: Operands
    scales: str


@torch.no_grad()
def quantize_shard(weight: Tensor, recipe: Recipe, needs_grad_input: bool) -> CachedShard:
    """Quantize this rank's part of a DTensor for more than one pass; ranks reduce its amaxes now, and not later."""
    assert isinstance(weight, DTensor)
    scaling = options.current().scales
    came = (Replicate(),) * weight.device_mesh.ndim, tuple(weight.placements)
    layer: ShardedLayer = cached_layer_of(
        plain_mesh(weight.device_mesh),
        (0,),
        tuple(weight.shape),
        came,
        largest_blocks(recipe),
        False,
        None,
        scaling,
        None,
    )
    source = ShardedWeight(*layer.scaled[1:])
    return CachedShard(weight_operands(_read_weight(weight, layer, recipe), recipe, needs_grad_input, source), scaling)


def _cached_operands(cached: object) -> Operands | None:
    if cached is None:
        return None
    if not isinstance(cached, CachedShard):
        raise ValueError("quantized_weight needs plain tensors; got an operand of another type, such as DTensor")
    if cached.scales != options.current().scales:
        raise RuntimeError(
            f"the block of quantize_weights_once was opened with scales {cached.scales!r}; got "
            f"{options.current().scales!r}: open it inside tritonfp8.distributed.scales"
        )
    return cached.operands


def _aligned_weight(weight: DTensor, layer: ShardedLayer) -> Tensor:
    return align(layer.k, align(layer.n, weight.to_local(grad_placements=layer.placements.grad_weight), 0), 1)


class _RoundedTogether(torch.autograd.Function):
    """A shard rounded in blocks that lie on several ranks, to the values of the whole weight; passes its gradient on.

    The ranks reduce the amaxes in forward, for the reason of :meth:`ShardedWeight.now`. So the values are saved for
    backward. A cast that rounds them once more leaves them as they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, layouts: tuple[DimLayout, DimLayout]) -> Tensor:
        amax, _ = global_amax(x, spec, None, layouts)
        return sealed(rounded(x, spec, amax), x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _read_weight(weight: DTensor, layer: ShardedLayer, recipe: Recipe) -> Tensor:
    """This rank's part of a weight as the casts read it."""
    local = _aligned_weight(weight, layer)
    if not splits_rounding(recipe, layer.k) or isinstance(weight._local_tensor, _HAVE_CODES):
        return local
    return _RoundedTogether.apply(local, recipe.weights, (layer.n, layer.k))  # type: ignore[no-untyped-call]


def sharded_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    shared_input: SharedInput | None = None,
    quantized_weight: object = None,
    output_placements: Sequence[Placement] | None = None,
) -> Tensor:
    """:func:`tritonfp8.functional.linear` on DTensors; the table in :mod:`.placements`.

    Args:
        input: DTensor ``[..., K]``.
        weight: DTensor ``[N, K]`` on the same mesh.
        bias: DTensor ``[N]`` or None.
        recipe: a :class:`~tritonfp8.Recipe`.
        shared_input: lets sibling layers that read the same DTensor share its cast and its gather.
        quantized_weight: the result of :func:`quantize_shard` for ``weight``, or None.
        output_placements: one for each mesh dim, or None. Where the output is Partial and this says Shard(tokens), the
            layer sums and scatters it, and gathers its gradient: in 8 bits if one operand serves both GEMMs.

    Returns:
        DTensor ``[..., N]``.

    Raises:
        TypeError: a plain tensor among DTensors.
        ValueError: placements or shapes that do not fit together, a ``quantized_weight`` of plain tensors, or a
            batch-invariant output that more than two ranks sum.
        RuntimeError: a ``quantized_weight`` by other scales than this block's.
    """
    cached = _cached_operands(quantized_weight)
    _check(input, weight, bias)
    assert isinstance(input, DTensor)
    assert isinstance(weight, DTensor)
    mesh = input.device_mesh
    wanted = None if output_placements is None else tuple(output_placements)
    if wanted is not None and (len(wanted) != mesh.ndim or not all(isinstance(p, Placement) for p in wanted)):
        raise ValueError(f"output_placements must be a Placement for each mesh dim ({mesh.ndim}); got {shown(wanted)}")
    # Unless tokens are sharded, their number is left out, so that one compiled graph serves any number.
    sharded = _tokens_are_sharded(input) or _shards_tokens(wanted or (), input.ndim)
    leading = tuple([operator.index(size) if sharded else 0 for size in input.shape[:-1]])
    build = layer_of if torch.compiler.is_compiling() else cached_layer_of
    layer = build(
        plain_mesh(mesh), leading, tuple(weight.shape), (tuple(input.placements), tuple(weight.placements)),
        largest_blocks(recipe), isinstance(weight._local_tensor, _HAVE_CODES), wanted,
        *options.current(),
    )  # fmt: skip
    if recipe.output.batch_invariant:
        _check_invariant(mesh.shape, layer.placements.output)
    out = _local(input, weight, bias, recipe, shared_input, layer, cached)
    found = distributed(out, mesh, layer.returned, (*input.shape[:-1], weight.shape[0]))
    is_placed = wanted is None or layer.scatter is not None
    return found if is_placed else found.redistribute(placements=wanted, async_op=True)


def _shards_tokens(placements: Sequence[Placement], ndim: int) -> bool:
    return any(type(p) is Shard and p.dim % ndim < ndim - 1 for p in placements)


def _check_invariant(ranks: Sequence[int], output: Sequence[Placement]) -> None:
    # A sum of two does not depend on the order.
    if any(isinstance(p, Partial) and size > 2 for size, p in zip(ranks, output, strict=True)):
        raise ValueError(
            f"a batch-invariant layer cannot be summed over more than two ranks; got a mesh of {tuple(ranks)}: a "
            "collective sums in an order that depends on the size. Shard this layer by ColwiseParallel"
        )


def _local(
    input: DTensor,
    weight: DTensor,
    bias: Tensor | None,
    recipe: Recipe,
    shared_input: SharedInput | None,
    layer: ShardedLayer,
    cached: Operands | None,
) -> Tensor:
    """This rank's part of the output."""
    moved = _placed(_cast(input), layer.placements.input)
    summed_later = layer.gather is not None and not layer.counted
    local = moved.to_local(grad_placements=layer.placements.grad_input)
    if summed_later:
        # _FromShards carries the gradient instead.
        local = local.detach()
    rows = local.reshape(math.prod(local.shape[:-1]), local.shape[-1])
    sharded = _tokens_are_sharded(input)
    if (sharded and rows.shape[0] != layer.rows) or rows.shape[1] != layer.k.local_size:
        raise ValueError(
            f"of an input {tuple(input.shape)} with placements {tuple(input.placements)} and a weight "
            f"{tuple(weight.shape)}, this rank must hold {layer.rows} rows of {layer.k.local_size} features; got "
            f"{tuple(rows.shape)}. Tokens that lie otherwise than torch.chunk divides them need "
            "tritonfp8.distributed.token_counts."
        )
    # A grad_weight GEMM in high precision reads the input itself.
    reads_input = torch.is_grad_enabled() and weight.requires_grad and not recipe.grad_weight.quantized
    in_8_bits = layer.gather is not None and recipe.output.quantized and not reads_input
    if layer.gather is not None and in_8_bits:
        operand, own_rows = gathered_placeholder(rows, layer.gather, layer.k), rows
    else:
        operand = own_rows = _aligned_rows(rows, layer, input, shared_input)
    if summed_later:
        operand = _FromShards.apply(moved, operand, layer)  # type: ignore[no-untyped-call]
    w = _read_weight(weight, layer, recipe)
    needs = (torch.is_grad_enabled() and x.requires_grad for x in (operand, weight))
    scatter = layer.scatter if _sends_gradient_once(recipe, *needs) else None
    provider = ShardedOperands(*layer.scaled, layer.gather if in_8_bits else None, layer.k, scatter, layer.n)
    if isinstance(weight._local_tensor, GatheredWeight):
        source: WeightSource = GatheredShard(layer.n, layer.k)
    else:
        kind = StoredShard if isinstance(weight._local_tensor, _STORED) else ShardedWeight
        source = kind(*layer.scaled[1:])
    out = local_linear(
        operand, w, _local_bias(bias, layer), recipe, quantized_weight=cached, shared_input=shared_input,
        shared_as=input, own_rows=own_rows, provider=provider, source=source,
    )  # fmt: skip
    if scatter is None:
        out = unalign(layer.n, unalign(layer.m, out, 0), 1)
        out = out if layer.scatter is None else scattered_rows(out, layer.scatter)
    lead = layer.lead if sharded or layer.scatter is not None else local.shape[:-1]
    return out.reshape(*lead, layer.n.local_size)


def _sends_gradient_once(recipe: Recipe, needs_grad_input: bool, needs_grad_weight: bool) -> bool:
    """Whether one operand of codes serves each GEMM that reads the gradient, so that it takes less than bf16 takes."""
    gemms = (recipe.grad_input, needs_grad_input), (recipe.grad_weight, needs_grad_weight)
    specs = [gemm.lhs for gemm, needed in gemms if needed]
    first, last = (specs or [None])[0], (specs or [None])[-1]
    if first is None or last is None:
        return False
    return len(specs) == 1 or recipe.codes["grad_output"] is not None or is_own_transpose(first, last)


def _placed(x: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    # One by one: torch 2.11 cannot trace a comparison of tuples of placements.
    same = all(here == wanted for here, wanted in zip(x.placements, placements, strict=True))
    return x if same else x.redistribute(placements=placements)


def _aligned_rows(rows: Tensor, layer: ShardedLayer, input: DTensor, shared_input: SharedInput | None) -> Tensor:
    """The rows that the GEMMs read, gathered if tokens are sharded and the layer needs all."""

    def make() -> Tensor:
        gathered = rows if layer.gather is None else gathered_rows(rows, layer.gather)
        return align(layer.k, align(layer.m, gathered, 0), 1)

    # Rows with a gradient are not shared: the entry would keep their autograd graph alive.
    if layer.gather is None or shared_input is None or rows.requires_grad:
        return make()
    return shared_input.once(input, (rows.dtype, rows.shape, layer.gather, layer.k), make)


def _local_bias(bias: Tensor | None, layer: ShardedLayer) -> Tensor | None:
    if bias is None:
        return None
    assert isinstance(bias, DTensor)
    bias = _placed(bias, layer.placements.bias)
    local = align(layer.n, bias.to_local(grad_placements=layer.placements.grad_bias), 0)
    if any(isinstance(p, Partial) for p in layer.placements.output):
        return _AddedOnce.apply(local, layer.adds_bias)  # type: ignore[no-untyped-call]
    return local
