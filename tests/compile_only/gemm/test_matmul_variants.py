"""The GEMM kernels for every target, and in the variants that a configuration may choose."""

import pytest
from compile_target import compile_kernel
from matmul_compiles import (
    ADA_SHARED_BYTES,
    E4M3,
    E5M2,
    FULL_EPILOGUE,
    HOPPER_SHARED_BYTES,
    ITEMSIZES,
    ROWS,
    aligned,
    compile_specialized,
    compile_tiles,
    compiled_once,
    epilogue_types,
    promotion,
    split_arguments,
)

from tritonfp8.compat import triton_since
from tritonfp8.kernels.gemm.scaled import reduce_parts_kernel
from tritonfp8.tuning import REDUCE_TILE
from tritonfp8.tuning.matmul_space import SPACES, MatmulConfig, shared_bytes, supports

# Ways of the specialized kernel that a configuration may take, with the scales for which it has the registers.
VARIANTS = {
    "stagger": (MatmulConfig(256, 128, 128, 4, 4, specialized=True, stagger=True), [(0, 0)], True),
    "tight": (MatmulConfig(256, 128, 128, 4, 3, specialized=True, tight=True), [(1, 128)], True),
    "tight, stagger, halves": (
        MatmulConfig(256, 128, 128, 4, 4, specialized=True, tight=True, stagger=True, halves=True),
        [(0, 0), *ROWS["blockwise"]],
        True,
    ),
    "overlap": (MatmulConfig(128, 128, 128, 4, 5, specialized=True, overlap=4), [(0, 0), (1, 128)], True),
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


NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
ELEMENTS = [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)]
PRODUCTS = [(family, element, True) for family in ("epilogue", "blockwise") for element in ELEMENTS]
PRODUCTS += [("mx", ELEMENTS[0], tma) for tma in (False, True)]


@pytest.mark.parametrize(("cc", "instruction"), [(89, "mma.sync"), (90, "wgmma"), (100, "tcgen05.mma")])
@pytest.mark.parametrize(("family", "element", "tma"), PRODUCTS)
def test_every_element_format_compiles_for_every_target(family, element, tma, cc, instruction):
    """Ada has no TMA."""
    shared = ADA_SHARED_BYTES if cc == 89 else HOPPER_SHARED_BYTES
    config = next(c for c in SPACES[family]["precise"] if supports(c, family, 2, True, False, shared))
    options = {"element": element, "cc": cc, "tma": tma and cc >= 90, **promotion(family, "precise")}
    report = compile_tiles(family, config, ROWS[family][0], **options)
    assert instruction in report.ptx
    assert f".target sm_{cc}{'a' if cc >= 90 else ''}" in report.ptx
    if family != "mx" and cc < 100:
        names = [NAMES[e] for e in element]
        assert ".".join(reversed(names) if config.swap else names) in report.ptx


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_specialized_kernel_takes_every_element_format(element):
    config = SPACES["epilogue"]["precise"][0]
    assert config.specialized
    names = ".".join(NAMES[e] for e in element)
    assert f"m64n128k32.f32.{names}" in compile_specialized(config, (0, 0), element=element).ptx


@pytest.mark.parametrize("tma", [False, True])
def test_mx_is_native_where_a_report_calls_it_so(tma):
    """Of a tile below 128 rows Triton makes a bf16 product, silently: such a config must not be chosen there."""
    space = SPACES["mx"]["precise"]
    chosen = [c for c in space if supports(c, "mx", 2, True, False, HOPPER_SHARED_BYTES, native_mx=True)]
    assert chosen
    assert not any(config.swap for config in chosen)
    # A swapped tile has few rows of the input, and the kernel refuses to be compiled as native.
    for config in (c for c in space if not c.swap):
        native = "kind::mxf8f6f4" in compile_tiles("mx", config, (1, 1), cc=100, tma=tma).ptx
        assert native == (config in chosen)


@pytest.mark.parametrize("family", list(SPACES))
def test_the_pointer_path_compiles_for_hopper(family):
    """The kernels for operands that TMA cannot address."""
    for config in (c for c in compiled_once(SPACES[family]["precise"]) if not c.specialized):
        # Scales are read alike on either path: of the kinds of products the first and the last.
        for rows in ROWS[family][:1] if config.max_m else {ROWS[family][0], ROWS[family][-1]}:
            report = compile_tiles(family, config, rows, tma=False, **promotion(family, "precise"))
            assert "wgmma" in report.ptx
            assert report.shared_bytes <= HOPPER_SHARED_BYTES
