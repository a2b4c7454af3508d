"""Host time of repeated calls, in microseconds, on the stub of the CUDA driver: the time before the driver is called.

    python tests/compile_only/host_time.py [package ...]

Several packages (such as an older version whose modules were renamed, on PYTHONPATH) are measured in turn, so that a
busy machine slows all alike. Printed is the median of the fastest tenth of all rounds.
"""

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
ROUNDS, CALLS = 400, 50


def cases(package):
    """Calls of a package by name."""
    casts, gemms, recipes = (
        importlib.import_module(f"{package}.{n}") for n in ("launch.casts", "launch.gemms", "recipes")
    )
    import torch

    x, w = (torch.randn(n, 512).bfloat16() for n in (256, 512))
    found = {}
    for name in ("rowwise", "blockwise"):
        gemm = recipes.get(name).output
        spec, spec_b = gemm.lhs.args, gemm.rhs.args
        a, b = casts.quantize(x, *spec), casts.quantize(w, *spec_b)
        args = (*a, *spec, *b, *spec_b, None, None, None, torch.bfloat16, "precise")
        full = (*args[:6], torch.randn(512), "gelu", torch.randn(256, 512), torch.bfloat16, "precise")
        found[f"GEMM {name}"] = lambda args=args, f=gemms.scaled_matmul: f(*args)
        found[f"GEMM {name}, epilogue"] = lambda args=full, f=gemms.scaled_matmul: f(*args)
        found[f"quantize {name}"] = lambda s=spec, f=casts.quantize: f(x, *s)
        found[f"quantize transposed {name}"] = lambda s=spec, f=casts.quantize: f(x, *s, True)
        found[f"quantize both {name}"] = lambda s=spec, f=casts.quantize_both: f(x, *s, *s)
    return found


def microseconds(call):
    """One round of a call."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measure(packages):
    stub.patch()
    for package in packages:
        stub.patch_abilities(importlib.import_module(f"{package}.hardware"))
    by_package = [cases(package) for package in packages]
    gc.disable()
    print(f"{'':32}" + "".join(f"{package:>14}" for package in packages))
    for name in by_package[0]:
        calls = [of_package[name] for of_package in by_package]
        for call in calls * 2:
            call()
        rounds = [[microseconds(call) for call in calls] for _ in range(ROUNDS)]
        fastest = [statistics.median(sorted(times)[: ROUNDS // 10]) for times in zip(*rounds, strict=True)]
        print(f"{name:32}" + "".join(f"{t:14.2f}" for t in fastest), flush=True)


def main(packages):
    if IN_STUB in os.environ:
        return measure(packages)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**stub.environment(folder), IN_STUB: "1"}
        subprocess.run([sys.executable, __file__, *packages], env=environment, check=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["tritonfp8"])
