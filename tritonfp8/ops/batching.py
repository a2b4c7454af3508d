"""The ops under ``torch.vmap``: each sample is computed by itself, to the bits of a loop over the samples.

Samples are not folded into one call: a scale of a tensor, or of a block that crosses rows, would then depend on the
other samples, and a GEMM of more rows may sum in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def each_sample(
    function: Callable[..., Any], size: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[Any, Any]:
    """The results of ``function`` for each of ``size`` samples, stacked, and the dim along which they lie.

    Args:
        function: takes ``args`` of one sample; returns a tensor, or a tuple or list of tensors.
        size: number of samples.
        in_dims: for each argument the dim along which its samples lie; None if all samples share it.
        args: of all samples.

    Raises:
        ValueError: no samples, so the shapes of the results are unknown.
    """
    if size == 0:
        raise ValueError(
            "torch.vmap over layers or ops of tritonfp8 needs one sample or more; got a batch dim of size 0. Leave out "
            "the call for an empty batch"
        )
    results = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    stacked = [torch.stack(column) for column in zip(*results, strict=True)]
    return type(results[0])(stacked), type(results[0])([0] * len(stacked))


def register(name: str, library: torch.library.Library) -> None:
    """Give the op ``name``, such as ``tritonfp8::quantize``, the batching rule :func:`each_sample`."""
    namespace, _, short = name.partition("::")
    op = getattr(getattr(torch.ops, namespace), short).default

    def rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        return each_sample(op, info.batch_size, in_dims, args)

    torch.library.register_vmap(name, rule, lib=library)
