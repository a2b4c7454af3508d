"""Fuse norms and MLPs of a converted model with the quantization of what its linears read, in place.

A module is fused by changing its class, as a linear is converted. That is done only where it is certain what computes
with its result: a fused norm returns 8 bits, which linears of its recipe take and nothing else does.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn

from tritonfp8.autograd_fused import is_fusable
from tritonfp8.modules import Float8Linear
from tritonfp8.modules_fused import Float8RMSNorm, Float8SwiGLU
from tritonfp8.recipes import Recipe

# Families of transformers whose decoder layers differ in names only.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
# In a decoder layer: a norm, and the one module that is called with its result.
READER_OF_NORM = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
MLP_INPUTS = ("gate_proj", "up_proj")
MLP_LINEARS = (*MLP_INPUTS, "down_proj")
SWIGLU = "down_proj(mul(silu(gate_proj(x)), up_proj(x)))"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FUNCTIONS: dict[object, str] = {F.silu: "silu", operator.mul: "mul", torch.mul: "mul"}


class _NormKind(NamedTuple):
    """How a class of norms rounds, and its name for eps."""

    rounding: str
    eps: str


PLAIN_NORM = _NormKind("output", "eps")
TRANSFORMERS_NORM = _NormKind("normalized", "variance_epsilon")


def _computes_as(cls: type, part: str) -> bool:
    """Whether the forward of a class is that of a part of one of the families: a subclass may have its own."""
    forward = getattr(cls, "forward", None)
    names = {f"{family}{part}.forward" for family in FAMILIES}
    module = getattr(forward, "__module__", "")
    return module.startswith("transformers.models.") and getattr(forward, "__qualname__", "") in names


def _norm_kind(cls: type) -> _NormKind | None:
    if cls is nn.RMSNorm:
        return PLAIN_NORM
    return TRANSFORMERS_NORM if _computes_as(cls, "RMSNorm") else None


def _children(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """Those of the names; empty unless all are there."""
    found = [child for name in names if (child := module._modules.get(name)) is not None]
    return found if len(found) == len(names) else []


def _linears_reading(reader: nn.Module) -> list[nn.Module]:
    """The linears that alone read what ``reader`` is called with; empty where that is not known."""
    if isinstance(reader, nn.Linear):
        return [reader]
    if isinstance(reader, Float8SwiGLU) or _computes_as(type(reader), "MLP"):
        return _children(reader, MLP_INPUTS)
    return _children(reader, ATTENTION_INPUTS) if _computes_as(type(reader), "Attention") else []


def _readers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Of each norm in a place where its result goes to one module only: that module."""
    found: dict[nn.Module, nn.Module] = {}
    for parent in model.modules():
        pairs: list[tuple[nn.Module | None, nn.Module | None]] = []
        if type(parent) is nn.Sequential:
            pairs = list(itertools.pairwise(parent._modules.values()))
        elif _computes_as(type(parent), "DecoderLayer"):
            pairs = [
                (parent._modules.get(norm), parent._modules.get(reader)) for norm, reader in READER_OF_NORM.items()
            ]
        found |= {norm: reader for norm, reader in pairs if norm is not None and reader is not None}
    return found


def _is_touched(module: nn.Module) -> bool:
    """Whether hooks, or a forward of its own, see what goes through a module."""
    return any(getattr(module, name) for name in HOOKS) or "forward" in module.__dict__


def _common_recipe(linears: list[nn.Module]) -> Recipe | str:
    """The recipe of all the linears, or why there is none that can be fused."""
    converted = [linear for linear in linears if isinstance(linear, Float8Linear)]
    if len(converted) < len(linears):
        return "a linear of it is not converted"
    recipe = converted[0].recipe
    if any(linear.recipe != recipe for linear in converted):
        return "its linears follow different recipes"
    return recipe if is_fusable(recipe) else f"{recipe.name!r} keeps a product in high precision"


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear | nn.SiLU)


def _formula(argument: object, modules: dict[str, nn.Module]) -> str:
    """What a node of a graph computes, with the operands of products in order."""
    if not isinstance(argument, fx.Node):
        return repr(argument)
    if argument.op == "placeholder":
        return "x"
    operands = [_formula(a, modules) for a in argument.args]
    if argument.op == "output":
        return operands[0]
    name = str(argument.target)
    if argument.op == "call_module" and isinstance(modules[name], nn.SiLU):
        name = "silu"
    elif argument.op == "call_function":
        name = _FUNCTIONS.get(argument.target, name)
    return f"{name}({', '.join(sorted(operands) if name == 'mul' else operands)})"


def _is_swiglu(mlp: nn.Module) -> bool:
    """Whether the module's forward is the formula of SwiGLU, as its own code says."""
    try:
        nodes = list(_Tracer().trace(mlp).nodes)
    except Exception:
        # Whatever its code does, it is no formula.
        return False
    inputs = [node for node in nodes if node.op == "placeholder"]
    return len(inputs) == 1 and _formula(nodes[-1], dict(mlp.named_modules())) == SWIGLU


def _why_no_mlp(mlp: nn.Module) -> str | None:
    linears = _children(mlp, MLP_LINEARS)
    recipe = _common_recipe(linears)
    if isinstance(recipe, str):
        return recipe
    if any(getattr(linear, "bias", None) is not None for linear in linears):
        return "a linear of it has a bias"
    if any(map(_is_touched, linears)) or "forward" in mlp.__dict__:
        return "a linear of it has hooks, or it has a forward of its own"
    return None if _is_swiglu(mlp) else f"its forward is not {SWIGLU}"


def _why_no_norm(norm: nn.Module, reader: nn.Module | None) -> str | None:
    linears = [] if reader is None else _linears_reading(reader)
    if reader is None or not linears:
        return "it is not known that converted linears alone read it"
    recipe = _common_recipe(linears)
    if isinstance(recipe, str):
        return recipe.replace("of it", "that reads it").replace("its linears", "the linears that read it")
    if any(map(_is_touched, (norm, reader, *linears))):
        return "hooks on it or on what reads it would see 8 bits"
    weight = getattr(norm, "weight", None)
    return None if weight is not None and weight.ndim == 1 else "it has no weight of one dim"


def _named_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if _norm_kind(type(module)):
            yield name, module


def _mark(linears: list[nn.Module]) -> None:
    for linear in linears:
        assert isinstance(linear, Float8Linear)
        linear.is_fused = True


def _fuse_norm(norm: nn.Module, linears: list[nn.Module]) -> Recipe:
    recipe = _common_recipe(linears)
    assert isinstance(recipe, Recipe)
    _mark(linears)
    cls = type(norm)
    kind = _norm_kind(cls)
    assert kind is not None
    eps = getattr(norm, kind.eps)
    norm.__class__ = Float8RMSNorm
    norm.eps, norm.rounding, norm.recipe, norm.fused_from = eps, kind.rounding, recipe, cls  # type: ignore[assignment]
    return recipe


def fuse_model(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Fuse the MLPs and norms of a converted model.

    MLPs: modules of ``gate_proj``, ``up_proj`` and ``down_proj`` without biases whose forward is SwiGLU. SiLU and
    product then round once, where the plain MLP rounds twice. Norms: ``nn.RMSNorm`` before a linear or such an MLP in
    an ``nn.Sequential``, and those before attention and MLP in decoder layers of :data:`FAMILIES` in transformers.

    The linears must follow one recipe whose three products are quantized. What a hook, or an unknown reader (as
    of a model's last norm), may see is left as it is. Hooks added later see 8 bits on norms and do not run on the
    linears of an MLP.

    Returns:
        What each fused module is now, by fully qualified name; and of each other norm and MLP why it was left.
    """
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, mlp in list(model.named_modules()):
        if not _children(mlp, MLP_LINEARS) or isinstance(mlp, Float8SwiGLU):
            continue
        if reason := _why_no_mlp(mlp):
            left[name] = reason
        else:
            mlp.fused_from = type(mlp)
            mlp.__class__ = Float8SwiGLU
            _mark(_children(mlp, MLP_LINEARS))
            fused[name] = f"Float8SwiGLU, {mlp.recipe.name}"
    readers = _readers(model)
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for name, norm in list(_named_norms(model)):
        reader = readers.get(norm)
        reason = _why_no_norm(norm, reader) if places[id(norm)] == 1 else "it is used in more than one place"
        if reason or reader is None:
            left[name] = str(reason)
        else:
            recipe = _fuse_norm(norm, _linears_reading(reader))
            fused[name] = f"Float8RMSNorm, {recipe.name}"
    return fused, left


def recipes_of_norms(
    model: nn.Module, recipe_of: Callable[[Float8Linear], Recipe]
) -> list[tuple[Float8RMSNorm, Recipe]]:
    """The recipe of each fused norm, where its linears are given theirs by ``recipe_of``.

    Raises:
        ValueError: linears that one fused module serves would follow different recipes.
    """

    def common(name: str, linears: list[nn.Module]) -> Recipe:
        found = [recipe_of(linear) for linear in linears if isinstance(linear, Float8Linear)]
        if any(recipe != found[0] for recipe in found[1:]):
            raise ValueError(
                f"{name} is fused, and its linears must follow one recipe; got "
                f"{', '.join(repr(recipe.name) for recipe in found)}. Use tritonfp8.revert first."
            )
        return found[0]

    readers = _readers(model)
    norms = []
    for name, module in model.named_modules():
        if isinstance(module, Float8SwiGLU) and module.fused_from is not None:
            common(name, _children(module, MLP_LINEARS))
        elif isinstance(module, Float8RMSNorm) and module.fused_from is not None and module in readers:
            norms.append((module, common(name, _linears_reading(readers[module]))))
    return norms


def unfuse_model(model: nn.Module) -> list[str]:
    """Undo :func:`fuse_model`; the names of the modules that were changed back."""
    names = []
    for name, module in model.named_modules():
        module.__dict__.pop("is_fused", None)
        cls = module.__dict__.get("fused_from")
        if cls is None:
            continue
        names.append(name)
        kind = _norm_kind(cls) if isinstance(module, Float8RMSNorm) else None
        added = {"fused_from"} if kind is None else {"fused_from", "recipe", "rounding", "eps"} - {kind.eps}
        for attribute in added:
            delattr(module, attribute)
        module.__class__ = cls
    return names
