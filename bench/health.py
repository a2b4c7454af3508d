"""The cost of ``tritonfp8.inspect``, as a share of a training step: ``python -m bench.health [--compile]``.

Trains Llama layers of ``--shapes`` in four kinds of steps, in turns: without ``inspect``, the same in eager mode,
unsampled inside of ``inspect``, and sampled. Prints the median of each, and the share that a sample every 50 steps
adds. On a CPU, use ``--shapes smoke``.
"""

import argparse
import collections
import functools
import statistics
from collections.abc import Callable, Sequence

import torch

import tritonfp8
from bench import shapes
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="models", help="a set of bench.shapes with models")
    parser.add_argument("--recipe", default="rowwise")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rows", type=int, nargs="+", default=[ROWS], help="rows of an operand that are measured")
    args = parser.parse_args()
    for shape in shapes.select("model", [args.shapes]):
        found = measure(shape, args.recipe, args.compile, args.rounds, args.rows)
        plain = found["plain"]
        print(f"{shape}, {args.recipe}, {'compiled' if args.compile else 'eager'}, {args.rounds} rounds")
        for kind, time in found.items():
            print(f"  {kind:<12} {1e3 * time:9.2f} ms  {time / plain - 1:+.1%}")
        for rows in args.rows:
            sampled = found[f"sampled {rows}"]
            share = ((EVERY - 1) * found["unsampled"] + sampled) / (EVERY * plain) - 1
            print(
                f"  a sample of {rows} rows every {EVERY} steps costs {(sampled - plain) / (EVERY * plain):.2%} of a "
                f"step; with the unsampled ones {share:+.2%}"
            )


if __name__ == "__main__":
    main()
