"""Which bytes the ranks that share the weights of experts send each other.

A weight ``[E, N, K]`` is sharded over E, so each of W ranks holds whole experts: ``ceil(E / W)``, the last ranks fewer
or none. Scales are those of one expert, so a rank quantizes its experts as all of them would be, without a reduction.
Each rank sends codes and, beside them, scales, as many bytes as any other rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.byte_layout import WeightOrientation
from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.specs import empty_grouped_scale, grouped_scale_shape


@dataclass(frozen=True)
class MatricesLayout:
    """Where each part of a weight lies in the gathered bytes. Compared by value: compiled graphs are guarded on it.

    Attributes:
        experts, rows, cols: the shape of the parameter before it is sharded.
        shards: W, the ranks that hold it.
        orientations: how the GEMMs read the matrices of the parameter.
        together: whether the bytes hold all orientations; otherwise one, and they do not say which.
    """

    experts: int
    rows: int
    cols: int
    shards: int
    orientations: tuple[WeightOrientation, ...]
    together: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> MatricesLayout:
        # It never changes. Guards of compiled graphs copy it, and compare faster if that is the same object.
        return self

    @property
    def shard_experts(self) -> int:
        """Experts of the largest shard."""
        return -(-self.experts // self.shards)

    @property
    def held(self) -> int:
        """How many orientations the bytes hold."""
        return len(self.orientations) if self.together else 1

    def shape(self, orientation: WeightOrientation) -> tuple[int, int]:
        """The shape of one matrix of codes."""
        return (self.cols, self.rows) if orientation.transposed else (self.rows, self.cols)

    def _scale_shape(self, orientation: WeightOrientation) -> tuple[int, ...]:
        matrices = (self.shard_experts, *self.shape(orientation))
        return grouped_scale_shape(matrices, orientation.spec.block, "matrices", self.shard_experts)

    def _scale_bytes(self, orientation: WeightOrientation) -> int:
        return math.prod(self._scale_shape(orientation)) * SCALE_FORMATS[orientation.spec.scale_format].dtype.itemsize

    def _scale_places(self, wanted: tuple[int, ...]) -> list[tuple[int, int]]:
        """The first byte and the number of bytes of the scales of each orientation, among the scales of one rank."""
        sizes = [self._scale_bytes(self.orientations[i]) for i in wanted]
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    @property
    def scales_size(self) -> int:
        """Bytes of scales that a rank sends, whichever orientations it sends."""
        sizes = [self._scale_bytes(orientation) for orientation in self.orientations]
        return sum(sizes) if self.together else max(sizes)

    def contents(self, content: int | None) -> tuple[int, ...]:
        """The indices of the orientations in the bytes; ``content`` is that of the one, or None if they hold all."""
        return tuple(range(len(self.orientations))) if content is None else (content,)

    def pack(self, shard: Tensor, wanted: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The bytes that a rank sends of its experts ``[e, N, K]``: codes of each orientation, then all scales."""
        each = self.shard_experts
        scales = torch.zeros(self.scales_size, dtype=torch.uint8, device=shard.device)
        found = []
        for i, (start, size) in zip(wanted, self._scale_places(wanted), strict=True):
            orientation = self.orientations[i]
            codes = torch.zeros(0, dtype=torch.uint8, device=shard.device)
            if len(shard):
                qdata, scale = ops.quantize_matrices(shard, *orientation.spec.args, orientation.transposed)
                codes = qdata.view(torch.uint8).flatten()
                own = scale.contiguous().view(torch.uint8).flatten()
                scales[start : start + size][: len(own)].copy_(own)
            missing = (each - len(shard)) * self.rows * self.cols
            found.append(torch.cat([codes, codes.new_zeros(missing)]) if missing else codes)
        return (*found, scales)

    def read(self, codes: Tensor, scales: Tensor, index: int, content: int | None) -> tuple[Tensor, Tensor]:
        """``(qdata [E, ...], scale)`` of the orientation with this index, from the bytes of all ranks."""
        orientation, wanted = self.orientations[index], self.contents(content)
        spec, shape = orientation.spec, self.shape(orientation)
        qdata = codes.view(FORMATS[spec.format].dtype).view(-1, *shape)[: self.experts]
        start, size = self._scale_places(wanted)[wanted.index(index)]
        own = scales.view(self.shards, self.scales_size)[:, start : start + size].contiguous()
        dtype, (_, *rest) = SCALE_FORMATS[spec.scale_format].dtype, self._scale_shape(orientation)
        scale = empty_grouped_scale((self.experts, *shape), spec, "matrices", self.experts, codes.device)
        scale.copy_(own.flatten().view(dtype).view(-1, *rest)[: self.experts])
        return qdata, scale
