"""Jobs of worker processes in the tests of warm-up, and the program that the tests start as ranks of a launcher."""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

SHAPES = ((64, 48, 32), (256, 48, 32))


@dataclasses.dataclass(frozen=True)
class Touch:
    """Sleep, then end by a signal, raise an error, or write a file with the process id and the device."""

    path: str
    error: str | None = None
    kill: int | None = None
    nap: float = 0.0

    def run(self, device):
        time.sleep(self.nap)
        if self.kill is not None:
            os.kill(os.getpid(), self.kill)
        if self.error is not None:
            raise RuntimeError(self.error)
        Path(self.path).write_text(f"{os.getpid()} {device}")


def last_is_fastest(functions):
    return [1.0 / (i + 1) for i in range(len(functions))]


def choices():
    """The chosen configuration of each GEMM of the shapes, by GEMM."""
    from tritonfp8.warmup import measure
    from tritonfp8.warmup.record import record_linear

    calls = [call for mnk in SHAPES for call in record_linear(mnk, "rowwise", "bfloat16")]
    found = measure.distinct_gemms(calls, "cpu")
    return {str(gemm): gemm.chosen("cpu").name for gemm in found}


def killed_while_tuning():
    """Tune on the CPU; the process is killed when it times the third GEMM."""
    from tritonfp8.warmup import run as warmup

    timed = []

    def timer(functions):
        timed.append(functions)
        if len(timed) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return last_is_fastest(functions)

    warmup.warm_up(shapes=SHAPES, recipes=["rowwise"], tune=True, device="cpu", workers=0, timer=timer)


def rank_of_two_machines():
    """Tune on rank 0, then fail there. Each rank acts as a machine with its own home, and writes what it saw."""
    rank = int(os.environ["RANK"])
    home = Path(sys.argv[2]) / str(rank)
    os.environ |= {"XDG_CACHE_HOME": str(home), "LOCAL_RANK": "0"}
    import torch.distributed as dist

    from tritonfp8.warmup import run as warmup

    def refuse(functions):
        raise AssertionError("only rank 0 measures")

    options = {"shapes": SHAPES, "recipes": ["rowwise"], "tune": True, "device": "cpu", "workers": 0, "timeout": 60}
    report = warmup.warm_up(**options, timer=refuse if rank else last_is_fastest)
    seen = {"report": dataclasses.asdict(report), "choices": choices(), "errors": [], "bad": [], "waited": 0.0}
    dist.init_process_group("gloo")
    for bad in ({"dtype": "int8"}, {"recipes": 3}, {"timeout": "soon"}, {"workers": -1}):
        begin = time.monotonic()
        try:
            warmup.warm_up(**{**options, **(bad if rank else {})})
        except (ValueError, TypeError, RuntimeError) as error:
            seen["bad"].append(f"{type(error).__name__}: {error}")
        seen["waited"] = max(seen["waited"], time.monotonic() - begin)
    real, warmup.tune = warmup.tune, lambda *args, **more: (_ for _ in ()).throw(RuntimeError("out of luck"))
    try:
        warmup.warm_up(**options)
    except RuntimeError as error:
        seen["errors"].append(str(error))
    warmup.tune = real
    # The program's own process group still works after the warm-up.
    dist.barrier()
    if rank == 1:
        try:
            warmup.warm_up(**{**options, "timeout": 2.0}, timer=refuse)
        except RuntimeError as error:
            seen["errors"].append(str(error))
    (home / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
