"""The cost of ``tritonfp8.monitor``, as a share of training: ``python -m bench.health [--compile]``.

Trains Llama layers of ``--shapes`` for windows of 50 steps, in turns: without ``monitor``, inside it without a sample,
and with a sample in the first step. Prints the median of each, and what a sample every 50 steps adds. On a CPU, use
``--shapes smoke``.
"""

import collections
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

import tritonfp8
from bench import shapes
from bench.contest.machine import write_results
from bench.models import llama
from tritonfp8.training.timers import now, seconds_between
from tritonfp8.workflow.health.monitoring import ROWS

EVERY = 50


def seconds(window: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``window``, until the device has done its work."""
    synchronize(device)
    begin = now(device)
    window()
    end = now(device)
    synchronize(device)
    return seconds_between(begin, end)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(shape: shapes.Shape, recipe: str, compile: bool, rounds: int, rows: Sequence[int]) -> dict[str, float]:
    """Median seconds of a window of :data:`EVERY` steps of each kind; ``sampled N`` measures N rows of an operand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, hidden, _, _, _, batch, sequence = shape.size
    model = llama(shape, device)
    tritonfp8.convert(model, recipe)
    call = torch.compile(model) if compile else model
    x = torch.randn(batch, sequence, hidden, device=device, dtype=torch.bfloat16)

    def step() -> None:
        call(x).float().square().mean().backward()

    def plain() -> None:
        for _ in range(EVERY):
            step()

    def monitored(first_step: int, rows: int = ROWS) -> None:
        # The last steps are outside of the block, whose next sample would begin with them.
        with tritonfp8.monitor(model, every=EVERY, rows=rows, thresholds=(), first_step=first_step) as stats:
            for _ in range(EVERY - 1 - first_step):
                step()
                stats.step()
        for _ in range(1 + first_step):
            step()

    kinds: dict[str, Callable[[], None]] = {"plain": plain, "unsampled": functools.partial(monitored, 1)}
    kinds |= {f"sampled {each}": functools.partial(monitored, 0, each) for each in rows}
    for window in kinds.values():
        window()
    found: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(rounds):
        for kind, window in kinds.items():
            found[kind].append(seconds(window, device))
    return {kind: statistics.median(times) for kind, times in found.items()}


def cost(seconds: Mapping[str, float], rows: int) -> float:
    """What a sample of so many rows every :data:`EVERY` steps adds, as a share of the time of those steps."""
    return seconds[f"sampled {rows}"] / seconds["plain"] - 1


def main(
    models: Annotated[str, typer.Option("--shapes", help="A set of bench.shapes with models.")] = "models",
    only: Annotated[str, typer.Option(help="Only the models of the set whose name contains this.")] = "",
    recipe: str = "rowwise",
    compile: bool = False,
    rounds: int = 5,
    out: Annotated[Path | None, typer.Option(help="A JSON file for the figures.")] = None,
) -> None:
    """Measure, print, and write."""
    measured = []
    for shape in shapes.select("model", [models]):
        if only not in shape.name:
            continue
        found = measure(shape, recipe, compile, rounds, [ROWS])
        plain = found["plain"]
        print(f"{shape}, {recipe}, {'compiled' if compile else 'eager'}, {rounds} rounds")
        for kind, time in found.items():
            print(f"  {kind:<12} {1e3 * time / EVERY:9.2f} ms a step  {time / plain - 1:+.2%}")
        print(f"  a sample of {ROWS} rows every {EVERY} steps adds {cost(found, ROWS):.2%}")
        measured.append(
            {"shape": shape.name, "size": shape.size, "recipe": recipe, "compile": compile, "seconds": found}
        )
    if out is not None:
        write_results(out, {"unit": "seconds of a window of steps", "every": EVERY, "rows": measured})


if __name__ == "__main__":
    typer.run(main)
