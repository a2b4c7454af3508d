"""Host time of an eager call against ``torch._scaled_mm``, and the first training step of a process."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import tritonfp8
from bench.contest import gates
from bench.contest.cases import CALLS, FIRST_STEP, GEMM_CASES, IN_GRAPH, OPS_IN_GRAPHS, Product
from bench.contest.compare import Contender, measures
from bench.contest.peers import epilogue_scaled
from bench.training.direct_calls import HOST_CALLS, OPS_IN_GRAPH, graphs_of_ops
from tritonfp8 import ops

PEER = "torch._scaled_mm"
FIRST_STEP_RECIPE = "rowwise"
PROCESS_SECONDS = 600
ROOT = Path(__file__).resolve().parents[2]
# Folders of compiled code from earlier runs.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")


def cast_contenders(case, x):
    expected = case.expected(x)
    if case.spec is not None and case.spec_t is not None:
        op = lambda: ops.quantize_both(x, *case.spec.args, *case.spec_t.args)  # noqa: E731
    else:
        op = lambda: ops.quantize(x, *case.spec.args)  # noqa: E731
    return [
        Contender("tritonfp8", lambda: lambda: case.run(x), gates.same_bytes(expected), own=True, peer=PEER),
        Contender("tritonfp8 op", lambda: op, gates.same_bytes(expected), own=True, peer=PEER),
    ]


def product_contenders(case, a, b):
    qa, qb = case.quantized(a, b)
    args = (qa.qdata, qa.scale, *qa.spec.args, qb.qdata, qb.scale, *qb.spec.args)
    check = gates.close_gemm(tritonfp8.dequantize(qa) @ tritonfp8.dequantize(qb).t(), "precise")
    return [
        Contender("tritonfp8", lambda: lambda: tritonfp8.scaled_matmul(qa, qb), check, own=True, peer=PEER),
        Contender(
            "tritonfp8 op",
            lambda: lambda: ops.scaled_matmul(*args, None, None, None, torch.bfloat16, "precise"),
            check,
            own=True,
            peer=PEER,
        ),
    ]


@measures("launch", CALLS)
def test_call(benchmark, contest, case, shape):
    m, n, k = shape.size
    a, b = (torch.randn(rows, k, device=contest.device.device, dtype=torch.bfloat16) for rows in (m, n))
    rowwise = next(product for product in GEMM_CASES if product.name == "rowwise")
    peer = Contender(PEER, lambda: epilogue_scaled(*rowwise.quantized(a, b), "precise"))
    own = product_contenders(case, a, b) if isinstance(case, Product) else cast_contenders(case, a)
    contest(benchmark, case, shape, [*own, peer], clock=contest.device.host_seconds)


@measures("launch", (IN_GRAPH,))
def test_op_in_a_compiled_graph(benchmark, contest, case, shape):
    m, n, k = shape.size
    graphs = graphs_of_ops(contest.device.device, m, n, k)

    def contender(name):
        function, argument, _ = graphs[name]
        graph = torch.compile(function, fullgraph=True, backend="eager" if contest.smoke else "inductor")
        return Contender(name, lambda: lambda: graph(argument), own=True)

    def seconds(function):
        return contest.device.idle_host_seconds(function, HOST_CALLS) / OPS_IN_GRAPH

    with torch.no_grad():
        contest(benchmark, case, shape, [contender(name) for name in OPS_IN_GRAPHS], clock=seconds)


def run(command, environment):
    """Run a command and return its last line of output. RuntimeError with its stderr if it fails."""
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:4])} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip().rpartition("\n")[2]


def first_step(shape, device, recipe, *, warm_up, smoke, profile=False):
    """Row fields of the first step of a new process. Its caches are empty, or filled by ``tritonfp8 warmup``.

    With ``profile`` there is also a field with the seconds by package.
    """
    batch, sequence = map(str, shape.size)
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {name: os.path.join(folder, name) for name in CACHES}
        if warm_up:
            tokens = f"{batch}x{sequence}"
            command = ["warmup", "--model", shape.name, "--recipes", recipe, "--tokens", tokens, "--device", device]
            command += ["--workers", "0"] if smoke else []
            run([sys.executable, "-m", "tritonfp8", *command], environment)
        command = ["--model", shape.name, "--recipe", recipe, "--batch", batch, "--sequence", sequence]
        command += ["--device", device, *(["--eager"] if smoke else []), *(["--profile"] if profile else [])]
        return json.loads(run([sys.executable, "-m", "bench.first_step", *command], environment))


@pytest.mark.timeout(4 * PROCESS_SECONDS)
@measures("first_step", (FIRST_STEP,))
def test_first_step(benchmark, contest, case, shape):
    def contender(name, recipe, warm_up, own, peer):
        fields = {}

        def make():
            fields.update(first_step(shape, contest.device.device.type, recipe, warm_up=warm_up, smoke=contest.smoke))
            return lambda: fields["step_seconds"]

        return Contender(name, make, own=own, same_bits=False, peer=peer, fields=fields)

    contenders = [contender("after warm-up", FIRST_STEP_RECIPE, warm_up=True, own=True, peer="bf16")]
    if not contest.smoke:
        # Left out of a smoke test: they take as long as the other and run no other code.
        contenders.insert(0, contender("bf16", "bf16", warm_up=False, own=False, peer=None))
        contenders.append(contender("cold", FIRST_STEP_RECIPE, warm_up=False, own=True, peer="bf16"))
    # The process itself measured the time, and more rounds would read the same number.
    contest(benchmark, case, shape, contenders, clock=lambda seconds: seconds(), rounds=1)
