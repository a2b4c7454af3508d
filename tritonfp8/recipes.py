"""Recipes: the spec of each operand in each of the three GEMMs of a linear layer. Data, not code.

A linear layer of ``weight [N, K]`` on ``input [M, K]`` runs three GEMMs. Each is written here as
``lhs [., C] @ rhs [., C].T``. The contraction ``C`` is last in both operands, as FP8 tensor cores read them, and the
spec of an operand refers to this layout:

    output      [M, N] = input         [M, K] @ weight  [N, K].T        contraction K
    grad_input  [M, K] = grad_output   [M, N] @ weight.T [K, N].T       contraction N
    grad_weight [N, K] = grad_output.T [N, M] @ input.T  [K, M].T       contraction M

``Q[...]`` in the docstrings below is :func:`tritonfp8.quantize` with the spec named in the brackets.
"""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tritonfp8.checks import require, require_type
from tritonfp8.specs import ACCUMULATIONS, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, QuantSpec, matmul_family

GEMMS = ("output", "grad_input", "grad_weight")
OPERANDS = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight.T"),
    "grad_weight": ("grad_output.T", "input.T"),
}


@dataclass(frozen=True)
class Gemm:
    """One GEMM ``lhs [., C] @ rhs [., C].T``: the specs of its operands, both None for high precision.

    Attributes:
        lhs: spec of the left operand, or None.
        rhs: spec of the right operand, or None.
        accumulation: ``"precise"`` (fp32 promotion at least every 128 of the contraction) or ``"fast"`` (the tensor
            core's own accumulator).

    Raises:
        ValueError: only one operand is quantized, no kernel multiplies the two specs, or an unknown accumulation.
        TypeError: an operand is neither a QuantSpec nor None.
    """

    lhs: QuantSpec | None = None
    rhs: QuantSpec | None = None
    accumulation: str = "precise"

    def __post_init__(self) -> None:
        for name, spec in (("lhs", self.lhs), ("rhs", self.rhs)):
            if spec is not None and not isinstance(spec, QuantSpec):
                raise TypeError(f"{name} must be a QuantSpec or None; got {spec!r}")
        require("accumulation", self.accumulation, ACCUMULATIONS)
        if (self.lhs is None) != (self.rhs is None):
            raise ValueError(f"a GEMM needs both operands quantized or neither; got lhs={self.lhs} and rhs={self.rhs}")
        if self.lhs is not None and self.rhs is not None:
            matmul_family(self.lhs.block, self.rhs.block)

    @property
    def quantized(self) -> bool:
        """Whether the GEMM runs on quantized operands."""
        return self.lhs is not None

    def to_dict(self) -> dict[str, object]:
        """Plain data; operands in high precision are left out."""
        specs = {name: spec.to_dict() for name, spec in (("lhs", self.lhs), ("rhs", self.rhs)) if spec is not None}
        return {**specs, "accumulation": self.accumulation}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Gemm:
        """Inverse of :meth:`to_dict`. Raises ValueError for a key that is not a field."""
        _check_keys("GEMM", data, ("lhs", "rhs", "accumulation"))
        specs = {name: _spec_from_dict(data[name]) for name in ("lhs", "rhs") if data.get(name) is not None}
        return cls(**specs, accumulation=data.get("accumulation", "precise"))


@dataclass(frozen=True)
class Recipe:
    """How a linear layer computes its three GEMMs. Immutable, hashable, comparable.

    Attributes:
        name: its name in reports.
        output: ``input @ weight.T``.
        grad_input: ``grad_output @ weight``.
        grad_weight: ``grad_output.T @ input``.

    Use :func:`dataclasses.replace` for a variant; :func:`save` and :func:`load` for a file; :meth:`to_dict`,
    :meth:`to_json`, :meth:`to_toml` and their inverses for data and text.
    """

    name: str
    output: Gemm = field(default_factory=Gemm)
    grad_input: Gemm = field(default_factory=Gemm)
    grad_weight: Gemm = field(default_factory=Gemm)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"a recipe's name must be a non-empty str; got {self.name!r}")
        for gemm in GEMMS:
            if not isinstance(getattr(self, gemm), Gemm):
                raise TypeError(f"{gemm} must be a recipes.Gemm; got {type(getattr(self, gemm)).__name__}")
        # Made once, here: otherwise Dynamo would trace its construction for each layer.
        text = json.dumps({gemm: getattr(self, gemm).to_dict() for gemm in GEMMS})
        object.__setattr__(self, "_args", (text,))

    def __deepcopy__(self, memo: object) -> Recipe:
        return self

    def __str__(self) -> str:
        lines = [f"recipe {self.name!r}"]
        for gemm in GEMMS:
            how: Gemm = getattr(self, gemm)
            lhs, rhs = OPERANDS[gemm]
            if how.quantized:
                lines.append(f"  {gemm:<11} = Q[{how.lhs}]({lhs}) @ Q[{how.rhs}]({rhs}).T, {how.accumulation}")
            else:
                right = rhs.removesuffix(".T") if rhs.endswith(".T") else f"{rhs}.T"
                lines.append(f"  {gemm:<11} = {lhs} @ {right}, in the input's dtype")
        return "\n".join(lines)

    @property
    def args(self) -> tuple[str]:
        """The three GEMMs as an op takes them, one text without the name; :func:`recipe_of` reads it."""
        return self._args  # type: ignore[attr-defined]

    @property
    def quantized_share(self) -> float:
        """Share of a linear layer's training FLOPs on quantized operands: 0, 1/3, 2/3 or 1, as all GEMMs are equal."""
        return [self.output.quantized, self.grad_input.quantized, self.grad_weight.quantized].count(True) / len(GEMMS)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, which JSON and TOML store."""
        return {"name": self.name, **{gemm: getattr(self, gemm).to_dict() for gemm in GEMMS}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: a missing name, a key that is not a field, or an impossible combination.
        """
        _check_keys("recipe", data, ("name", *GEMMS))
        if "name" not in data:
            raise ValueError(f"a recipe needs a 'name'; got the keys {sorted(data, key=str)}")
        return cls(data["name"], **{gemm: Gemm.from_dict(data[gemm]) for gemm in GEMMS if gemm in data})

    def to_json(self) -> str:
        """The recipe as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Inverse of :meth:`to_json`. Raises ValueError if the text is not a recipe."""
        require_type("text", text, str, "a str of JSON")
        return cls.from_dict(_parsed("JSON", json.loads, text))

    def to_toml(self) -> str:
        """The recipe as a TOML document."""
        import tomli_w  # Only writing TOML needs it: the standard library reads it.

        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Inverse of :meth:`to_toml`. Raises ValueError if the text is not a recipe."""
        require_type("text", text, str, "a str of TOML")
        return cls.from_dict(_parsed("TOML", tomllib.loads, text))


@functools.cache
def recipe_of(text: str) -> Recipe:
    """The recipe whose text (:attr:`Recipe.args`) an op was called with; its name is not known."""
    return Recipe.from_dict({"name": "given to an op", **json.loads(text)})


def _parsed(name: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a recipe must be valid {name}; this text cannot be parsed: {error}") from error


def _check_keys(what: str, data: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"a {what} must be a mapping with the keys {', '.join(allowed)}; got {type(data).__name__}")
    if unknown := sorted(set(data) - set(allowed), key=str):
        raise ValueError(f"a {what} has the keys {', '.join(allowed)}; got {', '.join(map(repr, unknown))} as well")


def _spec_from_dict(data: Mapping[str, Any]) -> QuantSpec:
    _check_keys("spec", data, ("format", "block", "scale_format", "scale_rounding"))
    return QuantSpec(**data)


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


_RECIPES: dict[str, Recipe] = {name: factory() for name, factory in _FACTORIES.items()}


def names() -> list[str]:
    """The names of the built-in recipes."""
    return list(_RECIPES)


def get(recipe: str | Recipe, *, accumulation: str | None = None) -> Recipe:
    """The built-in recipe of this name, or that of a TOML file; a :class:`Recipe` is returned unchanged.

    Args:
        recipe: a name, the path of a file that ends in ``.toml`` (:func:`load`), or a Recipe.
        accumulation: ``"fast"`` or ``"precise"`` for all quantized GEMMs of the recipe; None leaves them as they are.
            The name of a recipe that this changes ends in the value: ``"rowwise_fast"``.

    Raises:
        ValueError: no recipe has this name, and the message names the nearest one; an unusable file; an unknown
            accumulation.
        TypeError: neither a str nor a Recipe.
    """
    found = _found(recipe)
    if accumulation is None:
        return found
    require("accumulation", accumulation, ACCUMULATIONS)
    gemms = {gemm: getattr(found, gemm) for gemm in GEMMS}
    changed = {gemm: replace(how, accumulation=accumulation) for gemm, how in gemms.items() if how.quantized}
    return found if changed.items() <= gemms.items() else replace(found, name=f"{found.name}_{accumulation}", **changed)


def _found(recipe: str | Recipe) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"a recipe must be a name or a tritonfp8.Recipe; got {type(recipe).__name__}")
    if recipe.endswith(".toml"):
        return load(recipe)
    if recipe not in _RECIPES:
        nearest = max(_RECIPES, key=lambda name: difflib.SequenceMatcher(None, recipe.lower(), name).ratio())
        raise ValueError(
            f"no recipe is named {recipe!r}; did you mean {nearest!r}? Recipes: {', '.join(_RECIPES)}, or the path of "
            "a .toml file"
        )
    return _RECIPES[recipe]


def load(path: str | Path) -> Recipe:
    """The recipe in a TOML file, as :func:`save` writes it.

    The file has a ``name`` and a table for each GEMM (``output``, ``grad_input``, ``grad_weight``). A table has the
    specs ``lhs`` and ``rhs``, with the fields of :class:`~tritonfp8.QuantSpec`, and ``accumulation``. A GEMM without
    specs runs in high precision, as does one whose table is left out.

    Raises:
        ValueError: the file cannot be read, or holds no recipe; the message names the file.
        TypeError: ``path`` is neither a str nor a Path.
    """
    require_type("path", path, str | Path, "a str or a Path")
    try:
        return Recipe.from_toml(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the file of a recipe: {error}") from error


def save(recipe: str | Recipe, path: str | Path) -> None:
    """Write a recipe to a TOML file, which :func:`load` and :func:`tritonfp8.convert` read. Replaces the file.

    Raises:
        ValueError: an unknown recipe.
        TypeError: an argument of another type.
        OSError: the file cannot be written.
    """
    require_type("path", path, str | Path, "a str or a Path")
    Path(path).write_text(get(recipe).to_toml(), encoding="utf-8")


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
