"""The matrix products, in every shipped configuration: in the interpreter on CPU tensors, compiled on CUDA tensors.

An output is filled with NaN before a launch and lies between guards that must survive it; padded operands lie in
buffers of NaN, so that what is read beyond an edge shows.
"""

import copy
import itertools
import math

import covering
import pytest
import torch
from cases import CUDA, INTERPRETER, each_device, generator, normal, surrounded
from matmul_cases import EPILOGUES, OTHER_PAIRS, PAIRS, Product, family, integers, runs

from tritonfp8.launch import casts, gemms
from tritonfp8.specs import ACCUMULATIONS, ACTIVATIONS, scale_shape
from tritonfp8.specs.formats import FORMATS, HIGH_PRECISION_DTYPES
from tritonfp8.specs.testing import MATMUL_TOLERANCES, assert_bitwise_equal, assert_matmul_close, sqnr
from tritonfp8.tuning import chooser

pytestmark = pytest.mark.one_in(2)

FEWEST_ROWS = 16


def positive(*shape, seed):
    return torch.rand(*shape, generator=generator(seed))


def launch_exactly(x, spec):
    """As :func:`quantize_exactly` with one scale of 1 for all, in little memory."""
    amax = torch.full(scale_shape(x.shape, spec.block), FORMATS[spec.format].qmax, device=x.device)
    return casts.quantize(x, *spec.args, amax=amax)


def padded_rows(x):
    """Rows 16-byte aligned, as TMA requires, whatever K is; NaN between them."""
    return surrounded(x, row_padding=-x.shape[1] % 16 + 16)


def assert_equal(actual, expected):
    """Equal values, in the actual dtype. The order of the additions decides the sign of a zero."""
    assert_bitwise_equal(actual + 0, expected.to(actual.dtype) + 0)


def check(pair, shape, device, accumulation="precise", layout=lambda x: x, pooled=None, **options):
    """Exact on integers; precise products within the tolerances on normal and on positive data.

    Where sums of normal data cancel, the noise of an output is the noise of its terms: of few outputs the ratio says
    little, so they go to the pool.
    """
    exact = Product.of(integers, pair, shape, device).with_layout(layout)
    assert_equal(exact.run(accumulation, **options), exact.expected())
    if accumulation == "fast":
        return
    out_dtype = options.get("out_dtype", torch.float32)
    if device == "cuda":
        # The interpreter adds up in float32, which data of one sign does not try harder.
        product = Product.of(positive, pair, shape, device).with_layout(layout)
        assert_matmul_close(product.run(**options), product.expected(), out_dtype)
    product = Product.of(normal, pair, shape, device).with_layout(layout)
    actual, expected = product.run(**options), product.expected()
    if pooled is None:
        assert_matmul_close(actual, expected, out_dtype)
    else:
        pooled.append((actual.flatten(), expected.flatten()))


def check_pool(pooled, out_dtype=torch.float32):
    actual, expected = (torch.cat(parts) for parts in zip(*pooled, strict=True))
    assert sqnr(actual, expected) >= MATMUL_TOLERANCES[out_dtype].overall


def sweep():
    """Every shipped configuration with every pair of blocks of its family, with and without TMA."""
    for name, pair in PAIRS.items():
        seen = []
        for accumulation in ACCUMULATIONS:
            for config in chooser.space(family(pair), accumulation):
                # A family that is always promoted has one space.
                if config in seen and family(pair) != "epilogue":
                    continue
                seen.append(config)
                for tma in (True,) if config.specialized else (True, False):
                    yield name, accumulation, config, tma


def flags(name, accumulation, config, tma):
    """The flags that decide which code of a kernel runs; the interpreter knows neither stages nor warps."""
    split = config.split_k > 1
    return name, accumulation, tma, config.swap, split, config.halves, config.flatten, config.group_m


def interpreted():
    """The smallest tile of each combination of flags: the interpreter runs the same code for the others."""
    found = {}
    for case in sorted(sweep(), key=lambda case: case[2].block_m * case[2].block_n):
        if output_dtypes(*case, "cpu"):
            found.setdefault(flags(*case), case)
    return list(found.values())


def output_dtypes(name, accumulation, config, tma, device):
    """The output dtypes that the configuration has room for on this device: some tiles are too large for four bytes."""
    return [dtype for dtype in (torch.float32, torch.bfloat16) if runs(config, PAIRS[name], device, tma, dtype)]


def swept(device, cases):
    for name, accumulation, config, tma in cases:
        sizes = f"{config.block_m}x{config.block_n}x{config.block_k} {config.num_stages} stages"
        sizes += " swapped" * config.swap + f" {config.split_k} parts" * (config.split_k > 1)
        kind = "specialized" if config.specialized else "tiles"
        path = "tma" if tma else "pointers"
        text = f"{name} {accumulation} {sizes} {kind} {path}-{device.id}"
        yield pytest.param(*device.values, name, accumulation, config, tma, id=text, marks=device.marks)


def best_and_smallest(pair, device, **product):
    """The first and the last configuration that can run; for the interpreter, the last."""
    configs = [config for config in chooser.space(family(pair), "precise") if runs(config, pair, device, **product)]
    return configs[-1:] if device == "cpu" else [configs[0], configs[-1]]


@pytest.mark.parametrize(
    ("device", "name", "accumulation", "config", "tma"), [*swept(INTERPRETER, interpreted()), *swept(CUDA, sweep())]
)
def test_every_configuration(device, name, accumulation, config, tma):
    """On a GPU each; in the interpreter one for each combination of flags."""
    pair = PAIRS[name]
    dtypes = output_dtypes(name, accumulation, config, tma, device)
    if not dtypes:
        pytest.skip("the device cannot run this configuration")
    options = {"config": config, "tma": tma, "out_dtype": dtypes[0]}
    aligned = [(config.block_m + 16, config.block_n + 16, 272)]
    if device == "cuda":
        aligned.append((384, 512, 1024))
        # Every part of K takes each stage more than once.
        steps = config.split_k * (2 * config.num_stages + 1)
        aligned.append((config.block_m + 16, config.block_n + 16, steps * config.block_k))
        # More tiles than programs: groups that take turns have several each.
        aligned += [(4112, 1040, k) for k in (272, steps * config.block_k)] * config.pingpong
    tails = (
        [(FEWEST_ROWS + 1 if config.max_m else 129, 127, 17)]
        if device == "cpu"
        else [(129, 127, 1000), (1000, 7, 17), (17, 1000, 127), (7, 129, 129)]
    )
    ones = [(1, 1, 1)]
    if config.specialized:
        # TMA stores the output, so its rows must be aligned.
        tails, ones = ([(m, n + -n % 8, k) for m, n, k in shapes] for shapes in (tails, ones))
    if tma:
        for shape in aligned:
            check(pair, shape, device, accumulation, **options)
    pooled = []
    for shape in tails if tma else tails + ones:
        layout = padded_rows if tma else lambda x: x
        product = Product.of(integers, pair, shape, device).with_layout(layout)
        assert gemms.has_tma_layout(product.a) or not tma, "this would test the pointer path"
        check(pair, shape, device, accumulation, layout, pooled, **options)
    if accumulation == "precise":
        check_pool(pooled, dtypes[0])


def test_the_interpreter_sees_every_flag_and_every_pair_of_flags():
    every = [flags(*case) for case in sweep() if output_dtypes(*case, "cpu")]
    some = [flags(*case) for case in interpreted()]
    assert len(some) < len(every) / 2
    for i, j in itertools.combinations(range(len(every[0])), 2):
        assert {(f[i], f[j]) for f in some} == {(f[i], f[j]) for f in every}
    assert {name for name, *_ in some} == set(PAIRS)
    assert {f[1] for f in some} == set(ACCUMULATIONS)
    for flag in (2, 3, 4, 5):
        assert {f[flag] for f in some} == {True, False}


SMALL_SIZES = (1, 17, 129)
SIZES = (1, 7, 17, 127, 129, 1000)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("device", "shapes"),
    [
        pytest.param(
            *INTERPRETER.values, covering.pairs(*[SMALL_SIZES] * 3), id=INTERPRETER.id, marks=INTERPRETER.marks
        ),
        pytest.param(*CUDA.values, list(itertools.product(SIZES, repeat=3)), id=CUDA.id, marks=CUDA.marks),
    ],
)
def test_every_tail(device, shapes, name):
    """M, N and K, in one configuration: by pairs in the interpreter, in the configuration of fewest steps."""
    pair = PAIRS[name]
    configs = [config for config in chooser.space(family(pair), "precise") if not config.specialized]
    config = configs[0] if device == "cpu" else configs[-1]
    pooled = []
    for shape in shapes:
        check(pair, shape, device, pooled=pooled, config=config, tma=False)
    check_pool(pooled)


@each_device
@pytest.mark.parametrize("name", PAIRS | OTHER_PAIRS)
def test_chosen_configuration(device, name):
    """What a caller gets: aligned and not, small and large."""
    pair = (PAIRS | OTHER_PAIRS)[name]
    shapes = [(144, 160, 144), (33, 20, 150)]
    if device == "cuda":
        shapes += [(1024, 2048, 512), (2048, 1000, 1000)]
    for shape in shapes:
        check(pair, shape, device)


def test_epilogues_are_all_there():
    assert {activation for _, activation, _, _ in EPILOGUES} == {None, *ACTIVATIONS}
    assert {dtype for *_, dtype in EPILOGUES} == set(HIGH_PRECISION_DTYPES)


@each_device
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 128x128", "mx"])
@pytest.mark.parametrize(("bias", "activation", "residual", "out_dtype"), EPILOGUES)
def test_epilogue(device, name, bias, activation, residual, out_dtype):
    pair = PAIRS[name]
    bare = activation is None and residual is None
    configs = best_and_smallest(pair, device, out_dtype=out_dtype, bare=bare)
    for config, (m, n, k) in ((configs[0], (80, 144, 160)), (configs[-1], (66, 77, 33))):
        product = Product.of(normal, pair, (m, n, k), device)
        product.check_epilogue((bias, activation, residual, out_dtype), config=config)


@each_device
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_every_value(device, activation):
    """Products of one term, each exact: what is left is the function."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    a, b = codes[codes.isfinite()].view(-1, 1), torch.tensor([[1.0], [0.125], [2.0**-9]])
    product = Product(PAIRS["rowwise"], a, b, device)
    assert torch.equal(product.expected(), (a @ b.t()).to(device).double())
    epilogue = None, activation, None
    actual = product.run(epilogue=epilogue).double()
    torch.testing.assert_close(actual, product.expected(*epilogue), rtol=1e-5, atol=1e-6)


LAYOUTS = {
    "odd offset": lambda x: surrounded(x, offset=1),
    "odd row stride": lambda x: surrounded(x, row_padding=3),
    "aligned row stride": padded_rows,
    "every other row": lambda x: surrounded(x, row_step=2),
    "every other column": lambda x: surrounded(x, col_step=2),
    "transposed": lambda x: surrounded(x.t().contiguous(), row_padding=1).t(),
}


@each_device
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 128x128", "mx"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_operands(device, name, layout):
    """Any strides and offsets of the operands, of their scales and of the residual."""
    m, n, k = 130, 144, 144
    residual = integers(m, n, seed=4).to(device)
    product = Product.of(integers, PAIRS[name], (m, n, k), device)
    expected = product.expected(None, None, residual)
    product.a_scale, product.b_scale = layout(product.a_scale), layout(product.b_scale)
    epilogue = None, None, layout(residual)
    # With operands that TMA can read, and with others.
    best = best_and_smallest(PAIRS[name], device, bare=False)[0]
    assert_equal(product.run(epilogue=epilogue, config=best), expected)
    assert_equal(product.with_layout(layout).run(epilogue=epilogue), expected)


@each_device
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 128x128", "mx"])
def test_layouts_of_bias_and_residual(device, name):
    m, n, k = 33, 48, 144
    product = Product.of(integers, PAIRS[name], (m, n, k), device)
    bias, one = integers(2 * n, seed=3).to(device)[1::2], torch.ones((), device=device)
    for epilogue in ((bias, None, None), (one.expand(n), None, one.expand(m, n))):
        assert_equal(product.run(epilogue=epilogue), product.expected(*epilogue))


@each_device
@pytest.mark.parametrize("name", PAIRS)
def test_empty_dims(device, name):
    """Nothing to add up is zero, which goes through the epilogue."""
    pair = PAIRS[name]
    for m, n in ((7, 20), (0, 20), (7, 0)):
        product = Product.of(normal, pair, (m, n, 0), device)
        bias, residual = normal(n, seed=3, device=device), normal(m, n, seed=4, device=device)
        assert_equal(product.run(), torch.zeros(m, n, device=device))
        epilogue = bias, "relu", residual
        assert_equal(product.run(epilogue=epilogue), product.expected(*epilogue))
    for m, n in ((0, 20), (7, 0)):
        product = Product.of(normal, pair, (m, n, 40), device)
        assert product.run().shape == (m, n)


@each_device
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
def test_nan_spreads_to_its_own_row_and_column_only(device, name, tma):
    pair = PAIRS[name]
    m, n, k = 144, 96, 160
    a, b = normal(m, k), normal(n, k, seed=1)
    a[3, 140] = math.nan
    b[90, 5] = math.inf
    product = Product(pair, a, b, device)
    expected = product.expected()
    assert expected.isnan().any()
    for config in best_and_smallest(pair, device):
        if runs(config, pair, device, tma):
            actual = product.run(tma=tma, config=config)
            assert torch.equal(actual.isnan(), expected.isnan())
            if not expected.isnan().all():
                assert_matmul_close(actual, expected, torch.float32)


@each_device
def test_overflow_of_the_output_dtype_is_infinite(device):
    product = Product(PAIRS["rowwise"], torch.full((20, 64), 100.0), torch.full((24, 64), -100.0), device)
    assert (product.run(out_dtype=torch.float16) == -math.inf).all()


@each_device
def test_extreme_scales_do_not_overflow_on_the_way(device):
    """A huge operand times a tiny one: the product of the scales, or of one with the sum, stays in range."""
    product = Product(PAIRS["rowwise"], torch.full((20, 64), 1e30), torch.full((24, 64), 1e-32), device)
    assert_matmul_close(product.run(), product.expected(), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
@pytest.mark.parametrize("name", ["rowwise", "1x128 x 128x128", "mx"])
@pytest.mark.parametrize("shape", [(2**16 + 8, 2**15, 64), (2**16 + 8, 64, 2**15)], ids=["output", "operand"])
def test_more_than_2_to_the_31_elements(shape, name, tma):
    """Offsets beyond 32 bits: the first rows are right, and so are the last."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    m, n, k = shape
    pair = PAIRS[name]
    a = torch.randint(-2, 3, (m, k), dtype=torch.bfloat16, device="cuda")
    product = Product(pair, a, integers(n, k, seed=2).cuda(), "cuda", launch_exactly)
    out = product.run(tma=tma)
    for rows in (slice(0, 128), slice(m - 128, m)):
        part = copy.copy(product)
        part.a, part.a_scale = product.a[rows], product.a_scale[rows]
        assert_equal(out[rows], part.expected())
