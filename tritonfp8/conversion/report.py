"""The result of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, field

from tritonfp8.recipes import Recipe
from tritonfp8.specs.naming import Repeated, columns, repeated


@dataclass(frozen=True)
class HighPrecision:
    """A parameter that no converted layer has.

    Attributes:
        flops: of a forward a token: 2 for each element that is multiplied; 0 for an embedding that is looked up.
        share: ``flops`` over the FLOPs of all linear layers of the model, converted or not; 0 to 1.
        reason: why it stays in high precision.
        layer: the name of its layer in ``skipped``, or None if no linear layer and no experts have it.
    """

    flops: int
    share: float
    reason: str
    layer: str | None = None


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion; ``str(report)`` is a table, in which repeated layers are one line.

    Attributes:
        converted: the recipe of each layer that this call converted, by fully qualified name.
        skipped: for each other linear layer and module of experts, the reason why it was not converted.
        already: the recipe of each layer that was converted before and keeps its recipe.
        high_precision: each parameter with two dims or more that no converted layer has, by fully qualified name, with
            its FLOPs and the reason; empty in the report of ``swap_recipe``.
        fp8_share: share of the linear FLOPs of a training step that run in FP8, 0 to 1; None in the report of
            ``swap_recipe``. GEMMs that a recipe keeps in high precision do not count.
        stored_bytes: bytes of all weights of the model that are stored in 8 bits, and of the same weights in their
            dtype; None without ``weight_storage="quantized"``.
        experts: the number of experts in each converted module of experts, by fully qualified name.
        unstored_experts: of the experts that keep their weights in high precision though the call stores weights, the
            reasons, by fully qualified name.
        action: what was done with the layers in ``converted``; ``"gathered in 8 bits"`` in the report of
            ``enable_float8_all_gather``.
    """

    converted: dict[str, Recipe]
    skipped: dict[str, str]
    already: dict[str, Recipe] = field(default_factory=dict)
    high_precision: dict[str, HighPrecision] = field(default_factory=dict)
    fp8_share: float | None = None
    stored_bytes: tuple[int, int] | None = None
    experts: dict[str, int] = field(default_factory=dict)
    unstored_experts: dict[str, str] = field(default_factory=dict)
    action: str = "converted"

    @property
    def is_empty(self) -> bool:
        """Whether no layer follows a recipe: ``filter="auto"`` found that bf16 is faster for each."""
        return not (self.converted or self.already)

    def __str__(self) -> str:
        total = f"{len(self.converted)} {self.action}, {len(self.skipped)} skipped"
        total += f", {len(self.already)} converted before" if self.already else ""
        total += "" if self.fp8_share is None else f"; {_percent(self.fp8_share)} of the linear FLOPs run in FP8"
        verdicts = [(name, f"{recipe.name}{self._experts_of(name)}") for name, recipe in self.converted.items()]
        verdicts += [
            (name, f"{recipe.name}{self._experts_of(name)}, converted before") for name, recipe in self.already.items()
        ]
        rows = [(each.label, each.verdict) for each in repeated(verdicts)]
        rows += [(each.label, self._skipped(each)) for each in repeated(self.skipped.items())]
        lines = [total, *columns(rows)]
        others = [(name, each.reason) for name, each in self.high_precision.items() if each.layer is None]
        if others:
            lines += ["parameters of no linear layer, with their share of the linear FLOPs:"]
            lines += columns([(each.label, self._of(each)) for each in repeated(others)])
        if self.stored_bytes is not None:
            now, before = (f"{n / 2**20:.1f} MiB" for n in self.stored_bytes)
            lines.append(f"weights are stored in 8 bits: {now} in place of {before}")
        if self.fp8_share is not None:
            bf16 = "nothing was changed: bf16 is faster for each layer that could be converted"
            lines.append(bf16 if self.is_empty else "tritonfp8.verify(model, batch) shows what runs")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<ConversionReport: {str(self).partition(chr(10))[0]}>"

    def _experts_of(self, name: str) -> str:
        if name not in self.experts:
            return ""
        why = self.unstored_experts.get(name)
        kept = "" if why is None else f", weights in high precision: {why}"
        return f", {self.experts[name]} experts{kept}"

    def _skipped(self, layers: Repeated[str]) -> str:
        of, names = self.high_precision.values(), set(layers.names)
        shares = [each.share for each in of if each.layer in names]
        return f"skipped{f' ({_percent(sum(shares))} of the FLOPs)' if shares else ''}: {layers.verdict}"

    def _of(self, parameters: Repeated[str]) -> str:
        share = sum(self.high_precision[name].share for name in parameters.names)
        return f"{_percent(share):>8}  {parameters.verdict}"


def _percent(share: float) -> str:
    """Whole percents, but for shares that these would hide: 0.3 %, 99.7 %."""
    if 0 < share < 0.0005 or 0.9995 < share < 1:
        return "< 0.1 %" if share < 0.5 else "> 99.9 %"
    digits = 1 if 0 < share < 0.01 or 0.99 < share < 1 else 0
    return f"{100 * share:.{digits}f} %"
