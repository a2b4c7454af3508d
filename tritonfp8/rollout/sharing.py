"""A second model over the weights of a model that trains: what both have in common, and what the second one owns."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8 import ops
from tritonfp8.compat import without_fsdp
from tritonfp8.conversion import is_fsdp, share_inputs, unshare_inputs
from tritonfp8.conversion.selection import converted
from tritonfp8.layers import ParameterHooks
from tritonfp8.layers.linear import is_converted, is_distributed, source_of
from tritonfp8.layers.stored import (
    StoredMatrices,
    StoredWeight,
    check_storable,
    is_stored,
    names_of_weights,
    recipe_of_storage,
    stored_as_layer,
    why_experts_stay,
)
from tritonfp8.specs.naming import listed


def second_model(model: nn.Module) -> Any:
    """A model of the same modules, in eval mode, whose parameters and buffers are the tensors of ``model``.

    Parameters that FSDP2 shards are on the meta device. Hooks that torch.distributed and this package added to modules
    are left out.
    """
    made: dict[nn.Module, Any] = {}
    stand_in = without_fsdp(model, made)
    memo: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    for x in model.parameters():
        if is_distributed(x):
            memo[id(x)] = nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="meta"), False)
    # Forwards that other programs replaced: bound to a module, or calling the forward from before, which is.
    functions: list[tuple[Any, str, Any]] = []
    for found in made.values():
        if isinstance(found, ParameterHooks):
            found.drop_hooks()
        for name, value in list(vars(found).items()):
            # What FSDP2 keeps in a module; by the last two, ranks would wait for each other at every token.
            if name.startswith(("__composable_api", "_is_fsdp_managed", "_fsdp_")):
                del found.__dict__[name]
            elif name.endswith("_hooks") and isinstance(value, dict):
                kept = ((key, hook) for key, hook in value.items() if not _is_of_trainer(hook))
                found.__dict__[name] = type(value)(kept)
            elif isinstance(value, MethodType | FunctionType | functools.partial):
                functions.append((found, name, found.__dict__.pop(name)))
    unshare_inputs(stand_in)
    second = copy.deepcopy(stand_in, memo)
    copies = {module: memo[id(found)] for module, found in made.items()}
    for found, name, value in functions:
        memo[id(found)].__dict__[name] = _rebound(value, copies, {})
    layers = [layer for layer in converted(second).values() if is_converted(layer)]
    share_inputs(second, layers, layers)
    return second.eval()


def _rebound(value: Any, made: Mapping[nn.Module, Any], memo: dict[int, Any]) -> Any:
    """A function, with modules of the second model in the places of modules that it is bound to or closes over."""
    if isinstance(value, nn.Module):
        return made.get(value, value)
    if isinstance(value, MethodType):
        return MethodType(_rebound(value.__func__, made, memo), _rebound(value.__self__, made, memo))
    if isinstance(value, functools.partial):
        func, *args = (_rebound(x, made, memo) for x in (value.func, *value.args))
        return functools.partial(func, *args, **{key: _rebound(x, made, memo) for key, x in value.keywords.items()})
    if not isinstance(value, FunctionType) or value.__closure__ is None:
        return value
    if id(value) in memo:
        return memo[id(value)]
    cells = tuple(CellType() for _ in value.__closure__)
    found = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    functools.update_wrapper(found, value)
    found.__kwdefaults__ = value.__kwdefaults__
    # Before its cells: it may call itself.
    memo[id(value)], changes = found, False
    for cell, before in zip(cells, value.__closure__, strict=True):
        # A cell of a name that has no value yet is empty.
        with contextlib.suppress(ValueError):
            cell.cell_contents = _rebound(before.cell_contents, made, memo)
            changes |= cell.cell_contents is not before.cell_contents
    if not changes:
        memo[id(value)] = value
    return memo[id(value)]


def _is_of_trainer(hook: Any) -> bool:
    # torch wraps some.
    hook = getattr(hook, "hook", hook)
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return owner.startswith(("torch.distributed", "tritonfp8."))


@dataclass(frozen=True, eq=False)
class OwnWeight:
    """A parameter that the second model has in memory of its own.

    Attributes:
        name: of the parameter in the trainer.
        source: the trainer's module that has it.
        key: its name there.
        places: modules of the second model that have it, and its names there.
        stored: whether it is kept as codes.
        gathers: the module of the trainer by which FSDP2 gathers it; None if it is whole.
    """

    name: str
    source: nn.Module
    key: str
    places: list[tuple[Any, str]]
    stored: bool
    gathers: Any

    @property
    def parameter(self) -> Any:
        """The trainer's parameter; what FSDP2 gathered while it is gathered."""
        return self.source._parameters[self.key]

    @property
    def tensor(self) -> Tensor:
        """The tensor of the second model."""
        module, key = self.places[0]
        found: Tensor = module._parameters[key]
        return found

    @property
    def is_cast_in_place(self) -> bool:
        """Whether codes are written by the cast of a whole weight, so that nothing is read before."""
        return self.stored and self.gathers is None and not self.tensor.is_meta and self.tensor is not self.parameter

    def cast(self, dtype: torch.dtype | None) -> None:
        """Write the codes of the weight, at the same address.

        Args:
            dtype: of autocast, or None.
        """
        values = self.parameter.detach()
        self.tensor.overwrite(values if dtype is None else values.to(dtype))  # type: ignore[attr-defined]

    def read(self, dtype: torch.dtype | None) -> Tensor:
        """What the trainer's forward reads of the parameter now, in memory of its own: codes, or values.

        Args:
            dtype: of autocast, or None.
        """
        weight = self.parameter
        if is_distributed(weight):
            raise ValueError(f"{self.name} is sharded by tensor or expert parallelism, which a Rollout cannot gather")
        layer, key = self.places[0]
        if not self.stored:
            return weight.detach().clone()
        spec, read = layer.recipe.storage, layer.recipe.output.rhs
        if not source_of(weight).has_codes:
            values = weight.detach() if dtype is None else weight.detach().to(dtype)
            return stored_as_layer(layer, key, values, spec)
        qdata, scale = weight.read_operand(read, False)
        if spec == read:
            # FSDP2 gathers codes into memory that it frees.
            qdata, scale = qdata.clone(), scale.clone()
        else:
            # Values that are rounded already keep their codes.
            qdata, scale = ops.quantize(ops.dequantize(qdata, scale, *read.args, weight.dtype), *spec.args)
        kind = StoredMatrices if weight.ndim == 3 else StoredWeight
        return kind(qdata, scale, spec, weight.dtype, getattr(weight, "is_transposed", False))

    def write(self, x: Tensor) -> None:
        """Take what :meth:`read` returned, at the same address once there is one."""
        if not self.tensor.is_meta and self.tensor is not self.parameter:
            self.tensor.copy_(x)
        else:
            parameter = nn.Parameter(x, requires_grad=False)
            for module, key in self.places:
                module._parameters[key] = parameter


def own_weights(model: nn.Module, second: Any, outer: nn.Module) -> list[OwnWeight]:
    """What ``second``, of :func:`second_model`, must own: codes of weights in high precision, and what FSDP2 shards.

    ``outer`` is ``model``, or what adapters put around it.

    Raises:
        ValueError: a weight cannot be kept as codes, or as the codes that the trainer's forward reads.
    """
    layers = _to_store(second)
    own: dict[int, OwnWeight] = {}
    sources = dict(model.named_modules())
    for name, module in second.named_modules():
        for key, parameter in sources[name]._parameters.items():
            stored = name in layers and key in names_of_weights(module)
            if parameter is None or not (stored or is_distributed(parameter)):
                continue
            if id(parameter) in own:
                own[id(parameter)].places.append((module, key))
                continue
            full, gathers = f"{name}.{key}".lstrip("."), _gathering(name, sources, outer)
            if parameter.is_meta or (is_distributed(parameter) and gathers is None):
                problem = "on the meta device" if parameter.is_meta else "sharded, and not by FSDP2"
                raise ValueError(f"a Rollout needs weights in memory, whole or sharded by FSDP2; {full} is {problem}")
            own[id(parameter)] = OwnWeight(full, sources[name], key, [(module, key)], stored, gathers)
    return list(own.values())


def _to_store(second: Any) -> dict[str, Any]:
    """The layers whose weights become codes."""
    layers = {name: m for name, m in converted(second).items() if not is_stored(m) and m.recipe.output.quantized}
    layers = {name: m for name, m in layers.items() if why_experts_stay(m, True) is None}
    rounded = [name for name, layer in layers.items() if recipe_of_storage(layer.recipe) != layer.recipe]
    if rounded:
        recipe = layers[rounded[0]].recipe
        raise ValueError(
            f"recipe {recipe.name!r} scales the weight of {listed(rounded)} by numbers that are no powers of two, "
            "which codes in memory cannot have: use 'rowwise', 'blockwise' or 'mxfp8'"
        )
    check_storable(second, layers, {name: layer.recipe for name, layer in layers.items()}, on_meta=True)
    return layers


def _gathering(name: str, modules: dict[str, nn.Module], outer: nn.Module) -> Any:
    """The nearest module at or above ``name`` to which ``fully_shard`` was applied, or None."""
    parts = name.split(".") if name else []
    above = [modules[".".join(parts[:n])] for n in range(len(parts), -1, -1)]
    return next((m for m in (*above, outer) if is_fsdp(m)), None)


def read_all(own: list[OwnWeight], dtype: torch.dtype | None) -> Iterator[tuple[OwnWeight, Tensor]]:
    """What each parameter has now. What FSDP2 gathers together is gathered once, as forward gathers it, and freed."""
    groups: dict[int, list[OwnWeight]] = {}
    for each in own:
        groups.setdefault(id(each.gathers), []).append(each)
    for members in groups.values():
        gathers = members[0].gathers
        if gathers is not None:
            gathers.unshard()
        try:
            for each in members:
                yield each, each.read(dtype)
        finally:
            if gathers is not None:
                gathers.reshard()
