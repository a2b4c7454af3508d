"""Casts: GPU time against Inductor on the same tensor, and speed against the speed of a copy in the same rounds."""

import functools

import torch

from bench.contest import gates
from bench.contest.cases import ALIKE_COPY, CASTS, COPY
from bench.contest.compare import Contender, measures
from bench.contest.peers import compiled
from bench.shapes import SMOKE, select

COPY_BYTES = 2**30
COMPILED_SETS = ("large", SMOKE)


@functools.cache
def buffers(device, size):
    return tuple(torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))


def is_compiled_for(case, shape, contest):
    """Whether to measure Inductor. Compiling takes long: large tensors only, and with --quick one for each set."""
    left_out = contest.quick and shape != select("cast", [shape.set])[0]
    return shape.set in COMPILED_SETS and case.takes_whole_blocks(shape.size) and not left_out


@measures("cast", CASTS)
def test_quantize(benchmark, contest, case, shape):
    device = contest.device.device
    size = COPY_BYTES // 2 if not contest.smoke else 2**10
    source, target = buffers(device, size)
    x = torch.randn(shape.size, device=device, dtype=torch.bfloat16)
    inputs = case.inputs(x)
    expected = case.expected(*inputs)
    moved = {"bytes": case.moved_bytes(shape.size, x.element_size())}
    alike = [buffer[: moved["bytes"] // 2] for buffer in (source, target)]
    contenders = [
        Contender(
            "tritonfp8",
            lambda: lambda: case.run(*inputs),
            gates.same_bytes(expected),
            own=True,
            peer=COPY,
            fields=moved,
        ),
        Contender(COPY, lambda: lambda: target.copy_(source), fields={"bytes": 2 * size}),
        # The copy speed at this size: a launch has a fixed cost. Limited to the size of the large copy.
        Contender(
            ALIKE_COPY, lambda: lambda: alike[1].copy_(alike[0]), peer=COPY, fields={"bytes": 2 * alike[0].numel()}
        ),
    ]
    if is_compiled_for(case, shape, contest):
        plain = compiled(lambda: case.plain(*inputs), contest.smoke)
        contenders.append(Contender("inductor", lambda: plain, gates.nearly_same_bytes(expected[0]), fields=moved))
    contest(benchmark, case, shape, contenders)
