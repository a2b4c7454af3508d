"""From the placements of a linear layer's operands to its parallelism.

On each mesh dim, the placements of input and weight decide which dim of the GEMMs is sharded there (M tokens, N out
features, K in features). All other placements follow::

    input      weight    sharded   output       grad_input   grad_weight   bias, grad_bias
    Replicate  Replicate none      Replicate    Replicate    Replicate     Replicate
    Replicate  Shard(0)  N         Shard(-1)    Partial      Shard(0)      Shard(0)
    Shard(-1)  Shard(1)  K         Partial      Shard(-1)    Shard(1)      Replicate, added once
    Shard(t)   Replicate M         Shard(t)     Shard(t)     Partial       Replicate, Partial
    Shard(t)   Shard(0)  N         Shard(-1)    Partial      Shard(0)      Shard(0); input gathered

The last grad_input is Partial, so that sibling layers sum their gradients first and ranks sum only once. torch cannot
scatter by token counts (:func:`~.token_counts`): with them each layer scatters its own gradient, to Shard(t).

Any other input is redistributed first: a Partial input is reduced, and a replicated one is chunked for ``Shard(1)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tritonfp8.distributed.shard_layout import DimLayout, Mesh, aligned_to, cuts_of, flattened, local_sizes, whole
from tritonfp8.distributed.tensor_parallel.token_gather import TokenGather


class ParallelMode(NamedTuple):
    """The parallelism of a layer along one mesh dim."""

    input: str
    """The sharded dim of the input when the layer begins: "M" or "K", else "whole"."""
    sharded: str | None
    """The dim of the GEMMs that is sharded: "M", "N", "K" or None."""


_COLWISE = ParallelMode("whole", "N")
_GATHERS = ParallelMode("M", "N")
# By (sharding of the input, sharding of the weight): the table above.
_MODES = {
    **{(input, "whole"): ParallelMode("whole", None) for input in ("whole", "K", "sum")},
    ("M", "whole"): ParallelMode("M", "M"),
    **{(input, "N"): _COLWISE for input in ("whole", "K", "sum")},
    ("M", "N"): _GATHERS,
    **{(input, "K"): ParallelMode("K", "K") for input in ("whole", "M", "K", "sum")},
}


class Placements(NamedTuple):
    """The placements of the operands when the layer begins, of its gradients and of its output."""

    input: tuple[Placement, ...]
    weight: tuple[Placement, ...]
    bias: tuple[Placement, ...]
    grad_input: tuple[Placement, ...]
    grad_weight: tuple[Placement, ...]
    grad_bias: tuple[Placement, ...]
    output: tuple[Placement, ...]


class ShardedLayer(NamedTuple):
    """One call of a linear layer on this rank."""

    placements: Placements
    rows: int
    """The number of this rank's rows of the input when the layer begins."""
    lead: tuple[int, ...]
    """The leading sizes of this rank's output."""
    adds_bias: bool
    m: DimLayout
    n: DimLayout
    k: DimLayout
    scaled: tuple[DimLayout, DimLayout, DimLayout]
    """The layouts of M, N and K that decide scales: not sharded if scales are local."""
    gather: TokenGather | None
    scatter: TokenGather | None
    """How ranks sum a Partial output and scatter its tokens, whose gradient they gather; None if they do not."""
    returned: tuple[Placement, ...]
    """The placements of what the layer returns: of its output, or of the scattered sum."""
    counted: bool
    """Whether :func:`~.token_counts` says which tokens each rank has."""


def _kind(name: str, placement: Placement, dims: Sequence[str]) -> str:
    """The sharded dim of a tensor on one mesh dim, or "whole", or "sum"; ``dims`` are the dims of the tensor."""
    if isinstance(placement, Replicate):
        return "whole"
    if type(placement) is Shard:
        return dims[placement.dim]
    if isinstance(placement, Partial) and placement.reduce_op == "sum" and name == "input":
        return "sum"
    raise ValueError(
        f"the {name} of a linear layer must be Replicate, Shard{' or Partial(sum)' if name == 'input' else ''} on each "
        f"mesh dim; got {placement}. Redistribute it first."
    )


def _token_gather(
    sizes: Sequence[int], mesh: Mesh, placements: Sequence[Placement], at: int, target: DimLayout, block: int
) -> TokenGather:
    """The gather over mesh dim ``at`` of an input whose leading dims have these global sizes."""
    placement = placements[at]
    assert isinstance(placement, Shard)
    dim = placement.dim
    if any(isinstance(p, Shard) and p.dim == dim for p in placements[at + 1 :]):
        raise ValueError(
            f"dim {dim} of the input is sharded on a later mesh dim than {at}, over which its parts are gathered: put "
            "the mesh dim of tensor parallelism last"
        )
    sources, counts, outer = [], [], 1
    cuts = cuts_of(sizes, mesh, placements)
    for rank in range(mesh.sizes[at]):
        there = mesh._replace(here=(*mesh.here[:at], rank, *mesh.here[at + 1 :]))
        lengths = local_sizes(sizes, placements, there)
        sources.append(aligned_to(flattened(sizes, there, placements, cuts), block))
        outer = math.prod(lengths[:dim])
        counts.append(math.prod(lengths[dim:]))
    return TokenGather(outer, tuple(counts), mesh.here[at], mesh.groups[at], tuple(sources), target)


def _scattered(output: Sequence[Placement], wanted: Sequence[Placement] | None, t: int) -> tuple[Placement, ...]:
    """``output``, a Partial placement of which is Shard(tokens) where that is ``wanted``; on one mesh dim at most."""
    found = list(output)
    for at, placement in enumerate(wanted or ()):
        if isinstance(output[at], Partial) and type(placement) is Shard and placement.dim % (t + 1) < t:
            found[at] = Shard(placement.dim % (t + 1))
    moved = [at for at in range(len(found)) if found[at] != output[at]]
    return tuple(found if len(moved) == 1 else output)


def _modes(came: Sequence[Sequence[Placement]], input_dims: int, counted: bool) -> list[ParallelMode]:
    kinds = [_kind("input", p, ("M",) * (input_dims - 1) + ("K",)) for p in came[0]]
    weight_kinds = [_kind("weight", p, ("N", "K")) for p in came[1]]
    modes = [_MODES[pair] for pair in zip(kinds, weight_kinds, strict=True)]
    gathers = [i for i, mode in enumerate(modes) if mode == _GATHERS]
    if counted and any(pair == ("M", "K") for pair in zip(kinds, weight_kinds, strict=True)):
        raise ValueError(
            "tokens in other numbers than torch.chunk makes (token_counts) meet a weight sharded by in features: "
            "gather them before this layer, or shard its weight by out features (ColwiseParallel)"
        )
    if len(gathers) > 1:
        raise ValueError(
            f"the tokens of the input are sharded on the mesh dims {gathers}, on which the weight is sharded, too: "
            "they can be gathered over one. Redistribute the input to Replicate on the others."
        )
    return modes


def _placements(
    modes: Sequence[ParallelMode], came: Sequence[Placement], weight: Sequence[Placement], t: int, counted: bool
) -> Placements:
    """``came`` is how the input comes; ``t`` its last dim."""
    summed_later = (_COLWISE,) if counted else (_COLWISE, _GATHERS)
    starts: list[Placement] = []
    for mode, p in zip(modes, came, strict=True):
        starts.append(p if mode.input == "M" else Shard(t) if mode.input == "K" else Replicate())
    bias: list[Placement] = [Shard(0) if mode.sharded == "N" else Replicate() for mode in modes]
    outputs: dict[str | None, Placement] = {"N": Shard(t), "K": Partial(), None: Replicate()}

    def gradient(placements: Sequence[Placement], summed: Callable[[ParallelMode], bool]) -> tuple[Placement, ...]:
        return tuple(Partial() if summed(mode) else p for mode, p in zip(modes, placements, strict=True))

    return Placements(
        input=tuple(starts),
        weight=tuple(weight),
        bias=tuple(bias),
        grad_input=gradient(starts, lambda mode: mode in summed_later),
        grad_weight=gradient(weight, lambda mode: mode.sharded == "M"),
        grad_bias=gradient(bias, lambda mode: mode.sharded == "M"),
        output=tuple(
            p if mode.sharded == "M" else outputs[mode.sharded] for mode, p in zip(modes, starts, strict=True)
        ),
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def layer_of(
    mesh_args: tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]],
    leading: tuple[int, ...],
    weight_shape: tuple[int, ...],
    came: tuple[tuple[Placement, ...], tuple[Placement, ...]],
    blocks: tuple[int, int, int],
    gathered: bool,
    wanted: tuple[Placement, ...] | None,
    scaling: str,
    counts: tuple[int, ...] | None,
) -> ShardedLayer:
    """Work out one call.

    Args:
        mesh_args: the first fields of a :class:`Mesh`; plain, for a compiled graph.
        leading: the global sizes of all dims of the input but the last; zeros where none of them is sharded.
        weight_shape: ``[N, K]``, global.
        came: the placements of the input and of the weight.
        blocks: see :func:`largest_blocks`.
        gathered: whether the weight was gathered in 8 bits: its scales then belong to the global weight.
        wanted: the placements that the output should have, if the caller says so.
        scaling, counts: see :mod:`tritonfp8.distributed.options`.

    Raises:
        ValueError: placements that a linear layer does not take.
    """
    mesh = Mesh(*mesh_args)
    token_mesh = mesh._replace(counts=counts)
    t = len(leading)
    modes = _modes(came, t + 1, counts is not None)
    placements = _placements(modes, *came, t, counts is not None)
    gathers = [i for i, mode in enumerate(modes) if mode == _GATHERS]
    to = blocks if scaling == "global" or gathers or gathered else (1, 1, 1)
    in_features = [Shard(0) if p == Shard(1) else Replicate() for p in placements.weight]
    m = aligned_to(flattened(leading, token_mesh, placements.output), to[0])
    n = aligned_to(flattened(weight_shape[:1], mesh, placements.weight), to[1])
    k = aligned_to(flattened(weight_shape[1:], mesh, in_features), to[2])
    gather = None
    if gathers:
        gather = _token_gather(leading, token_mesh, placements.input, gathers[0], m, blocks[0])
    returned = _scattered(placements.output, wanted, t)
    scatter = None
    for at, placement in enumerate(returned):
        if placement != placements.output[at]:
            scatter = _token_gather(leading, token_mesh, returned, at, m, blocks[0])
    return ShardedLayer(
        placements,
        rows=m.local_size if gather is None else gather.sources[gather.rank].local_size,
        lead=tuple(local_sizes(leading, returned, token_mesh)),
        adds_bias=all(mode.sharded != "K" or at == 0 for mode, at in zip(modes, mesh.here, strict=True)),
        m=m,
        n=n,
        k=k,
        scaled=(m, n, k) if scaling == "global" else (whole(m.local_size), whole(n.local_size), whole(k.local_size)),
        gather=gather,
        scatter=scatter,
        returned=returned,
        counted=counts is not None,
    )


CACHED_LAYERS = 256
"""The number of cached calls: a model makes about ten for each number of tokens.

With sequence parallelism an entry lists the start of each sequence on each rank: 130 kB for 64 sequences on 8 ranks.
"""
cached_layer_of = functools.lru_cache(maxsize=CACHED_LAYERS)(layer_of)
