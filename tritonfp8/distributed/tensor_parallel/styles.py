"""Parallel styles that send FP8: the names of torchao.float8.float8_tensor_parallel, for every recipe.

torch's own ``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel`` work on converted models, too. The styles
here differ if tokens are sharded (sequence parallelism): torch's styles gather them in high precision before the layer,
these leave the gather to the layer, which quantizes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from tritonfp8.distributed import options
from tritonfp8.distributed.shard_layout import distributed, distributed_as
from tritonfp8.layers.linear import Float8Linear
from tritonfp8.specs.checks import require_flag, shown

_CONVERT = "use tritonfp8.convert(model, recipe), before or after parallelize_module"


def _distributed(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A local tensor as part of a DTensor, whose tokens may be sharded by :func:`~.token_counts`."""
    if isinstance(x, DTensor):
        return x
    counts = options.current().token_counts
    (placement,) = placements
    if counts is None or not isinstance(placement, Shard) or placement.dim % x.ndim == x.ndim - 1:
        return DTensor.from_local(x, mesh, placements, run_check=False)
    dim = placement.dim % x.ndim
    if len(counts) != mesh.size() or counts[mesh.get_local_rank()] != x.shape[dim]:
        raise ValueError(
            f"token_counts says {counts}; rank {mesh.get_local_rank()} of {mesh.size()} came with an input of "
            f"{x.shape[dim]} tokens: give every rank the counts of all, in the order of the mesh"
        )
    return distributed(x, mesh, [Shard(dim)], (*x.shape[:dim], sum(counts), *x.shape[dim + 1 :]))


def _summing_gradient_once(x: DTensor) -> DTensor:
    """``x``; if it is sharded, the ranks sum its gradient here.

    Layers return a Partial gradient. Each earlier op that cannot take a Partial would sum it by itself: three ops in
    the backward of a norm, two of them in float32.
    """
    if not any(placement.is_shard() for placement in x.placements):
        return x
    return distributed_as(x.to_local(), x)


def _check_placements(**layouts: Any) -> None:
    """Raise TypeError unless each is a Placement, a tuple of them (None for other arguments), or None."""
    for name, given in layouts.items():
        each = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(p, Placement | None) for p in each):
            raise TypeError(
                f"{name} must be a Placement (Shard(dim), Replicate()), a tuple of these and None, or None; got "
                f"{shown(given)}"
            )


def _input_left_sharded(style: str) -> Any:
    """The hook of a style that makes the input a DTensor and does not redistribute it.

    The layer itself sends it, after it has quantized it.
    """

    def prepare(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> DTensor:
        if not isinstance(mod, Float8Linear):
            raise TypeError(f"{style} needs a converted layer; got {type(mod).__name__}: {_CONVERT}")
        x = _distributed(inputs[0], device_mesh, input_layouts)
        # Siblings sum their gradients before the ranks do: PrepareFloat8ModuleInput sees to that.
        return _summing_gradient_once(x) if x is inputs[0] and mod.shared_input is None else x

    return staticmethod(prepare)


class _LinearStyle:
    """Checks of both styles of linear layers; torch's style, the next base class, does the rest."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        _check_placements(input_layouts=input_layouts, output_layouts=output_layouts)
        require_flag("use_local_output", use_local_output)
        layouts = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        super().__init__(**layouts, use_local_output=use_local_output)  # type: ignore[call-arg]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(
                f"{type(self).__name__} is for linear layers that follow a recipe; got {type(module).__name__}"
            )
        applied: nn.Module = super()._apply(module, device_mesh)  # type: ignore[misc]
        return applied


class Float8ColwiseParallel(_LinearStyle, ColwiseParallel):
    """``ColwiseParallel`` of a converted linear layer; an input whose tokens are sharded is gathered in FP8.

    One collective carries 8-bit data and scales: M K bytes and the scales for ``output``; as much again for
    ``grad_weight``, unless its operand is made from codes. Tensorwise, one serves both. The gathered operand of
    ``grad_weight`` is saved for backward, M K bytes. Recipes that keep one of the two GEMMs in high precision gather
    the input in its own dtype, for both GEMMs.

    Args:
        input_layouts: placement of a plain input; ``Shard(tokens)`` for sequence parallelism. Default: ``Replicate()``.
        output_layouts: placement of the output. Default: ``Shard(-1)``.
        use_local_output: whether the output is a plain tensor. Default: True.

    Raises:
        TypeError: something else than placements; when it is applied, the module is not a linear layer; when it runs,
            it is not converted.
    """

    _prepare_input_fn = _input_left_sharded("Float8ColwiseParallel")


class Float8RowwiseParallel(_LinearStyle, RowwiseParallel):
    """``RowwiseParallel`` of a converted linear layer, whose output may be left with any number of tokens on each rank.

    It sends the output (reduced, or reduce-scattered to ``Shard(tokens)``) in its own dtype, and the amaxes of the
    input's rows: 4 bytes a token for the recipe rowwise. The gradient of a scattered output is gathered in 8 bits, M N
    bytes and scales, where one operand serves both GEMMs that read it: in tensorwise, and in recipes that make
    transposes from codes. Others gather it in its own dtype.

    Args:
        input_layouts: placement of a plain input. Default: ``Shard(-1)``.
        output_layouts: placement of the output. Default: ``Replicate()``.
        use_local_output: whether the output is a plain tensor. Default: True.

    Raises:
        TypeError: something else than placements; when it is applied, the module is not a linear layer; when it runs,
            it is not converted.
    """

    _prepare_input_fn = _input_left_sharded("Float8RowwiseParallel")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        applied = super()._apply(module, device_mesh)
        # The layer scatters its output itself, so that it gets this rank's part of the gradient, and sends codes of it.
        applied.output_placements = self.output_layouts  # type: ignore[assignment]
        return applied


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """``PrepareModuleInput`` whose gather of tokens is left to the converted linear layers inside, in FP8.

    An input ``Shard(tokens)`` whose desired layout is ``Replicate()`` is passed on as the DTensor of the shards. The
    first layer that reads it quantizes and gathers it. Its siblings (layers of one parent, converted together) share
    that, so q, k and v cost one gather. In a compiled graph the compiler merges equal gathers.

    Args: as ``PrepareModuleInput``; ``use_local_output`` must be False, since a plain tensor does not say how it lies.

    Raises:
        ValueError: ``use_local_output=True``, or one of the layouts without the other.
        TypeError: something else than placements; when it runs, no layer inside is converted.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        _check_placements(input_layouts=input_layouts, desired_input_layouts=desired_input_layouts)
        require_flag("use_local_output", use_local_output)
        if (input_layouts is None) != (desired_input_layouts is None):
            raise ValueError(
                f"input_layouts and desired_input_layouts are given both or neither: how each input comes, and how the "
                f"module wants it; got {input_layouts} and {desired_input_layouts}"
            )
        if use_local_output:
            raise ValueError(
                "PrepareFloat8ModuleInput hands on DTensors, from which the layers gather in FP8: use_local_output "
                "must be False. For local tensors use PrepareModuleInput, which gathers in high precision."
            )
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=False,
        )

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        if input_layout is None:
            return input
        x = _distributed(input, mesh, (input_layout,))
        (placement,) = x.placements
        features = isinstance(placement, Shard) and placement.dim == x.ndim - 1
        if desired_layout is None or (isinstance(desired_layout, Replicate) and placement.is_shard() and not features):
            # A local tensor's gradient is summed where it became a DTensor.
            return _summing_gradient_once(x) if x is input else x
        return x.redistribute(placements=(desired_layout,))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def require_converted(module: nn.Module, *args: Any) -> None:
            if not any(isinstance(m, Float8Linear) for m in module.modules()):
                raise TypeError(f"PrepareFloat8ModuleInput needs a converted layer inside; got none: {_CONVERT}")

        module.register_forward_pre_hook(require_converted)
        return super()._apply(module, device_mesh)
