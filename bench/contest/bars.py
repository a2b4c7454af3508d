"""Bars: required ratios between rows of the same run, as data, and the check whether they are met.

``bars.md`` is written from :func:`judge`. A bar over a set of shapes is met if all of them were measured and meet it.
The verdict counts shapes that were not measured.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import shapes
from bench.contest import cases, grouped
from bench.shapes import ALL_MODELS, BAR_GEMMS

# The epilogue should cost no measurable time: rounds of one GEMM differ by more than 2%.
EPILOGUE_SHARE = 0.98
Row = Mapping[str, Any]
MEAN, LOWEST, HIGHEST = "geometric mean", "lowest", "highest"
_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    MEAN: statistics.geometric_mean,
    LOWEST: min,
    HIGHEST: max,
}


def _speed_up(row: Row, over: Row) -> float:
    return over["seconds"] / row["seconds"]


def _rate_share(row: Row, over: Row) -> float:
    return (row["bytes"] / row["seconds"]) / (over["bytes"] / over["seconds"])


def _time_ratio(row: Row, over: Row) -> float:
    return row["seconds"] / over["seconds"]


def _more_seconds(row: Row, over: Row) -> float:
    return row["seconds"] - over["seconds"]


def _microseconds(row: Row, over: Row) -> float:
    return 1e6 * row["seconds"]


def _memory_ratio(row: Row, over: Row) -> float:
    return row["peak_bytes"] / over["peak_bytes"]


def _extra_launches(row: Row, over: Row) -> float:
    return row["extra_launches"]


_MORE, _EXTRA = "more seconds", "extra launches"
# Name -> function of a row and the row that it is compared with, and the field that both rows need.
QUANTITIES: dict[str, tuple[Callable[[Row, Row], float], str]] = {
    "speed-up": (_speed_up, "seconds"),
    "share of copy speed": (_rate_share, "seconds"),
    "host time ratio": (_time_ratio, "seconds"),
    "microseconds": (_microseconds, "seconds"),
    _MORE: (_more_seconds, "seconds"),
    "peak memory ratio": (_memory_ratio, "peak_bytes"),
    _EXTRA: (_extra_launches, "extra_launches"),
}


@dataclass(frozen=True)
class Bar:
    """One requirement.

    Attributes:
        what: description.
        kind: kind of the shapes (:mod:`bench.shapes`).
        suite, case, contender: select the rows.
        over: the contender that they are compared with.
        bar: the smallest value allowed, or the largest if ``at_most``.
        sets: sets of the shapes.
        shape: name of a single shape of these sets, or None for all.
        quantity: a key of :data:`QUANTITIES`.
        reduce: how the values of all shapes become one.
    """

    what: str
    kind: str
    suite: str
    case: str
    contender: str
    over: str
    bar: float
    sets: tuple[str, ...]
    shape: str | None = None
    quantity: str = "speed-up"
    reduce: str = LOWEST
    at_most: bool = False

    def sizes(self) -> list[tuple[int, ...]]:
        """The shapes of the bar."""
        return [s.size for s in shapes.select(self.kind, self.sets) if self.shape in (None, s.name)]


@dataclass(frozen=True)
class Verdict:
    """The measurement of a bar.

    Attributes:
        bar: the bar.
        values: ``(size, value)`` of each measured shape.
        expected: number of shapes of the bar, without shapes on which the peer cannot run.
        reason: text for the table if nothing was measured.
    """

    bar: Bar
    values: tuple[tuple[tuple[int, ...], float], ...]
    expected: int
    reason: str

    @property
    def measured(self) -> float | None:
        """The reduced value, which is compared with the bar; None if nothing was measured."""
        return _REDUCE[self.bar.reduce]([value for _, value in self.values]) if self.values else None

    @property
    def holds(self) -> bool | None:
        """Whether the bar is met; None if too few shapes were measured to know."""
        if self.measured is None:
            return None
        met = self.measured <= self.bar.bar if self.bar.at_most else self.measured >= self.bar.bar
        # If every shape must meet the bar, one failure decides, and a missing shape might be that failure.
        complete = len(self.values) == self.expected
        return met if complete or (not met and self.bar.reduce != MEAN) else None


def judge(rows: Iterable[Row], bars: Sequence[Bar]) -> list[Verdict]:
    """The verdict of each bar on the rows."""
    found = {(r["suite"], r["case"], tuple(r["shape"]), r["contender"]): r for r in rows}
    return [_judge(bar, found) for bar in bars]


def _judge(bar: Bar, found: Mapping[tuple[Any, ...], Row]) -> Verdict:
    function, needed = QUANTITIES[bar.quantity]
    values, reasons, expected = [], [], len(bar.sizes())
    for size in bar.sizes():
        row, over = (found.get((bar.suite, bar.case, size, name), {}) for name in (bar.contender, bar.over))
        reasons += [each["reason"] for each in (row, over) if "reason" in each]
        if row.get(needed) is not None and over.get(needed) is not None:
            values.append((size, function(row, over)))
        elif row.get(needed) is not None and "reason" in over:
            # The peer cannot run on this shape.
            expected -= 1
    absent = "not measured" if bar.case in known_cases() else "not built"
    reason = f"not measured: {reasons[0]}" if reasons else absent
    return Verdict(bar, tuple(values), expected, reason)


def known_cases() -> set[str]:
    """Names of the cases of all suites."""
    ops = (*cases.CASTS, *cases.FUSED, *cases.GEMM_CASES, cases.EPILOGUE, *grouped.PRODUCTS, *grouped.CASTS)
    return {case.name for case in (*ops, *cases.CALLS, *cases.WHOLE, grouped.EXPERTS)}


# Of each case and accumulation: geometric mean and lowest over the shapes of BAR_GEMMS.
_GEMM_BARS = {
    ("rowwise", "precise"): (1.07, 0.98),
    ("tensorwise", "precise"): (1.03, 0.97),
    ("rowwise", "fast"): (1.01, 0.97),
    ("tensorwise", "fast"): (1.03, 0.97),
}


def _products() -> list[Bar]:
    bars = []
    for (case, accumulation), (mean, lowest) in _GEMM_BARS.items():
        own, peer = f"tritonfp8 {accumulation}", f"torch {accumulation}"
        common = ("gemm", "scaled_matmul", case, own, peer)
        what = f"{case} GEMM, {accumulation}, over torch._scaled_mm"
        bars += [
            Bar(f"{what}, large shapes", *common, mean, BAR_GEMMS, reduce=MEAN),
            Bar(f"{what}, each large shape", *common, lowest, BAR_GEMMS),
            Bar(f"{what}, M of 1 to 256", *common, 1.0, ("decode",), reduce=MEAN),
        ]
    own, peer = "tritonfp8 precise", "torch precise"
    block = ("gemm", "scaled_matmul", "blockwise", own, peer)
    what = "blockwise GEMM (1x128 by 128x128) over F.scaled_mm"
    grad_weight = ("gemm", "scaled_matmul", "blockwise grad_weight", own, peer)
    what_t = "blockwise grad_weight GEMM (1x128 by 1x128) over F.scaled_mm"
    return [
        *bars,
        Bar(
            "rowwise GEMM, precise over our fast, large shapes",
            "gemm", "scaled_matmul", "rowwise", own, "tritonfp8 fast", 0.95, BAR_GEMMS, reduce=MEAN,
        ),
        Bar(f"{what}, large shapes", *block, 1.10, BAR_GEMMS, reduce=MEAN),
        Bar(f"{what}, M of 1 to 256", *block, 1.15, ("decode",), reduce=MEAN),
        Bar(f"{what}, each shape", *block, 1.0, (*BAR_GEMMS, "decode")),
        Bar(f"{what_t}, large shapes", *grad_weight, 1.0, BAR_GEMMS, reduce=MEAN),
        Bar(f"{what_t}, each large shape", *grad_weight, 0.96, BAR_GEMMS),
        *(
            Bar(
                f"rowwise GEMM with an epilogue of {name}, precise, over the one without",
                "gemm", "scaled_matmul", cases.EPILOGUE.name, name, cases.NO_EPILOGUE, EPILOGUE_SHARE,
                cases.EPILOGUE.sets, reduce=MEAN,
            )
            for name in cases.EPILOGUES
            if name != cases.NO_EPILOGUE
        ),
    ]  # fmt: skip


_COPY_SHARES = {
    "rowwise": 0.93,
    "1x128": 0.93,
    "128x128": 0.93,
    "1x32": 0.90,
    "1x128 both": 0.85,
    "rowwise both": 0.85,
    "tensorwise": 0.88,
    "RMSNorm + quantize": 0.88,
    "SiLU-mul + quantize": 0.88,
}


def _casts() -> list[Bar]:
    return [
        Bar(
            f"cast {case}, each tensor of 64 MB or more: share of copy speed",
            "cast", "quantize", case, "tritonfp8", cases.COPY, bar, ("large",), quantity="share of copy speed",
        )
        for case, bar in _COPY_SHARES.items()
    ]  # fmt: skip


# One bar for each shape of the set "layers", in its order.
_LAYER_BARS = {
    "rowwise precise": (1.55, 1.38, 1.38, 1.18),
    "rowwise fast": (1.60, 1.42, 1.42, 1.20),
    "blockwise precise": (1.50, 1.35, 1.35, 1.18),
    "tensorwise precise": (1.50, 1.35, 1.35, 1.18),
}


def _layers() -> list[Bar]:
    layers = shapes.select("layer", ("layers",))
    bars = [
        Bar(
            f"linear layer, forward + backward, {contender}, over bf16, {'x'.join(map(str, shape.size))}",
            "layer", "linear", "layer", contender, "bf16", bar, ("layers",), shape.name,
        )
        for contender, values in _LAYER_BARS.items()
        for shape, bar in zip(layers, values, strict=True)
    ]  # fmt: skip
    what = "linear layer, forward + backward, tensorwise precise, over torchao tensorwise, each shape"
    mx = "linear layer, forward + backward, mxfp8 precise, over bf16, each shape"
    return [
        *bars,
        Bar(mx, "layer", "linear", "layer", "mxfp8 precise", "bf16", 0.85, ("layers",)),
        Bar(
            what, "layer", "linear", "layer", "tensorwise precise", "torchao tensorwise", 1.0, ("layers",)
        ),
    ]  # fmt: skip


_MODEL_BARS = {
    "llama 8b layers": {
        "rowwise precise": 1.50, "rowwise fast": 1.42, "tensorwise precise": 1.43, "blockwise precise": 1.43
    },
    "qwen 14b layers": {"rowwise precise": 1.47, "blockwise precise": 1.40},
    "gemma layers": {"rowwise precise": 1.42, "blockwise precise": 1.38},
    "hidden 2048 layers": {"rowwise precise": 1.33, "blockwise precise": 1.30},
    "vit h layers": {"rowwise precise": 1.25, "blockwise precise": 1.20},
    "gpt 2 xl layers": {"rowwise precise": 1.22, "blockwise precise": 1.18},
    "hidden 1024 layers": {"rowwise precise": 1.10},
}  # fmt: skip
_FUSED_BARS = {
    "llama 8b layers": {"rowwise precise": 1.38, "tensorwise precise": 1.43, "blockwise precise": 1.38},
    "hidden 2048 layers": {"rowwise precise": 1.20, "blockwise precise": 1.20},
}
_MEMORY_BAR, _MEMORY_SHAPE = 0.85, "llama 8b layers"
_GRAPH_BARS = {"hidden 1024 layers": 1.15}
_TORCHAO = "torchao tensorwise"


def _models() -> list[Bar]:
    bars = []
    fused = {shape: {name + cases.FUSES: bar for name, bar in values.items()} for shape, values in _FUSED_BARS.items()}
    memory = {"quantity": "peak memory ratio", "reduce": HIGHEST, "at_most": True}
    for shape, values in (*_MODEL_BARS.items(), *fused.items()):
        for contender, bar in values.items():
            common = ("model", "model", "model", contender, "bf16")
            what = f"{shape}, forward + backward, {contender}, over bf16"
            bars.append(Bar(what, *common, bar, ALL_MODELS, shape))
            if shape == _MEMORY_SHAPE:
                bars.append(Bar(f"{what}: peak memory", *common, _MEMORY_BAR, ALL_MODELS, shape, **memory))
    for shape, bar in _GRAPH_BARS.items():
        bars.append(
            Bar(
                f"{shape} in a CUDA graph, forward + backward, {cases.GRAPHED_VARIANT}, over bf16", "model", "model",
                cases.MODEL_GRAPH.name, cases.GRAPHED_VARIANT, "bf16", bar, ALL_MODELS, shape,
            )
        )  # fmt: skip
    peer = ("model", "model", "model", "tensorwise precise", _TORCHAO)
    what = f"models, forward + backward, tensorwise precise, over {_TORCHAO}"
    bars += [
        Bar(f"{what}, each", *peer, 1.0, ALL_MODELS),
        Bar(f"{what}, all", *peer, 1.03, ALL_MODELS, reduce=MEAN),
    ]
    for contender in ("rowwise precise", "tensorwise precise", "blockwise precise"):
        what = f"models, forward + backward, {contender}, over {_TORCHAO}, each: peak memory"
        bars.append(Bar(what, "model", "model", "model", contender, _TORCHAO, 1.0, ALL_MODELS, **memory))
    return bars


def _launches() -> list[Bar]:
    most = {"reduce": HIGHEST, "at_most": True}
    calls = [
        Bar(
            f"host time of an eager {case.name} over torch._scaled_mm's",
            "launch", "launch", case.name, "tritonfp8", "torch._scaled_mm", 1.0, ("launch",),
            quantity="host time ratio", **most,
        )
        for case in cases.CALLS if not case.name.endswith("both")
    ]  # fmt: skip
    first = ("first_step", "launch", "first step")
    sets = ("first-step",)
    in_graph = [
        Bar(
            f"host time of a {op} in a compiled graph, in microseconds",
            "launch", "launch", cases.IN_GRAPH.name, op, op, 10.0, ("launch",), quantity="microseconds", **most,
        )
        for op in cases.OPS_IN_GRAPHS
    ]  # fmt: skip
    return [
        *calls,
        *in_graph,
        Bar("first step, cold: seconds beyond bf16's", *first, "cold", "bf16", 10.0, sets, quantity=_MORE, **most),
        Bar(
            "first step, warm: seconds beyond bf16's",
            *first,
            "after warm-up",
            "bf16",
            2.0,
            sets,
            quantity=_MORE,
            **most,
        ),
        Bar("first step, cold: launches beyond the second's", *first, "cold", "bf16", 0, sets, quantity=_EXTRA, **most),
    ]


BARS = (*_products(), *_casts(), *_layers(), *_models(), *_launches())
