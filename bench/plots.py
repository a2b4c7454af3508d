"""Plots of the measured rows. Each function returns a figure, or None if its rows are missing."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from matplotlib.figure import Figure

from bench.contest.cases import ALIKE_COPY, COPY, EPILOGUE, LAYER, MODEL_KERNELS
from bench.tables import over_peer, size_name, with_peers

Row = Mapping[str, Any]
MARKERS = "osD^vP*X<>"


def _measured(rows: Iterable[Row], suite: str) -> list[Row]:
    return [row for row in rows if row["suite"] == suite and row["seconds"] is not None]


def _rate(row: Row, what: str) -> float:
    return row[what] / row["seconds"] / 1e12


def _axes(width: float, height: float) -> Any:
    return Figure(figsize=(width, height), layout="constrained").subplots()


def _scatter(axes: Any, rows: Iterable[tuple[Row, float, float]]) -> None:
    """Plot ``(row, x, y)``: one colour per case, or per contender if there is one case; one marker per contender.

    The points of peers are hollow.
    """
    rows = list(rows)
    hue = "case" if len({row["case"] for row, _, _ in rows}) > 1 else "contender"
    hues: dict[str, int] = {}
    contenders: dict[str, int] = {}
    groups: dict[tuple[str, str, str, bool], list[tuple[float, float]]] = {}
    for row, x, y in rows:
        groups.setdefault((row["case"], row["contender"], row[hue], row["own"]), []).append((x, y))
    for (case, contender, key, own), points in groups.items():
        color = f"C{hues.setdefault(key, len(hues)) % 10}"
        marker = MARKERS[contenders.setdefault(contender, len(contenders)) % len(MARKERS)]
        face = color if own else "none"
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, label=f"{case}: {contender}", marker=marker, edgecolors=color, facecolors=face)


def _legend(axes: Any) -> None:
    axes.figure.legend(fontsize="x-small", loc="outside lower center", ncols=3)


def _copy_speed(rows: Iterable[Row]) -> float | None:
    speeds = [_rate(row, "bytes") for row in _measured(rows, "quantize") if row["contender"] == COPY]
    return statistics.median(speeds) if speeds else None


def casts(rows: list[Row]) -> Figure | None:
    """Speed of the casts by tensor size, with the speed of a copy."""
    found = [row for row in _measured(rows, "quantize") if row["contender"] not in (COPY, ALIKE_COPY)]
    if not found:
        return None
    axes = _axes(9, 7)
    _scatter(axes, [(row, row["shape"][0] * row["shape"][1] / 1e6, _rate(row, "bytes")) for row in found])
    if (copy := _copy_speed(rows)) is not None:
        axes.axhline(copy, color="black", linestyle="--", label="copy (read + write)")
    axes.set(xscale="log", xlabel="million elements", ylabel="TB/s of necessary traffic", title="Casts")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return axes.figure


def products(rows: list[Row]) -> Figure | None:
    """Roofline of the GEMMs. The roofs are the copy speed and the fastest GEMM of the same data."""
    found = [row for row in _measured(rows, "scaled_matmul") if "bytes" in row]
    if not found:
        return None
    axes = _axes(9, 7)
    _scatter(axes, [(row, row["flops"] / row["bytes"], _rate(row, "flops")) for row in found])
    top = max(_rate(row, "flops") for row in found)
    if (copy := _copy_speed(rows)) is not None:
        intensities = sorted({top / copy, *(row["flops"] / row["bytes"] for row in found)})
        roof = [min(top, copy * intensity) for intensity in intensities]
        axes.plot(intensities, roof, color="black", linestyle="--", label="roof: copy speed, fastest GEMM")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title="GEMMs")
    _legend(axes)
    return axes.figure


def _speed_ups(rows: list[Row], suite: str, title: str) -> Figure | None:
    ratios = [
        (row, ratio) for row, peer in with_peers(_measured(rows, suite)) if (ratio := over_peer(row, peer)) is not None
    ]
    if not ratios:
        return None
    shapes = list(dict.fromkeys(size_name(row["shape"]) for row, _ in ratios))[::-1]
    axes = _axes(9, 4 + 0.25 * len(shapes))
    _scatter(axes, [(row, ratio, shapes.index(size_name(row["shape"]))) for row, ratio in ratios])
    axes.axvline(1, color="black", linestyle="--")
    axes.set_yticks(range(len(shapes)), shapes)
    axes.grid(axis="y", alpha=0.3)
    axes.set(xlabel="speed-up", title=title)
    _legend(axes)
    return axes.figure


def product_speed_ups(rows: list[Row]) -> Figure | None:
    """Speed of GEMMs over torch's with the same accumulation, by shape."""
    over_torch = [row for row in rows if row["case"] != EPILOGUE.name]
    return _speed_ups(over_torch, "scaled_matmul", "GEMMs over torch's (M x N x K)")


def layer_speed_ups(rows: list[Row]) -> Figure | None:
    """Speed of linear layers over bf16, by shape."""
    layers = [row for row in rows if row["case"] == LAYER.name]
    return _speed_ups(layers, "linear", "Linear layer, forward + backward, over bf16 (M x K x N)")


def model_speed_ups(rows: list[Row]) -> Figure | None:
    """Speed of Llama layers over bf16, by shape."""
    timed = [row for row in rows if row["case"] != MODEL_KERNELS.name]
    return _speed_ups(timed, "model", "Llama layers, forward + backward, over bf16")


def _who(row: Row) -> tuple[object, ...]:
    return tuple(row["shape"]), row["contender"]


def _no_gemms(row: Row) -> float:
    """Seconds in other kernels than GEMMs. Older data has no casts apart."""
    return float(row.get("cast_seconds", 0.0) + row["other_seconds"])


def layer_breakdown(rows: list[Row]) -> Figure | None:
    """Time of a linear layer in GEMMs, in other kernels, and between kernels."""
    found = [row for row in _measured(rows, "linear") if "gemm_seconds" in row][::-1]
    if not found:
        return None
    axes = _axes(9, 2 + 0.25 * len(found))
    left = [0.0] * len(found)
    whole = {_who(row): row["seconds"] for row in _measured(rows, "linear") if row["case"] == LAYER.name}
    gaps = [max(0.0, whole.get(_who(row), 0.0) - row["gemm_seconds"] - _no_gemms(row)) for row in found]
    for label, parts in (
        ("GEMMs", [row["gemm_seconds"] for row in found]),
        ("casts and other kernels", [_no_gemms(row) for row in found]),
        ("no kernel running", gaps),
    ):
        axes.barh(range(len(found)), [1e3 * part for part in parts], left=left, label=label)
        left = [start + 1e3 * part for start, part in zip(left, parts, strict=True)]
    axes.set_yticks(range(len(found)), [f"{size_name(row['shape'])} {row['contender']}" for row in found])
    axes.set(xlabel="ms", title="Linear layer, forward + backward (M x K x N)")
    axes.legend()
    return axes.figure


PLOTS: dict[str, Callable[[list[Row]], Figure | None]] = {
    "casts.png": casts,
    "products.png": products,
    "product_speed_ups.png": product_speed_ups,
    "layer_speed_ups.png": layer_speed_ups,
    "model_speed_ups.png": model_speed_ups,
    "layer_breakdown.png": layer_breakdown,
}
