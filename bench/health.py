"""The cost of ``tritonfp8.monitor``, as a share of training: ``python -m bench.health [--compile]``.

Trains Llama layers of ``--shapes`` for windows of 50 steps, in turns: without ``monitor``, inside it without a sample,
and with a sample in the first step. Prints the median of each, and what a sample every 50 steps adds. On a CPU, use
``--shapes smoke``.
"""

import argparse
import collections
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

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


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="models", help="a set of bench.shapes with models")
    parser.add_argument("--only", default="", help="only the models of the set whose name contains this")
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[ROWS], help="rows of an operand that are measured")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    measured = []
    for shape in shapes.select("model", [args.shapes]):
        if args.only not in shape.name:
            continue
        found = measure(shape, args.recipe, args.compile, args.rounds, args.rows)
        plain = found["plain"]
        print(f"{shape}, {args.recipe}, {'compiled' if args.compile else 'eager'}, {args.rounds} rounds")
        for kind, time in found.items():
            print(f"  {kind:<12} {1e3 * time / EVERY:9.2f} ms a step  {time / plain - 1:+.2%}")
        for rows in args.rows:
            print(f"  a sample of {rows} rows every {EVERY} steps adds {cost(found, rows):.2%}")
        measured.append(
            {"shape": shape.name, "size": shape.size, "recipe": args.recipe, "compile": args.compile, "seconds": found}
        )
    if args.out is not None:
        write_results(args.out, {"unit": "seconds of a window of steps", "every": EVERY, "rows": measured})


if __name__ == "__main__":
    main()
