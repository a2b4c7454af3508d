"""What :func:`tritonfp8.verify` found, as data, as a table and as the text of an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tritonfp8.compat.counting import KINDS
from tritonfp8.recipes import GEMMS
from tritonfp8.specs.naming import columns, reasons, repeated

ON_FAILURE = ("raise", "warn")
# In place of a recipe: GEMMs of a layer that was not converted, and of a converted layer's weight outside of the layer.
_NOT_CONVERTED, _READ_ELSEWHERE = "not converted", "read elsewhere"


class VerificationError(RuntimeError):
    """A converted model does not do what its conversion promised.

    Attributes:
        report: the :class:`VerificationReport` of :func:`verify`, or the :class:`TrainingCheck` of
            :func:`verify_training`.
    """

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


def deliver(message: str, report: Any, on_failure: str, stacklevel: int) -> None:
    """Raise :class:`VerificationError`, or warn."""
    if on_failure == "raise":
        raise VerificationError(message, report)
    warnings.warn(message, stacklevel=stacklevel + 1)


@dataclass(frozen=True)
class GemmReport:
    """One of the GEMMs of a layer, over all calls of the layer.

    Attributes:
        op: the op that ran, such as ``"tritonfp8.scaled_matmul"``.
        dtype: the formats of both operands, ``"e4m3 x e5m2"``; of a GEMM in high precision its dtype.
        kind: how the device computed it, a key of :data:`tritonfp8.compat.counting.KINDS`.
        device: the type of the device, such as ``"cuda"``.
        calls: how often it ran; a recompute counts, too.
        flops: 2 M N K of each call, on this rank.
        share: of the FLOPs of all GEMMs that read a weight, 0 to 1.
    """

    op: str
    dtype: str
    kind: str
    device: str
    calls: int
    flops: int
    share: float

    @property
    def in_8_bits(self) -> bool:
        """Whether both operands have 8 bits, by kernels that compute with them or by the reference on a CPU."""
        return self.kind in ("fp8", "dequantized", "emulated") or (self.kind == "reference" and self.device == "cpu")


@dataclass(frozen=True)
class LayerReport:
    """A converted layer.

    Attributes:
        recipe: the name of its recipe.
        calls: how often it was called, recomputes included.
        gemms: by name, ``"output"``, ``"grad_input"`` and ``"grad_weight"``; one that did not run is missing. Nobody
            needs the ``grad_input`` of a first layer or the ``grad_weight`` of a frozen one.
    """

    recipe: str
    calls: int
    gemms: Mapping[str, GemmReport]

    @property
    def share(self) -> float:
        """Of the FLOPs of all GEMMs that read a weight, 0 to 1."""
        return sum(gemm.share for gemm in self.gemms.values())


@dataclass(frozen=True)
class OtherGemms:
    """The GEMMs of a parameter of two or more dims that no converted layer ran.

    Attributes:
        ops: what ran, with its dtype, such as ``("aten.addmm in bfloat16",)``.
        flops: 2 M N K of each GEMM, all passes together.
        share: of the FLOPs of all GEMMs that read a weight, 0 to 1.
    """

    ops: tuple[str, ...]
    flops: int
    share: float


@dataclass(frozen=True)
class Failure:
    """A layer that does not do what its conversion promised.

    Attributes:
        layer: its name in the model.
        cause: what is wrong.
        remedy: what to do.
    """

    layer: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.layer or 'the model'}: {self.what}"

    @property
    def what(self) -> str:
        """Cause and remedy."""
        return f"{self.cause}. To mend it, {self.remedy}."


def lines_of(failures: Iterable[Failure], limit: int = 12) -> list[str]:
    """A line for each cause, with its layers and what to do; repeated layers are one."""
    return reasons(((each.layer, each.what) for each in failures), limit, ": see the failures of the report")


@dataclass(frozen=True)
class VerificationReport:
    """What ran in one forward and backward of a converted model; ``str(report)`` is a table.

    The summary says how the device computed GEMMs on 8-bit operands, unless FP8 tensor cores did. If they differ in it,
    each cell of the table says it. The table leaves out how often layers were called if each was called once.

    Attributes:
        layers: each converted layer by name.
        others: the GEMMs of other parameters by name: layers that were not converted, and weights that code around a
            converted layer read.
        failures: converted layers that do not run in FP8, with causes; empty if all is well.
        backward: whether a backward ran.
    """

    layers: Mapping[str, LayerReport]
    others: Mapping[str, OtherGemms]
    failures: tuple[Failure, ...]
    backward: bool

    @property
    def ok(self) -> bool:
        """Whether there is no failure."""
        return not self.failures

    def share(self, *kinds: str) -> float:
        """Share of these :data:`~tritonfp8.compat.counting.KINDS` in the FLOPs of all GEMMs that read a weight."""
        return self._share_of(gemm for gemm in self._gemms() if gemm.kind in kinds)

    @property
    def fp8_share(self) -> float:
        """Share of GEMMs on 8-bit operands in the FLOPs of all GEMMs that read a weight, 0 to 1."""
        return self._share_of(gemm for gemm in self._gemms() if gemm.in_8_bits)

    def _share_of(self, gemms: Iterable[GemmReport]) -> float:
        # A sum of shares would not be exactly 1 where everything runs in FP8.
        total = sum(gemm.flops for gemm in self._gemms()) + sum(other.flops for other in self.others.values())
        return sum(gemm.flops for gemm in gemms) / total if total else 0.0

    def _gemms(self) -> Iterable[GemmReport]:
        return (gemm for layer in self.layers.values() for gemm in layer.gemms.values())

    def _kinds(self) -> set[str]:
        """How GEMMs on 8-bit operands were computed."""
        return {gemm.kind for gemm in self._gemms() if gemm.in_8_bits}

    @property
    def summary(self) -> str:
        """One line, such as ``91 % of the linear FLOPs run in FP8``."""
        line = f"{_percent(self.fp8_share)} of the linear FLOPs run in FP8"
        # Operands have 8 bits in each of these, but only FP8 tensor cores make that quick.
        kinds = self._kinds()
        slow = [kind for kind in ("dequantized", "emulated", "reference") if kind in kinds]
        shares = [f"{_percent(self.share(kind))} " if len(kinds) > 1 else "" for kind in slow]
        notes = [f"{share}by {KINDS[kind]}" for share, kind in zip(shares, slow, strict=True)]
        line += f" ({', '.join(notes)})" if notes else ""
        return line if self.ok else f"{line}; {self._failing()} converted layers fail"

    def _failing(self) -> str:
        """How many layers fail, of how many; a layer may fail for several causes."""
        failing = {failure.layer for failure in self.failures}
        return f"{len(failing)} of {len(failing.union(self.layers))}"

    def message(self) -> str:
        """The failures: a line for each, with its layer, cause and remedy. Without one, that all layers pass."""
        if self.ok:
            return f"all {len(self.layers)} converted layers run as their recipes say: {self.summary}"
        return "\n  ".join([f"{self._failing()} converted layers do not run in FP8:", *lines_of(self.failures)])

    def __str__(self) -> str:
        of_one_kind = len(self._kinds()) == 1
        verdicts: list[tuple[str, tuple[str, ...]]] = [
            (name, (layer.recipe, str(layer.calls), *(_cell(layer.gemms.get(gemm), of_one_kind) for gemm in GEMMS)))
            for name, layer in self.layers.items()
        ]
        for name, other in self.others.items():
            what = _READ_ELSEWHERE if name.rpartition(".")[0] in self.layers else _NOT_CONVERTED
            verdicts.append((name, ("-", "", f"{what}: {', '.join(other.ops)}")))
        shares = {name: each.share for found in (self.layers, self.others) for name, each in found.items()}
        rows: list[tuple[str, ...]] = [("layer", "recipe", "calls", "FLOPs", *GEMMS)]
        for each in repeated(verdicts):
            recipe, calls, *gemms = each.verdict
            share = _percent(sum(shares[name] for name in each.names))
            rows.append((each.label or "(the model)", recipe, calls, share, *gemms))
        if all(layer.calls == 1 for layer in self.layers.values()):
            rows = [(*row[:2], *row[3:]) for row in rows]
        return "\n".join([self.summary, *columns(rows), *([self.message()] if self.failures else [])])


def _cell(gemm: GemmReport | None, of_one_kind: bool) -> str:
    if gemm is None:
        return "-"
    # A report of 80 layers fits 100 columns if the kind of all of them stands in the summary.
    of_all = (of_one_kind and gemm.in_8_bits) or gemm.kind == "high_precision"
    return gemm.dtype if of_all else f"{gemm.dtype} ({gemm.kind})"


def _percent(share: float) -> str:
    text = f"{100 * share:.1f}" if 0 < share < 0.1 else f"{100 * share:.0f}"
    return f"{text} %"
