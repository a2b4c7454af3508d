"""GEMMs at the clocks that the GPU's power allows: ``python -m bench.limits.power``.

Each GEMM runs for a second on random codes, and on codes that are all zero, which switch few transistors and so take
less power. During the run ``nvidia-smi`` samples the clock of the multiprocessors and the power. Where power lowers the
clock, the energy of a TFLOP decides how fast a GEMM is. On a CPU, use ``--smoke``: a small shape, without samples.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import tritonfp8
from bench.contest.cases import BOTH, GEMM_CASES, Product, gemm_flops
from bench.contest.machine import results_folder, write_results

SHAPES = ((8192, 8192, 8192), (16384, 4096, 14336), (32768, 6144, 2048))
SMOKE_SHAPES = ((256, 256, 256),)
CASES = {"rowwise": BOTH, "tensorwise": ("precise",), "blockwise": ("precise",), "blockwise grad_weight": ("precise",)}
OWN, TORCH = "tritonfp8", "torch"
RANDOM, ZERO = "random", "zero"
SECONDS = 1.2
SETTLING_SHARE = 0.5
QUERY = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap")
SAMPLE_MILLISECONDS = 50


class Sample(NamedTuple):
    """One line of ``nvidia-smi``: when it came, clock in MHz, power in W, whether the power limit lowers clocks."""

    seconds: float
    mhz: float
    watts: float
    is_capped: bool

    @classmethod
    def of(cls, line: str) -> Sample:
        """From a line of values of :data:`QUERY`, separated by commas."""
        mhz, watts, capped = (each.strip() for each in line.split(","))
        return cls(time.perf_counter(), float(mhz), float(watts), capped == "Active")


class Sampler:
    """Samples the GPU while it is open; on a CPU it has no samples.

    Raises:
        FileNotFoundError: there is no ``nvidia-smi``, which the samples come from.
    """

    def __init__(self, device: torch.device) -> None:
        self._found: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        if device.type != "cuda":
            return
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
        # By its name, because a process may see some of the GPUs only, under other numbers.
        command += ["-lms", str(SAMPLE_MILLISECONDS), "-i", f"GPU-{torch.cuda.get_device_properties(device).uuid}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._found.append(Sample.of(line))

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()

    def between(self, start: float, end: float) -> dict[str, float]:
        """Medians of the samples between two times of ``time.perf_counter``, as fields of a row; empty without any."""
        found = [sample for sample in self._found if start <= sample.seconds <= end]
        if not found:
            return {}
        return {
            "mhz": statistics.median(sample.mhz for sample in found),
            "watts": statistics.median(sample.watts for sample in found),
            "capped": sum(sample.is_capped for sample in found) / len(found),
        }


def timed(function: Callable[[], Any], device: torch.device, seconds: float, sampler: Sampler) -> dict[str, float]:
    """Seconds of a run in the second half of ``seconds``, when clocks have settled, and what the sampler saw then."""
    function()
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return {"seconds": time.perf_counter() - start}
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    torch.cuda.synchronize(device)
    runs = max(2, int(seconds / (time.perf_counter() - start)))
    settling = int(runs * SETTLING_SHARE)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(runs):
        if i == settling:
            begin.record()
        function()
    end.record()
    end.synchronize()
    now = time.perf_counter()
    took = begin.elapsed_time(end) / 1e3
    return {"seconds": took / (runs - settling), **sampler.between(now - took, now)}


def rows_of(
    case: Product, shape: tuple[int, int, int], device: torch.device, seconds: float, sampler: Sampler
) -> Iterator[dict[str, Any]]:
    """The rows of one case on one shape: both contenders, on both kinds of codes, by turns."""
    m, n, k = shape
    assert case.peer is not None
    for codes in (RANDOM, ZERO):
        make = torch.randn if codes == RANDOM else torch.zeros
        a, b = (make(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
        qa, qb = case.quantized(a, b)
        for accumulation in CASES[case.name]:
            contenders = {
                OWN: lambda qa=qa, qb=qb, kind=accumulation: tritonfp8.scaled_matmul(qa, qb, accumulation=kind),
                TORCH: case.peer(qa, qb, accumulation) if device.type == "cuda" else None,
            }
            for name, function in contenders.items():
                if function is not None:
                    about = {"case": case.name, "accumulation": accumulation, "contender": name, "codes": codes}
                    work = {"shape": shape, "flops": gemm_flops(m, n, k)}
                    yield {**about, **work, **timed(function, device, seconds, sampler)}


def main(
    smoke: Annotated[bool, typer.Option(help="A small shape, once: to test this program, also on a CPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="File. [default: power.json of this GPU's results]")] = None,
) -> None:
    """Measure, print each row, and write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    with Sampler(device) as sampler:
        for shape in SMOKE_SHAPES if smoke else SHAPES:
            for case in GEMM_CASES:
                if case.name not in CASES:
                    continue
                for row in rows_of(case, shape, device, 0.0 if smoke else SECONDS, sampler):
                    rows.append(row)
                    samples = f"{row['mhz']:.0f} MHz {row['watts']:.0f} W" if "mhz" in row else "no samples"
                    rate = f"{row['flops'] / row['seconds'] / 1e12:.0f} TFLOP/s"
                    print(
                        shape,
                        row["case"],
                        row["accumulation"],
                        row["contender"],
                        row["codes"],
                        rate,
                        samples,
                        flush=True,
                    )
    about = {"unit": "seconds, MHz, W; capped: share of the samples", "multiprocessors": multiprocessors}
    write_results(out or results_folder() / "power.json", {**about, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
