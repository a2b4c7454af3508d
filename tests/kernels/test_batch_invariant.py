"""Batch-invariant GEMMs: the bits of a row depend neither on the other rows nor on their number."""

import pytest
import torch
from cases import each_device, normal
from matmul_cases import PAIRS, Product, family, runs
from tuned import ADA, H200

from tritonfp8.kernels.gemm.hopper_dense import hopper_matmul_kernel
from tritonfp8.launch import casts, gemms
from tritonfp8.launch.gemms import dense
from tritonfp8.launch.plan import View, make_plan
from tritonfp8.specs import BLOCK_1X128, BLOCK_128X128, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal, assert_matmul_close
from tritonfp8.tuning import space

pytestmark = pytest.mark.one_in(3)

# Up to 64 rows MX codes are read by a kernel, up to 256 a GEMM may split K, from there on tiles are large.
COUNTS = (1, 7, 64, 65, 256, 300)
NAMES = ("rowwise", "1x128 x 128x128", "1x128 x 1x128", "mx")


def view(slot, *shape, dtype=torch.float8_e4m3fn):
    return View.of(torch.empty(shape, dtype=dtype, device="meta"), slot)._replace(aligned=True)


def planned_launches(pair, m, n, k, device, batch_invariant):
    """The kernels of a GEMM with their constants and options: all that decides in which order it sums."""
    operands = []
    for rows, spec in zip((m, n), pair, strict=True):
        shape = spec.scale_shape((rows, k))
        dtype = torch.uint8 if spec.scale_format == "e8m0" else torch.float32
        scale = view(len(operands) + 1, *shape, dtype=dtype)
        if spec.block == (1, 128):
            scale = scale._replace(strides=(1, -(-shape[0] // 4) * 4))
        operands += [view(len(operands), rows, k), scale]
    options = (pair[0].args[0], pair[1].args[0], None, torch.bfloat16, "precise", None, None, batch_invariant)
    plan = make_plan(dense.plan_scaled_matmul, [*operands, None, None, None], options, device)
    return [(launch.kernel, launch.constants, launch.options) for launch in plan.launches]


class TestPlans:
    @pytest.mark.parametrize("device", [H200, ADA], ids=lambda device: device.name)
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(("n", "k"), [(4096, 4096), (4096, 14336), (1024, 8192), (100, 272)])
    def test_one_order_of_sums_for_every_number_of_rows(self, device, name, n, k):
        def found(batch_invariant):
            return [planned_launches(PAIRS[name], m, n, k, device, batch_invariant) for m in range(1, 4097, 13)]

        first, *others = found(True)
        assert len(first) == 1, "a GEMM whose K is split has a second launch"
        kernels = {kernel for plan in (first, *others) for kernel, _, _ in plan}
        if kernels == {hopper_matmul_kernel}:
            # Its tiles give the same bits, as the test below sees on a GPU.
            assert not any(constants["SPLIT"] for plan in (first, *others) for _, constants, _ in plan)
            assert {plan[0][1]["PROMOTE"] for plan in (first, *others)} == {first[0][1]["PROMOTE"]}
        else:
            assert all(other == first for other in others)
        # Without it, the number of rows decides, unless the GEMM is small.
        assert n < 1024 or any(other != first for other in found(False))

    def test_an_odd_layout_of_the_rows_is_copied(self):
        """Rows from the middle of others may begin where TMA cannot read, and another kernel would run."""
        memory = torch.zeros(4 * 32 + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
        odd, wide = memory[1:].view(4, 32), memory[: 4 * 32].view(2, 64)[:, :32]
        assert not gemms.has_tma_layout(odd)
        copy = dense._readable_rows(odd)
        assert gemms.has_tma_layout(copy)
        assert torch.equal(copy.view(torch.uint8), odd.view(torch.uint8))
        assert dense._readable_rows(wide) is wide


def rows_of(product, m):
    """The GEMM of the first ``m`` rows, quantized by themselves."""
    part = Product.__new__(Product)
    part.specs, part.b, part.b_scale = product.specs, product.b, product.b_scale
    part.a, part.a_scale = casts.quantize(product.rows[:m], *product.specs[0].args)
    return part


# Name: operands and accumulation. The scales of blocks are no powers of two: sums of scaled steps then round.
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "none")
SQUARE = QuantSpec("e4m3", BLOCK_128X128, "fp32", "none")
GEMMS = {
    "rowwise": (*PAIRS["rowwise"], "precise"),
    "rowwise fast": (*PAIRS["rowwise"], "fast"),
    "1x128 x 128x128": (VECTOR, SQUARE, "precise"),
    "1x128 x 1x128": (VECTOR, VECTOR, "precise"),
    "mx": (*PAIRS["mx"], "precise"),
}


@each_device
@pytest.mark.parametrize("name", GEMMS)
def test_rows_are_those_of_a_larger_batch(device, name):
    *pair, accumulation = GEMMS[name]
    n, k, counts = (40, 2100, COUNTS) if device == "cpu" else (1024, 8192, (*COUNTS, 2, 17, 128, 257, 1024, 4095))
    product = Product.of(normal, pair, (1, n, k), device)
    product.rows = normal(max(counts) if device == "cpu" else 4096, k, seed=1, device=device)
    whole = rows_of(product, len(product.rows)).run(accumulation, batch_invariant=True)
    for m in counts:
        assert_bitwise_equal(rows_of(product, m).run(accumulation, batch_invariant=True), whole[:m])
    if accumulation == "precise":
        assert_matmul_close(whole[:8], rows_of(product, 8).expected(), torch.float32)
    if name != "mx" and device != "cpu":
        # The forward of training, whose GEMMs do not split K. Its tiles differ, and the interpreter multiplies tiles by
        # a BLAS, which on some CPUs sums tiles of another shape in another order.
        assert_bitwise_equal(rows_of(product, len(product.rows)).run(accumulation), whole)
    if device != "cpu" and name != "1x128 x 1x128" and torch.cuda.get_device_capability()[0] == 9:
        alike = [
            c for c in space(family(pair), accumulation) if c.specialized and c.split_k == 1 and runs(c, pair, device)
        ]
        assert len(alike) > 2 or name == "mx"
        for config in alike:
            for m in (7, 300):
                assert_bitwise_equal(rows_of(product, m).run(accumulation, config=config), whole[:m])
    if name == "rowwise" and device != "cpu":
        return  # Hopper's tensor cores round the sum of a step so coarsely that adding up steps is exact in any order.
    # So this test can fail: a configuration that splits K sums in another order. The GPU decides which GEMMs get one.
    splits = next(c for c in space(family(pair), accumulation) if c.split_k > 1 and runs(c, pair, device))
    assert not torch.equal(rows_of(product, 7).run(accumulation, config=splits), whole[:7])
