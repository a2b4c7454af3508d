"""Host time of calls, in microseconds, on the stub of the CUDA driver: the time before the driver is called.

Calls with the same sizes, which are repeated; and calls with another number of rows each, which are planned.

    python tests/compile_only/host_time.py [--rounds N] [package ...]

Several packages (such as a later version whose modules were renamed, on PYTHONPATH) are measured in turn, so that a
busy machine slows all alike. Printed is the median of the fastest tenth of all rounds.
"""

import argparse
import functools
import gc
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time

import stub

IN_STUB = "TRITONFP8_ON_STUB"
CALLS = 50
MOST_ROWS = 32768
NEW_ROWS = range(257, MOST_ROWS)


def cases(package):
    """Calls of a package by name."""
    launches, recipes = (importlib.import_module(f"{package}.{name}") for name in ("launch", "recipes"))
    import torch

    call = launches.LAUNCHES
    x, w = (torch.randn(n, 512).bfloat16() for n in (256, 512))
    found = {}
    for name in ("rowwise", "blockwise"):
        gemm = recipes.get(name).output
        (spec,), (spec_b,) = gemm.lhs.args, gemm.rhs.args
        a, b = call["quantize"](x, spec), call["quantize"](w, spec_b)
        plain = (*a, spec, *b, spec_b, None, None, None, torch.bfloat16, "precise")
        full = (*plain[:6], torch.randn(512), "gelu", torch.randn(256, 512), torch.bfloat16, "precise")
        for label, op, args in (
            ("GEMM", "scaled_matmul", plain),
            ("GEMM, epilogue", "scaled_matmul", full),
            ("quantize", "quantize", (x, spec)),
            ("quantize transposed", "quantize", (x, spec, True)),
            ("quantize both", "quantize_both", (x, spec, spec)),
        ):
            found[f"{label} {name}"] = functools.partial(call[op], *args)
        rows = torch.randn(MOST_ROWS, 512).bfloat16()
        codes = call["quantize"](rows, spec)
        ends = torch.full((8,), 256, dtype=torch.int32)
        experts = torch.stack([b[0].view(torch.uint8)] * 8).view(b[0].dtype), torch.stack([b[1]] * 8)
        for label, op, some, args in (
            ("GEMM", "scaled_matmul", codes, plain[2:]),
            ("quantize both", "quantize_both", (rows,), (spec, spec)),
            ("grouped GEMM", "scaled_grouped_matmul", codes, (spec, *experts, spec_b, ends, None, torch.bfloat16)),
        ):
            found[f"{label} {name}, new rows"] = functools.partial(with_new_rows, call[op], some, args, iter(NEW_ROWS))
    return found


def with_new_rows(op, some, args, numbers):
    """Call ``op`` with the first rows of ``some``, another number of them each time."""
    number = next(numbers)
    return op(*(x[:number] for x in some), *args)


def microseconds(call):
    """One round of a call."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(packages, count):
    stub.patch()
    for package in packages:
        stub.patch_abilities(importlib.import_module(f"{package}.compat.hardware"))
    by_package = [cases(package) for package in packages]
    gc.disable()
    print(f"{'':32}" + "".join(f"{package:>14}" for package in packages))
    for name in by_package[0]:
        calls = [of_package[name] for of_package in by_package]
        for call in calls * 2:
            call()
        rounds = [[microseconds(call) for call in calls] for _ in range(count)]
        fastest = [statistics.median(sorted(times)[: count // 10]) for times in zip(*rounds, strict=True)]
        print(f"{name:32}" + "".join(f"{t:14.2f}" for t in fastest), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", default=["tritonfp8"])
    parser.add_argument("--rounds", type=int, default=400, help="at least 10 [default: 400]")
    asked = parser.parse_args()
    if IN_STUB in os.environ:
        return measure(asked.packages, asked.rounds)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**stub.environment(folder), IN_STUB: "1"}
        subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=environment, check=True)


if __name__ == "__main__":
    main()
