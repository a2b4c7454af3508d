"""Measure which configuration is fastest for the products of a model, and keep it for :mod:`tritonfp8.tuning`.

Nothing here runs unless asked for: a training step never measures.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

import tritonfp8
from tritonfp8 import hardware, launch, reference, tuning
from tritonfp8.quantized import Quantized
from tritonfp8.specs import QuantSpec, matmul_family, spec_of
from tritonfp8.testing import MatmulTolerance, assert_matmul_close, sqnr, worst_tile_sqnr
from tritonfp8.tuning import Entries, Entry, Key, MatmulConfig, find, store
from tritonfp8.warmup.record import Call, Layout
from tritonfp8.warmup.workers import default_workers, describe, run_jobs

MAX_CANDIDATES = 12
ROUNDS = 25
# More than any L2; so often that the GPU, while it flushes, falls behind the host, whose time would be measured else.
FLUSH_BYTES, FLUSHES = 2**28, 8
CHECKED_ROWS = 1024
# Fast accumulation loses about 4 dB an octave of K, 65 dB at K = 1024 on normal data; less than this is a defect.
FAST_TOLERANCE = MatmulTolerance(overall=30.0, worst_tile=27.0)
MATMUL = "scaled_matmul"

Timer = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
"""From functions to the seconds that each takes."""


@dataclass(frozen=True)
class Product:
    """A call of ``scaled_matmul`` and what its configuration is filed under."""

    call: Call
    key: Key
    m: int

    @classmethod
    def of(cls, call: Call, device: torch.device) -> Product:
        """The product that ``call`` runs on ``device``."""
        given = call.named()
        m, k = given["a"].shape
        n = given["b"].shape[0]
        a_block, b_block = (spec_of(given[name]).block for name in ("a_spec", "b_spec"))
        matrices = (given["a"], given["b"], Layout((m, n), (n, 1), 0, given["out_dtype"]))
        kind = tuning.kind(
            matmul_family(a_block, b_block),
            given["accumulation"],
            (a_block[0], b_block[0]),
            given["out_dtype"].itemsize,
            given["activation"] is None and given["residual"] is None,
            hardware.abilities(device).has_tma and all(map(_has_tma_layout, matrices)),
        )
        return cls(call, tuning.key(kind, m, n, k), m)

    def candidates(self, device: torch.device) -> list[MatmulConfig]:
        """The configurations worth measuring, the most promising first."""
        runnable = tuning.candidates(self.key.kind, self.m, self.key.n, self.key.k, hardware.abilities(device))
        return runnable[:MAX_CANDIDATES]

    def chosen(self, device: torch.device) -> MatmulConfig:
        """The configuration that a launch takes now."""
        kind = self.key.kind
        return tuning.choose(
            kind.family, kind.accumulation, (kind.a_rows, kind.b_rows), self.m, self.key.n, self.key.k,
            kind.out_itemsize, kind.bare, kind.copy_engine, hardware.abilities(device),
        )  # fmt: skip

    def __str__(self) -> str:
        kind = self.key.kind
        return f"{kind.family} {kind.accumulation} [{self.m}, {self.key.n}, {self.key.k}]"


def _has_tma_layout(layout: Layout) -> bool:
    return launch.has_tma_layout(torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta"))


def _launch(args: Sequence[Any], config: MatmulConfig, out: Tensor | None = None) -> Tensor:
    return launch.scaled_matmul(*args, config=config, out=out)


def _refer(args: Sequence[Any], config: MatmulConfig, out: Tensor | None = None) -> Tensor:
    return reference.scaled_matmul(*args)


# On a CPU there is one way to multiply: the steps around it can be tried out there.
_MULTIPLY: Mapping[str, Callable[..., Tensor]] = {"cuda": _launch, "cpu": _refer}


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` the current one in the ``with`` block: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True)
class OpJob:
    """Run a call once, on zeros: it compiles what it launches. A product can be run in one configuration by name."""

    call: Call
    config: str | None = None

    def run(self, device: torch.device) -> None:
        """Run it and wait for it."""
        args = self.call.arguments(device)
        if self.config is None:
            self.call.overload(*args)
        else:
            kind = Product.of(self.call, device).key.kind
            config = find(kind.family, kind.accumulation, self.config)
            assert config is not None
            _MULTIPLY[device.type](args, config)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            # Others need the memory.
            torch.cuda.empty_cache()


def products(calls: Sequence[Call], device: torch.device) -> list[Product]:
    """The products among ``calls`` that are launched in a configuration, one of each key."""
    found: dict[Key, Product] = {}
    for call in calls:
        if call.op == MATMUL and math.prod((*call.named()["a"].shape, *call.named()["b"].shape)):
            product = Product.of(call, device)
            found.setdefault(product.key, product)
    return list(found.values())


def cuda_seconds(functions: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each function on the current GPU, L2 flushed before each run.

    Of the GPU alone, as long as it takes the host less than half a millisecond to call one (on a GPU of 4 TB/s). The
    functions take turns, each round beginning with another: a GPU slows down as it warms up.
    """
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events: list[list[tuple[Any, Any]]] = [[] for _ in functions]
    for function in functions:
        function()
    for first in range(rounds):
        for offset in range(len(functions)):
            i = (first + offset) % len(functions)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(FLUSHES):
                flushed.zero_()
            start.record()
            functions[i]()
            end.record()
            events[i].append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in pairs) / 1e3 for pairs in events]


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` did.

    Attributes:
        entries: what was measured now, by key.
        skipped: how many products had been tuned by these versions before.
        failed: what went wrong, a line each.
        interrupted: Ctrl-C ended it; the entries are saved.
    """

    entries: Entries
    skipped: int
    failed: tuple[str, ...]
    interrupted: bool = False


def tune(
    calls: Sequence[Call],
    device: torch.device | str = "cuda",
    *,
    force: bool = False,
    workers: int | None = None,
    timer: Timer | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Tuned:
    """Measure the products among ``calls`` and choose by the result from now on, in this process and later ones.

    Each is tried in its :data:`MAX_CANDIDATES` most promising configurations, compiled in parallel, on random normal
    data. One whose output is not within the tolerances (:mod:`tritonfp8.testing`) is not timed. The fastest is saved
    before the next product is begun.

    Args:
        calls: what a step calls: see :func:`tritonfp8.warmup.record.record_model` and ``record_linear``.
        device: where.
        force: measure again what these versions of triton and tritonfp8 have measured.
        workers: processes that compile; None for one a core, at most 8; 0 to compile in this process.
        timer: in place of :func:`cuda_seconds`.
        progress: told how many steps are done, and how many there are.

    Raises:
        RuntimeError: a CUDA graph is being captured.
        ValueError: a device other than a GPU, without a ``timer``.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tuning cannot run while a CUDA graph is captured: tune before, with tritonfp8 warmup --tune"
        )
    if timer is None and torch.device(device).type != "cuda":
        raise ValueError(f"tuning times kernels and needs a CUDA GPU, or a timer; got device {str(device)!r}")
    device = hardware.with_index(device)
    machine = hardware.machine_key(hardware.abilities(device))
    wanted = products(calls, device)
    pending = [product for product in wanted if force or not _is_tuned(product.key, machine)]
    tuning_run = _Tuning(pending, device, timer or cuda_seconds, progress)
    interrupted = False
    try:
        with current(device):
            tuning_run.compile(default_workers() if workers is None else workers)
            tuning_run.measure(machine)
    except KeyboardInterrupt:
        interrupted = True
    return Tuned(tuning_run.entries, len(wanted) - len(pending), tuple(tuning_run.failed), interrupted)


class _Tuning:
    """The products to tune, and what came of them so far."""

    def __init__(
        self, pending: Sequence[Product], device: torch.device, timer: Timer, progress: Callable[[int, int], object]
    ) -> None:
        self.device, self.timer, self.progress = device, timer, progress
        self.entries: Entries = {}
        self.failed: list[str] = []
        self.tried = [(product, config) for product in pending for config in product.candidates(device)]
        self.compiled: dict[Product, list[MatmulConfig]] = {product: [] for product in pending}
        self.steps = 0
        self._step(0)

    def _step(self, by: int = 1) -> None:
        self.steps += by
        self.progress(self.steps, len(self.tried) + len(self.compiled))

    def compile(self, workers: int) -> None:
        """Compile every candidate; those that fail are out."""

        def done(index: int, error: str | None) -> None:
            product, config = self.tried[index]
            if error is None:
                self.compiled[product].append(config)
            else:
                self.failed.append(f"{product} in {config.name}: {error}")
            self._step()

        run_jobs([OpJob(product.call, config.name) for product, config in self.tried], self.device, workers, done)

    def measure(self, machine: str) -> None:
        """Find the fastest of each product, and save it."""
        for product, configs in self.compiled.items():
            try:
                self.entries[product.key] = _fastest(product, configs, self.device, self.timer, self.failed)
            except Exception as error:
                # One product that cannot be measured (memory, say) must not cost the others.
                self.failed.append(f"{product}: {describe(error)}")
            else:
                # All of them: what could not be written a moment ago may be now.
                store.save(self.entries, machine)
                tuning.install(self.entries, machine)
            self._step()


def versions() -> dict[str, str]:
    """The versions that an entry measured now carries."""
    return {"triton": triton.__version__, "tritonfp8": tritonfp8.__version__}


def _is_tuned(key: Key, machine: str) -> bool:
    entry = tuning.table(machine).get(key.kind, {}).get(key)
    if entry is None or find(key.kind.family, key.kind.accumulation, entry.config) is None:
        return False
    return {"triton": entry.triton, "tritonfp8": entry.tritonfp8} == versions()


def _fastest(
    product: Product, configs: Sequence[MatmulConfig], device: torch.device, timer: Timer, failed: list[str]
) -> Entry:
    args = _operands(product.call, device)
    multiply = _MULTIPLY[device.type]
    given = product.call.named()
    # Poisoned: what a configuration leaves unwritten shows.
    out = torch.full((product.m, product.key.n), torch.nan, dtype=given["out_dtype"], device=device)
    expected = reference.scaled_matmul(*_with_out_dtype(args, product.call, torch.float32))
    right = []
    for config in configs:
        try:
            _check(multiply(args, config, out.fill_(torch.nan)), expected, given["out_dtype"], product)
            right.append(config)
        except Exception as error:
            failed.append(f"{product} in {config.name}: {describe(error)}")
    seconds = timer([functools.partial(multiply, args, config, out) for config in right]) if right else []
    timed = [(s, i) for i, s in enumerate(seconds) if math.isfinite(s) and s > 0]
    if not timed:
        raise RuntimeError(f"none of {len(configs)} configurations ran")
    best, i = min(timed)
    return Entry(right[i].name, round(best * 1e6, 3), **versions())


def _check(out: Tensor, expected: Tensor, out_dtype: torch.dtype, product: Product) -> None:
    """Raise AssertionError where ``out`` is wrong. In bands of rows: in float64, a whole one may not fit."""
    for rows in _bands(len(out)):
        if product.key.kind.accumulation == "precise":
            assert_matmul_close(out[rows], expected[rows], out_dtype)
            continue
        overall, worst = sqnr(out[rows], expected[rows]), worst_tile_sqnr(out[rows], expected[rows])
        if not (overall >= FAST_TOLERANCE.overall and worst >= FAST_TOLERANCE.worst_tile):
            raise AssertionError(f"SQNR of {overall:.2f} dB, {worst:.2f} in the worst tile; required {FAST_TOLERANCE}")


def _bands(rows: int) -> Iterator[slice]:
    return (slice(first, first + CHECKED_ROWS) for first in range(0, rows, CHECKED_ROWS))


def _operands(call: Call, device: torch.device) -> list[Any]:
    """The call's arguments with random normal data: zeros and ones flatter a product."""
    generator = torch.Generator(device).manual_seed(0)
    given = call.named()
    values = dict(given)
    for name in ("a", "b"):
        q = _normal_quantized(given[name], spec_of(given[f"{name}_spec"]), generator, device)
        values |= {name: q.qdata, f"{name}_scale": q.scale}
    for name in ("bias", "residual"):
        if given[name] is not None:
            values[name] = torch.randn(given[name].shape, generator=generator, device=device).to(given[name].dtype)
    return list(values.values())


def _normal_quantized(layout: Layout, spec: QuantSpec, generator: torch.Generator, device: torch.device) -> Quantized:
    x = torch.randn(layout.shape, generator=generator, device=device)
    q = tritonfp8.quantize(x, spec)
    if q.qdata.stride() == layout.stride:
        return q
    return Quantized(layout.zeros(device).copy_(q.qdata), q.scale, spec)


def _with_out_dtype(args: Sequence[Any], call: Call, dtype: torch.dtype) -> list[Any]:
    return [dtype if name == "out_dtype" else arg for name, arg in zip(call.named(), args, strict=True)]
