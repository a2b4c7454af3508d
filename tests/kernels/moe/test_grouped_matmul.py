"""The GEMMs of groups, in every configuration: in the interpreter on CPU tensors, compiled on CUDA tensors.

Where all magnitudes are equal every scale is a power of two and every sum is exact, so the values equal the
reference's.
"""

import pytest
import torch
from cases import CUDA, each_device, normal
from routings import ends, routing_cases
from tuned import ADA, H200

from tritonfp8 import recipes, reference
from tritonfp8.compat import hardware
from tritonfp8.launch import gemms
from tritonfp8.recipes import Gemm
from tritonfp8.specs import BLOCK_1X128, BLOCK_128X128, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal, assert_matmul_close
from tritonfp8.tuning import chooser, grouped_tiles, matmul_space

pytestmark = [pytest.mark.usefixtures("poisoned_outputs"), pytest.mark.one_in(3)]

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def ternary(*shape, seed):
    """1.75, the mantissa of the largest e4m3 and e5m2 number, of either sign, and zeros."""
    return normal(*shape, seed=seed).sign().mul(normal(*shape, seed=seed + 1).abs() < 1).mul(1.75).bfloat16()


def assert_equal(found, expected):
    """Equal values; the order of the additions decides the sign of a zero."""
    assert_bitwise_equal(found + 0, expected + 0)


def moved(args, device):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]


def of_rows(gemm, x, weight, offsets):
    """The first arguments of a GEMM of groups of rows."""
    lhs = reference.quantize_groups(x, offsets, *gemm.lhs.args)
    return (*lhs, *gemm.lhs.args, *reference.quantize_matrices(weight, *gemm.rhs.args), *gemm.rhs.args, offsets)


def of_columns(gemm, grad, x, offsets):
    """The first arguments of a GEMM of groups of columns."""
    pairs = [
        (*reference.quantize_groups(y, offsets, *s.args, True), *s.args) for y, s in ((grad, gemm.lhs), (x, gemm.rhs))
    ]
    return (*pairs[0], *pairs[1], offsets)


def check_rows(gemm, device, tokens, sizes, n, k, data=ternary, bias=True, out_dtype=None, **options):
    x, weight, offsets = data(tokens, k, seed=0), data(len(sizes), n, k, seed=5), ends(sizes)
    vector = normal(len(sizes), n, seed=9).round().bfloat16() if bias else None
    args = (*of_rows(gemm, x, weight, offsets), vector, out_dtype)
    expected = reference.scaled_grouped_matmul(*args)
    return gemms.scaled_grouped_matmul(*moved(args, device), gemm.accumulation, **options).cpu(), expected


def check_columns(gemm, device, tokens, sizes, n, k, data=ternary, out_dtype=None, **options):
    grad, x, offsets = data(tokens, n, seed=0), data(tokens, k, seed=5), ends(sizes)
    args = (*of_columns(gemm, grad, x, offsets), None, out_dtype)
    expected = reference.scaled_grouped_matmul(*args, tokens=tokens)
    found = gemms.scaled_grouped_matmul(*moved(args, device), gemm.accumulation, tokens=tokens, **options)
    return found.cpu(), expected


HOSTILE = [(-5, 70, 3), (90, 10, 300), (2**31 - 1, -(2**31), 0)]


def of_both(recipe, offsets):
    """The first arguments of a GEMM of 100 rows and of one of 100 columns, and the number of tokens that each needs."""
    recipe = recipes.get(recipe)
    x, weight, grad = ternary(100, 96, seed=0), ternary(3, 48, 96, seed=5), ternary(100, 48, seed=7)
    return (of_rows(recipe.output, x, weight, offsets), 0), (of_columns(recipe.grad_weight, grad, x, offsets), 100)


def check_clamped(recipe, device, hostile):
    for args, tokens in of_both(recipe, torch.tensor(hostile, dtype=torch.int32)):
        found = gemms.scaled_grouped_matmul(*moved(args, device), tokens=tokens)
        assert_equal(found.cpu(), reference.scaled_grouped_matmul(*args, tokens=tokens))


def bf16(*shape, seed):
    return normal(*shape, seed=seed, dtype=torch.bfloat16)


@each_device
@each_recipe
@pytest.mark.parametrize(("tokens", "sizes"), routing_cases())
def test_groups_of_any_size(device, recipe, tokens, sizes):
    recipe = recipes.get(recipe)
    assert_equal(*check_rows(recipe.output, device, tokens, sizes, 48, 160))
    assert_equal(*check_columns(recipe.grad_weight, device, tokens, sizes, 48, 160))


@each_device
@each_recipe
@pytest.mark.parametrize(("n", "k"), [(41, 75), (200, 8), (136, 264)])
def test_sizes(device, recipe, n, k):
    recipe = recipes.get(recipe)
    for out_dtype in (torch.float32, torch.float16):
        assert_equal(*check_rows(recipe.output, device, 170, (7, 130, 20), n, k, out_dtype=out_dtype))
        assert_equal(*check_columns(recipe.grad_weight, device, 170, (7, 130, 20), n, k, out_dtype=out_dtype))


BLOCKS = [QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2"), QuantSpec("e5m2", BLOCK_128X128)]


@each_device
@pytest.mark.parametrize("rhs", BLOCKS, ids=str)
@pytest.mark.parametrize("lhs", BLOCKS, ids=str)
def test_every_pair_of_blocks(device, lhs, rhs):
    gemm = Gemm(lhs, rhs)
    assert_equal(*check_columns(gemm, device, 300, (7, 0, 250), 256, 144))
    if lhs.block == BLOCK_1X128:
        assert_equal(*check_rows(gemm, device, 300, (7, 0, 250), 256, 144))


SPECIALIZED = [
    pytest.param(family, accumulation, config, id=f"{family}-{accumulation}-{config.name}")
    for (family, accumulation), configs in grouped_tiles.SPECIALIZED.items()
    for config in configs
]


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("family", "accumulation", "config"), SPECIALIZED)
class TestSpecialized:
    """Each configuration of the warp-specialized kernel."""

    def gemms(self, family, accumulation):
        names = {"epilogue": ("rowwise", "tensorwise"), "blockwise": ("blockwise",)}[family]
        for name in names:
            recipe = recipes.get(name)
            for gemm in (recipe.output, recipe.grad_weight):
                yield Gemm(gemm.lhs, gemm.rhs, accumulation)

    def serves(self, family, config, out_dtype, of_columns, sizes=(256, 384)):
        rows = (1, 1) if of_columns else (1, 128)
        gemm = grouped_tiles.GroupedGemm(family, "precise", rows, 3, 400, sizes, of_columns, out_dtype.itemsize)
        return grouped_tiles.serves(config, gemm, H200, True)

    @pytest.mark.parametrize(("tokens", "sizes"), routing_cases())
    def test_groups_of_any_size(self, device, family, accumulation, config, out_dtype, tokens, sizes):
        output, grad_weight = list(self.gemms(family, accumulation))[:2]
        # The last wide tile ends in its left half, or 16 columns into its right one.
        for columns in (272, 400):
            if self.serves(family, config, out_dtype, False, (columns, 384)):
                found = check_rows(output, device, tokens, sizes, columns, 384, out_dtype=out_dtype, config=config)
                assert_equal(*found)
        if self.serves(family, config, out_dtype, True):
            found = check_columns(grad_weight, device, tokens, sizes, 272, 384, out_dtype=out_dtype, config=config)
            assert_equal(*found)

    def test_normal_data(self, device, family, accumulation, config, out_dtype):
        for gemm in self.gemms(family, accumulation):
            of_columns = gemm.lhs.block[1] == -1 and gemm == list(self.gemms(family, accumulation))[1]
            check = check_columns if of_columns else check_rows
            if accumulation == "fast" or not self.serves(family, config, out_dtype, of_columns):
                continue
            options = {"out_dtype": out_dtype, "config": config}
            found, expected = check(gemm, device, 700, (300, 0, 399), 256, 1024, bf16, **options)
            assert_matmul_close(found.flatten(0, -2), expected.float().flatten(0, -2), out_dtype)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("config", grouped_tiles.WIDE, ids=lambda config: config.name)
class TestWide:
    """Each configuration of the warp-specialized kernel for operands of two bytes: of bf16, and of MX operands."""

    @pytest.fixture(autouse=True)
    def _chosen(self, config, monkeypatch):
        monkeypatch.setattr(grouped_tiles, "WIDE", (config,))
        monkeypatch.setattr(matmul_space, "MAX_M_OF_CODES", -1)
        chooser.reload()
        yield
        chooser.reload()

    @pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize(("tokens", "sizes"), routing_cases())
    def test_mx_groups_of_any_size(self, device, out_dtype, tokens, sizes):
        recipe = recipes.get("mxfp8")
        assert_equal(*check_rows(recipe.output, device, tokens, sizes, 272, 416, out_dtype=out_dtype))
        assert_equal(*check_columns(recipe.grad_weight, device, tokens, sizes, 272, 416, out_dtype=out_dtype))

    @pytest.mark.parametrize(("n", "k"), [(8, 8), (200, 72), (264, 1000)])
    def test_sizes(self, device, n, k):
        recipe = recipes.get("mxfp8")
        assert_equal(*check_rows(recipe.output, device, 500, (7, 230, 20), n, k))
        assert_equal(*check_columns(recipe.grad_weight, device, 500, (7, 230, 20), n, k))

    def test_normal_data(self, device):
        recipe = recipes.get("mxfp8")
        for check, gemm in ((check_rows, recipe.output), (check_columns, recipe.grad_weight)):
            found, expected = check(gemm, device, 700, (300, 0, 399), 256, 1024, bf16)
            assert_matmul_close(found.flatten(0, -2), expected.float().flatten(0, -2), torch.bfloat16)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("tokens", "sizes"), routing_cases())
    def test_high_precision(self, device, dtype, tokens, sizes):
        x, weight = ternary(tokens, 136, seed=0).to(dtype), ternary(len(sizes), 272, 136, seed=3).to(dtype)
        offsets, bias = ends(sizes), normal(len(sizes), 272, seed=9).round().to(dtype)
        for args in ((x, weight, offsets, bias), (x, weight, offsets)):
            found = gemms.grouped_matmul(*moved(args, device))
            assert_equal(found.cpu(), reference.grouped_matmul(*args))

    def test_what_belongs_to_no_group_is_not_read(self, device):
        gemm = recipes.get("mxfp8").output
        x, weight, offsets = ternary(400, 96, seed=0), ternary(3, 48, 96, seed=5), ends((0, 350, 0))
        args = of_rows(gemm, x, weight, offsets)
        x[350:], weight[0], weight[2] = torch.nan, torch.nan, torch.nan
        found = gemms.scaled_grouped_matmul(*moved(of_rows(gemm, x, weight, offsets), device))
        assert_equal(found.cpu(), reference.scaled_grouped_matmul(*args))

    @pytest.mark.parametrize("hostile", HOSTILE, ids=str)
    def test_hostile_offsets_are_clamped(self, device, hostile):
        check_clamped("mxfp8", device, hostile)


def test_how_groups_are_multiplied_is_known(monkeypatch):
    """Of MX operands on Hopper it depends on the size of a group."""
    recipe, few, many = recipes.get("mxfp8"), matmul_space.MAX_M_OF_CODES, matmul_space.MAX_M_OF_CODES + 1
    x, weight, offsets = ternary(2 * many, 96, seed=0), ternary(2, 48, 96, seed=5), ends((many, many))
    rows, columns = of_rows(recipe.output, x, weight, offsets), of_columns(recipe.grad_weight, x, x, offsets)

    def kinds(device):
        monkeypatch.setattr(hardware, "abilities", lambda _: device)
        return [
            gemms.grouped_product_kind(*rows),
            gemms.grouped_product_kind(*rows, batch_invariant=True),
            gemms.grouped_product_kind(*of_rows(recipe.output, x[: 2 * few], weight, ends((few, few)))),
            gemms.grouped_product_kind(*columns, tokens=2 * many),
            gemms.grouped_product_kind(*columns, tokens=2 * few),
            gemms.grouped_product_kind(*of_rows(recipes.get("rowwise").output, x, weight, offsets)),
        ]

    assert kinds(H200) == ["dequantized", "emulated", "emulated", "dequantized", "emulated", "fp8"]
    assert kinds(ADA) == [*["emulated"] * 5, "fp8"]
    assert kinds(hardware.CPU) == ["reference"] * 6


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
# On Hopper torch sums bf16 over tokens where the sizes are multiples of 16 bytes.
@pytest.mark.parametrize(("n", "k"), [(40, 72), (41, 75)])
@pytest.mark.parametrize(("tokens", "sizes"), routing_cases())
def test_high_precision(device, dtype, n, k, tokens, sizes):
    x, weight, grad = (
        ternary(*shape, seed=seed).to(dtype)
        for seed, shape in ((0, (tokens, k)), (3, (len(sizes), n, k)), (7, (tokens, n)))
    )
    offsets, bias = ends(sizes), normal(len(sizes), n, seed=9).round().to(dtype)
    for args in ((x, weight, offsets, bias), (x, weight, offsets), (grad.t(), x.t(), offsets)):
        found = gemms.grouped_matmul(*moved(args, device))
        assert_equal(found.cpu(), reference.grouped_matmul(*args))


@each_device
@each_recipe
def test_what_belongs_to_no_group_is_not_read(device, recipe):
    """NaN in the weights of empty groups, and in rows of no group."""
    gemm = recipes.get(recipe).output
    x, weight, offsets = ternary(200, 96, seed=0), ternary(3, 48, 96, seed=5), ends((0, 150, 0))
    expected = gemms.scaled_grouped_matmul(*moved(of_rows(gemm, x, weight, offsets), device))
    x[150:], weight[0], weight[2] = torch.nan, torch.nan, torch.nan
    found = gemms.scaled_grouped_matmul(*moved(of_rows(gemm, x, weight, offsets), device))
    assert_bitwise_equal(found, expected)
    assert not found[150:].any()


@each_device
@pytest.mark.parametrize("hostile", HOSTILE, ids=str)
def test_hostile_offsets_are_clamped(device, hostile):
    check_clamped("rowwise", device, hostile)


@each_device
def test_scales_and_offsets_of_other_layouts(device):
    gemm = recipes.get("blockwise").output
    x, weight, offsets = ternary(100, 256, seed=0), ternary(2, 128, 256, seed=5), ends((60, 40))
    a, a_scale, a_spec, b, b_scale, b_spec, _ = of_rows(gemm, x, weight, offsets)
    expected = reference.scaled_grouped_matmul(a, a_scale, a_spec, b, b_scale, b_spec, offsets)
    strided = torch.stack([offsets, offsets], 1)[:, 0]
    args = (a, a_scale.contiguous(), a_spec, b, b_scale.transpose(1, 2).contiguous().transpose(1, 2), b_spec, strided)
    assert_equal(gemms.scaled_grouped_matmul(*moved(args, device)).cpu(), expected)


@each_device
def test_a_given_output_is_written_in_every_call(device):
    """Also in a repeated call: it must not allocate another output."""
    for args, tokens in of_both("rowwise", ends((40, 0, 50))):
        expected = reference.scaled_grouped_matmul(*args, tokens=tokens)
        out = torch.empty(expected.shape, dtype=torch.bfloat16, device=device)
        for _ in range(2):
            found = gemms.scaled_grouped_matmul(*moved(args, device), tokens=tokens, out=out.fill_(torch.nan))
            assert found is out
            assert_equal(found.cpu(), expected)
