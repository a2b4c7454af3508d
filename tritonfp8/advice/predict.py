"""Predict steps without a GPU: layers by the shipped tables of a machine, the rest by FLOPs and bytes.

The model runs on tensors without data. Attention and experts are stood in for: torch would run other kernels for them
than on a GPU, or read data. The rates are of an H200 (``python -m bench.advice``).
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tritonfp8.advice.blocks import Call, LayerGroup, calls_of, tensors_of
from tritonfp8.advice.contenders import PLAIN, Contender, without_slower
from tritonfp8.advice.measure import Measured, Subject, compiled_modes
from tritonfp8.advice.result import GRAPH, NONE, BlockTime, LayerTime
from tritonfp8.advice.steps import Step, Timing
from tritonfp8.compat.hardware import Abilities
from tritonfp8.conversion import cost, revert
from tritonfp8.layers.moe import class_of_experts
from tritonfp8.recipes import Recipe
from tritonfp8.specs.naming import pattern_of

DEFAULT_MACHINE = "h200"
# FLOP/s of attention, forward and backward; bytes a second of all other operations, by machine.
ATTENTION_RATE = 3.5e14
BANDWIDTH = {"h200": 3.6e12, "h100": 2.6e12}
# Backward of attention computes the scores again, and four more products of their size: 5 for 2 of forward.
ATTENTION_PASSES = 3.5
# Of the bytes of operations, which a compiler leaves when it fuses them; and of the host's time.
FUSED_BYTES, COMPILED_HOST = 0.25, 0.5


class WithoutData:
    """Makes models and inputs without data: shapes, strides and dtypes."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def model(self, model: nn.Module) -> nn.Module:
        """A copy of a model."""
        made = copy.deepcopy(model).to("meta")
        with self.mode:
            return made.to_empty(device="cpu")

    def call(self, call: Call) -> Call:
        """The same arguments."""
        found: Call = pytree.tree_map_only(Tensor, self._empty, call)
        return found

    def _empty(self, x: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, requires_grad=x.requires_grad, device="cpu")


@dataclass
class Work:
    """What a module computes besides linear layers and experts, forward and backward.

    Attributes:
        flops: of attention and convolutions.
        bytes: that other operations read and write, one by one.
        launches: of operations.
    """

    flops: float = 0.0
    bytes: float = 0.0
    launches: int = 0


def predict(
    subject: Subject, contenders: Sequence[Contender], modes: Sequence[str], machine: str, found: Measured
) -> None:
    """Predict what :func:`tritonfp8.advice.measure.measure` measures, for a machine of :data:`BANDWIDTH`."""
    model = subject.shortened.model
    calls, works = _observed(subject, model)
    groups = [group.called_with(calls[group.name]) for group in subject.groups if group.name in calls]
    waiting, plain = [PLAIN, *contenders], dict[LayerGroup, float]()
    for each in waiting:
        chosen = _recipes_of(subject, each)
        layers = {g: _layer_seconds(g, chosen.get(g.name), cost.MACHINES[machine]) for g in groups}
        prediction = _Prediction(model, works, layers, chosen, machine)
        for mode in compiled_modes(modes):
            for kind in subject.shortened.kinds:
                if kind.names[0] in works:
                    timing = prediction.timing(kind.names[0], mode)
                    found.blocks.append(BlockTime(kind.label, len(kind.names), each.name, mode, timing))
            found.add_step(each.name, mode, prediction.timing("", mode), GRAPH in modes)
        found.contenders[each.name] = each
        times = {g: seconds for g, seconds in layers.items() if each is PLAIN or g.name in chosen}
        plain = plain or times
        if each is PLAIN or each in contenders:
            found.layers += [LayerTime(g.label, g.sizes, g.count, each.name, seconds) for g, seconds in times.items()]
            waiting += filter(None, [without_slower(each, times, plain)])


class _Prediction:
    """One contender.

    Args:
        model: the shortened model.
        works: what its blocks, and the model itself (path ""), compute besides layers.
        layers: the seconds of each group of layers.
        recipes: of the layers that are converted, by name.
        machine: a key of :data:`BANDWIDTH`.
    """

    def __init__(
        self,
        model: nn.Module,
        works: Mapping[str, Work],
        layers: Mapping[LayerGroup, float],
        recipes: Mapping[str, Recipe],
        machine: str,
    ) -> None:
        self.model, self.works, self.machine = model, works, machine
        self.layers = {
            pattern_of(group.name): (seconds, cost.host_launches(recipes.get(group.name)))
            for group, seconds in layers.items()
        }

    def timing(self, path: str, mode: str) -> Timing:
        """The timing of a module of the model."""
        eager, work = mode == NONE, self.works[path]
        layers = self._layers_in(path)
        moved = work.bytes * (1.0 if eager else FUSED_BYTES) / BANDWIDTH[self.machine]
        gpu = moved + work.flops / ATTENTION_RATE + sum(seconds for seconds, _ in layers)
        launches = work.launches + sum(of_layer for _, of_layer in layers)
        host = cost.TORCH_LAUNCH * launches * (1.0 if eager else COMPILED_HOST)
        return Timing(max(gpu, host), host, gpu, 0.0, None)

    def _layers_in(self, path: str) -> list[tuple[float, float]]:
        prefix = f"{path}." if path else ""
        names = (f"{prefix}{name}" if name else path for name, _ in self.model.get_submodule(path).named_modules())
        return [self.layers[pattern] for name in names if (pattern := pattern_of(name)) in self.layers]


def _layer_seconds(group: LayerGroup, recipe: Recipe | None, machine: Abilities) -> float:
    rows, (outside, inside) = group.tokens, group.features
    if not group.experts:
        return cost.layer_seconds(recipe, rows, group.features, machine)
    # As dense layers of as many rows: gate and up together, and down.
    return sum(cost.layer_seconds(recipe, rows, sizes, machine) for sizes in ((outside, 2 * inside), (inside, outside)))


def _recipes_of(subject: Subject, each: Contender) -> dict[str, Recipe]:
    """The recipe of each layer that a contender converts."""
    report = each.convert(subject.shortened.model)
    if report is None:
        return {}
    revert(subject.shortened.model)
    return dict(report.converted)


# Products of linear layers: their layers are predicted by themselves.
_PRODUCTS = {"mm", "addmm", "_grouped_mm"}
# Operations that launch nothing: namespaces of names, and new memory.
_NO_KERNEL = ("device", "layout", "sym_", "_unsafe_view", "empty", "new_empty", "detach", "alias")
_CONVOLUTIONS = {"convolution", "convolution_backward"}


class _Opaque(torch.autograd.Function):
    """A result of known shape that depends on its inputs, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
        """An empty tensor of this shape."""
        ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Empty gradients."""
        return (None, *(torch.empty_like(x) for x in ctx.saved_tensors))


def _opaque(shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
    found: Tensor = _Opaque.apply(shape, *inputs)  # type: ignore[no-untyped-call]
    return found


@contextlib.contextmanager
def _experts_stood_in(model: nn.Module) -> Iterator[None]:
    """Experts compute nothing in the block: they would read the routing."""
    experts = [module for module in model.modules() if class_of_experts(module) is not None]
    for module in experts:
        module.forward = lambda x, *args, **kwargs: _opaque(x.shape, x)
    try:
        yield
    finally:
        for module in experts:
            del module.forward


def _observed(subject: Subject, model: nn.Module) -> tuple[dict[str, Call], dict[str, Work]]:
    """The inputs of layers, and the work of the model (path "") and of a block of each kind."""
    blocks = [kind.names[0] for kind in subject.shortened.kinds]
    with _experts_stood_in(model):
        with _Attention(Work()):
            calls = calls_of(model, [*blocks, *(group.name for group in subject.groups)], subject.step(model))
        steps = {"": subject.step(model)}
        for name in blocks:
            if name in calls:
                steps[name] = subject.step_of([model.get_submodule(name)], [calls[name]])
        return calls, {name: _counted(step) for name, step in steps.items()}


def _counted(step: Step) -> Work:
    work = Work()
    with _Operations(work), _Attention(work):
        step()
    return work


class _Operations(TorchDispatchMode):
    """Counts the operations that are neither views nor products of linear layers."""

    def __init__(self, work: Work) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if (
            name.startswith(_NO_KERNEL)
            or name in _PRODUCTS
            or any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        ):
            return result
        self.work.launches += 1
        if name in _CONVOLUTIONS:
            self.work.flops += flop_registry[getattr(torch.ops.aten, name)](*args, **(kwargs or {}), out_val=result)
        else:
            self.work.bytes += sum(x.nbytes for x in tensors_of(((args, result), kwargs or {})))
        return result


class _Attention(TorchFunctionMode):
    """Counts attention, and computes nothing for it."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key", "value")))
        # A model that is traced makes the mask that it leaves to the kernel otherwise: a causal one, most often.
        masked = kwargs.get("is_causal") or kwargs.get("attn_mask") is not None
        scores = math.prod(q.shape[:-1]) * k.shape[-2] * (0.5 if masked else 1.0)
        self.work.flops += ATTENTION_PASSES * 2 * scores * (q.shape[-1] + v.shape[-1])
        self.work.launches += 4
        return _opaque((*q.shape[:-1], v.shape[-1]), q, k, v)
