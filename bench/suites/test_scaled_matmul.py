"""GEMMs: GPU time against torch's own on the same operands, and against bf16."""

import torch
from torch.nn.functional import silu

import tritonfp8
from bench.contest import gates
from bench.contest.cases import EPILOGUE, EPILOGUES, GEMM_CASES, NO_EPILOGUE, gemm_bytes, gemm_flops
from bench.contest.compare import Contender, measures


def contenders_of(case, accumulation, qa, qb, expected, work):
    """The package's GEMM with this accumulation, and torch's."""
    check = gates.close_gemm(expected, accumulation)
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


def operands(contest, shape):
    """``a [M, K]`` and ``b [N, K]``, standard normal."""
    m, n, k = shape.size
    return (torch.randn(rows, k, device=contest.device.device, dtype=torch.bfloat16) for rows in (m, n))


@measures("gemm", GEMM_CASES)
def test_scaled_matmul(benchmark, contest, case, shape):
    a, b = operands(contest, shape)
    qa, qb = case.quantized(a, b)
    expected = tritonfp8.dequantize(qa) @ tritonfp8.dequantize(qb).t()
    work = {"flops": gemm_flops(*shape.size), "bytes": gemm_bytes(*shape.size)}
    contenders = [
        contender
        for accumulation in case.accumulations
        for contender in contenders_of(case, accumulation, qa, qb, expected, work)
    ]
    bf16 = Contender("bf16", lambda: lambda: a @ b.t(), fields={"flops": work["flops"]})
    contest(benchmark, case, shape, [*contenders, bf16], contest.device.settled_seconds)


@measures("gemm", (EPILOGUE,))
def test_epilogues(benchmark, contest, case, shape):
    qa, qb = case.quantized(*operands(contest, shape))
    product = tritonfp8.dequantize(qa) @ tritonfp8.dequantize(qb).t()
    bias = torch.randn(product.shape[1], device=contest.device.device, dtype=torch.bfloat16)
    fields = {"flops": gemm_flops(*shape.size)}

    def contender(name, bias, activation):
        expected = product if bias is None else product + bias
        return Contender(
            name,
            lambda: lambda: tritonfp8.scaled_matmul(qa, qb, bias, activation),
            gates.close_gemm(silu(expected) if activation else expected, "precise"),
            own=True,
            peer=None if name == NO_EPILOGUE else NO_EPILOGUE,
            fields=fields,
        )

    contenders = [
        contender(name, bias if has_bias else None, activation) for name, (has_bias, activation) in EPILOGUES.items()
    ]
    contest(benchmark, case, shape, contenders, contest.device.settled_seconds)
