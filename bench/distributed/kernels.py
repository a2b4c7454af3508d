"""Where the GPU time of a training step over ranks goes, by kinds of kernels.

    torchrun --nproc-per-node 2 -m bench.distributed.kernels --recipes rowwise
    torchrun --nproc-per-node 2 -m bench.distributed.kernels --recipes rowwise --experts 8

The contestants of ``bench.distributed``, or of ``bench.distributed.experts --compile --gather``, on rank 0.
``busy_seconds`` is the time in which any kernel runs: collectives run beside others. What a step takes longer than
that, the host decides.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.contest.machine import command_line, results_folder, write_results
from bench.distributed.compare import Job, Settings, Training, free
from bench.distributed.experts import LayerSettings
from bench.distributed.ranks import joined
from tritonfp8.advice import kernel_seconds

COLLECTIVE = "nccl"
UNTIMED_STEPS, STEPS = 7, 3
MOST = 40


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """The time that is inside of any of the spans ``(begin, end)``."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def kinds(events: Iterable[Any]) -> dict[str, float]:
    """The seconds of kernels by kind, from the profiler's events: a ``name``, and a ``time_range`` in microseconds."""
    found = [(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events]
    collectives = sum(end - begin for name, begin, end in found if COLLECTIVE in name)
    own = kernel_seconds((name, end - begin) for name, begin, end in found if COLLECTIVE not in name)
    return {**own, "collective_seconds": collectives, "busy_seconds": busy((begin, end) for _, begin, end in found)}


def kernels_of(profiled: profile) -> dict[str, Any]:
    """The GPU's time in a profile, in seconds.

    Returns:
        ``span`` from the first kernel to the end of the last; ``busy``, in which a kernel other than NCCL's ran;
        ``kernels``, by name the seconds and the number of calls of the :data:`MOST` that take longest; ``host``, the
        same of what the host called, without what that called.
    """
    # Ranges that a program names have times on the GPU too.
    ran = [e for e in profiled.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    found: dict[str, list[float]] = {}
    for event in ran:
        each = found.setdefault(event.name[:120], [0.0, 0])
        each[0] += event.time_range.elapsed_us() / 1e6
        each[1] += 1
    spans = [(e.time_range.start / 1e6, e.time_range.end / 1e6) for e in ran if COLLECTIVE not in e.name]
    span = max(end for _, end in spans) - min(begin for begin, _ in spans) if spans else 0.0
    longest = sorted(found.items(), key=lambda item: -item[1][0])[:MOST]
    calls = sorted(profiled.key_averages(), key=lambda call: -call.self_cpu_time_total)[:MOST]
    host = {call.key[:120]: [call.self_cpu_time_total / 1e6, call.count] for call in calls}
    return {"span": span, "busy": busy(spans), "kernels": dict(longest), "host": host}


def measure(training: Training, batches: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """The seconds of a step's kernels by kind, and as ``profile`` what :func:`kernels_of` finds in all steps."""
    for batch in batches[:UNTIMED_STEPS]:
        training.step(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for batch in batches[UNTIMED_STEPS : UNTIMED_STEPS + STEPS]:
            training.step(batch)
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type.name == "CUDA" and not e.is_user_annotation]
    by_kind = {kind: seconds / STEPS for kind, seconds in kinds(events).items()}
    return {**by_kind, "profile": {"steps": STEPS, **kernels_of(profiler)}}


def main(
    names: Annotated[str, typer.Option("--recipes", help="Recipes, or files of them, separated by commas.")],
    model: Annotated[str, typer.Option(help="As for bench.distributed.")] = "8b-slice",
    batch_size: Annotated[int, typer.Option(help="Sequences.", min=1)] = 4,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 4096,
    ways: Annotated[str, typer.Option(help="Styles of tensor parallelism, separated by commas.")] = "float8",
    experts: Annotated[int, typer.Option(help="Instead: so many layers of Qwen3-30B-A3B, experts over ranks.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File. [default: kernels-MODEL-tpN.json of this GPU]")] = None,
) -> None:
    """Measure bf16 and each recipe under tensor parallelism over all ranks, or with experts over them."""
    device, size = torch.device("cuda", int(os.environ["LOCAL_RANK"])), int(os.environ["WORLD_SIZE"])
    chosen = tuple(names.split(",")), UNTIMED_STEPS + STEPS, batch_size, seq_len
    settings = (
        LayerSettings("qwen3-30b-a3b", *chosen, size, 1, True, False, layers=experts, gather=True)
        if experts
        else Settings(model, *chosen, 1, size, True, False, ways=tuple(ways.split(",")))
    )
    with joined(device) as ranks:
        job, rows = Job.make(settings, device), []
        for contestant in settings.contestants():
            training = Training(job, contestant)
            rows.append({"contender": contestant.name, **measure(training, job.batches)})
            del training
            torch.compiler.reset()
            free(device)
        if ranks.rank == 0:
            what = f"experts-{experts}-layers-ep{size}" if experts else f"{Path(model).stem}-tp{size}"
            path = out or results_folder() / f"kernels-{what}.json"
            command = f"torchrun --nproc-per-node {size} {command_line().removeprefix('python ')}"
            write_results(path, {"command": command, "settings": vars(settings), "rows": rows})
            for row in rows:
                shown = {key: x for key, x in row.items() if key != "profile"}
                print({key: f"{1e3 * x:.1f} ms" if isinstance(x, float) else x for key, x in shown.items()})


if __name__ == "__main__":
    typer.run(main)
