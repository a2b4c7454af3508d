"""Choose the configuration of a GEMM. Nothing is benchmarked at call time.

The first of these that exists is taken: the configuration tuned for the GEMM; the one tuned for the nearest M of the
same N and K; the one tuned for the nearest sizes; the configuration with the least predicted time. A tuned entry serves
only up to a limited distance. For the same GEMM the user's entry replaces the shipped one; else the nearer entry wins.
Files are read once a process, at the first choice for a machine.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence

from tritonfp8.compat.hardware import Abilities, machine_key
from tritonfp8.tuning import grouped_tiles, store
from tritonfp8.tuning.grouped_tiles import GroupedGemm
from tritonfp8.tuning.kinds import COLUMNS, ROWS, Key, Kind
from tritonfp8.tuning.matmul_space import INVARIANT_M, MatmulConfig, predicted_time, space, space_accumulation, supports
from tritonfp8.tuning.store import Entries, Entry

__all__ = ["candidates", "choose", "choose_grouped", "grouped_key", "install", "key", "reload", "space", "table"]

MIN_BUCKET = 8
# In octaves (factors of two): distance in M for the same N and K, else Euclidean distance of (M, N, K). Farther off the
# cost model chooses better than the nearest entry (``bench.contest.ranking``); the model of groups was not compared.
MAX_M_OCTAVES = 2.0
MAX_OCTAVES, MAX_OCTAVES_OF_GROUPS = 0.5, 1.0

_ByKind = dict[Kind, Entries]
_tables: dict[str, _ByKind] = {}
_lock = threading.RLock()
_listeners: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """Call ``forget`` whenever earlier choices may have become wrong."""
    _listeners.append(forget)


def bucket(m: int) -> int:
    """The least of 8, 12, 16, 24, 32, 48, ... that is at least ``m``: sizes of M that share a tuned configuration."""
    power = max(MIN_BUCKET, 1 << (m - 1).bit_length())
    between = power * 3 // 4
    return between if m <= between and between > MIN_BUCKET else power


def kind(
    family: str, accumulation: str, rows: tuple[int, int], out_itemsize: int, bare: bool, copy_engine: bool
) -> Kind:
    """The kind of a GEMM; see :func:`choose` for the arguments."""
    # One kernel reads tensorwise and rowwise scales, by a stride of 0 or more; MX scales have one shape.
    a_rows, b_rows = rows if family == "blockwise" else (0, 0)
    return Kind(family, space_accumulation(family, accumulation), a_rows, b_rows, out_itemsize, bare, copy_engine)


def key(product: Kind, m: int, n: int, k: int) -> Key:
    """The key of a GEMM in the tables of tuned configurations."""
    return Key(product, n, k, bucket(m))


def candidates(product: Kind, m: int, n: int, k: int, device: Abilities) -> list[MatmulConfig]:
    """The configurations that can run a GEMM, by predicted time; equal ones in the order of the space.

    Raises:
        RuntimeError: the device has too little shared memory for any.
    """
    specialized = product.copy_engine and device.has_warpgroup_mma
    runnable = [
        config
        for config in space(product.family, product.accumulation)
        if (config.max_m is None or m <= config.max_m)
        and supports(
            config,
            product.family,
            product.out_itemsize,
            product.bare,
            specialized,
            device.max_shared_bytes,
            native_mx=device.has_native_mx,
            column_scales=product.b_rows == 1,
        )
    ]
    if not runnable:
        raise RuntimeError(
            f"{device.name} has {device.max_shared_bytes} bytes of shared memory a block, too little for every "
            f"{product.family} configuration"
        )
    return sorted(runnable, key=lambda config: predicted_time(config, m, n, k, product.out_itemsize, device.num_sms))


@functools.lru_cache(maxsize=4096)
def choose(
    family: str,
    accumulation: str,
    rows: tuple[int, int],
    m: int,
    n: int,
    k: int,
    out_itemsize: int,
    bare: bool,
    copy_engine: bool,
    device: Abilities,
    batch_invariant: bool = False,
) -> MatmulConfig:
    """The configuration of a GEMM, which can always run it.

    Args:
        family: of the product (:func:`tritonfp8.specs.matmul_family`).
        accumulation: ``"fast"`` or ``"precise"``.
        rows: rows of each operand that share a scale.
        m, n, k: sizes of ``[m, k] @ [n, k].T``.
        out_itemsize: bytes of an output element.
        bare: the product has no activation and no residual.
        copy_engine: TMA can address all three matrices.
        device: what it runs on.
        batch_invariant: choose among configurations that give a row the same bits for every ``m``. Of the
            warp-specialized kernel these are all that do not split K, as seen on an H200, but not with a scale for
            each row and 128 of K of both operands. Elsewhere the configuration for one ``m``,
            :data:`~tritonfp8.tuning.matmul_space.INVARIANT_M`.
    """
    product = kind(family, accumulation, rows, out_itemsize, bare, copy_engine)
    if batch_invariant:
        runnable = candidates(product, m, n, k, device)
        alike = [config for config in runnable if config.specialized and config.split_k == 1]
        if alike and product.b_rows != 1:
            return _best(alike, key(product, m, n, k), device)
        m = INVARIANT_M
    return _best(candidates(product, m, n, k, device), key(product, m, n, k), device)


def grouped_key(gemm: GroupedGemm, copy_engine: bool) -> Key:
    """The key of a GEMM of groups in the tables of tuned configurations.

    Args:
        gemm: the GEMM.
        copy_engine: TMA can address all three matrices.
    """
    rows = gemm.rows if gemm.family == "blockwise" else (0, 0)
    accumulation = grouped_tiles.space_accumulation(gemm.family, gemm.accumulation)
    groups = COLUMNS if gemm.sums_tokens else ROWS
    kind = Kind(gemm.family, accumulation, *rows, gemm.out_itemsize, True, copy_engine, groups)
    return Key(kind, *gemm.sizes, bucket(-(-gemm.tokens // max(1, gemm.groups))), gemm.groups)


@functools.lru_cache(maxsize=4096)
def choose_grouped(gemm: GroupedGemm, device: Abilities, copy_engine: bool) -> MatmulConfig:
    """The configuration of a GEMM of groups, which can always run it; ``copy_engine`` as for :func:`grouped_key`."""
    runnable = grouped_tiles.candidates(gemm, device, copy_engine and device.has_warpgroup_mma)
    return _best(runnable, grouped_key(gemm, copy_engine), device)


def _best(runnable: Sequence[MatmulConfig], wanted: Key, device: Abilities) -> MatmulConfig:
    """The tuned one of ``runnable``, or its first if nothing near was tuned."""
    by_name = {config.name: config for config in runnable}
    tuned = table(machine_key(device)).get(wanted.kind, {})
    nearest = _nearest({at: entry for at, entry in tuned.items() if entry.config in by_name}, wanted)
    return runnable[0] if nearest is None else by_name[nearest.config]


def _nearest(entries: Mapping[Key, Entry], wanted: Key) -> Entry | None:
    """The nearest entry, or None if all are too far. Of equally near entries the one with the least sizes is taken."""
    found = [(rank, entry) for at, entry in entries.items() if (rank := _rank(at, wanted)) is not None]
    return min(found, key=lambda each: each[0])[1] if found else None


def _rank(at: Key, wanted: Key) -> tuple[float, ...] | None:
    """Level (0: all sizes but M are the same) and distance in octaves; None if that is too far."""
    sizes, others = (at.n, at.k, at.experts), (wanted.n, wanted.k, wanted.experts)
    of_m = abs(math.log2(at.m / wanted.m))
    if sizes == others:
        return (0, of_m, at.m) if of_m <= MAX_M_OCTAVES else None
    if not (wanted.n and wanted.k):
        return None
    distance = math.hypot(of_m, *(math.log2(a / b) for a, b in zip(sizes, others, strict=True) if a != b))
    limit = MAX_OCTAVES_OF_GROUPS if wanted.experts else MAX_OCTAVES
    return (1, distance, at.m, *sizes) if distance <= limit else None


def table(machine: str) -> Mapping[Kind, Entries]:
    """The tuned entries of a machine by kind, shipped ones and the user's. Reads the files at the first call."""
    found = _tables.get(machine)
    if found is None:
        with _lock:
            found = _tables.get(machine)
            if found is None:
                found = _tables[machine] = _by_kind({**store.read_shipped(machine), **store.read_user(machine)})
    return found


def _by_kind(entries: Entries) -> _ByKind:
    grouped: _ByKind = {}
    for at, entry in entries.items():
        grouped.setdefault(at.kind, {})[at] = entry
    return grouped


def _forget_choices() -> None:
    choose.cache_clear()
    choose_grouped.cache_clear()
    # Cached plans hold earlier choices.
    for forget in _listeners:
        forget()


def install(entries: Entries, machine: str) -> None:
    """Choose by ``entries`` from now on in this process; they replace entries of the same GEMMs."""
    with _lock:
        present = {at: entry for of_kind in table(machine).values() for at, entry in of_kind.items()}
        _tables[machine] = _by_kind({**present, **entries})
        _forget_choices()


def reload() -> None:
    """Forget all entries and choices: the next choice reads the files again."""
    with _lock:
        _tables.clear()
        _forget_choices()
