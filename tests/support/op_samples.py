"""Sample calls of every op."""

import torch
from cases import SPEC_OF_BLOCK, banded, normal
from strategies import PACKED_SPECS

from tritonfp8 import ops, reference
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, MXFP4, ROWWISE, QuantSpec
from tritonfp8.workflow import op_tests

ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
SQUARE = QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2")
MX = QuantSpec("e4m3", BLOCK_1X32, "e8m0", "pow2")
# Ops whose calls the doctor has.
OF_THE_DOCTOR = (
    "adamw", "adamw_amax", "amax_of_shards", "operand_figures", "quantize_parts", "quantize_shards", "sum_in_pairs",
)  # fmt: skip
MATMUL_PAIRS = [(ROW, ROW), (QuantSpec("e5m2"), QuantSpec("e4m3")), (VECTOR, SQUARE), (VECTOR, VECTOR), (MX, MX)]


def matmul_args(pair, device, bias=False, residual=False, activation=None, out_dtype=torch.bfloat16, k=70):
    m, n = 33, 24
    operands = []
    for x, spec in zip((normal(m, k), normal(n, k, seed=1)), pair, strict=True):
        operands += [*reference.quantize(x.to(device), *spec.args), *spec.args]
    return (
        *operands,
        normal(n, seed=2, device=device) if bias else None,
        activation,
        normal(m, n, seed=3, device=device) if residual else None,
        out_dtype,
        "precise",
    )


def chain_args(x, weight, spec=ROW):
    """The GEMM of two matrices that are cast, and the codes and scale of the first one."""
    x_, w, q, s, q_w, s_w = map(reference.TensorPlace, range(6))
    steps = (
        reference.ChainStep("quantize", (x_, *spec.args)),
        reference.ChainStep("quantize", (w, *spec.args)),
        reference.ChainStep("scaled_matmul", (q, s, *spec.args, q_w, s_w, *spec.args)),
    )
    return x, [weight], reference.Chain(steps, (6, 2, 3)).text


def samples(device):
    """``(op, args)``: every op, every block shape, both orientations, several ranks and layouts."""
    x = banded(130, 70, dtype=torch.bfloat16).to(device)
    deep = banded(2, 3, 40, dtype=torch.float32).to(device)
    for spec in SPEC_OF_BLOCK:
        yield ops.amax, (x, list(spec.block))
        yield ops.quantize, (x, *spec.args)
        yield ops.quantize, (x.t(), *spec.args, True)
        yield ops.quantize, (deep, *spec.args)
        yield ops.quantize, (x, *spec.args, False, reference.amax(x, spec.block))
        yield ops.quantize_into, (*reference.quantize(x * 0, *spec.args), x, *spec.args)
        yield ops.quantize_both, (x, *spec.args, *SPEC_OF_BLOCK[0].args)
        yield ops.quantize_both_sum, (x, *spec.args, *SPEC_OF_BLOCK[0].args)
        for dtype in (torch.float32, torch.bfloat16):
            yield ops.dequantize, (*reference.quantize(x, *spec.args), *spec.args, dtype)
    yield from packed_samples(x, deep, device)
    for spec in (SPEC_OF_BLOCK[0], ROW):
        yield ops.quantize_with_amax, (x, *spec.args, *spec.args)
    for spec in (ROW, VECTOR, MX, SQUARE):
        codes = reference.quantize(x, *spec.args)
        yield ops.transpose_codes, (*codes, *spec.args, *spec.args)
        yield ops.transpose_codes, (x, codes[1], *spec.args, *spec.args)
        yield ops.quantize_both, (x, *spec.args, *spec.args, True)
        yield ops.quantize_both_sum, (x, *spec.args, *spec.args, True)
    *codes, amax = reference.quantize_with_amax(x, *ROW.args, *ROW.args, True)
    yield ops.quantize_with_amax, (x, *ROW.args, *ROW.args, True)
    yield ops.transpose_codes, (*codes, *ROW.args, *ROW.args, amax)
    yield ops.quantize_weights, (x, [x[:40].contiguous()], *ROW.args, [])
    yield ops.quantize_weights, (x, [x[:40].contiguous()], *ROW.args, [codes[1], codes[1][:40]], *ROW.args)
    yield ops.chain, chain_args(x, x[:40].contiguous())
    for part in (x, x.t(), x[:0], x[::2, 1:]):
        # No NaN: opcheck's comparison treats NaN as a difference.
        yield ops.transpose, (part.clamp(-448, 448).to(torch.float8_e4m3fn),)
    yield ops.quantize, (x[:0], *ROW.args)
    yield ops.quantize, (x[0], *ROW.args)
    for pair in MATMUL_PAIRS:
        yield ops.scaled_matmul, matmul_args(pair, device)
    yield ops.scaled_matmul, matmul_args((ROW, ROW), device, True, True, "gelu", torch.float32)
    yield ops.scaled_matmul, matmul_args((ROW, ROW), device, k=0)
    yield ops.scaled_matmul, (*matmul_args((VECTOR, SQUARE), device), True)
    for call in op_tests.calls():
        if call.name in OF_THE_DOCTOR:
            yield getattr(ops, call.name), call.args
    yield from grouped_samples()
    yield from exact_samples()
    yield ops.matmul, (x, banded(24, 70, dtype=torch.bfloat16).to(device))
    yield ops.matmul, (x, *(banded(24, k, dtype=torch.bfloat16).to(device).squeeze(1) for k in (70, 1)))
    yield ops.matmul, (x.t(), banded(70, 130, dtype=torch.bfloat16).t().contiguous().t()[:24].to(device))


def packed_samples(x, deep, device):
    """Codes of fewer than 8 bits."""
    for spec in PACKED_SPECS:
        codes = reference.quantize(deep, *spec.args)
        yield ops.quantize, (deep, *spec.args)
        yield ops.quantize, (x, *spec.args, True)
        yield ops.quantize_into, (*reference.quantize(x * 0, *spec.args), x, *spec.args)
        yield ops.quantize_at_random, (
            *reference.quantize(x * 0, *spec.args), x, torch.tensor([5, -7], dtype=torch.int32, device=device),
            *spec.args, [3, 0],
        )  # fmt: skip
        yield ops.dequantize, (*codes, *spec.args, torch.bfloat16)
        yield ops.expand_codes, (*codes, *spec.args)
        yield ops.expand_codes, (*codes, *spec.args, reference.measure_rows(*codes, *spec.args)[0])
        ends = torch.tensor([1, 2], dtype=torch.int32, device=device)
        yield ops.expand_codes, (*codes, *spec.args, None, ends)
        yield ops.measure_rows, (*codes, *spec.args)
        weight = reference.quantize(x[:24], *spec.args)
        found = (*reference.quantize(x, *ROW.args), *ROW.args, *weight, *spec.args)
        yield ops.packed_matmul, found
        of_rows = reference.measure_rows(*weight, *spec.args)[0]
        yield ops.packed_matmul, (*found, None, None, None, None, "precise", False, of_rows)
        # Rows that TMA can address.
        weight = reference.quantize(normal(24, 64), *spec.args)
        yield ops.packed_matmul, (*reference.quantize(normal(9, 64), *ROW.args), *ROW.args, *weight, *spec.args)


def exact_samples():
    """Two sequences, the first with 3 tokens of padding, whose last queries see a cache."""
    q, k = normal(2, 4, 5, 16, dtype=torch.bfloat16), normal(2, 70, 2, 16, seed=1, dtype=torch.bfloat16)
    k = k.transpose(1, 2)
    places = torch.tensor([[3, 60], [0, 7]], dtype=torch.int32)
    for options in ((), (20, places)):
        yield ops.exact_attention, (q, k, k.clone(), 0.25, *options)
        out, logsumexp = reference.exact_attention(q, k, k, 0.25, *options)
        yield ops.exact_attention_backward, (out, q, k, k.clone(), out, logsumexp, 0.25, *options)
    x, weight = normal(2, 5, 33, dtype=torch.bfloat16), normal(33, seed=1)
    for unit_offset in (False, True):
        out, rstd = reference.rms_norm(x, weight, 1e-5, unit_offset)
        yield ops.rms_norm, (x, weight, 1e-5, unit_offset)
        yield ops.rms_norm_backward, (out, x, weight, rstd, unit_offset)
    yield ops.row_logsumexp, (x,)
    yield ops.row_logsumexp, (x, 0.7)
    for activation in ("silu", "gelu_tanh"):
        yield ops.gated, (x, x.flip(0), activation)
        yield ops.gated_backward, (x, x, x.flip(0), activation)
    yield ops.rotary_tables, (torch.arange(10).view(2, 5), normal(8).abs(), 1.0)
    yield ops.matmul, (x.view(10, 33), x[0], None, True)


def grouped_samples():
    """Groups of 3, 0 and 130 tokens, and 7 tokens of none."""
    tokens, n, k = 140, 24, 70
    offsets = torch.tensor([3, 3, 133], dtype=torch.int32)
    x, grad = normal(tokens, k), normal(tokens, n, seed=1)
    weight, bias, gates = normal(3, n, k, seed=2), normal(3, n, seed=3), normal(tokens, 2 * n, seed=4)
    for lhs, rhs in MATMUL_PAIRS:
        yield ops.quantize_groups, (x, offsets, *lhs.args)
        yield ops.quantize_groups, (x.t().contiguous().t(), offsets, *rhs.args, True)
        yield ops.quantize_groups_both, (x, offsets, *lhs.args, *rhs.args)
        yield ops.quantize_groups, (x, offsets, *lhs.args, False, None, None, True)
        yield ops.swiglu_backward_amax, (grad, gates, offsets, *lhs.args, *rhs.args)
        amax = reference.group_amax(grad, offsets, *lhs.args, *rhs.args)
        yield ops.quantize_groups_both, (grad, offsets, *lhs.args, *rhs.args, None, None, False, amax)
        for transpose in (False, True):
            yield ops.quantize_matrices, (weight, *rhs.args, transpose)
        *_, amax = reference.quantize_matrices_with_amax(weight, *rhs.args, *rhs.args)
        yield ops.quantize_matrices, (weight, *rhs.args, True, amax)
        yield ops.quantize_matrices_with_amax, (weight, *rhs.args, *rhs.args)
        if lhs.scale_rounding != "none":
            codes = reference.quantize_groups(x, offsets, *lhs.args)
            yield ops.transpose_group_codes, (*codes, offsets, *lhs.args, *lhs.args)
            yield ops.quantize_groups_both, (x, offsets, *lhs.args, *lhs.args, None, None, False, None, True)
            codes = reference.quantize_matrices(weight, *rhs.args)
            yield ops.transpose_codes, (*codes, *rhs.args, *rhs.args)
            yield ops.quantize_matrices_with_amax, (weight, *rhs.args, *rhs.args, True)
        rows = *reference.quantize_groups(x, offsets, *lhs.args), *lhs.args
        matrices = *reference.quantize_matrices(weight, *rhs.args), *rhs.args
        yield ops.scaled_grouped_matmul, (*rows, *matrices, offsets, bias, torch.float32)
        columns = [
            part
            for each, spec in ((grad, lhs), (x, rhs))
            for part in (*reference.quantize_groups(each, offsets, *spec.args, True), *spec.args)
        ]
        yield ops.scaled_grouped_matmul, (*columns, offsets, None, torch.bfloat16, "fast", False, tokens)
    packed = reference.quantize(normal(3, n, 64, seed=2), *MXFP4.args)
    codes = *reference.quantize_groups(normal(tokens, 64), offsets, *ROW.args), *ROW.args, *packed, *MXFP4.args, offsets
    yield ops.packed_grouped_matmul, (*codes, bias.bfloat16(), torch.float32)
    of_rows = reference.measure_rows(*packed, *MXFP4.args)[0]
    yield ops.packed_grouped_matmul, (*codes, None, None, "precise", False, of_rows)
    yield ops.grouped_matmul, (x, weight, offsets, bias)
    yield ops.grouped_matmul, (grad.t(), x.t(), offsets)
    yield ops.grouped_sum, (grad, offsets)
    yield ops.swiglu, (x,)
    yield ops.swiglu_backward, (grad, gates)
    places = torch.arange(tokens).view(-1, 4).flip(1)
    yield ops.sum_of_rows, (x, places)
    yield ops.sum_of_rows, (x.bfloat16(), places, normal(tokens // 4, 4, seed=5))
    of_sums = normal(tokens // 4, x.shape[1], seed=6).mul(4).round()
    for normalize in (False, True):
        yield ops.routed, (normal(tokens, 9, seed=7), 3, normalize)
    yield ops.dots_of_rows, (of_sums, x.mul(4).round(), places, torch.float32)


SAMPLES = list(samples("cpu"))
