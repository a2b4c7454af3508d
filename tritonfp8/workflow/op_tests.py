"""Self-tests of the ops that ``tritonfp8 doctor`` compares beside casts and GEMMs of single matrices.

Each call has sizes that no tile divides, so that the plain kernels run, or that the kernels of Hopper take.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tritonfp8 import ops, reference
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, MXFP4, ROWWISE, TENSORWISE, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal, assert_matmul_close

ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
SQUARE = QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2")
MX = QuantSpec("e4m3", BLOCK_1X32, "e8m0", "pow2")
TENSOR = QuantSpec("e4m3", TENSORWISE, "fp32", "pow2")
# Specs of the left and the right operand of a GEMM of groups.
PAIRS = ((ROW, ROW), (TENSOR, TENSOR), (VECTOR, SQUARE), (VECTOR, VECTOR), (MX, MX))
# Groups of 40, 0 and 144 tokens, and 16 tokens of no group.
ENDS, TOKENS = (40, 40, 184), 200
# N and K: of the plain kernels, and of those for Hopper.
SIZES = ((24, 70), (192, 256))
# The largest magnitude of each block of the operands of SwiGLU. A sigmoid of it rounds to one in 16 bits, so scales do
# not depend on the last bit of an exponential.
LARGEST = 8.0
# rtol and atol by bytes of an element: of a code or a 16-bit value that rounding moves to a neighbour, of float32.
NEAR = {1: (0.13, 2.0**-9), 2: (2.0**-7, 2.0**-9), 4: (1e-4, 1e-5)}
# Their sums, exponentials and roots differ in the last bits by device.
_INEXACT = {
    "exact_attention", "exact_attention_backward", "gated", "gated_backward", "matmul", "rms_norm", "rms_norm_backward",
    "row_logsumexp", "dots_of_rows", "operand_figures", "quantize_both_sum", "swiglu", "swiglu_backward",
    "swiglu_backward_amax",
}  # fmt: skip
_GEMMS = {"grouped_matmul", "packed_grouped_matmul", "packed_matmul", "scaled_grouped_matmul"}


class OpCall(NamedTuple):
    """A call of an op.

    Attributes:
        name: of the op.
        args: on the CPU.
        on_host: the places of arguments that stay there.
    """

    name: str
    args: tuple[Any, ...]
    on_host: tuple[int, ...] = ()


def calls() -> Iterator[OpCall]:
    """The calls; calls of one op are adjacent."""
    found = itertools.chain(
        _casts(), _of_shards(), _of_gradients(), _of_groups(), _of_matrices(), _of_rows(), _exact(), _steps()
    )
    return iter(sorted(found, key=lambda call: call.name))


def agrees(group: Iterable[OpCall], device: torch.device) -> str:
    """Compare the results of calls of one op on ``device`` with the reference's results on the CPU.

    Returns:
        What they agree in.

    Raises:
        AssertionError: they do not agree.
    """
    count, name = 0, ""
    for call in group:
        name, count = call.name, count + 1
        found = _run(getattr(ops, name), call, device)
        expected = _run(getattr(reference, name), call, torch.device("cpu"))
        if name in _GEMMS:
            for x, y in zip(found, expected, strict=True):
                assert_matmul_close(x.flatten(0, -2), y.float().flatten(0, -2), x.dtype)
        elif name in _INEXACT:
            for x, y in zip(found, expected, strict=True):
                _assert_near(x, y)
        else:
            assert_bitwise_equal(found, expected)
    what = "within the tolerances of" if name in _GEMMS | _INEXACT else "bitwise equal to"
    return f"{what} the reference in {count} calls"


def _run(function: Any, call: OpCall, device: torch.device) -> list[Tensor]:
    """What a call returns, and for an op that writes to its arguments, these; on the CPU."""
    args = [
        arg if i in call.on_host else pytree.tree_map_only(Tensor, lambda x: x.to(device, copy=True), arg)
        for i, arg in enumerate(call.args)
    ]
    results = function(*args)
    writes = "!)" in ops.OPS[call.name].schema
    found = pytree.tree_leaves((results, args) if writes else results)
    return [each.cpu() for each in found if isinstance(each, Tensor)]


def _assert_near(found: Tensor, expected: Tensor) -> None:
    if found.dtype == torch.int32:
        # Bits of amaxes.
        found, expected = found.view(torch.float32), expected.view(torch.float32)
    rtol, atol = NEAR[min(found.itemsize, 4)]
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _dominated(m: int, n: int, seed: int) -> Tensor:
    """A matrix ``[m, n]`` with the same largest magnitude in each block of each spec."""
    x = _normal(m, n, seed=seed)
    x[::8] = LARGEST
    x[:, ::8] = LARGEST
    return x


def _casts() -> Iterator[OpCall]:
    x = _normal(TOKENS, 336)
    for spec in (ROW, TENSOR, VECTOR, SQUARE, MX):
        yield OpCall("amax", (x, list(spec.block)))
        yield OpCall("quantize_both_sum", (x, *spec.args, *spec.args))
    for spec in (ROW, TENSOR):
        yield OpCall("quantize_with_amax", (x, *spec.args, *spec.args))
    for spec in (ROW, VECTOR, MX):
        yield OpCall("transpose_codes", (*reference.quantize(x, *spec.args), *spec.args, *spec.args))
    for name in ("expand_codes", "measure_rows"):
        yield OpCall(name, (*reference.quantize(x, *MXFP4.args), *MXFP4.args))
    both = x, x[:40].contiguous()
    yield OpCall("quantize_weights", (both[0], [both[1]], *ROW.args, []))
    scales = [reference.quantize(each, *ROW.args)[1] for each in both]
    yield OpCall("quantize_weights", (both[0], [both[1]], *ROW.args, scales, *ROW.args))
    casts = (reference.ChainStep("quantize", (reference.TensorPlace(i), *ROW.args)) for i in range(2))
    yield OpCall("chain", (both[0], [both[1]], reference.Chain((*casts,), (2, 3, 4, 5)).text))
    yield OpCall("transpose", (reference.quantize(x, *ROW.args)[0],))
    # Of two operands that are quantized by scales which may clip. Without scales, figures are NaN, which equal nothing.
    x, spec = _normal(2, 65, 70), QuantSpec("e4m3", BLOCK_1X32, "e8m0", "floor")
    qdata, scale = reference.quantize(x, *spec.args)
    result, flat = reference.dequantize(qdata, scale, *spec.args, torch.float32), scale.float().flatten(1)
    whole = x.float().abs().amax((1, 2))
    yield OpCall("operand_figures", (x, whole, 10_000, 448.0, result, qdata, flat.amin(1), flat.amax(1)))


def _of_shards() -> Iterator[OpCall]:
    """Of one weight ``[330, 70]``: shards of 256 rows, 74 rows and none; in one orientation or two."""
    x = _normal(330, 70, dtype=torch.float32)
    shards, starts = [x[:256], x[256:], x[330:]], (0, 256, 330)
    for spec, spec_t in ((ROW, ROW), (QuantSpec("e5m2"), None), (SQUARE, None)):
        blocks, grids = [*spec.block], [(0, -(-70 // spec.block[1]) if spec.block[1] > 0 else 1)]
        if spec_t is not None:
            blocks += spec_t.block[::-1]
            grids.append((330, 70))
        places = [[ops.GridPlace(first, cols, start, 0) for first, cols in grids] for start in starts]
        amaxes, to_read = torch.zeros(330 + 70), ops.places_to_read(places)
        yield OpCall("amax_of_shards", (amaxes, shards, to_read, blocks), on_host=(2,))
        found = amaxes.clone()
        reference.amax_of_shards(found, shards, to_read, blocks)
        for i, transpose in enumerate((False, True)[: len(grids)]):
            rows = [256, 330, 330] if transpose else [70] * 3
            offsets = (0, 70 * 330, 70 * 400) if transpose else (0, 70 * 256, 70 * 330)
            to = ops.places_to_write([(o, r, of[i]) for o, r, of in zip(offsets, rows, places, strict=True)])
            args = (torch.zeros(70 * 800, dtype=torch.uint8), shards, to, found, *(spec_t or spec).args)
            yield OpCall("quantize_shards", (*args, transpose, torch.bfloat16), on_host=(2,))


def _of_gradients() -> Iterator[OpCall]:
    """Three parts of 700 elements, the last group of each with 60."""
    for dtype in (torch.float32, torch.bfloat16):
        x = _normal(2100, dtype=dtype)
        yield OpCall("quantize_parts", (x, 3, 1))
        for parts in (x.view(3, 700), reference.quantize_parts(x, 3, 1)):
            yield OpCall("sum_in_pairs", (torch.zeros(700, dtype=dtype), parts, 0.25))


def _of_groups() -> Iterator[OpCall]:
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    x = _normal(TOKENS, 70)
    yield OpCall("grouped_sum", (x, offsets))
    for lhs, rhs in PAIRS:
        for transpose, spec in ((False, lhs), (True, rhs)):
            yield OpCall("quantize_groups", (x, offsets, *spec.args, transpose))
        yield OpCall("quantize_groups_both", (x, offsets, *lhs.args, *rhs.args))
        if lhs.scale_rounding == "pow2":
            codes = reference.quantize_groups(x, offsets, *lhs.args)
            yield OpCall("transpose_group_codes", (*codes, offsets, *lhs.args, *lhs.args))
    for (n, k), (lhs, rhs) in itertools.product(SIZES, PAIRS):
        x, grad, weight = _normal(TOKENS, k), _normal(TOKENS, n, seed=1), _normal(3, n, k, seed=2)
        rows = *reference.quantize_groups(x, offsets, *lhs.args), *lhs.args
        matrices = *reference.quantize_matrices(weight, *rhs.args), *rhs.args
        yield OpCall("scaled_grouped_matmul", (*rows, *matrices, offsets, None, torch.float32))
        columns = [
            part
            for each, spec in ((grad, lhs), (x, rhs))
            for part in (*reference.quantize_groups(each, offsets, *spec.args, True), *spec.args)
        ]
        options = (None, torch.float32, "precise", False, TOKENS)
        yield OpCall("scaled_grouped_matmul", (*columns, offsets, *options))
        if lhs is ROW:
            yield OpCall("grouped_matmul", (x, weight, offsets, _normal(3, n, seed=3)))
            yield OpCall("grouped_matmul", (grad.t(), x.t(), offsets))
    for n, k in ((24, 96), (192, 256)):
        q, scale = reference.quantize(_normal(3, n, k, seed=2), *MXFP4.args)
        rows = *reference.quantize_groups(_normal(TOKENS, k), offsets, *ROW.args), *ROW.args
        yield OpCall("packed_grouped_matmul", (*rows, q, scale, *MXFP4.args, offsets, None, torch.float32))
        yield OpCall("packed_matmul", (*rows, q[0], scale[0], *MXFP4.args))


def _of_matrices() -> Iterator[OpCall]:
    weight = _normal(3, 24, 70)
    for spec in (ROW, TENSOR, VECTOR, SQUARE, MX):
        for transpose in (False, True):
            yield OpCall("quantize_matrices", (weight, *spec.args, transpose))
        if spec in (ROW, TENSOR):
            yield OpCall("quantize_matrices_with_amax", (weight, *spec.args, *spec.args))


def _of_rows() -> Iterator[OpCall]:
    """SwiGLU, and the sums of each token's experts."""
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    for n in (72, 192):
        gate_up, grad = _dominated(TOKENS, 2 * n, 0), _dominated(TOKENS, n, 1)
        yield OpCall("swiglu", (gate_up,))
        yield OpCall("swiglu_backward", (grad, gate_up))
        yield OpCall("swiglu_backward_amax", (grad, gate_up, offsets, *ROW.args, *ROW.args))
    places = torch.arange(TOKENS).view(-1, 4).flip(1)
    x, grad = _normal(TOKENS, 70), _normal(TOKENS // 4, 70, seed=1)
    yield OpCall("sum_of_rows", (x, places, _normal(TOKENS // 4, 4, seed=2, dtype=torch.float32)))
    yield OpCall("dots_of_rows", (grad, x, places, torch.float32))


def _exact() -> Iterator[OpCall]:
    """Of exact models, in float32, whose sums differ in the last bits only."""
    x, grad = (_normal(TOKENS, 70, seed=i, dtype=torch.float32) for i in range(2))
    weight = 1 + 0.1 * _normal(70, seed=2, dtype=torch.float32)
    norm = x, weight, 1e-5, False
    yield OpCall("rms_norm", norm)
    yield OpCall("rms_norm_backward", (grad, x, weight, reference.rms_norm(*norm)[1], False))
    yield OpCall("row_logsumexp", (x, 0.7))
    yield OpCall("gated", (x, grad, "silu"))
    yield OpCall("gated_backward", (grad, x, grad, "silu"))
    yield OpCall("matmul", (x, grad, None, True))
    q, k, v = (_normal(2, heads, 70, 16, seed=i, dtype=torch.float32) for i, heads in enumerate((4, 2, 2)))
    out = reference.exact_attention(q, k, v, 0.25)
    yield OpCall("exact_attention", (q, k, v, 0.25))
    yield OpCall("exact_attention_backward", (out[0], q, k, v, *out, 0.25))
    for spec in (ROW, VECTOR, MX):
        yield OpCall("quantize_into", (*reference.quantize(x * 0, *spec.args), x, *spec.args))


def _steps() -> Iterator[OpCall]:
    """Steps of a stored weight by AdamW, whole and as a shard, with moments in float32 and in 8 bits."""
    numbers = torch.tensor([0.999, 0.1, 0.99, 0.01, 0.04, 5.8, 1e-8])
    keys = reference.rounding_keys(7, torch.tensor([3.0]), torch.tensor([5]))[0]
    grad = _normal(40, 150, seed=2, dtype=torch.float32)
    for spec, dtype in itertools.product((ROW, TENSOR, SQUARE, MX), (torch.float32, torch.float8_e4m3fn)):
        qdata, scale = reference.quantize(_normal(40, 150, dtype=torch.float32), *spec.args)
        moments = [torch.full((40, 150), 0.5).to(dtype) for _ in range(2)]
        scales = [torch.full((40, 2), 120, dtype=torch.uint8) if dtype.itemsize == 1 else None for _ in moments]
        place = [70 if spec is SQUARE else 0, 0]
        head, layout = (qdata, scale, *moments, grad, numbers), (*spec.args, list(spec.block), place)
        yield OpCall("adamw_amax", (*head, *layout, *scales))
        yield OpCall("adamw", (*head, keys, *layout, True, *scales))
    packed = reference.quantize(torch.zeros(40, 64), *MXFP4.args)
    yield OpCall("quantize_at_random", (*packed, _normal(40, 64, dtype=torch.float32), keys, *MXFP4.args, [70, 0]))
