"""The cost of ``tritonfp8.inspect``, as a share of a training step: ``python -m bench.health [--compile]``.

Trains Llama layers of ``--shapes`` in four kinds of steps, in turns: without ``inspect``, the same in eager mode,
unsampled inside of ``inspect``, and sampled. Prints the median of each, and the share that a sample every 50 steps
adds. On a CPU, use ``--shapes smoke``.
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
from tritonfp8.workflow.health.inspection import ROWS

EVERY = 50


def seconds(step: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of ``step``; ``before`` is not timed."""
    before()
    synchronize(device)
    begin = now(device)
    step()
    end = now(device)
    synchronize(device)
    return seconds_between(begin, end)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(shape: shapes.Shape, recipe: str, compile: bool, rounds: int, rows: Sequence[int]) -> dict[str, float]:
    """Median seconds of a step of each kind; ``sampled N`` measures N rows of an operand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, hidden, _, _, _, batch, sequence = shape.size
    model = llama(shape, device)
    tritonfp8.convert(model, recipe)
    call = torch.compile(model) if compile else model
    x = torch.randn(batch, sequence, hidden, device=device, dtype=torch.bfloat16)

    def step() -> None:
        call(x).float().square().mean().backward()

    def eager() -> None:
        with torch.compiler.set_stance("force_eager"):
            step()

    def sampled(rows: int) -> None:
        with tritonfp8.inspect(model, every=EVERY, rows=rows, thresholds=()) as stats:
            step()
            stats.step()

    found: dict[str, list[float]] = collections.defaultdict(list)
    for round in range(rounds + 2):
        times = {"plain": seconds(step, device), "eager": seconds(eager, device)}
        times |= {f"sampled {each}": seconds(functools.partial(sampled, each), device) for each in rows}
        with tritonfp8.inspect(model, every=EVERY, thresholds=()) as stats:
            # Step 0 is sampled. It is not timed.
            times["unsampled"] = seconds(lambda: (step(), stats.step()), device, lambda: (step(), stats.step()))
        if round >= 2:
            for kind, each in times.items():
                found[kind].append(each)
    return {kind: statistics.median(times) for kind, times in found.items()}


def cost(seconds: Mapping[str, float], rows: int) -> float:
    """What a sample of so many rows every :data:`EVERY` steps adds, as a share of a step."""
    return (seconds[f"sampled {rows}"] - seconds["plain"]) / (EVERY * seconds["plain"])


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="models", help="a set of bench.shapes with models")
    parser.add_argument("--only", default="", help="only the models of the set whose name contains this")
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
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
            print(f"  {kind:<12} {1e3 * time:9.2f} ms  {time / plain - 1:+.1%}")
        for rows in args.rows:
            print(f"  a sample of {rows} rows every {EVERY} steps costs {cost(found, rows):.2%} of a step")
        measured.append(
            {"shape": shape.name, "size": shape.size, "recipe": args.recipe, "compile": args.compile, "seconds": found}
        )
    if args.out is not None:
        write_results(args.out, {"unit": "seconds a step", "every": EVERY, "rows": measured})


if __name__ == "__main__":
    main()
