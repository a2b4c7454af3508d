"""Every shipped kernel and configuration compiles: for Hopper within its limits, for Ada and Blackwell at all."""

import dataclasses
import re
from dataclasses import dataclass, replace

import pytest
import torch
from compile_target import compile_kernel, compile_launch, descriptor, note_launches, triton_since
from triton.experimental.gluon import language as gl

from tritonfp8 import reference
from tritonfp8.kernels.cast.quantize import quantize_kernel
from tritonfp8.kernels.matmul.block_scaled import block_scaled_matmul_kernel, mx_matmul_kernel
from tritonfp8.kernels.matmul.hopper import EARLY_STEPS, hopper_matmul_kernel
from tritonfp8.kernels.matmul.scaled import reduce_parts_kernel, scaled_matmul_kernel
from tritonfp8.launch import cast as launch
from tritonfp8.launch import partial_maxima
from tritonfp8.launch.matmul import REDUCE_TILE
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROWWISE, QuantSpec
from tritonfp8.tuning.matmul_space import (
    SCALE_VECTOR,
    SPACES,
    SPECIALIZED_WAVE_ROWS,
    MatmulConfig,
    shared_bytes,
    supports,
)

HOPPER_SHARED_BYTES = 232448
ADA_SHARED_BYTES = 101376
E4M3, E5M2 = "fp8e4nv", "fp8e5"
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
NO_EPILOGUE = {"HAS_BIAS": False, "ACTIVATION": None, "HAS_RESIDUAL": False}
FULL_EPILOGUE = {"HAS_BIAS": True, "ACTIVATION": "gelu", "HAS_RESIDUAL": True}
KERNELS = {
    "epilogue": scaled_matmul_kernel,
    "blockwise": block_scaled_matmul_kernel,
    "mx": mx_matmul_kernel,
}
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
    if family != "mx":
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
    signature, constants = split_arguments(hopper_matmul_kernel, types, constants)
    return compile_kernel(
        hopper_matmul_kernel, signature, constants, 90, config.num_warps, divisible_by_16=aligned(signature)
    )


def fences_of_barriers(ptx):
    """How often the copy engine is made to see barriers: before its first copies, and where other warps begin."""
    start = ptx.index("mbarrier.init")
    prologue = ptx[start : ptx.index("barrier.sync", ptx.rindex("mbarrier.init"))]
    first_copies, _, rest = prologue.partition("cp.async.bulk.tensor")
    assert "mbarrier.init" in rest
    return [part.rfind("fence.proxy.async") > part.rfind("mbarrier.init") for part in (first_copies, rest)]


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


@pytest.mark.parametrize(("family", "accumulation", "config", "rows"), SHIPPED)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_every_config_runs_on_hopper_without_spills(family, accumulation, config, rows, out):
    if not supports(config, family, ITEMSIZES[out], True, True, HOPPER_SHARED_BYTES, column_scales=rows[1] == 1):
        pytest.skip("this configuration is not chosen for this output")
    if config.split_k > 1 and out != "fp32":
        pytest.skip("its parts are float32 whatever the output is")
    if out == "fp32" and replace(config, split_k=2) in compiled_once(SPACES[family][accumulation]):
        pytest.skip("compiled as the parts of a sum")
    report = compile_shipped(family, accumulation, config, rows, out=out)
    instruction = "bf16.bf16" if family == "mx" else "e4m3.e4m3"
    assert f".f32.{instruction}" in report.ptx
    assert "wgmma.mma_async.sync" in report.ptx
    assert "cp.async.bulk.tensor.2d" in report.ptx
    assert report.spill_bytes == 0, report.log
    assert report.shared_bytes <= HOPPER_SHARED_BYTES
    assert report.shared_bytes <= shared_bytes(config, family, ITEMSIZES[out])
    if config.specialized:
        assert "serialized" not in report.log, report.log
        # Every barrier that is initialized is waited for. The memory of any other is given to a buffer, over which a
        # GPU that took turns with processes restored it.
        assert report.ptx.count("mbarrier.init") == 2 * config.num_stages + config.stagger
        # Barriers of stages that the early copies do not take are initialized after the first fence.
        assert fences_of_barriers(report.ptx) == [True, config.num_stages > EARLY_STEPS.value]


# Ways of the specialized kernel that a configuration may take, with the scales for which it has the registers.
VARIANTS = {
    "stagger": (MatmulConfig(256, 128, 128, 4, 4, specialized=True, stagger=True), [(0, 0)], True),
    "tight": (MatmulConfig(256, 128, 128, 4, 3, specialized=True, tight=True), [(1, 128)], True),
    "tight, stagger, halves": (
        MatmulConfig(256, 128, 128, 4, 4, specialized=True, tight=True, stagger=True, halves=True),
        [(0, 0), *ROWS["blockwise"]],
        True,
    ),
    "overlap": (
        MatmulConfig(128, 128, 128, 4, 5, specialized=True, overlap=4),
        [(0, 0), (1, 128)],
        True,
    ),
    "fast, halves": (MatmulConfig(128, 256, 128, 4, 4, specialized=True, halves=True), [(0, 0)], False),
    "fast, two waves": (MatmulConfig(256, 128, 128, 4, 4, specialized=True), [(0, 0)], False),
}


@pytest.mark.parametrize(
    ("config", "rows", "promote"),
    [
        pytest.param(config, rows, promote, id=f"{name}-{rows[0]}x{rows[1]}")
        for name, (config, several, promote) in VARIANTS.items()
        for rows in several
    ],
)
def test_variants_hold_their_registers(config, rows, promote):
    """0 spills, and the assembler leaves products in flight: it serializes what it cannot follow, and only says so."""
    if config.stagger and not config.tight and triton_since("3.8"):
        pytest.skip("two waves a group, not tight, spill 692 bytes since triton 3.8; no space has such a configuration")
    report = compile_specialized(config, rows, promote=promote)
    assert f"m64n{config.block_n}k32.f32.e4m3.e4m3" in report.ptx
    assert report.spill_bytes == 0, report.log
    assert "serialized" not in report.log, report.log
    assert report.shared_bytes <= HOPPER_SHARED_BYTES
    assert report.shared_bytes <= shared_bytes(config, "blockwise" if rows[0] else "epilogue", ITEMSIZES["bf16"])


def test_the_largest_tile_has_room_for_an_epilogue():
    if triton_since("3.9"):
        pytest.skip("an activation spills 392 bytes since triton 3.9; only bare products choose this tile")
    config, _, _ = VARIANTS["tight, stagger, halves"]
    report = compile_specialized(config, (0, 0), epilogue={**FULL_EPILOGUE, "ACTIVATION": "silu"})
    assert report.spill_bytes == 0, report.log
    assert "serialized" not in report.log, report.log


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_sum_of_parts_compiles_for_every_target(cc, scaled):
    types, constants = epilogue_types(FULL_EPILOGUE)
    types |= {"parts": "*fp32", "out": "*bf16", "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32"}
    constants |= {**REDUCE_TILE, "SPLIT_K": 4, "SCALED": scaled}
    signature, constants = split_arguments(reduce_parts_kernel, types, constants)
    divisible = aligned(signature, "N", "parts", "out", "stride_parts", "stride_out", "stride_rm")
    report = compile_kernel(reduce_parts_kernel, signature, constants, cc, divisible_by_16=divisible)
    assert ("griddepcontrol.wait" in report.ptx) == (cc >= 90)
    assert report.spill_bytes == 0
    assert "ld.global.v4" in report.ptx, "a thread reads 16 bytes of a part at a time"


@pytest.mark.parametrize(("family", "accumulation", "config", "rows"), SHIPPED)
def test_every_config_holds_its_epilogue(family, accumulation, config, rows):
    if config.split_k > 1:
        pytest.skip("parts have no epilogue")
    # An epilogue comes after the scales of blocks: one kind of them will do, that which takes most memory.
    if family == "blockwise" and rows != ROWS["blockwise"][0 if config.max_m else 1]:
        pytest.skip("compiled with vectors of scales")
    if config.bare:
        report = compile_shipped(family, accumulation, config, rows, epilogue={**NO_EPILOGUE, "HAS_BIAS": True})
    else:
        report = compile_shipped(family, accumulation, config, rows, epilogue=FULL_EPILOGUE)
    assert report.shared_bytes <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("out", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(("family", "accumulation"), [(f, a) for f, spaces in SPACES.items() for a in spaces])
def test_every_product_has_a_config_on_every_target(family, accumulation, bare, out):
    for specialized, shared in ((True, HOPPER_SHARED_BYTES), (False, HOPPER_SHARED_BYTES), (False, ADA_SHARED_BYTES)):
        configs = SPACES[family][accumulation]
        assert any(supports(c, family, ITEMSIZES[out], bare, specialized, shared) for c in configs)


def test_no_config_is_shipped_in_vain():
    """Each serves some output on Hopper."""
    for family, spaces in SPACES.items():
        for config in (c for configs in spaces.values() for c in configs):
            assert any(supports(config, family, size, True, True, HOPPER_SHARED_BYTES) for size in (2, 4))


ELEMENTS = [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize(("cc", "instruction"), [(89, "mma.sync"), (90, "wgmma"), (100, "tcgen05.mma")])
@pytest.mark.parametrize("family", ["epilogue", "blockwise"])
def test_every_element_format_compiles_for_every_target(family, cc, instruction, element):
    shared = ADA_SHARED_BYTES if cc == 89 else HOPPER_SHARED_BYTES
    config = next(c for c in SPACES[family]["precise"] if supports(c, family, 2, True, False, shared))
    rows = ROWS[family][0]
    tma = cc >= 90
    report = compile_tiles(family, config, rows, element=element, cc=cc, tma=tma, **promotion(family, "precise"))
    assert instruction in report.ptx
    if cc < 100:
        names = [{E4M3: "e4m3", E5M2: "e5m2"}[e] for e in element]
        assert ".".join(reversed(names) if config.swap else names) in report.ptx


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_specialized_kernel_takes_every_element_format(element):
    config = SPACES["epilogue"]["precise"][0]
    assert config.specialized
    names = [{E4M3: "e4m3", E5M2: "e5m2"}[e] for e in element]
    assert f"m64n128k32.f32.{'.'.join(names)}" in compile_specialized(config, (0, 0), element=element).ptx


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("tma", [False, True])
def test_mx_compiles_for_every_target(cc, tma):
    if cc == 89 and tma:
        pytest.skip("Ada has no copy engine")
    shared = ADA_SHARED_BYTES if cc == 89 else HOPPER_SHARED_BYTES
    config = next(c for c in SPACES["mx"]["precise"] if supports(c, "mx", 2, True, False, shared))
    report = compile_tiles("mx", config, (1, 1), cc=cc, tma=tma)
    assert {89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}[cc] in report.ptx


@pytest.mark.parametrize("tma", [False, True])
def test_mx_is_native_where_a_report_calls_it_so(tma):
    """Of a tile below 128 rows Triton makes a bf16 product, silently: such a config must not be chosen there."""
    chosen = [
        c for c in SPACES["mx"]["precise"] if supports(c, "mx", 2, True, False, HOPPER_SHARED_BYTES, native_mx=True)
    ]
    assert chosen
    for config in SPACES["mx"]["precise"]:
        native = "kind::mxf8f6f4" in compile_tiles("mx", config, (1, 1), cc=100, tma=tma).ptx
        assert native == (config in chosen)


@pytest.mark.parametrize("family", list(SPACES))
def test_the_pointer_path_compiles_for_hopper(family):
    """What runs where the copy engine cannot address an operand."""
    for config in (c for c in compiled_once(SPACES[family]["precise"]) if not c.specialized):
        # Scales are read alike on either path: of the kinds of products the first and the last.
        for rows in ROWS[family][:1] if config.max_m else {ROWS[family][0], ROWS[family][-1]}:
            report = compile_tiles(family, config, rows, tma=False, **promotion(family, "precise"))
            assert "wgmma" in report.ptx
            assert report.shared_bytes <= HOPPER_SHARED_BYTES


COMPILED = {}


@dataclass(frozen=True)
class Launch:
    kernel: object
    arguments: tuple
    options: dict

    def compile(self, cc):
        """Once for all tests: of tensors only dtypes matter."""
        pointers, *rest = self.arguments
        key = cc, self.kernel.__name__, tuple(p.dtype for p in pointers), repr(rest), repr(self.options)
        if key not in COMPILED:
            COMPILED[key] = compile_launch(cc, self.kernel, *self.arguments, **self.options)
        return COMPILED[key]


@pytest.fixture
def launches(monkeypatch):
    """What the launcher would launch on a device of compute capability ``cc``: a function of ``cc`` and a cast."""

    def record(cc, cast):
        found = note_launches(monkeypatch, cc, launch, partial_maxima)
        cast()
        return [Launch(*each) for each in found]

    return record


def cast(x, spec, side):
    """``spec`` in one orientation or both, the transposed one as e5m2."""
    spec_t = dataclasses.replace(spec, format="e5m2")
    return {
        "normal": lambda: launch.quantize(x, *spec.args),
        "transposed": lambda: launch.quantize(x, *spec_t.args, True),
        "both": lambda: launch.quantize_both(x, *spec.args, *spec_t.args),
    }[side]


# Specs by block shape, as recipes use them.
CASTS = [
    QuantSpec(),
    QuantSpec("e4m3", ROWWISE, "fp32", "pow2"),
    QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2"),
    QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2"),
    QuantSpec("e4m3", BLOCK_1X32, "e8m0", "pow2"),
]
each_cast = pytest.mark.parametrize("spec", CASTS, ids=str)
each_side = pytest.mark.parametrize("side", ["normal", "transposed", "both"])


def matrix(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("cc", [89, 90, 100])
@each_cast
@each_side
def test_casts_compile_for_every_target(launches, spec, side, cc):
    for launched in launches(cc, cast(matrix(4096, 4096), spec, side)):
        report = launched.compile(cc)
        quantizes = launched.kernel is quantize_kernel
        assert ("cvt.rn.satfinite.e4m3x2" in report.ptx) == (quantizes and side != "transposed")
        assert ("cvt.rn.satfinite.e5m2x2" in report.ptx) == (quantizes and side != "normal")
        if cc == 90:
            assert report.spill_bytes == 0, report.log


# Of the 16-bit dtypes one is as wide as the other, and one orientation takes less than both.
@each_cast
@pytest.mark.parametrize("side", ["transposed", "both"])
def test_casts_of_float32_run_on_hopper_without_spills(launches, spec, side):
    for launched in launches(90, cast(matrix(4096, 4096, dtype=torch.float32), spec, side)):
        report = launched.compile(90)
        assert report.spill_bytes == 0, report.log


@each_cast
def test_casts_of_float16_compile(launches, spec):
    for launched in launches(90, cast(matrix(4096, 4096, dtype=torch.float16), spec, "both")):
        assert launched.compile(90).spill_bytes == 0


@each_cast
@pytest.mark.parametrize("side", ["normal", "both"])
def test_casts_with_tails_run_on_hopper_without_spills(launches, spec, side):
    for launched in launches(90, cast(matrix(4080, 4112), spec, side)):
        report = launched.compile(90)
        assert report.spill_bytes == 0, report.log


@each_cast
def test_casts_without_vectors_compile(launches, spec):
    for launched in launches(90, cast(matrix(1001, 4097), spec, "both")):
        assert launched.compile(90).registers


def shared_bytes_at_once(ptx):
    """Widths of the accesses to shared memory, in bytes."""
    accesses = re.findall(r"(?:st|ld)\.shared(?:::cta)?(?:\.v(\d))?\.[a-z](\d+)", ptx)
    return [int(count or 1) * int(bits) // 8 for count, bits in accesses]


@each_cast
@pytest.mark.parametrize("side", ["transposed", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_transposed_tiles_move_as_vectors(launches, spec, side, dtype):
    """No element goes through shared memory alone, nor to memory as less than 16 bytes."""
    launched = launches(90, cast(matrix(4096, 4096, dtype=dtype), spec, side))[-1]
    report = launched.compile(90)
    # Scales of one byte are few: four rows of tiles of a thread at most.
    assert shared_bytes_at_once(report.ptx).count(1) <= (32 if spec.scale_format == "e8m0" else 0)
    assert "st.global.v4.b32" in report.ptx


@pytest.mark.parametrize("cc", [89, 90, 100])
def test_transposes_move_as_vectors(launches, cc):
    qdata = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="meta")
    (launched,) = launches(cc, lambda: launch.transpose(qdata))
    report = launched.compile(cc)
    assert report.spill_bytes == 0, report.log
    assert min(shared_bytes_at_once(report.ptx), default=16) >= 4
    assert "ld.global.v4.b32" in report.ptx
    assert "st.global.v4.b32" in report.ptx


@pytest.mark.parametrize("cc", [89, 90, 100])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32), (1, -1), (-1, -1)], ids=str)
def test_amax_compiles_for_every_target(launches, block, cc):
    # Rows of so many parts that a launch of their own joins them.
    found = launches(cc, lambda: launch.amax(matrix(512, 32768), block))
    assert len(found) == (2 if block == ROWWISE else 1)
    for launched in found:
        assert launched.compile(cc).spill_bytes == 0


@pytest.mark.parametrize("cc", [89, 90, 100])
def test_a_cast_that_joins_parts_of_columns_compiles_for_every_target(launches, cc):
    (spec,) = (spec for spec in CASTS if spec.block == ROWWISE)
    found = launches(cc, lambda: launch.quantize(matrix(2048, 2048), *spec.args, True))
    assert len(found) == 2
    for launched in found:
        assert launched.compile(cc).spill_bytes == 0


@pytest.mark.parametrize("cc", [89, 90, 100])
def test_dequantize_compiles_for_every_target(launches, cc):
    spec = CASTS[-1]
    qdata, scale = reference.quantize(torch.zeros(4096, 64), *spec.args)
    (launched,) = launches(cc, lambda: launch.dequantize(qdata, scale, *spec.args, torch.bfloat16))
    assert launched.compile(cc).spill_bytes == 0
