"""Do GEMMs gain from TMA multicast? ``python -m bench.limits.multicast FILE``, after ``--compile`` has made ``FILE``.

``--compile`` needs Triton 3.8 or later and no GPU: it writes builds of :mod:`bench.limits.multicast_kernel` for Hopper.
The measurement launches them by the CUDA driver under any Triton, beside our GEMM and torch's, in turn, and samples the
power. All builds must give the same bits, before and after. On a CPU, use ``--smoke``: our GEMM of a small shape.
"""

from __future__ import annotations

import base64
import ctypes
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

import tritonfp8
from bench.contest.cases import GEMM_CASES, gemm_flops
from bench.contest.machine import results_folder, write_results
from bench.limits.multicast_kernel import multicast_matmul_kernel
from bench.limits.power import OWN, SMOKE_SHAPES, TORCH, Sampler, timed
from tritonfp8 import Quantized
from tritonfp8.launch.kernel_cache import COMPILER_OPTIONS

SHAPES = ((8192, 8192, 8192), (16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (8192, 9728, 2560))
ROUNDS, SECONDS = 3, 0.4
# The largest error of a result, relative to the float32 product of the same codes.
MAX_ERROR = 0.02
# A build has so many blocks a cluster, and MULTICAST.
ALONE, CLUSTER, MULTICAST, RELAY = "one block", "cluster", "cluster, multicast", "cluster, multicast, relay"
BUILDS = {ALONE: (1, None), CLUSTER: (2, None), MULTICAST: (2, "direct"), RELAY: (2, "relay")}
# The first configuration that the package has for each accumulation: columns of a tile, stages, overlap.
TILES = {"fast": (256, 4, 0), "precise": (128, 5, 2)}
WAVE_ROWS, BLOCK_K, GROUP_M = 64, 128, 16
CLUSTER_DIMENSION, MAX_DYNAMIC_SHARED_BYTES, SWIZZLE_128, L2_PROMOTION_128 = 4, 8, 3, 2
DRIVER_TYPES = {torch.float8_e4m3fn: 0, torch.bfloat16: 9}
Functions = dict[str, Callable[[], torch.Tensor]]


def compiled(accumulation: str, build: str) -> dict[str, Any]:
    """A build of the kernel for Hopper: the machine code, and what its launch needs."""
    columns, stages, overlap = TILES[accumulation]
    blocks, multicast = BUILDS[build]

    def descriptor(element: str, block: tuple[int, int], bits: int, split: int) -> str:
        layout = gl.NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=bits, rank=2, cga_layout=[[split, 0]] if blocks > 1 else []
        )
        return f"tensordesc<{element}{list(block)},{layout!r}>"

    types = {
        "a_desc": descriptor("fp8e4nv", (WAVE_ROWS * blocks, BLOCK_K), 8, 1),
        "b_desc": descriptor("fp8e4nv", (columns, BLOCK_K), 8, 0),
        "out_desc": descriptor("bf16", (WAVE_ROWS * blocks, columns // 2), 16, 1),
        "a_scale": "*fp32", "b_scale": "*fp32", "M": "i32", "N": "i32", "K": "i32",
    }  # fmt: skip
    names = multicast_matmul_kernel.arg_names
    constants = (columns, BLOCK_K, GROUP_M, stages, overlap, multicast)
    source = GluonASTSource(
        fn=multicast_matmul_kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(len(types) + i,): value for i, value in enumerate(constants)},
    )
    options = {"num_warps": 4, "num_ctas": blocks, **COMPILER_OPTIONS}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "accumulation": accumulation, "build": build, "triton": triton.__version__, "blocks": blocks,
        "tile": (2 * WAVE_ROWS * blocks, columns), "shared": found.metadata.shared, "warps": found.metadata.num_warps,
        "boxes": [meta["block_size"] for meta in found.metadata.tensordesc_meta],
        "code": base64.b64encode(found.asm["cubin"]).decode(),
    }  # fmt: skip


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint32),
    )  # fmt: skip


def _call(name: str, *arguments: Any) -> None:
    if error := getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments):
        raise RuntimeError(f"{name} returned {error}")


def _tensor_map(matrix: torch.Tensor, box: list[int]) -> ctypes.Array[Any]:
    """A TMA descriptor of a matrix of dense rows."""
    memory = (ctypes.c_uint8 * 192)()
    aligned = (ctypes.c_uint8 * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
    (rows, columns), row_bytes = matrix.shape, matrix.stride(0) * matrix.itemsize
    _call(
        "cuTensorMapEncodeTiled", aligned, DRIVER_TYPES[matrix.dtype], 2, ctypes.c_void_p(matrix.data_ptr()),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(*box[::-1]), (ctypes.c_uint32 * 2)(1, 1), 0, SWIZZLE_128, L2_PROMOTION_128, 0,
    )  # fmt: skip
    return aligned


def launcher(build: dict[str, Any], a: Quantized, b: Quantized) -> Callable[[], torch.Tensor]:
    """A function that launches a build on the current stream, and returns ``a @ b.T``, each time in the same memory.

    The arguments are as Triton's launcher passes them: a TMA descriptor is followed by its shape and strides, and two
    pointers to memory that this kernel does not use come last.
    """
    module, function, code = ctypes.c_void_p(), ctypes.c_void_p(), base64.b64decode(build["code"])
    _call("cuModuleLoadData", ctypes.byref(module), code)
    _call("cuModuleGetFunction", ctypes.byref(function), module, b"multicast_matmul_kernel")
    _call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, build["shared"])
    (m, k), n = a.qdata.shape, b.qdata.shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=a.qdata.device)
    scales = [each.scale.flatten().contiguous() for each in (a, b)]
    values: list[Any] = []
    for matrix, box in zip((a.qdata, b.qdata, out), build["boxes"], strict=True):
        values += [_tensor_map(matrix, box), *map(ctypes.c_int32, matrix.shape), *map(ctypes.c_int64, matrix.stride())]
    values += [ctypes.c_void_p(scale.data_ptr()) for scale in scales]
    values += [*map(ctypes.c_int32, (m, n, k)), ctypes.c_void_p(), ctypes.c_void_p()]
    arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    blocks, (rows, columns) = build["blocks"], build["tile"]
    multiprocessors = torch.cuda.get_device_properties(out.device).multi_processor_count
    grid = (min(multiprocessors // blocks, m // rows * (n // columns)) * blocks, 1, 1)
    attributes = (LaunchAttribute * 1)(LaunchAttribute(CLUSTER_DIMENSION, (blocks, 1, 1)))
    stream = torch.cuda.current_stream().cuda_stream
    config = LaunchConfig(grid, (32 * build["warps"], 1, 1), build["shared"], stream, attributes, int(blocks > 1))

    # The arguments are addresses of ``values``, and two of these are addresses of ``scales``: the default keeps them.
    def launch(kept: Any = (values, scales)) -> torch.Tensor:
        _call("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)
        return out

    return launch


def check(functions: Functions, expected: torch.Tensor) -> dict[str, float]:
    """The relative error of each contender.

    Raises:
        RuntimeError: an error is too large, or two builds differ in a bit.
    """
    errors, first = {}, None
    for name, function in functions.items():
        out = function()
        errors[name] = float((out.float() - expected).norm() / expected.norm())
        if not errors[name] < MAX_ERROR:
            raise RuntimeError(f"{name} has an error of {errors[name]}")
        if name in BUILDS:
            first = out.clone() if first is None else first
            if not torch.equal(out, first):
                raise RuntimeError(f"{name} differs from the other builds")
    return errors


def rows_of(
    builds: list[dict[str, Any]], shape: tuple[int, int, int], device: torch.device, sampler: Sampler, smoke: bool
) -> list[dict[str, Any]]:
    """A row for each contender on one shape: seconds of each round, and medians over the rounds."""
    m, n, k = shape
    a, b = GEMM_CASES[0].quantized(*(torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n)))
    expected = (a.qdata.float() * a.scale) @ (b.qdata.float() * b.scale).t()
    rows = []
    for kind in TILES:
        functions: Functions = {x["build"]: launcher(x, a, b) for x in builds if x["accumulation"] == kind}
        functions[OWN] = lambda kind=kind: tritonfp8.scaled_matmul(a, b, accumulation=kind)
        if device.type == "cuda":
            functions[TORCH] = GEMM_CASES[0].peer(a, b, kind)
        errors = check(functions, expected)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in functions}
        for _ in range(1 if smoke else ROUNDS):
            for name, function in functions.items():
                rounds[name].append(timed(function, device, 0.0 if smoke else SECONDS, sampler))
        check(functions, expected)
        for name, found in rounds.items():
            row = {"shape": shape, "accumulation": kind, "contender": name, "flops": gemm_flops(m, n, k)}
            measured = set.intersection(*map(set, found))
            row |= {key: statistics.median(each[key] for each in found) for key in sorted(measured)}
            rows.append({**row, "error": errors[name], "rounds": [each["seconds"] for each in found]})
    return rows


def main(
    kernels: Annotated[Path | None, typer.Argument(help="File of the builds.")] = None,
    compile: Annotated[bool, typer.Option(help="Write the file; needs Triton 3.8 or later.")] = False,
    smoke: Annotated[bool, typer.Option(help="A small shape, once: to test this program, also on a CPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="File. [default: multicast.json of this GPU's results]")] = None,
) -> None:
    """Compile; or measure, print each row, and write."""
    if compile and kernels:
        kernels.write_text(json.dumps([compiled(kind, build) for kind in TILES for build in BUILDS]))
        return
    builds = json.loads(kernels.read_text()) if kernels else []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    with Sampler(device) as sampler:
        for shape in SMOKE_SHAPES if smoke else SHAPES:
            for row in rows_of(builds, shape, device, sampler, smoke):
                rows.append(row)
                rate = f"{row['flops'] / row['seconds'] / 1e12:.0f} TFLOP/s"
                print(shape, row["accumulation"], row["contender"], rate, row.get("mhz"), row.get("watts"), flush=True)
    about = {"unit": "seconds, MHz, W; capped: share of the samples; error: relative, of the float32 product"}
    about["compiled by triton"] = ", ".join({build["triton"] for build in builds})
    write_results(out or results_folder() / "multicast.json", {**about, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
