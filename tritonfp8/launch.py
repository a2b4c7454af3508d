"""Validate, allocate, choose a configuration, launch: the Triton twin of each function in :mod:`tritonfp8.reference`.

On CPU tensors the kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested without a
GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonfp8 import hardware, reference, tuning
from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.kernels import block_scaled_matmul as block_kernels
from tritonfp8.kernels import hopper_matmul as hopper_kernels
from tritonfp8.kernels import quantize as quantize_kernels
from tritonfp8.kernels import scaled_matmul as matmul_kernels
from tritonfp8.kernels.configs import SPECIALIZED_WAVE_ROWS, MatmulConfig
from tritonfp8.specs import (
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    SCALE_ALIGNMENT,
    empty_scale,
    matmul_family,
    scale_shape,
    transposed,
)

MAX_ROW_IN_TILE = 16384
TILE_ELEMENTS = 8192
TMA_ALIGNMENT = 16
MAX_TMA_STRIDE = 2**40
PROMOTION = 128

Block = Sequence[int]


def _rows(x: Tensor) -> Tensor:
    """``[..., K]`` as ``[rows, K]``."""
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(math.prod(x.shape[:-1]), 0)


def _is_folded(x: Tensor, block: Block) -> bool:
    """Whether the blocks of ``x`` are those of ``x`` folded to 2-D: no block of several rows crosses a matrix."""
    return x.ndim <= 2 or block[0] <= 1 or x.shape[-2] % block[0] == 0


class _Tile(NamedTuple):
    m: int
    n: int
    warps: int


def _tile(m: int, n: int, block: Block | None, block_t: Block | None) -> _Tile:
    """Tile of a cast of ``x [m, n]``; both blocks in the coordinates of ``x``."""
    if block_t is None and block == (1, -1) and n <= MAX_ROW_IN_TILE:
        width = max(triton.next_power_of_2(n), 128)
        return _Tile(max(1, TILE_ELEMENTS // 2 // width), width, 4 if width <= 4096 else 8)
    if block_t is None and block is not None and block[0] <= 1:
        return _Tile(32, 128, 4)
    # A square block is one reduction over the tile; strips of it are reductions of their own, faster in fewer warps.
    square = block_t is None or block_t == BLOCK_128X128
    return _Tile(128, 128, 8 if square else 4)


def _fits(block: Block, tile: _Tile, m: int, n: int) -> bool:
    return (block[0] != -1 or m <= tile.m) and (block[1] != -1 or n <= tile.n)


def _grid(tile: _Tile, m: int, n: int) -> tuple[int]:
    return (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),)


def _amax_bits(x: Tensor, block: Block | None, block_t: Block | None) -> tuple[Tensor | None, Tensor | None]:
    """amax bits of ``x [m, n]`` for one or two blocks (in the coordinates of ``x``), in one pass."""
    m, n = x.shape
    outs = [None if b is None else x.new_zeros(scale_shape((m, n), b), dtype=torch.int32) for b in (block, block_t)]
    tile = _Tile(128, 128, 8)
    sides = [x if out is None else out for out in outs]
    quantize_kernels.amax_kernel[_grid(tile, m, n)](
        x, *sides, m, n, *x.stride(),
        *sides[0].shape, *sides[0].stride(), *sides[1].shape, *sides[1].stride(),
        *(block or (1, 1)), *(block_t or (1, 1)), block is not None, block_t is not None,
        tile.m, tile.n, num_warps=tile.warps,
    )  # fmt: skip
    return outs[0], outs[1]


def amax(x: Tensor, block: Block) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.amax`."""
    if not x.numel():
        return reference.amax(x, block)
    if not _is_folded(x, block):
        return torch.stack([amax(matrix, block) for matrix in x])
    bits, _ = _amax_bits(_rows(x), tuple(block), None)
    assert bits is not None
    return bits.view(torch.float32).reshape(scale_shape(x.shape, block))


class _Side(NamedTuple):
    """One result of a cast: tensors and strides in the coordinates of ``x``."""

    qdata: Tensor
    scale: Tensor
    amax_bits: Tensor | None
    block: tuple[int, int]
    format: str
    scale_format: str
    scale_rounding: str

    def runtime_args(self) -> list[int]:
        amax = self.scale if self.amax_bits is None else self.amax_bits
        return [*self.scale.shape, *self.qdata.stride(), *self.scale.stride(), *amax.stride()]

    def tensors(self) -> list[Tensor]:
        scale = self.scale.view(torch.uint8) if SCALE_FORMATS[self.scale_format].exponent_only else self.scale
        return [self.qdata, scale, scale if self.amax_bits is None else self.amax_bits]

    def constants(self) -> list[object]:
        fmt = FORMATS[self.format]
        pow2 = self.scale_rounding == "pow2"
        exponent_only = SCALE_FORMATS[self.scale_format].exponent_only
        numbers = [fmt.qmax, fmt.emax, fmt.qmax_mantissa, fmt.mantissa_bits, fmt.emin]
        return [*self.block, *numbers, exponent_only, pow2, self.amax_bits is not None]


def _quantize(x: Tensor, side: _Side | None, side_t: _Side | None) -> None:
    """Fill one or two sides from ``x [m, n]``; computes the amax that a tile cannot see whole."""
    m, n = x.shape
    given = side or side_t
    assert given is not None
    tile = _tile(m, n, side and side.block, side_t and side_t.block)
    missing = [
        s.block if s is not None and s.amax_bits is None and not _fits(s.block, tile, m, n) else None
        for s in (side, side_t)
    ]
    if missing[0] is not None and missing[0] == missing[1]:
        bits, _ = _amax_bits(x, missing[0], None)
        found: tuple[Tensor | None, Tensor | None] = (bits, bits)
    elif any(missing):
        found = _amax_bits(x, *missing)
    else:
        found = (None, None)
    side, side_t = (
        s if bits is None or s is None else s._replace(amax_bits=bits)
        for s, bits in zip((side, side_t), found, strict=True)
    )
    first, second = side or given, side_t or given
    direct_cast = hardware.abilities(x.device).has_direct_cast
    quantize_kernels.quantize_kernel[_grid(tile, m, n)](
        x, *first.tensors(), *second.tensors(), m, n, *x.stride(), *first.runtime_args(), *second.runtime_args(),
        *first.constants(), *second.constants(), side is not None, side_t is not None, direct_cast,
        tile.m, tile.n, num_warps=tile.warps,
    )  # fmt: skip


def _side(
    x: Tensor, format: str, block: Block, scale_format: str, scale_rounding: str, transpose: bool, amax: Tensor | None
) -> tuple[_Side, Tensor, Tensor]:
    """Allocate one result of casting ``x``: the side, and its tensors as the caller gets them."""
    shape = x.shape[::-1] if transpose else x.shape
    qdata = torch.empty(shape, dtype=FORMATS[format].dtype, device=x.device)
    scale = empty_scale(shape, block, scale_format, x.device)
    matrix = _rows(qdata)
    scales = scale.view(scale_shape(matrix.shape, block))
    bits = None if amax is None else amax.reshape(scales.shape).view(torch.int32)
    if transpose:
        matrix, scales, bits = matrix.t(), scales.t(), None if bits is None else bits.t()
    of_x = transposed(block) if transpose else (block[0], block[1])
    return _Side(matrix, scales, bits, of_x, format, scale_format, scale_rounding), qdata, scale


def quantize(
    x: Tensor,
    format: str,
    block: Block,
    scale_format: str,
    scale_rounding: str,
    transpose: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize`."""
    if not x.numel():
        return reference.quantize(x, format, block, scale_format, scale_rounding, transpose, amax)
    if not _is_folded(x, block):
        amaxes = [None] * len(x) if amax is None else amax
        pairs = [
            quantize(m, format, block, scale_format, scale_rounding, False, a) for m, a in zip(x, amaxes, strict=True)
        ]
        return torch.stack([q for q, _ in pairs]), torch.stack([s for _, s in pairs])
    side, qdata, scale = _side(x, format, block, scale_format, scale_rounding, transpose, amax)
    _quantize(_rows(x), None if transpose else side, side if transpose else None)
    return qdata, scale


def quantize_both(
    x: Tensor,
    format: str,
    block: Block,
    scale_format: str,
    scale_rounding: str,
    format_t: str,
    block_t: Block,
    scale_format_t: str,
    scale_rounding_t: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_both`."""
    if not x.numel():
        spec, spec_t = (
            (format, block, scale_format, scale_rounding),
            (format_t, block_t, scale_format_t, scale_rounding_t),
        )
        return reference.quantize_both(x, *spec, *spec_t)
    side, qdata, scale = _side(x, format, block, scale_format, scale_rounding, False, None)
    side_t, qdata_t, scale_t = _side(x, format_t, block_t, scale_format_t, scale_rounding_t, True, None)
    _quantize(x, side, side_t)
    return qdata, scale, qdata_t, scale_t


def dequantize(
    qdata: Tensor, scale: Tensor, format: str, block: Block, scale_format: str, scale_rounding: str, dtype: torch.dtype
) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.dequantize`."""
    if not qdata.numel():
        return qdata.new_empty(qdata.shape, dtype=dtype)
    if not _is_folded(qdata, block):
        parts = zip(qdata, scale, strict=True)
        return torch.stack([dequantize(q, s, format, block, scale_format, scale_rounding, dtype) for q, s in parts])
    q = _rows(qdata)
    exponent_only = SCALE_FORMATS[scale_format].exponent_only
    s = (scale.view(torch.uint8) if exponent_only else scale).reshape(scale_shape(q.shape, block))
    m, n = q.shape
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    tile = _Tile(64, 128, 4)
    quantize_kernels.dequantize_kernel[_grid(tile, m, n)](
        q, s, out, m, n, *q.stride(), *s.stride(), *block, exponent_only, tile.m, tile.n, num_warps=tile.warps
    )
    return out.view(qdata.shape)


def has_tma_layout(x: Tensor) -> bool:
    """Whether the copy engine can address this matrix: rows contiguous, start and row stride 16-byte aligned."""
    stride = x.stride(0) * x.element_size()
    return (
        x.stride(1) == 1
        and x.data_ptr() % TMA_ALIGNMENT == 0
        and stride % TMA_ALIGNMENT == 0
        and 0 < stride < MAX_TMA_STRIDE
        and x.numel() > 0
    )


class _Product(NamedTuple):
    """Operands of a product as a kernel takes them: exponents of e8m0 scales as bytes, blocks as tuples."""

    a: Tensor
    a_scale: Tensor
    a_format: str
    a_rows: int
    b: Tensor
    b_scale: Tensor
    b_format: str
    b_rows: int
    bias: Tensor | None
    activation: str | None
    residual: Tensor | None
    out: Tensor

    def epilogue(self) -> dict[str, object]:
        return {
            "HAS_BIAS": self.bias is not None,
            "ACTIVATION": self.activation,
            "HAS_RESIDUAL": self.residual is not None,
        }

    def pointers(self) -> tuple[Tensor | None, ...]:
        return self.a_scale, self.b_scale, self.bias, self.residual

    def sizes(self) -> tuple[int, int, int]:
        return self.a.shape[0], self.b.shape[0], self.a.shape[1]

    def residual_strides(self) -> tuple[int, ...]:
        return (0, 0) if self.residual is None else self.residual.stride()


def _row_stride(scale: Tensor) -> int:
    """Stride from row to row of a scale that leaves K whole; 0 for a tensorwise one."""
    return scale.stride(0) if scale.shape[0] > 1 else 0


_KERNELS = {
    "epilogue": matmul_kernels.scaled_matmul_kernel,
    "blockwise": block_kernels.block_scaled_matmul_kernel,
    "mx": block_kernels.mx_matmul_kernel,
}


def _launch_tiles(
    p: _Product, family: str, accumulation: str, config: MatmulConfig, grid: tuple[int], tma: bool, tma_out: bool
) -> None:
    """Launch a plain Triton kernel, on any device."""
    m, n, k = p.sizes()
    native_mx = hardware.abilities(p.a.device).has_native_mx
    operands: list[object] = [p.a, p.b]
    if tma:
        operands = [
            TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, config.block_k])
            for x, rows in ((p.a, config.block_m), (p.b, config.block_n))
        ]
    columns = config.block_n // 2 if config.halves else config.block_n
    out = TensorDescriptor(p.out, [m, n], [n, 1], [config.block_m, columns]) if tma_out else p.out
    constants: dict[str, object]
    if family == "epilogue":
        scale_strides = [_row_stride(p.a_scale), _row_stride(p.b_scale)]
        # None is the tensor core's own choice: it adds up a whole K.
        constants = {"PROMOTE_EVERY": min(config.block_k, PROMOTION) if accumulation == "precise" else None}
    else:
        scale_strides = [*p.a_scale.stride(), *p.b_scale.stride()]
        constants = (
            {"A_ROWS": p.a_rows, "B_ROWS": p.b_rows, "SCALE_K": BLOCK_1X128[1]}
            if family == "blockwise"
            else {"A_FORMAT": p.a_format, "B_FORMAT": p.b_format, "SCALE_K": BLOCK_1X32[1], "NATIVE": native_mx}
        )
    _KERNELS[family][grid](
        *operands, out, *p.pointers(), m, n, k, *p.a.stride(), *p.b.stride(), p.out.stride(0), *p.residual_strides(),
        *scale_strides, BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        **constants, **p.epilogue(), TMA=tma, TMA_OUT=tma_out, HALVES=config.halves, FLATTEN=config.flatten,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _hopper_descriptor(x: Tensor, block: list[int], swizzle: int = 128) -> HopperDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * x.element_size(), rank=x.ndim)
    return HopperDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _scale_along_k(scale: Tensor, rows: int, block_rows: int) -> tuple[object, int, int]:
    """A scale along K as the warp-specialized kernel reads it, with its strides of a row and of a step of K."""
    if rows > 1:
        return scale, scale.stride(0), scale.stride(1)
    # Quantized lays these out so that the copy engine can read a step's rows; a scale from elsewhere is laid out anew.
    if scale.stride(0) != 1 or scale.stride(1) % SCALE_ALIGNMENT or scale.data_ptr() % TMA_ALIGNMENT:
        shape = (scale.shape[0], scale.shape[1] * BLOCK_1X128[1])
        scale = empty_scale(shape, BLOCK_1X128, "fp32", scale.device).copy_(scale)
    size = scale.stride(1) * (scale.shape[1] - 1) + scale.shape[0]
    return _hopper_descriptor(scale.as_strided((size,), (1,)), [block_rows], swizzle=0), 1, scale.stride(1)


def _launch_specialized(p: _Product, family: str, config: MatmulConfig, grid: tuple[int]) -> None:
    """Launch the warp-specialized kernel; the copy engine addresses all three matrices."""
    a_rows, b_rows = (p.a_rows, p.b_rows) if family == "blockwise" else (0, 0)
    if a_rows:
        a_scale, *a_strides = _scale_along_k(p.a_scale, a_rows, config.block_m)
        b_scale, *b_strides = _scale_along_k(p.b_scale, b_rows, config.block_n)
    else:
        a_scale, *a_strides = p.a_scale, _row_stride(p.a_scale), 0
        b_scale, *b_strides = p.b_scale, _row_stride(p.b_scale), 0
    hopper_kernels.hopper_matmul_kernel[grid](
        _hopper_descriptor(p.a, [config.block_m, config.block_k]),
        _hopper_descriptor(p.b, [config.block_n, config.block_k]),
        _hopper_descriptor(p.out, [SPECIALIZED_WAVE_ROWS, config.block_n]),
        a_scale, b_scale, p.bias, p.residual, *p.sizes(), *p.residual_strides(), *a_strides, *b_strides,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP_M=config.group_m,
        A_ROWS=a_rows, B_ROWS=b_rows, **p.epilogue(), STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip


def _launch_product(p: _Product, family: str, accumulation: str, config: MatmulConfig | None, tma: bool | None) -> None:
    device = hardware.abilities(p.a.device)
    m, n, _ = p.sizes()
    tma = device.has_tma if tma is None else tma
    tma_operands = tma and has_tma_layout(p.a) and has_tma_layout(p.b)
    tma_out = tma and has_tma_layout(p.out)
    if config is None:
        bare = p.activation is None and p.residual is None
        copy_engine = tma_operands and tma_out
        config = tuning.choose(family, accumulation, m, n, p.out.element_size(), bare, copy_engine, device)
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    grid = (min(device.num_sms * config.blocks_per_sm, tiles),)
    if config.specialized:
        _launch_specialized(p, family, config, grid)
    else:
        _launch_tiles(p, family, accumulation, config, grid, tma_operands, tma_out)


def scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_format: str,
    a_block: Block,
    a_scale_format: str,
    b: Tensor,
    b_scale: Tensor,
    b_format: str,
    b_block: Block,
    b_scale_format: str,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    *,
    config: MatmulConfig | None = None,
    tma: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.scaled_matmul`.

    Args:
        config: use this configuration, not the chosen one.
        tma: use the copy engine or not, where the layouts allow it; by default what the device has.
        out: write here, ``[M, N]`` contiguous.
    """
    family = matmul_family(a_block, b_block)
    if out is None:
        out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if bias is not None:
        bias = bias.contiguous()
    if SCALE_FORMATS[a_scale_format].exponent_only:
        a_scale, b_scale = a_scale.view(torch.uint8), b_scale.view(torch.uint8)
    _launch_product(
        _Product(a, a_scale, a_format, a_block[0], b, b_scale, b_format, b_block[0], bias, activation, residual, out),
        family,
        accumulation,
        config,
        tma,
    )
    return out


def product_kind(a_block: Block, device: torch.device) -> str:
    """What a product of operands with this block runs on: a key of :data:`tritonfp8.counting.KINDS`."""
    abilities = hardware.abilities(device)
    if not abilities.has_fp8_mma:
        return "reference"
    return "emulated" if tuple(a_block) == BLOCK_1X32 and not abilities.has_native_mx else "fp8"
