"""Compile the GEMM kernels for a target, as the launcher would launch a configuration."""

from dataclasses import replace

import pytest
from compile_target import compile_kernel, descriptor
from triton.experimental.gluon import language as gl

from tritonfp8.kernels.gemm.block_scaled import block_scaled_matmul_kernel, mx_matmul_kernel
from tritonfp8.kernels.gemm.hopper_dense import hopper_matmul_kernel
from tritonfp8.kernels.gemm.scaled import scaled_matmul_kernel
from tritonfp8.tuning.matmul_space import SCALE_VECTOR, SPACES, SPECIALIZED_WAVE_ROWS

HOPPER_SHARED_BYTES = 232448
ADA_SHARED_BYTES = 101376
E4M3, E5M2 = "fp8e4nv", "fp8e5"
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
NO_EPILOGUE = {"HAS_BIAS": False, "ACTIVATION": None, "HAS_RESIDUAL": False}
FULL_EPILOGUE = {"HAS_BIAS": True, "ACTIVATION": "gelu", "HAS_RESIDUAL": True}
KERNELS = {"epilogue": scaled_matmul_kernel, "blockwise": block_scaled_matmul_kernel, "mx": mx_matmul_kernel}
# What distinguishes the products of one family: rows that share a scale, in each operand.
ROWS = {"epilogue": [(0, 0)], "blockwise": [(1, 128), (1, 1), (128, 128), (128, 1)], "mx": [(1, 1)]}


def split_arguments(kernel, types, constants):
    """Signature and constants as the launcher would pass them: None and 1 are constants, the rest by type."""
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    return signature, {name: constants[name] for name in kernel.arg_names if name in constants}


def epilogue_types(epilogue):
    types = {"bias_ptr": "*bf16", "residual_ptr": "*bf16"}
    constants = {**epilogue, "stride_rn": 1}
    if not epilogue["HAS_BIAS"]:
        constants["bias_ptr"] = None
    if not epilogue["HAS_RESIDUAL"]:
        constants["residual_ptr"] = None
    return types, constants


def aligned(signature, *names):
    return [name for name in signature if name in names or (name.endswith("_ptr") and signature[name][0] == "*")]


def compile_tiles(
    family, config, rows, out="bf16", element=(E4M3, E4M3), epilogue=NO_EPILOGUE, tma=True, cc=90, **more
):
    kernel = KERNELS[family]
    scale = "*u8" if family == "mx" else "*fp32"
    blocks = ((config.block_m, config.block_k), (config.block_n, config.block_k))
    columns = config.block_n // 2 if config.halves else config.block_n
    types, constants = epilogue_types(epilogue)
    types |= {"a_scale_ptr": scale, "b_scale_ptr": scale}
    types |= {n: descriptor(e, b) if tma else f"*{e}" for n, e, b in zip("ab", element, blocks, strict=True)}
    tma_out = tma and config.split_k == 1
    if config.split_k > 1:
        # Parts of a sum, which have no epilogue.
        out, epilogue = "fp32", NO_EPILOGUE
    types["out"] = descriptor(out, (config.block_m, columns)) if tma_out else f"*{out}"
    constants |= {f"BLOCK_{d}": getattr(config, f"block_{d.lower()}") for d in "MNK"}
    constants |= {"GROUP_M": config.group_m, "TMA": tma, "TMA_OUT": tma_out, "HALVES": config.halves}
    constants |= {"FLATTEN": config.flatten, "stride_ak": 1, "stride_bk": 1, **more}
    constants |= {"SWAP": config.swap, "SPLIT": config.split_k > 1}
    if family == "blockwise":
        constants |= {"A_ROWS": rows[0], "B_ROWS": rows[1], "SCALE_K": 128}
    if family == "mx":
        constants |= {"A_FORMAT": "e4m3", "B_FORMAT": "e4m3", "SCALE_K": 32, "NATIVE": cc == 100}
    signature, constants = split_arguments(kernel, types, constants)
    divisible = aligned(signature, "M", "N", "K", "stride_am", "stride_bn", "stride_out", "stride_rm")
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_kernel(kernel, signature, constants, cc, divisible_by_16=divisible, **options)


def compile_specialized(config, rows, out="bf16", element=(E4M3, E4M3), epilogue=NO_EPILOGUE, promote=True):
    def layout(itemsize, rank=2):
        swizzle = 128 if rank == 2 else 0
        return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * itemsize, rank=rank)

    split = config.split_k > 1
    if split:
        out, epilogue = "fp32", NO_EPILOGUE
    block_m, block_n = config.block_m, config.block_n
    if config.swap:
        block_m, block_n, rows = block_n, block_m, rows[::-1]
    out_block = (SPECIALIZED_WAVE_ROWS, block_n // 2 if config.halves else block_n)
    if config.swap:
        out_block = out_block[::-1]
    types, constants = epilogue_types(epilogue)
    types |= {
        "a_desc": descriptor(element[0], (block_m, config.block_k), layout(1)),
        "b_desc": descriptor(element[1], (block_n, config.block_k), layout(1)),
        "out_desc": descriptor(out, out_block, layout(ITEMSIZES[out])),
        "a_scale": descriptor("fp32", (max(block_m, SCALE_VECTOR),), layout(4, 1)) if rows[0] == 1 else "*fp32",
        "b_scale": descriptor("fp32", (max(block_n, SCALE_VECTOR),), layout(4, 1)) if rows[1] == 1 else "*fp32",
    }
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m}
    constants |= {"A_ROWS": rows[0], "B_ROWS": rows[1], "STAGES": config.num_stages}
    constants |= {"PROMOTE": promote, "SWAP": config.swap, "SPLIT": split}
    constants |= {"STAGGER": config.stagger, "TIGHT": config.tight, "HALVES": config.halves, "OVERLAP": config.overlap}
    constants |= {"PINGPONG": config.pingpong}
    signature, constants = split_arguments(hopper_matmul_kernel, types, constants)
    return compile_kernel(
        hopper_matmul_kernel, signature, constants, 90, config.num_warps, divisible_by_16=aligned(signature)
    )


def promotion(family, accumulation):
    if family != "epilogue":
        return {}
    return {"PROMOTE_EVERY": 128 if accumulation == "precise" else None, "stride_a_scale": 1, "stride_b_scale": 1}


def compiled_once(configs):
    """How many parts K has is an argument of a kernel; that it has any is what it is compiled for."""
    return list(dict.fromkeys(replace(config, split_k=min(config.split_k, 2)) for config in configs))


SHIPPED = [
    pytest.param(family, accumulation, config, rows, id=f"{family}-{accumulation}-{rows[0]}x{rows[1]}-{number}")
    for family, spaces in SPACES.items()
    for accumulation, configs in spaces.items()
    for number, config in enumerate(compiled_once(configs))
    # Few rows are an input's: scaled each by itself. What has registers for precise sums has them for fast ones.
    if not (config.max_m and accumulation == "fast")
    for rows in ROWS[family][: 2 if config.max_m else None]
]


def compile_shipped(family, accumulation, config, rows, **options):
    if config.specialized:
        promote = accumulation == "precise" or family == "blockwise"
        return compile_specialized(config, rows, promote=promote, **options)
    return compile_tiles(family, config, rows, **promotion(family, accumulation), **options)
