"""The built-in recipes by name, and recipes in files."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritonfp8.recipes.recipe import GEMMS, Gemm, Recipe, check_keys, parsed
from tritonfp8.specs import ACCUMULATIONS, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, EXPANDED, MXFP4, ROWWISE, QuantSpec
from tritonfp8.specs.checks import nearest, require, require_type

_FACTORIES: dict[str, Callable[[], Recipe]] = {}


def _named(factory: Callable[[], Recipe]) -> Callable[[], Recipe]:
    _FACTORIES[factory.__name__] = factory
    return factory


@_named
def bf16() -> Recipe:
    """No quantization: the baseline, and the recipe for layers that should stay in high precision.

    output      = input @ weight.T
    grad_input  = grad_output @ weight
    grad_weight = grad_output.T @ input

    each in the dtype that a plain nn.Linear would use.
    """
    return Recipe("bf16")


@_named
def tensorwise() -> Recipe:
    """One fp32 scale a tensor: the cheapest GEMM; one outlier costs the whole tensor precision.

    output      = Q[e4m3](input) @ Q[e4m3](weight).T
    grad_input  = Q[e5m2](grad_output) @ Q[e4m3](weight)
    grad_weight = Q[e5m2](grad_output).T @ Q[e4m3](input)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433): e4m3 forward, e5m2 for gradients.
    """
    e4m3, e5m2 = QuantSpec("e4m3"), QuantSpec("e5m2")
    return Recipe("tensorwise", output=Gemm(e4m3, e4m3), grad_input=Gemm(e5m2, e4m3), grad_weight=Gemm(e5m2, e4m3))


@_named
def rowwise() -> Recipe:
    """One power-of-two fp32 scale for each row of each operand, along the contraction of each GEMM.

    output      = Q[e4m3 per token](input) @ Q[e4m3 per output feature](weight).T
    grad_input  = Q[e4m3 per token](grad_output) @ Q[e4m3 per input feature](weight.T).T
    grad_weight = Q[e4m3 per output feature](grad_output.T) @ Q[e4m3 per input feature](input.T).T

    Scales are powers of two, so only the rounding of the elements to FP8 loses precision.
    """
    row = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
    gemm = Gemm(row, row)
    return Recipe("rowwise", output=gemm, grad_input=gemm, grad_weight=gemm)


@_named
def rowwise_hp_grad_weight() -> Recipe:
    """As rowwise, but grad_weight, the GEMM most sensitive to rounding, runs in the input's dtype.

    output      = Q[e4m3 per token](input) @ Q[e4m3 per output feature](weight).T
    grad_input  = Q[e4m3 per token](grad_output) @ Q[e4m3 tensorwise](weight)
    grad_weight = grad_output.T @ input

    Two thirds of the FLOPs run in FP8. The input is saved for backward in its own dtype.
    """
    row = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
    tensor = QuantSpec("e4m3", scale_rounding="pow2")
    return Recipe("rowwise_hp_grad_weight", output=Gemm(row, row), grad_input=Gemm(row, tensor))


@_named
def blockwise() -> Recipe:
    """Power-of-two fp32 scales for 1x128 blocks of activations and gradients, 128x128 blocks of weights.

    output      = Q[e4m3 1x128](input) @ Q[e4m3 128x128](weight).T
    grad_input  = Q[e4m3 1x128](grad_output) @ Q[e4m3 128x128](weight)
    grad_weight = Q[e4m3 1x128](grad_output.T) @ Q[e4m3 1x128](input.T).T

    Transposing a weight quantized in 128x128 blocks is exact: both GEMMs read the same bits. Sums are always promoted
    to fp32 every 128 of the contraction, where the scales change.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.3.
    """
    vector = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
    square = QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2")
    return Recipe(
        "blockwise", output=Gemm(vector, square), grad_input=Gemm(vector, square), grad_weight=Gemm(vector, vector)
    )


@_named
def mxfp8() -> Recipe:
    """OCP MX: one e8m0 scale (a power of two in a byte) for each 32 elements along the contraction of each GEMM.

    output      = Q[e4m3 1x32](input) @ Q[e4m3 1x32](weight).T
    grad_input  = Q[e4m3 1x32](grad_output) @ Q[e4m3 1x32](weight.T).T
    grad_weight = Q[e4m3 1x32](grad_output.T) @ Q[e4m3 1x32](input.T).T

    Scales are rounded up (RCEIL), so nothing saturates. Tensor cores support MX from sm_100 on. On older GPUs the GEMM
    runs in bf16, to which MX data converts exactly, and reports call it dequantized; up to 64 rows, emulated.

    Source: OCP "Microscaling Formats (MX) Specification" v1.0; rounding: Mishra et al., "Recipes for Pre-training LLMs
    with MXFP8" (arXiv 2506.08027).
    """
    mx = QuantSpec("e4m3", BLOCK_1X32, "e8m0", "pow2")
    gemm = Gemm(mx, mx)
    return Recipe("mxfp8", output=gemm, grad_input=gemm, grad_weight=gemm)


@_named
def mxfp4_weights() -> Recipe:
    """The recipe rowwise of weights that are rounded to MXFP4: the model trains for generation at 4.25 bits a weight.

    output      = Q[e4m3 per token](input) @ Q[e4m3 per output feature](weight).T
    grad_input  = Q[e4m3 per token](grad_output) @ Q[e4m3 per input feature](weight.T).T
    grad_weight = Q[e4m3 per output feature](grad_output.T) @ Q[e4m3 per input feature](input.T).T

    Here, weight has the values of its codes in MXFP4: e2m1, blocks of 32 along K, e8m0 scales rounded down. Its
    gradient goes to the weight as it was before (straight-through). A weight that is stored has the codes, to the bits
    of this forward: e4m3 with a scale a row holds the blocks of a row whose exponents differ by up to 14.

    Source: OCP "Microscaling Formats (MX) Specification" v1.0; straight-through: Bengio et al., "Estimating or
    Propagating Gradients Through Stochastic Neurons for Conditional Computation" (arXiv 1308.3432).
    """
    gemm = Gemm(EXPANDED, EXPANDED)
    return Recipe("mxfp4_weights", output=gemm, grad_input=gemm, grad_weight=gemm, weights=MXFP4)


_RECIPES: dict[str, Recipe] = {name: factory() for name, factory in _FACTORIES.items()}


def names() -> list[str]:
    """The names of the built-in recipes."""
    return list(_RECIPES)


def get(
    recipe: str | Recipe,
    *,
    accumulation: str | None = None,
    batch_invariant: bool = False,
    transposed_from: str | None = None,
    backward: str | None = None,
) -> Recipe:
    """The built-in recipe of this name, or the recipe of a TOML file; a :class:`Recipe` is returned unchanged.

    A file of several recipes is an error: only functions that know the names of layers take one.

    Args:
        recipe: a name, the path of a file that ends in ``.toml`` (:func:`load`), or a Recipe.
        accumulation: ``"fast"`` or ``"precise"`` for all quantized GEMMs of the recipe; None leaves them as they are.
            The name of a recipe that this changes ends in the value: ``"rowwise_fast"``.
        batch_invariant: True makes the GEMM ``output`` batch-invariant (:class:`Gemm`), and the name end in
            ``"_batch_invariant"``; False leaves it as it is.
        transposed_from: ``"values"`` or ``"codes"`` (:class:`~tritonfp8.Recipe`); None leaves it as it is. The name of
            a recipe that this changes ends in the value.
        backward: ``"dequantized"`` computes ``grad_input`` and ``grad_weight`` in the input's dtype, of the values that
            forward multiplied: forward in FP8, gradients that nothing quantized. The name then ends in
            ``"_dequantized"``. None leaves backward as it is.

    Raises:
        ValueError: no recipe has this name, and the message names the nearest one; an unusable file; an unknown
            accumulation, ``transposed_from`` or ``backward``; a recipe whose ``output`` cannot be batch-invariant, or
            whose transposed operands cannot be made from codes.
        TypeError: neither a str nor a Recipe.
    """
    found = _found(recipe)
    if batch_invariant and not found.output.batch_invariant:
        try:
            output = replace(found.output, batch_invariant=True)
        except ValueError as error:
            raise ValueError(f"recipe {found.name!r}: {error}") from None
        found = replace(found, name=f"{found.name}_batch_invariant", output=output)
    if backward is not None:
        found = _dequantized(found, backward, transposed_from)
    elif transposed_from not in (None, found.transposed_from):
        found = replace(found, name=f"{found.name}_{transposed_from}", transposed_from=transposed_from)
    if accumulation is None:
        return found
    require("accumulation", accumulation, ACCUMULATIONS)
    gemms = {gemm: getattr(found, gemm) for gemm in GEMMS}
    changed = {gemm: replace(how, accumulation=accumulation) for gemm, how in gemms.items() if how.quantized}
    return found if changed.items() <= gemms.items() else replace(found, name=f"{found.name}_{accumulation}", **changed)


def _dequantized(recipe: Recipe, backward: str, transposed_from: str | None) -> Recipe:
    """``recipe`` with both gradients in high precision, of the values that forward multiplied."""
    require("backward", backward, (None, "dequantized"))
    if transposed_from == "values" or not recipe.output.quantized:
        raise ValueError(
            "backward='dequantized' reads the codes of a quantized forward GEMM; got "
            + ("transposed_from='values'" if recipe.output.quantized else f"recipe {recipe.name!r}, which has none")
        )
    name, precise = f"{recipe.name}_dequantized", Gemm()
    return replace(recipe, name=name, transposed_from="codes", grad_input=precise, grad_weight=precise)


def _found(recipe: str | Recipe) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"a recipe must be a name or a tritonfp8.Recipe; got {type(recipe).__name__}")
    if recipe.endswith(".toml"):
        found = load(recipe)
        if isinstance(found, Recipe):
            return found
        raise ValueError(
            f"{recipe} holds the recipes of layers by patterns of their names, and one recipe is needed here: "
            "tritonfp8.convert and swap_recipe take such a file"
        )
    if recipe not in _RECIPES:
        raise ValueError(
            f"no recipe is named {recipe!r}{nearest(recipe, _RECIPES)} Recipes: {', '.join(_RECIPES)}, or the path of "
            "a .toml file"
        )
    return _RECIPES[recipe]


def load(path: str | Path) -> Recipe | dict[str, Recipe]:
    """What is in a TOML file that :func:`save` wrote: a recipe, or the recipes of layers by patterns of their names.

    The file of a recipe has a ``name`` and a table for each GEMM (``output``, ``grad_input``, ``grad_weight``). A table
    has the specs ``lhs`` and ``rhs``, with the fields of :class:`~tritonfp8.QuantSpec`, and ``accumulation``. A GEMM
    without specs runs in high precision, as does one whose table is left out.

    The file of several recipes has a table ``layers`` from patterns to names, in which the first pattern that matches
    decides. A name that is not built in has a table ``recipes.NAME``, which is the file of that recipe without its
    ``name``.

    Raises:
        ValueError: the file cannot be read, or holds neither; the message names the file.
        TypeError: ``path`` is neither a str nor a Path.
    """
    require_type("path", path, str | Path, "a str or a Path")
    kind = "recipe"
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = parsed("TOML", tomllib.loads, text)
        if "layers" not in data:
            return Recipe.from_dict(data)
        kind = "recipe or a mapping"
        return _mapping_from(data)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the file of a {kind}: {error}") from error


def save(recipe: str | Recipe | Mapping[str, str | Recipe], path: str | Path) -> None:
    """Write a recipe, or a mapping of patterns of layer names to recipes, to a TOML file; replaces the file.

    :func:`load`, :func:`tritonfp8.convert` and :func:`tritonfp8.swap_recipe` read it.

    Raises:
        ValueError: an unknown recipe, a mapping without patterns, or two recipes of one name in a mapping.
        TypeError: an argument of another type.
        OSError: the file cannot be written.
    """
    require_type("path", path, str | Path, "a str or a Path")
    text = _mapping_text(recipe) if isinstance(recipe, Mapping) else get(recipe).to_toml()
    Path(path).write_text(text, encoding="utf-8")


def of_layers(recipe: str | Recipe) -> Recipe | dict[str, Recipe]:
    """:func:`get`, but for a file of several recipes: these by the patterns of their layers."""
    return load(recipe) if isinstance(recipe, str) and recipe.endswith(".toml") else get(recipe)


def _mapping_text(mapping: Mapping[str, str | Recipe]) -> str:
    import tomli_w

    if not mapping:
        raise ValueError("the mapping of patterns to recipes is empty: name at least one pattern")
    layers: dict[str, str] = {}
    own: dict[str, Recipe] = {}
    for pattern, each in mapping.items():
        require_type("a pattern of layer names", pattern, str, "a str")
        found = get(each)
        layers[pattern] = found.name
        if _RECIPES.get(found.name) == found:
            continue
        if found.name in _RECIPES or own.setdefault(found.name, found) != found:
            raise ValueError(
                f"two recipes are named {found.name!r}, by which a file tells them apart: rename one by "
                "dataclasses.replace(recipe, name=...)"
            )
    tables = {name: {key: value for key, value in r.to_dict().items() if key != "name"} for name, r in own.items()}
    return tomli_w.dumps({"layers": layers, **({"recipes": tables} if tables else {})})


def _mapping_from(data: Mapping[str, Any]) -> dict[str, Recipe]:
    check_keys("mapping of layers", data, ("layers", "recipes"))
    layers, tables = data["layers"], data.get("recipes", {})
    for name, table in (("layers", layers), ("recipes", tables)):
        require_type(name, table, dict, "a table")
    if not layers:
        raise ValueError("the table 'layers' is empty: name at least one pattern")
    own = {}
    for name, fields in tables.items():
        require_type(f"recipes.{name}", fields, dict, "a table")
        if name in _RECIPES:
            raise ValueError(f"recipes.{name} has the name of a built-in recipe: give it another one")
        own[name] = Recipe.from_dict({"name": name, **fields})
    if unused := sorted(own.keys() - {each for each in layers.values() if isinstance(each, str)}):
        raise ValueError(f"no pattern of the table 'layers' has the recipe {unused[0]!r}")
    return {pattern: _recipe_of(pattern, name, own) for pattern, name in layers.items()}


def _recipe_of(pattern: str, name: object, own: Mapping[str, Recipe]) -> Recipe:
    require_type(f"the recipe of {pattern!r}", name, str, "a str")
    known = {**_RECIPES, **own}
    if name not in known:
        raise ValueError(f"no recipe is named {name!r}{nearest(str(name), known)} Recipes: {', '.join(known)}")
    return known[str(name)]


def summary() -> str:
    """The built-in recipes as text: a line each, with the first sentence of the recipe's description."""
    width = max(map(len, _RECIPES))
    return "\n".join(f"  {name:<{width}}  {_description(name).partition(chr(10))[0]}" for name in _RECIPES)


def _description(name: str) -> str:
    return (_FACTORIES[name].__doc__ or "").strip()


def describe(recipe: str | Recipe) -> str:
    """A recipe as text: the specs of each GEMM, and for a built-in recipe its docstring (equations and source)."""
    found = get(recipe)
    text = str(found)
    if _RECIPES.get(found.name) == found:
        text += "\n\n" + "\n".join(line.removeprefix("    ") for line in _description(found.name).splitlines())
    return text
