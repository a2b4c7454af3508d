"""Fuse norms and MLPs of a converted model with the quantization of their linears' inputs, in place.

Fusing a module changes its class, as converting a linear does. A fused norm returns 8 bits, which only linears of its
recipe can read. So a module is fused only if every reader of its result is known.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import NamedTuple, TypeGuard

from torch import nn

from tritonfp8.layers.fused.formula import NoFormulaError, read_formula
from tritonfp8.layers.fused.modules import (
    Float8RMSNorm,
    Float8SwiGLU,
    Reader,
    are_plain,
    is_everything_touched,
    is_touched,
)
from tritonfp8.layers.in_place import change_class, rebase
from tritonfp8.layers.linear import Float8Linear, is_fusable
from tritonfp8.recipes import Recipe

# Families of transformers whose decoder layers differ in names only.
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
# The norms of a decoder layer, and the one module that is called with the result of each.
READER_OF_NORM = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}
ATTENTION_INPUTS = ("q_proj", "k_proj", "v_proj")
MLP_INPUTS = ("gate_proj", "up_proj")
MLP_LINEARS = (*MLP_INPUTS, "down_proj")
MORE_PLACES = "it is used in more than one place"
SWIGLU = "down_proj(mul(silu(gate_proj(x)), up_proj(x)))"


class _NormKind(NamedTuple):
    """The rounding of a class of norms, and its attribute for eps."""

    rounding: str
    eps: str


PLAIN_NORM = _NormKind("output", "eps")
TRANSFORMERS_NORM = _NormKind("normalized", "variance_epsilon")


def _computes_as(cls: type, part: str) -> bool:
    """Whether a class has the forward of this part of one of the families; a subclass may have its own forward."""
    forward = getattr(cls, "forward", None)
    # Transformers decorates some forwards. Decorators from elsewhere are not unwrapped: they may do anything.
    while _is_of_transformers(forward) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    names = {f"{family}{part}.forward" for family in FAMILIES}
    return _is_of_transformers(forward) and forward.__code__.co_qualname in names


def _is_of_transformers(function: object) -> TypeGuard[FunctionType]:
    """Whether transformers defines the function's code; its name does not tell, as ``functools.wraps`` copies names."""
    if not isinstance(function, FunctionType):
        return False
    return str(function.__globals__.get("__name__")).startswith("transformers.")


def _norm_kind(cls: type) -> _NormKind | None:
    if cls is nn.RMSNorm:
        return PLAIN_NORM
    return TRANSFORMERS_NORM if _computes_as(cls, "RMSNorm") else None


def _children(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """The children with these names; empty unless all are there."""
    found = [child for name in names if (child := module._modules.get(name)) is not None]
    return found if len(found) == len(names) else []


def _linears_reading(reader: nn.Module) -> list[nn.Module]:
    """The linears that read the input of ``reader``, if nothing else reads it; empty if that is not known."""
    if isinstance(reader, nn.Linear):
        return [reader]
    if isinstance(reader, Float8SwiGLU) or _computes_as(type(reader), "MLP"):
        return _children(reader, MLP_INPUTS)
    return _children(reader, ATTENTION_INPUTS) if _computes_as(type(reader), "Attention") else []


class _Place(NamedTuple):
    """The place of the only module that reads a norm."""

    parent: nn.Module
    name: str

    @property
    def reader(self) -> nn.Module:
        found = self.parent._modules[self.name]
        assert found is not None
        return found


def _readers(model: nn.Module) -> dict[nn.Module, _Place]:
    """For each norm whose result only one module reads: the place of that module."""
    found: dict[nn.Module, _Place] = {}
    for parent in model.modules():
        pairs: Iterable[tuple[str, str]] = []
        if type(parent) is nn.Sequential:
            pairs = itertools.pairwise(parent._modules)
        elif _computes_as(type(parent), "DecoderLayer"):
            pairs = READER_OF_NORM.items()
        for norm_name, reader_name in pairs:
            norm, reader = (parent._modules.get(name) for name in (norm_name, reader_name))
            if norm is not None and reader is not None:
                found[norm] = _Place(parent, reader_name)
    return found


def _common_recipe(linears: list[nn.Module]) -> Recipe | str:
    """The common recipe of the linears; or the reason why they cannot be fused."""
    converted = [linear for linear in linears if isinstance(linear, Float8Linear)]
    if len(converted) < len(linears):
        return "a linear of it is not converted"
    recipe = converted[0].recipe
    if any(linear.recipe != recipe for linear in converted):
        return "its linears follow different recipes"
    return recipe if is_fusable(recipe) else f"{recipe.name!r} keeps a GEMM in high precision"


def _why_no_mlp(mlp: nn.Module) -> str | None:
    linears = _children(mlp, MLP_LINEARS)
    recipe = _common_recipe(linears)
    if isinstance(recipe, str):
        return recipe
    if any(getattr(linear, "bias", None) is not None for linear in linears):
        return "a linear of it has a bias"
    if "forward" in mlp.__dict__ or type(mlp).__call__ is not nn.Module.__call__:
        return "it has a forward of its own"
    try:
        formula = read_formula(mlp)
    except NoFormulaError as error:
        return f"its forward is not {SWIGLU}: {error}"
    if formula.text != SWIGLU:
        return f"its forward is not {SWIGLU}, but {formula.text}"
    called = [*linears, *(each for each in formula.reads.values() if isinstance(each, nn.Module))]
    if is_everything_touched() or any(map(is_touched, called)):
        return "a module of it has hooks or a forward of its own"
    return None if are_plain(linears) else "a linear of it is of a class of its own"


def _why_no_norm(norm: nn.Module, reader: nn.Module | None) -> str | None:
    linears = [] if reader is None else _linears_reading(reader)
    if reader is None or not linears:
        return "it is not known that converted linears alone read it"
    recipe = _common_recipe(linears)
    if isinstance(recipe, str):
        return recipe.replace("of it", "that reads it").replace("its linears", "the linears that read it")
    if is_everything_touched() or any(map(is_touched, (norm, reader, *linears))) or not are_plain(linears):
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


def _fuse_mlp(mlp: nn.Module) -> Recipe:
    linears = _children(mlp, MLP_LINEARS)
    recipe = _common_recipe(linears)
    assert isinstance(recipe, Recipe)
    reads = read_formula(mlp).reads
    cls = type(mlp)
    _mark(linears)
    change_class(mlp, Float8SwiGLU)
    # Not by setattr: a class may override it.
    mlp.__dict__.update(fused_from=cls, fused_reads=reads)
    return recipe


def _fuse_norm(norm: nn.Module, place: _Place) -> Recipe:
    linears = _linears_reading(place.reader)
    recipe = _common_recipe(linears)
    assert isinstance(recipe, Recipe)
    _mark(linears)
    cls = type(norm)
    kind = _norm_kind(cls)
    assert kind is not None
    inputs = tuple(name for name, child in place.reader._modules.items() if child in linears)
    change_class(norm, Float8RMSNorm)
    norm.__dict__.update(
        eps=getattr(norm, kind.eps), eps_name=kind.eps, rounding=kind.rounding, recipe=recipe, fused_from=cls,
        reader=Reader(place.parent, place.name, type(place.reader), inputs),
    )  # fmt: skip
    return recipe


def fuse_model(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Fuse the MLPs and norms of a converted model.

    MLPs: modules of ``gate_proj``, ``up_proj`` and ``down_proj`` without biases whose forward is SwiGLU. SiLU and
    GEMM then round once, where the plain MLP rounds twice. Norms: ``nn.RMSNorm`` before a linear or such an MLP in
    an ``nn.Sequential``, and those before attention and MLP in decoder layers of :data:`FAMILIES` in transformers.

    The forward must be exactly this formula: a forward with a branch (``if self.training``), a ``with`` or a decorator
    may compute something else at another time. This reads the source of the forward and runs none of it. The linears
    must follow one recipe whose three GEMMs are quantized. A module is not fused if a hook or an unknown reader (as of
    a model's last norm) may see its result. Hooks and adapters that are added later still work: the modules that they
    see then run as before they were fused.

    Returns:
        For each fused module, by fully qualified name, its new class and recipe; for each other norm and MLP, the
        reason why it was not fused.
    """
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    for name, mlp in list(model.named_modules()):
        if not _children(mlp, MLP_LINEARS) or isinstance(mlp, Float8SwiGLU):
            continue
        if reason := _why_no_mlp(mlp):
            left[name] = reason
        else:
            fused[name] = f"Float8SwiGLU, {_fuse_mlp(mlp).name}"
    readers = _readers(model)
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for name, norm in list(_named_norms(model)):
        place = readers.get(norm)
        reason = _why_no_norm(norm, place and place.reader) if places[id(norm)] == 1 else MORE_PLACES
        if reason or place is None:
            left[name] = str(reason)
        else:
            fused[name] = f"Float8RMSNorm, {_fuse_norm(norm, place).name}"
    return fused, left


def recipes_of_norms(
    model: nn.Module, recipe_of: Callable[[Float8Linear], Recipe]
) -> list[tuple[Float8RMSNorm, Recipe]]:
    """The recipe that each fused norm gets if its linears get those of ``recipe_of``.

    Raises:
        ValueError: the linears of one fused module would follow different recipes.
    """

    def common(name: str, linears: list[nn.Module]) -> Recipe | None:
        found = [recipe_of(linear) for linear in linears if isinstance(linear, Float8Linear)]
        if any(recipe != found[0] for recipe in found[1:]):
            raise ValueError(
                f"{name} is fused, and its linears must follow one recipe; got "
                f"{', '.join(repr(recipe.name) for recipe in found)}. Use tritonfp8.revert first."
            )
        # None if adapters have replaced all of them.
        return found[0] if found else None

    readers = _readers(model)
    norms = []
    for name, module in model.named_modules():
        if isinstance(module, Float8SwiGLU) and module.fused_from is not None:
            common(name, _children(module, MLP_LINEARS))
        elif isinstance(module, Float8RMSNorm) and module.fused_from is not None and module in readers:
            recipe = common(name, _linears_reading(readers[module].reader))
            norms.append((module, recipe or module.recipe))
    return norms


def unfuse_model(model: nn.Module) -> list[str]:
    """Undo :func:`fuse_model`. Returns the names of the modules that were changed back."""
    names = []
    for name, module in model.named_modules():
        module.__dict__.pop("is_fused", None)
        cls = module.__dict__.get("fused_from")
        if cls is None:
            continue
        names.append(name)
        if isinstance(module, Float8RMSNorm):
            kept = {kind.eps} if (kind := _norm_kind(cls)) else set()
            added = {"fused_from", "reader", "recipe", "rounding", "eps", "eps_name"} - kept
            now = rebase(type(module), Float8RMSNorm, cls)
        else:
            added, now = {"fused_from", "fused_reads"}, rebase(type(module), Float8SwiGLU, cls)
        for attribute in added:
            module.__dict__.pop(attribute, None)
        change_class(module, now)
    return names
