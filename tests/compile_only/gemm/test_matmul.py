"""Every shipped configuration of the GEMMs compiles for Hopper, within its registers and its shared memory."""

from dataclasses import replace

import pytest
from matmul_compiles import (
    ADA_SHARED_BYTES,
    FULL_EPILOGUE,
    HOPPER_SHARED_BYTES,
    ITEMSIZES,
    NO_EPILOGUE,
    ROWS,
    SHIPPED,
    compile_shipped,
    compiled_once,
)

from tritonfp8.kernels.gemm.hopper_dense import EARLY_STEPS
from tritonfp8.tuning.matmul_space import SPACES, has_registers, shared_bytes, supports


def fences_of_barriers(ptx):
    """Number of fences that show barriers to TMA: before its first copies, and where other warps begin."""
    start = ptx.index("mbarrier.init")
    prologue = ptx[start : ptx.index("barrier.sync", ptx.rindex("mbarrier.init"))]
    first_copies, _, rest = prologue.partition("cp.async.bulk.tensor")
    assert "mbarrier.init" in rest
    return [part.rfind("fence.proxy.async") > part.rfind("mbarrier.init") for part in (first_copies, rest)]


def serves(family, config, rows, out):
    """Whether the configuration is chosen for this output on Hopper."""
    return supports(config, family, ITEMSIZES[out], True, True, HOPPER_SHARED_BYTES, column_scales=rows[1] == 1)


def has_epilogue(family, config, rows):
    """Whether the configuration is compiled with an epilogue: parts of a sum have none.

    An epilogue comes after the scales of blocks, so one kind of them is enough: the one that takes most memory.
    """
    return config.split_k == 1 and (family != "blockwise" or rows == ROWS["blockwise"][0 if config.max_m else 1])


def compile_with_epilogue(family, accumulation, config, rows, out):
    epilogue = {**NO_EPILOGUE, "HAS_BIAS": True} if config.bare else FULL_EPILOGUE
    return compile_shipped(family, accumulation, config, rows, out=out, epilogue=epilogue)


@pytest.mark.parametrize(("family", "accumulation", "config", "rows"), SHIPPED)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_every_config_runs_on_hopper_without_spills(family, accumulation, config, rows, out):
    if not serves(family, config, rows, out):
        pytest.skip("this configuration is not chosen for this output")
    if config.split_k > 1 and out != "fp32":
        pytest.skip("its parts are float32 whatever the output is")
    if out == "fp32" and replace(config, split_k=2) in compiled_once(SPACES[family][accumulation]):
        pytest.skip("compiled as the parts of a sum")
    report = None
    if out == "fp32" and has_epilogue(family, config, rows):
        # Compiled anyway, and takes no fewer registers than without an epilogue.
        report = compile_with_epilogue(family, accumulation, config, rows, out)
    if report is None or report.spill_bytes:
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
        # GPU that was time-sliced between processes restored the barrier.
        assert report.ptx.count("mbarrier.init") == 2 * config.num_stages + (config.stagger or config.pingpong)
        # Barriers of stages that the early copies do not take are initialized after the first fence.
        assert fences_of_barriers(report.ptx) == [True, config.num_stages > EARLY_STEPS.value]


@pytest.mark.parametrize(("family", "accumulation", "config", "rows"), SHIPPED)
def test_every_config_holds_its_epilogue(family, accumulation, config, rows):
    if not has_epilogue(family, config, rows):
        pytest.skip("parts have no epilogue, and one kind of scales is enough")
    # Of the outputs that it serves, the one that takes most memory.
    out = "fp32" if serves(family, config, rows, "fp32") else "bf16"
    report = compile_with_epilogue(family, accumulation, config, rows, out)
    assert report.shared_bytes <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("out", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize(("family", "accumulation"), [(f, a) for f, spaces in SPACES.items() for a in spaces])
def test_every_product_has_a_config_on_every_target(family, accumulation, bare, out):
    for specialized, shared in ((True, HOPPER_SHARED_BYTES), (False, HOPPER_SHARED_BYTES), (False, ADA_SHARED_BYTES)):
        configs = SPACES[family][accumulation]
        assert any(supports(c, family, ITEMSIZES[out], bare, specialized, shared) for c in configs)


def test_no_config_is_shipped_in_vain():
    """Each serves some output on Hopper, where triton finds registers for it."""
    for family, spaces in SPACES.items():
        for config in filter(has_registers, (c for configs in spaces.values() for c in configs)):
            assert any(supports(config, family, size, True, True, HOPPER_SHARED_BYTES) for size in (2, 4))
