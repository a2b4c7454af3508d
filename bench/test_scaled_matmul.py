"""Matrix products: GPU time against torch's own on the same operands, and against bf16."""

import torch

import tritonfp8
from bench import gates
from bench.cases import PRODUCTS, gemm_bytes, gemm_flops
from bench.contest import Contender, measures


def contenders_of(case, accumulation, qa, qb, expected, work):
    """The package's product with this accumulation, and torch's."""
    check = gates.close_product(expected, accumulation)
    own = Contender(
        f"tritonfp8 {accumulation}",
        lambda: lambda: tritonfp8.scaled_matmul(qa, qb, accumulation=accumulation),
        check,
        own=True,
        peer=f"torch {accumulation}" if case.peer else "bf16",
        fields=work,
    )
    if case.peer is None:
        return [own]
    peer = Contender(f"torch {accumulation}", lambda: case.peer(qa, qb, accumulation), check, fields=work)
    return [own, peer]


@measures("gemm", PRODUCTS)
def test_scaled_matmul(benchmark, contest, case, shape):
    m, n, k = shape.size
    a, b = (torch.randn(rows, k, device=contest.device.device, dtype=torch.bfloat16) for rows in (m, n))
    qa, qb = case.quantized(a, b)
    expected = tritonfp8.dequantize(qa) @ tritonfp8.dequantize(qb).t()
    work = {"flops": gemm_flops(m, n, k), "bytes": gemm_bytes(m, n, k)}
    contenders = [
        contender
        for accumulation in case.accumulations
        for contender in contenders_of(case, accumulation, qa, qb, expected, work)
    ]
    bf16 = Contender("bf16", lambda: lambda: a @ b.t(), fields={"flops": work["flops"]})
    contest(benchmark, case, shape, [*contenders, bf16], contest.device.settled_seconds)
