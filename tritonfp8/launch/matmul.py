"""Launch the matrix products: descriptors, configuration, grid. Part of :mod:`tritonfp8.launch.cast`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonfp8 import hardware, tuning
from tritonfp8.formats import SCALE_FORMATS
from tritonfp8.kernels.matmul import block_scaled as block_kernels
from tritonfp8.kernels.matmul import hopper as hopper_kernels
from tritonfp8.kernels.matmul import scaled as matmul_kernels
from tritonfp8.kernels.matmul.sizes import SCALE_VECTOR, SPECIALIZED_WAVE_ROWS
from tritonfp8.launch.kernel_cache import run, within_32_bits
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, SCALE_ALIGNMENT, empty_scale, matmul_family, spec_of
from tritonfp8.tuning import PARTIAL_BYTES, MatmulConfig

TMA_ALIGNMENT = 16
MAX_TMA_STRIDE = 2**40
MAX_TMA_COORDINATE = 2**31 - 1
PROMOTION = 128
REDUCE_TILE = {"BLOCK_M": 4, "BLOCK_N": 128}


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
        """Compile-time arguments of the epilogue, in the order of the kernels."""
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

    def scale_strides(self) -> tuple[int, int]:
        """Strides from row to row of scales that leave K whole; 0 for a tensorwise one."""
        a, b = (scale.stride(0) if scale.shape[0] > 1 else 0 for scale in (self.a_scale, self.b_scale))
        return a, b

    def parts(self, workspace: Tensor) -> _Product:
        """The same product without epilogue, its parts into ``workspace``."""
        return self._replace(out=workspace, bias=None, activation=None, residual=None)


_KERNELS = {
    "epilogue": matmul_kernels.scaled_matmul_kernel,
    "blockwise": block_kernels.block_scaled_matmul_kernel,
    "mx": block_kernels.mx_matmul_kernel,
}


def _tile_sizes(config: MatmulConfig) -> dict[str, object]:
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
    }


def _launch_tiles(
    p: _Product, family: str, accumulation: str, config: MatmulConfig, programs: int, tma: bool, tma_out: bool
) -> None:
    """Launch a plain Triton kernel, on any device."""
    m, n, k = p.sizes()
    split = config.split_k > 1
    tma_out = tma_out and not split
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
        scale_strides = list(p.scale_strides())
        # None is the tensor core's own choice: it adds up a whole K.
        constants = {"PROMOTE_EVERY": min(config.block_k, PROMOTION) if accumulation == "precise" else None}
    else:
        scale_strides = [*p.a_scale.stride(), *p.b_scale.stride()]
        constants = (
            {"A_ROWS": p.a_rows, "B_ROWS": p.b_rows, "SCALE_K": BLOCK_1X128[1]}
            if family == "blockwise"
            else {"A_FORMAT": p.a_format, "B_FORMAT": p.b_format, "SCALE_K": BLOCK_1X32[1], "NATIVE": native_mx}
        )
    integers = [m, n, k, *p.a.stride(), *p.b.stride(), p.out.stride(0), *p.residual_strides(), *scale_strides]
    paths = {"TMA": tma, "TMA_OUT": tma_out, "HALVES": config.halves, "FLATTEN": config.flatten}
    if family != "mx":
        integers.append(config.split_k)
        paths |= {"SWAP": config.swap, "SPLIT": split}
    run(
        _KERNELS[family],
        programs,
        (*operands, out, *p.pointers()),
        integers,
        {**_tile_sizes(config), **constants, **p.epilogue(), **paths},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _hopper_descriptor(x: Tensor, block: list[int], swizzle: int = 128) -> HopperDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * x.element_size(), rank=x.ndim)
    return HopperDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _scale_along_k(scale: Tensor, rows: int, block_rows: int) -> tuple[object, int, int]:
    """A scale along K as the warp-specialized kernel reads it, with its strides of a row and of a step of K."""
    if rows > 1:
        return scale, scale.stride(0), scale.stride(1)
    # Quantized lays these out so that the copy engine can read a step's rows; a scale from elsewhere is laid out anew.
    misaligned = scale.stride(0) != 1 or scale.stride(1) % SCALE_ALIGNMENT or scale.data_ptr() % TMA_ALIGNMENT
    # TMA finds a step's rows by one 32-bit coordinate.
    if misaligned or scale.stride(1) * scale.shape[1] > MAX_TMA_COORDINATE:
        shape = (scale.shape[0], scale.shape[1] * BLOCK_1X128[1])
        scale = empty_scale(shape, BLOCK_1X128, "fp32", scale.device).copy_(scale)
    size = scale.stride(1) * (scale.shape[1] - 1) + scale.shape[0]
    return _hopper_descriptor(scale.as_strided((size,), (1,)), [block_rows], swizzle=0), 1, scale.stride(1)


def _launch_specialized(p: _Product, family: str, accumulation: str, config: MatmulConfig, programs: int) -> None:
    """Launch the warp-specialized kernel; the copy engine addresses all three matrices."""
    m, n, k = p.sizes()
    split = config.split_k > 1
    a_rows, b_rows = (p.a_rows, p.b_rows) if family == "blockwise" else (0, 0)
    if a_rows:
        a_scale, *a_strides = _scale_along_k(p.a_scale, a_rows, max(config.block_m, SCALE_VECTOR))
        b_scale, *b_strides = _scale_along_k(p.b_scale, b_rows, max(config.block_n, SCALE_VECTOR))
    else:
        a_stride, b_stride = p.scale_strides()
        a_scale, *a_strides = p.a_scale, a_stride, 0
        b_scale, *b_strides = p.b_scale, b_stride, 0
    a = (p.a, config.block_m, a_scale, a_strides, a_rows, m)
    b = (p.b, config.block_n, b_scale, b_strides, b_rows, n)
    residual_strides = p.residual_strides()
    out_block = [SPECIALIZED_WAVE_ROWS, config.block_n // (2 if config.halves else 1)]
    if config.swap:
        a, b, residual_strides = b, a, residual_strides[::-1]
        out_block = [config.block_m, SPECIALIZED_WAVE_ROWS]
    (lhs, block_m, a_scale, a_strides, a_rows, m), (rhs, block_n, b_scale, b_strides, b_rows, n) = a, b
    matrices = (
        _hopper_descriptor(lhs, [block_m, config.block_k]),
        _hopper_descriptor(rhs, [block_n, config.block_k]),
        _hopper_descriptor(p.out, out_block),
    )
    run(
        hopper_kernels.hopper_matmul_kernel,
        programs,
        (*matrices, a_scale, b_scale, p.bias, p.residual),
        (m, n, k, *residual_strides, *a_strides, *b_strides, config.split_k),
        {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "A_ROWS": a_rows,
            "B_ROWS": b_rows,
            **p.epilogue(),
            "STAGES": config.num_stages,
            "PROMOTE": accumulation == "precise" or family == "blockwise",
            "SWAP": config.swap,
            "SPLIT": split,
            "STAGGER": config.stagger and not split,
            "TIGHT": config.tight,
            "HALVES": config.halves,
            "OVERLAP": config.overlap,
        },
        num_warps=config.num_warps,
    )


def _workspace(p: _Product, config: MatmulConfig) -> tuple[Tensor, int]:
    """Where the parts of a sum go, in rows that the copy engine can address, and how many rows a part has.

    Allocated for each launch: under the caching allocator that is safe on every stream and in a CUDA graph.
    """
    m, n, _ = p.sizes()
    rows = -(-m // config.block_m) * config.block_m
    unit = TMA_ALIGNMENT // PARTIAL_BYTES
    stride = -(-n // unit) * unit
    shape = (config.split_k * rows, n)
    return torch.empty_strided(shape, (stride, 1), dtype=torch.float32, device=p.a.device), rows


def _launch_reduce(p: _Product, family: str, config: MatmulConfig, workspace: Tensor, rows: int) -> None:
    """Add up the parts in their order, so that every run gives the same bits, and apply the epilogue."""
    m, n, _ = p.sizes()
    tiles = -(-m // REDUCE_TILE["BLOCK_M"]) * -(-n // REDUCE_TILE["BLOCK_N"])
    scaled = family == "epilogue"
    scale_strides = p.scale_strides() if scaled else (0, 0)
    run(
        matmul_kernels.reduce_parts_kernel,
        tiles,
        (workspace, p.out, *p.pointers()),
        (m, n, rows, workspace.stride(0), p.out.stride(0), *p.residual_strides(), *scale_strides),
        {**REDUCE_TILE, "SPLIT_K": config.split_k, "SCALED": scaled, **p.epilogue()},
        num_warps=4,
    )


def _launch_product(p: _Product, family: str, accumulation: str, config: MatmulConfig | None, tma: bool | None) -> None:
    device = hardware.abilities(p.a.device)
    m, n, k = p.sizes()
    tma = device.has_tma if tma is None else tma
    tma_operands = tma and has_tma_layout(p.a) and has_tma_layout(p.b)
    tma_out = tma and has_tma_layout(p.out)
    if config is None:
        bare = p.activation is None and p.residual is None
        copy_engine = tma_operands and tma_out
        scaled_rows = (p.a_rows, p.b_rows)
        config = tuning.choose(
            family, accumulation, scaled_rows, m, n, k, p.out.element_size(), bare, copy_engine, device
        )
    pieces = -(-m // config.block_m) * -(-n // config.block_n) * config.split_k
    programs = min(device.num_sms * config.blocks_per_sm, pieces)
    workspace, rows = _workspace(p, config) if config.split_k > 1 else (None, 0)
    product = p if workspace is None else p.parts(workspace)
    if config.specialized:
        _launch_specialized(product, family, accumulation, config, programs)
    else:
        _launch_tiles(product, family, accumulation, config, programs, tma_operands, tma_out)
    if workspace is not None:
        _launch_reduce(p, family, config, workspace, rows)


def scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: str = "precise",
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
    spec, spec_b = spec_of(a_spec), spec_of(b_spec)
    family = matmul_family(spec.block, spec_b.block)
    if out is None:
        out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    if bias is not None:
        bias = bias.contiguous()
    if SCALE_FORMATS[spec.scale_format].exponent_only:
        a_scale, b_scale = a_scale.view(torch.uint8), b_scale.view(torch.uint8)
    a_scale, b_scale = within_32_bits(a_scale), within_32_bits(b_scale)
    product = _Product(
        a, a_scale, spec.format, spec.block[0], b, b_scale, spec_b.format, spec_b.block[0],
        bias, activation, residual, out,
    )  # fmt: skip
    _launch_product(product, family, accumulation, config, tma)
    return out


def product_kind(a_spec: str, device: torch.device) -> str:
    """What a product of operands with this spec runs on: a key of :data:`tritonfp8.counting.KINDS`."""
    abilities = hardware.abilities(device)
    if not abilities.has_fp8_mma:
        return "reference"
    return "emulated" if spec_of(a_spec).block == BLOCK_1X32 and not abilities.has_native_mx else "fp8"
