"""Compile, and on request tune, all kernels of a training step before training starts.

After :func:`warm_up` the compiled kernels are in Triton's disk cache: the first step compiles no kernel of this
package. A warm-up that was killed can be repeated and continues: compiled kernels are found in that cache, tuned
configurations in the store of :mod:`tritonfp8.tuning.store`. Under a launcher one process a machine compiles, rank 0
tunes, and all ranks end with the same choices.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tritonfp8 import recipes, training, tuning
from tritonfp8.compat import hardware
from tritonfp8.training import default_lr, require_train_extra
from tritonfp8.tuning import store
from tritonfp8.warmup.gemms import gemm_of
from tritonfp8.warmup.measure import OpJob, Timer, current, tune
from tritonfp8.warmup.ranks import Ranks, joined, local_rank
from tritonfp8.warmup.record import DTYPES, Call, record_linear, record_model
from tritonfp8.warmup.workers import default_workers, run_jobs

DEFAULT_RECIPES = tuple(name for name in training.DEFAULT_RECIPES if name != training.BASELINE)
DEFAULT_TOKENS = ((training.DEFAULTS["cuda"].batch_size, training.DEFAULTS["cuda"].seq_len),)
DEFAULT_TIMEOUT = 3600.0
MAX_TIMEOUT = 1e8
MAX_SHAPES_BYTES = 2**20
_SIZES = ("m", "n", "k")

Mnk = tuple[int, int, int]
Progress = Callable[[str, int, int], object]
"""Called with the stage (``"tune"``, ``"compile"``, ``"load"``), its number of finished steps and of all steps."""


@dataclass(frozen=True)
class Report:
    """The result of a warm-up on this rank.

    Attributes:
        compiled: number of distinct calls of ops that ran once, so that their kernels are compiled.
        skipped: number of GEMMs that these versions had tuned before.
        tuned: number of GEMMs tuned now.
        failed: errors of all ranks, one line each.
        seconds: wall time.
        interrupted: whether the user stopped it; finished work is kept.
    """

    compiled: int
    skipped: int
    tuned: int
    failed: tuple[str, ...]
    seconds: float
    interrupted: bool = False


@dataclass(frozen=True)
class _Request:
    model: str | None
    shapes: tuple[Mnk, ...]
    recipes: tuple[str, ...]
    tokens: tuple[tuple[int, int], ...]
    dtype: str
    device: torch.device

    def record(self) -> list[Call]:
        """The distinct calls of all requested models, shapes and recipes."""
        calls: dict[Call, None] = {}
        for recipe in self.recipes:
            for mnk in self.shapes:
                calls |= dict.fromkeys(record_linear(mnk, recipe, self.dtype))
            if self.model is not None:
                for tokens in self.tokens:
                    calls |= dict.fromkeys(record_model(self.model, recipe, tokens, self.dtype))
        if not calls:
            raise ValueError(f"nothing to warm up: recipe {', '.join(self.recipes)} calls no op of this package here")
        return list(calls)


def read_shapes(path: str | Path) -> tuple[Mnk, ...]:
    """The linear layers listed in a JSON file: ``[{"m": tokens, "n": out features, "k": in features}, ...]``.

    Raises:
        ValueError: the file cannot be read, or is not such a list; the message names the entry.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SHAPES_BYTES + 1)
        if len(data) > MAX_SHAPES_BYTES:
            raise ValueError(f"larger than {MAX_SHAPES_BYTES} bytes")
        rows = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the shapes in {path} cannot be read: {error}") from error
    wanted = 'a list of {"m": tokens, "n": out features, "k": in features} with integers of at least 1'
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} must hold {wanted}; it holds {_shown(rows)}")
    for number, row in enumerate(rows, 1):
        if not (isinstance(row, dict) and set(row) == set(_SIZES) and all(map(_is_size, row.values()))):
            raise ValueError(f"{path} must hold {wanted}; entry {number} is {_shown(row)}")
    return tuple((row["m"], row["n"], row["k"]) for row in rows)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else text[:97] + "..."


def parse_tokens(text: str) -> tuple[int, int]:
    """``"4x2048"`` (sequences x tokens a sequence) as ``(4, 2048)``; ``"8192"`` as ``(1, 8192)``.

    Raises:
        ValueError: anything else.
    """
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ValueError(f"tokens must be sequences x tokens a sequence, such as 4x2048; got {text!r}")
    sizes = [int(part) for part in parts]
    return (1, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _choose_device(requested: str | None) -> torch.device:
    local = local_rank()
    if requested is None:
        requested = "cuda" if local is None else f"cuda:{local}"
    try:
        device, _ = training.choose_device(requested)
    except ValueError as error:
        raise ValueError(
            f"a warm-up compiles for the GPU it runs on and needs a CUDA GPU with FP8 tensor cores (sm_89 or later): "
            f"{error}. --device cpu goes through the steps and compiles nothing."
        ) from error
    return device


def _are_sizes(rows: object, count: int) -> bool:
    return (
        isinstance(rows, Sequence)
        and not isinstance(rows, str | bytes)
        and all(isinstance(row, Sequence) and len(row) == count for row in rows)
        and all(_is_size(size) for row in rows for size in row)
    )


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _check_types(model: object, shapes: object, names: object, tokens: object, device: object) -> None:
    """Raise TypeError for an argument of a wrong type; the message names it."""
    checks = {
        "model must be a str or None": (model, model is None or isinstance(model, str)),
        "shapes must be a path, None or (m, n, k) of ints of at least 1": (
            shapes, shapes is None or isinstance(shapes, str | Path) or _are_sizes(shapes, 3),
        ),
        "recipes must be a sequence of names": (names, isinstance(names, Sequence) and not isinstance(names, str)),
        "tokens must be a sequence of (sequences, tokens a sequence), ints of at least 1": (
            tokens, _are_sizes(tokens, 2),
        ),
        "device must be a str or None": (device, device is None or isinstance(device, str)),
    }  # fmt: skip
    for what, (value, fits) in checks.items():
        if not fits:
            raise TypeError(f"{what}; got {value!r}")


def _resolve(
    model: str | None,
    shapes: str | Path | Sequence[Mnk] | None,
    names: Sequence[str],
    tokens: Sequence[tuple[int, int]],
    dtype: str,
    device: str | None,
) -> _Request:
    if model is None and shapes is None:
        raise ValueError(
            "a warm-up needs a model or a file of shapes; got neither: give model (--model tiny), or shapes "
            "(--shapes FILE)"
        )
    _check_types(model, shapes, names, tokens, device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if not names:
        raise ValueError(f"at least one recipe is needed; recipes: {', '.join(recipes.names())}")
    for name in names:
        # Layers by their shapes have no names that patterns could match.
        (recipes.of_layers if shapes is None else recipes.get)(name)
    if model is not None:
        require_train_extra()
        default_lr(model)
    if shapes is None or isinstance(shapes, str | Path):
        layers = () if shapes is None else read_shapes(shapes)
    else:
        layers = tuple(shapes)
    wanted = tuple(name for name in dict.fromkeys(names) if name != training.BASELINE)
    return _Request(model, layers, wanted, tuple(dict.fromkeys(tokens)), dtype, _choose_device(device))


def warm_up(
    *,
    model: str | None = None,
    shapes: str | Path | Sequence[Mnk] | None = None,
    recipes: Sequence[str] = DEFAULT_RECIPES,
    tokens: Sequence[tuple[int, int]] = DEFAULT_TOKENS,
    dtype: str = "float32",
    tune: bool = False,
    force: bool = False,
    workers: int | None = None,
    device: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    timer: Timer | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Report:
    """Compile, and on request tune, the kernels of training steps. Call it on every rank, or in a single process.

    Args:
        model: a preset of ``tritonfp8 train`` or the path of a transformers config.
        shapes: linear layers, as ``(m, n, k)`` or as a file of them (:func:`read_shapes`): ``[m, k]`` tokens, ``n`` out
            features.
        recipes: names of built-in recipes.
        tokens: for a model, the sizes of its batches: (sequences, tokens a sequence).
        dtype: dtype of the weights: ``"float32"`` (runs under bfloat16 autocast), ``"bfloat16"`` or ``"float16"``.
        tune: also measure the configurations of the GEMMs and save the fastest.
        force: measure again GEMMs that these versions have measured before.
        workers: processes that compile; None for one a core, at most 8; 0 to compile in this process.
        device: ``"cuda"`` or ``"cuda:N"``; by default the current GPU, under a launcher the GPU of the local rank.
            ``"cpu"`` goes through the same steps with the reference ops, which compile nothing.
        timeout: seconds that a rank waits for the others.
        timer: replaces :func:`tritonfp8.warmup.measure.cuda_seconds`.
        progress: called after every step.

    Returns:
        A :class:`Report`. Ctrl-C sets its ``interrupted`` and finished work is kept; under a launcher Ctrl-C raises
        KeyboardInterrupt.

    Raises:
        ValueError, TypeError: a bad argument, a model that cannot be recorded, no GPU.
        ModuleNotFoundError: ``model`` without the ``train`` extra.
        RuntimeError: another rank failed (for example with a bad argument) or ended, or a CUDA graph is being captured.
    """

    def resolve() -> _WarmUp:
        if not _can_wait(timeout):
            most = f"{MAX_TIMEOUT:.0f}"
            raise ValueError(f"timeout must be a number of seconds above 0 and below {most}; got {timeout!r}")
        request = _resolve(model, shapes, recipes, tokens, dtype, device)
        return _WarmUp(request, _checked_workers(workers), timer, progress)

    # Joined before the arguments are checked: a rank that raised earlier would leave the others waiting for it.
    with joined(timeout if _can_wait(timeout) else DEFAULT_TIMEOUT) as ranks:
        job = ranks.together(resolve)
        assert job is not None
        return job.run(ranks, tune, force)


def _can_wait(timeout: object) -> bool:
    return isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < MAX_TIMEOUT


def _checked_workers(workers: object) -> int:
    if workers is None:
        return default_workers()
    if type(workers) is not int or workers < 0:
        raise ValueError(f"workers must be None or an int of at least 0; got {workers!r}")
    return workers


class _WarmUp:
    """The stages of a warm-up, and their results so far."""

    def __init__(self, request: _Request, workers: int, timer: Timer | None, progress: Progress) -> None:
        self.request, self.workers, self.timer, self.progress = request, workers, timer, progress
        self.device = request.device
        self.machine = hardware.machine_key(hardware.abilities(self.device))
        self.ready: set[Call] = set()
        self.broken: set[Call] = set()
        self.entries: store.Entries = {}
        self.skipped = 0
        self.failed: list[str] = []

    def run(self, ranks: Ranks, with_tuning: bool, force: bool) -> Report:
        """Run all stages, or until Ctrl-C."""
        begin = time.perf_counter()
        interrupted = False
        try:
            with current(self.device):
                self._stages(ranks, with_tuning, force)
        except KeyboardInterrupt:
            if ranks.size > 1:
                raise
            interrupted = True
        seconds = time.perf_counter() - begin
        return Report(len(self.ready), self.skipped, len(self.entries), tuple(self.failed), seconds, interrupted)

    def _stages(self, ranks: Ranks, with_tuning: bool, force: bool) -> None:
        """Run the stages in step with the other ranks. Tuning comes first: its results decide which kernels compile."""
        calls = ranks.together(self.request.record) or []
        if with_tuning:
            ranks.together((lambda: self._tune(calls, force)) if ranks.rank == 0 else None)
        if ranks.size > 1:
            mine = ranks.together(self._user_entries if ranks.local_rank == 0 else None) or {}
            shared = ranks.exchange(store.dump(mine, self.machine))
            ranks.together(lambda: self._take(shared, save=ranks.local_rank == 0))
        ranks.together((lambda: self._compile(calls)) if ranks.local_rank == 0 else None)
        ranks.together(lambda: self._load(calls))
        if ranks.size > 1:
            reports = ranks.exchange(json.dumps(self.failed).encode())
            self.failed = [f"rank {i}: {line}" for i, lines in enumerate(reports) for line in json.loads(lines)]

    def _tune(self, calls: Sequence[Call], force: bool) -> None:
        outcome = tune(
            calls,
            self.device,
            force=force,
            workers=self.workers,
            timer=self.timer,
            progress=lambda done, total: self.progress("tune", done, total),
        )
        self.entries, self.skipped = outcome.entries, outcome.skipped
        self.failed += outcome.failed
        if outcome.interrupted:
            raise KeyboardInterrupt

    def _user_entries(self) -> store.Entries:
        # Entries tuned now may be missing from the file, if it cannot be written.
        return {**store.read_user(self.machine), **self.entries}

    def _take(self, shared: Sequence[bytes], save: bool) -> None:
        """Merge the entries of all machines of this kind; rank 0's take precedence, so that all ranks choose alike."""
        merged: store.Entries = {}
        for data in reversed(shared):
            # Entries of another kind of GPU are dropped: other configurations are fastest there.
            with contextlib.suppress(store.UnusableError):
                merged |= store.parse(data, self.machine)[0]
        if save and merged:
            store.save(merged, self.machine)
        tuning.install(merged, self.machine)

    def _compile(self, calls: Sequence[Call]) -> None:
        jobs = [OpJob(call, self._config_name(call)) for call in calls]
        self._run("compile", calls, jobs, self.workers)

    def _load(self, calls: Sequence[Call]) -> None:
        # A call that failed in a worker would fail here too, and could end this process.
        good = [call for call in calls if call not in self.broken]
        self._run("load", good, [OpJob(call) for call in good], workers=0)

    def _run(self, stage: str, calls: Sequence[Call], jobs: Sequence[OpJob], workers: int) -> None:
        steps = 0

        def done(index: int, error: str | None) -> None:
            nonlocal steps
            steps += 1
            if error is None:
                self.ready.add(calls[index])
            else:
                self.ready.discard(calls[index])
                self.broken.add(calls[index])
                self.failed.append(f"{calls[index]}: {error}")
            self.progress(stage, steps, len(jobs))

        self.progress(stage, 0, len(jobs))
        run_jobs(jobs, self.device, workers, done)

    def _config_name(self, call: Call) -> str | None:
        """The configuration that this process chose. A worker must not choose again: it may read other files."""
        gemm = gemm_of(call, self.device)
        return None if gemm is None else gemm.chosen(self.device).name
