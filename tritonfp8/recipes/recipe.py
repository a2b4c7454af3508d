"""Recipe and Gemm: the specs of the operands of a linear layer's GEMMs, as data, dict, JSON and TOML."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonfp8.specs import ACCUMULATIONS, QuantSpec, check_transposable, expands_to, matmul_family, moves_codes
from tritonfp8.specs.checks import require, require_flag, require_type, shown
from tritonfp8.specs.formats import BYTE_FORMATS

GEMMS = ("output", "grad_input", "grad_weight")
TRANSPOSED_FROM = ("values", "codes")
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
        batch_invariant: whether the bits of a row of the result depend on this row of the left operand only, and not
            on the other rows or their number. The GEMM then never splits K, which is slower up to 256 rows.

    Raises:
        ValueError: only one operand is quantized, a format of fewer than 8 bits, no kernel multiplies the two specs, an
            unknown accumulation, or a batch-invariant GEMM in high precision or of a left operand with one scale for
            all rows.
        TypeError: an operand is neither a QuantSpec nor None, or ``batch_invariant`` is no bool.
    """

    lhs: QuantSpec | None = None
    rhs: QuantSpec | None = None
    accumulation: str = "precise"
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, spec in (("lhs", self.lhs), ("rhs", self.rhs)):
            if spec is not None and not isinstance(spec, QuantSpec):
                raise TypeError(f"{name} must be a QuantSpec or None; got {spec!r}")
            if spec is not None and spec.format not in BYTE_FORMATS:
                raise ValueError(f"{name} must have a format of 8 bits ({', '.join(BYTE_FORMATS)}); got {spec}")
        require("accumulation", self.accumulation, ACCUMULATIONS)
        if (self.lhs is None) != (self.rhs is None):
            raise ValueError(f"a GEMM needs both operands quantized or neither; got lhs={self.lhs} and rhs={self.rhs}")
        if self.lhs is not None and self.rhs is not None:
            matmul_family(self.lhs.block, self.rhs.block)
        require_flag("batch_invariant", self.batch_invariant)
        if self.batch_invariant:
            _check_invariant(self.lhs)

    @property
    def quantized(self) -> bool:
        """Whether the GEMM runs on quantized operands."""
        return self.lhs is not None

    def to_dict(self) -> dict[str, object]:
        """Plain data; operands in high precision are left out."""
        specs = {name: spec.to_dict() for name, spec in (("lhs", self.lhs), ("rhs", self.rhs)) if spec is not None}
        # Left out where it is off: earlier versions read such a file, and texts in graphs stay as they were.
        flags = {"batch_invariant": True} if self.batch_invariant else {}
        return {**specs, "accumulation": self.accumulation, **flags}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Gemm:
        """Inverse of :meth:`to_dict`. Raises ValueError for a key that is not a field."""
        check_keys("GEMM", data, ("lhs", "rhs", "accumulation", "batch_invariant"))
        specs = {name: _spec_from_dict(data[name]) for name in ("lhs", "rhs") if data.get(name) is not None}
        return cls(
            **specs,
            accumulation=data.get("accumulation", "precise"),
            batch_invariant=data.get("batch_invariant", False),
        )


def _check_invariant(lhs: QuantSpec | None) -> None:
    if lhs is None:
        raise ValueError(
            "a GEMM in high precision cannot be batch-invariant: torch's GEMM computes it, which sums in an order that "
            "depends on the number of rows. Quantize both operands, or leave the layer out by filter="
        )
    if lhs.block[0] != 1:
        raise ValueError(
            f"a batch-invariant GEMM needs a left operand with scales for each row; got {lhs}, whose scales depend on "
            "several rows, so each row would depend on the others. Use the recipe 'rowwise', 'blockwise' or 'mxfp8'"
        )


@dataclass(frozen=True)
class Recipe:
    """How a linear layer computes its three GEMMs. Immutable, hashable, comparable.

    Attributes:
        name: its name in reports.
        output: ``input @ weight.T``.
        grad_input: ``grad_output @ weight``.
        grad_weight: ``grad_output.T @ input``.
        transposed_from: what ``weight.T``, ``input.T`` and ``grad_output.T`` are made from: ``"values"``, the tensors
            themselves; or ``"codes"``, the operands that another GEMM of the layer multiplied. Backward then multiplies
            the values that forward multiplied. In a GEMM in high precision these are dequantized, in the input's dtype.
        weights: the format of fewer than 8 bits that weights are rounded to before they are quantized, in each of the
            GEMMs that read them; None for no such rounding. The gradient of the rounded weight is the gradient of the
            weight.
        codes: the specs of the codes that the transposes of ``"input"``, ``"weight"`` and ``"grad_output"`` are made
            from. None for a transpose that is made from values, and for square blocks, where both are the same.

    Raises:
        ValueError: an unknown ``transposed_from``; or ``"codes"`` where the operand that an operand is made from is not
            quantized, has another format, or has scales that are not powers of two; or ``weights`` where the weight of
            ``output`` is not quantized by a spec that holds their values.
        TypeError: a field of another type.

    Use :func:`dataclasses.replace` for a variant; :func:`save` and :func:`load` for a file; :meth:`to_dict`,
    :meth:`to_json`, :meth:`to_toml` and their inverses for data and text.
    """

    name: str
    output: Gemm = field(default_factory=Gemm)
    grad_input: Gemm = field(default_factory=Gemm)
    grad_weight: Gemm = field(default_factory=Gemm)
    transposed_from: str = "values"
    weights: QuantSpec | None = None
    codes: Mapping[str, QuantSpec | None] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"a recipe's name must be a non-empty str; got {self.name!r}")
        for gemm in GEMMS:
            if not isinstance(getattr(self, gemm), Gemm):
                raise TypeError(f"{gemm} must be a recipes.Gemm; got {type(getattr(self, gemm)).__name__}")
        require("transposed_from", self.transposed_from, TRANSPOSED_FROM)
        from_codes = self.transposed_from == "codes"
        if from_codes:
            self._check_codes()
        if self.weights is not None:
            self._check_weights()
        # Made once, like the text below: each call of a layer reads it.
        codes = {name: _codes_of(*pair) if from_codes else None for name, pair in self._pairs().items()}
        object.__setattr__(self, "codes", codes)
        # Made once, here: otherwise Dynamo would trace its construction for each layer.
        data = self.to_dict()
        del data["name"]
        text = json.dumps(data)
        object.__setattr__(self, "_args", (text,))

    def _check_codes(self) -> None:
        for name, (spec, spec_t) in self._pairs().items():
            if spec is None and spec_t is not None:
                raise ValueError(
                    f"transposed_from='codes' makes {name}.T from the codes of {name}, and no GEMM of recipe "
                    f"{self.name!r} quantizes {name} untransposed; use transposed_from='values'"
                )
            if spec is not None and spec_t is not None:
                try:
                    check_transposable(spec, spec_t)
                except ValueError as error:
                    raise ValueError(f"{name}.T of recipe {self.name!r}: {error}") from None

    def _check_weights(self) -> None:
        require_type("weights", self.weights, QuantSpec, "a QuantSpec or None")
        assert self.weights is not None
        if self.output.rhs is None or not expands_to(self.weights, self.output.rhs):
            raise ValueError(
                f"weights that are rounded to {self.weights} must be multiplied as e4m3 with a scale a row, powers of "
                "two, or with the blocks of MX, which hold the values of a format of fewer bits; recipe "
                f"{self.name!r} rounds them to that, and multiplies {self.output.rhs or 'in high precision'}"
            )

    def _pairs(self) -> dict[str, tuple[QuantSpec | None, QuantSpec | None]]:
        """The specs of each tensor, untransposed and transposed."""
        return {
            "weight": (self.output.rhs, self.grad_input.rhs),
            "input": (self.output.lhs, self.grad_weight.rhs),
            "grad_output": (self.grad_input.lhs, self.grad_weight.lhs),
        }

    def __deepcopy__(self, memo: object) -> Recipe:
        return self

    def __repr__(self) -> str:
        gemms = ((gemm, getattr(self, gemm)) for gemm in GEMMS)
        of = (f"{gemm}={f'{g.lhs.format} x {g.rhs.format}' if g.quantized else 'high precision'}" for gemm, g in gemms)
        return f"Recipe({shown(self.name, 32)}, {', '.join(of)})"

    def __str__(self) -> str:
        lines = [f"recipe {self.name!r}"]
        for gemm in GEMMS:
            how: Gemm = getattr(self, gemm)
            lhs, rhs = OPERANDS[gemm]
            summed = how.accumulation + (", batch-invariant" if how.batch_invariant else "")
            if how.quantized:
                lines.append(f"  {gemm:<11} = Q[{how.lhs}]({lhs}) @ Q[{how.rhs}]({rhs}).T, {summed}")
                continue
            right = rhs.removesuffix(".T") if rhs.endswith(".T") else f"{rhs}.T"
            # Of a tensor that has codes the values that another GEMM multiplied.
            source = self.codes.get(right) if gemm != "output" else None
            right = right if source is None else f"dequantized Q[{source}]({right})"
            lines.append(f"  {gemm:<11} = {lhs} @ {right}, in the input's dtype")
        if self.transposed_from == "codes" and (self.grad_input.quantized or self.grad_weight.quantized):
            lines.append("  transposed operands are made from the codes of the untransposed ones")
        if self.weights is not None:
            lines.append(f"  weight is rounded to the values of Q[{self.weights}](weight) before")
        return "\n".join(lines)

    @property
    def args(self) -> tuple[str]:
        """The three GEMMs as an op takes them, one text without the name; :func:`recipe_of` reads it."""
        return self._args  # type: ignore[attr-defined]

    @property
    def storage(self) -> QuantSpec | None:
        """How a weight is stored: in the format that it is rounded to, else as ``output`` reads it."""
        return self.weights or self.output.rhs

    @property
    def quantized_share(self) -> float:
        """Share of a linear layer's training FLOPs on quantized operands: 0, 1/3, 2/3 or 1, as all GEMMs are equal."""
        return [self.output.quantized, self.grad_input.quantized, self.grad_weight.quantized].count(True) / len(GEMMS)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain data, which JSON and TOML store."""
        # Left out at its default: earlier versions read such a file, and texts in graphs stay as they were.
        source = {} if self.transposed_from == "values" else {"transposed_from": self.transposed_from}
        weights = {} if self.weights is None else {"weights": self.weights.to_dict()}
        return {"name": self.name, **{gemm: getattr(self, gemm).to_dict() for gemm in GEMMS}, **source, **weights}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Inverse of :meth:`to_dict`.

        Raises:
            ValueError: a missing name, a key that is not a field, or an impossible combination.
        """
        check_keys("recipe", data, ("name", *GEMMS, "transposed_from", "weights"))
        if "name" not in data:
            raise ValueError(f"a recipe needs a 'name'; got the keys {sorted(data, key=str)}")
        gemms = {gemm: Gemm.from_dict(data[gemm]) for gemm in GEMMS if gemm in data}
        weights = None if data.get("weights") is None else _spec_from_dict(data["weights"])
        return cls(data["name"], **gemms, transposed_from=data.get("transposed_from", "values"), weights=weights)

    def to_json(self) -> str:
        """The recipe as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Inverse of :meth:`to_json`. Raises ValueError if the text is not a recipe."""
        require_type("text", text, str, "a str of JSON")
        return cls.from_dict(parsed("JSON", json.loads, text))

    def to_toml(self) -> str:
        """The recipe as a TOML document."""
        import tomli_w  # Only writing TOML needs it: the standard library reads it.

        return tomli_w.dumps(self.to_dict())

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Inverse of :meth:`to_toml`. Raises ValueError if the text is not a recipe."""
        require_type("text", text, str, "a str of TOML")
        return cls.from_dict(parsed("TOML", tomllib.loads, text))


def _codes_of(spec: QuantSpec | None, spec_t: QuantSpec | None) -> QuantSpec | None:
    """The spec of the codes that a transpose by ``spec_t`` is made from; None if it is the same from values."""
    return None if spec is None or (spec_t is not None and moves_codes(spec, spec_t)) else spec


@functools.cache
def recipe_of(text: str) -> Recipe:
    """The recipe whose text (:attr:`Recipe.args`) an op was called with; its name is not known."""
    return Recipe.from_dict({"name": "given to an op", **json.loads(text)})


def parsed(name: str, parse: Callable[[str], Any], text: str) -> Any:
    """The data of a text in the format ``name``. Raises ValueError if the text is not in this format."""
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a recipe must be valid {name}; this text cannot be parsed: {error}") from error


def check_keys(what: str, data: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless ``data`` is a mapping whose keys are among ``allowed``."""
    if not isinstance(data, Mapping):
        raise ValueError(f"a {what} must be a mapping with the keys {', '.join(allowed)}; got {type(data).__name__}")
    if unknown := sorted(set(data) - set(allowed), key=str):
        raise ValueError(f"a {what} has the keys {', '.join(allowed)}; got {', '.join(map(repr, unknown))} as well")


def _spec_from_dict(data: Mapping[str, Any]) -> QuantSpec:
    check_keys("spec", data, ("format", "block", "scale_format", "scale_rounding"))
    return QuantSpec(**data)
