"""The optimizer step of stored weights: the kernel, in the interpreter or on a GPU, equals the reference to the bit."""

import itertools

import covering
import pytest
import torch
from cases import SPECS, normal

from tritonfp8 import reference
from tritonfp8.launch import optimizer as launch
from tritonfp8.reference.optimizer import rounding_keys, write_moment
from tritonfp8.specs import QuantSpec, amax_shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.one_in(3), *([pytest.mark.gpu] if DEVICE == "cuda" else [])]

# Every block; and another format.
STORABLE = [
    spec for spec in SPECS if spec.scale_rounding == "pow2" and (spec.format == "e4m3" or spec.block == (1, -1))
]
LR, BETAS, EPS = 1e-2, (0.9, 0.99), 1e-8


def numbers(step=3, device=DEVICE):
    a, b = BETAS
    c, lr = 1 / (1 - b**step) ** 0.5, LR / (1 - a**step)
    return torch.tensor([1 - LR * 0.1, 1 - a, b, 1 - b, lr, c, EPS], device=device)


def keys(step=3, seed=7):
    return rounding_keys(seed, torch.tensor([step]), torch.tensor([5]))[0]


def moments(n, k, kind):
    """``(exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale)`` of values in many octaves, some of them zero."""
    found, scales = [], []
    for i, is_square in enumerate((False, True)):
        x = 1e-2 * normal(n, k, seed=3 + i) * torch.exp(3 * normal(n, k, seed=5 + i))
        x[:, ::7] = 0
        x = x.square() if is_square else x
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kind]
        values = torch.empty(n, k, dtype=dtype)
        scale = torch.empty(n, -(-k // 128), dtype=torch.uint8) if kind == "fp8" else None
        write_moment(x, values, scale, is_square)
        found.append(values)
        scales.append(scale)
    return [*found, *scales]


def as_rows(scale, spec, n):
    """The scales of each row, as exponents."""
    found = scale.view(torch.uint8) if scale.itemsize == 1 else (scale.view(torch.int32) >> 23).to(torch.uint8)
    rows = spec.block[0]
    return found.expand(n, -1).contiguous() if rows == -1 else found.repeat_interleave(rows, 0)[:n].contiguous()


def call(spec, n, k, kind, grad_dtype=torch.float32, by_rows=False, place=(0, 0), stochastic=True, nan=False):
    weight = normal(n, k) * torch.exp(normal(n, k, seed=1))
    qdata, scale = reference.quantize(weight, *spec.args)
    block = spec.block
    if by_rows:
        scale, block = as_rows(scale, spec, n), (1, spec.block[1])
    grad = (normal(n, k, seed=2) * torch.exp(3 * normal(n, k, seed=8))).to(grad_dtype)
    if nan:
        grad[n // 2, 40], grad[0, 0] = torch.nan, torch.inf
    exp_avg, exp_avg_sq, *scales = moments(n, k, kind)
    head = [qdata, scale, exp_avg, exp_avg_sq, grad, numbers()]
    return head, keys(), (*spec.args, list(block), list(place)), stochastic, scales


def moved(x):
    return None if x is None else x.to(DEVICE, copy=True)


def bits(x):
    """The bits of ``x``; of floats and of amaxes one NaN for all, as a GPU makes others than a CPU."""
    found = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]).cpu()
    if x.itemsize == 1:
        return found
    is_nan = x.isnan().cpu() if x.is_floating_point() else found > 0x7F800000
    return found.masked_fill(is_nan, -1)


def run(module, head, key, args, stochastic, scales, amax=None):
    head, scales = [moved(x) for x in head], [moved(x) for x in scales]
    amax = moved(amax)
    found = module.adamw_amax(*head, *args, *scales)
    module.adamw(*head, moved(key), *args, stochastic, *scales, amax)
    return [bits(x) for x in (found, *head[:4], *scales) if x is not None]


def assert_same(call, amax=None):
    for got, wanted in zip(run(launch, *call, amax), run(reference, *call, amax), strict=True):
        assert torch.equal(got, wanted), f"{(got != wanted).sum()} of {got.numel()}"


OPTIONS = STORABLE, ["fp32", "bf16", "fp8"], [True, False]
STEPS = list(itertools.product(*OPTIONS)) if DEVICE == "cuda" else covering.pairs(*OPTIONS)


@pytest.mark.parametrize(("n", "k", "dtype"), [(130, 201, torch.float32), (128, 512, torch.bfloat16)], ids=str)
@pytest.mark.parametrize(("spec", "kind", "stochastic"), STEPS, ids=str)
def test_step(spec, kind, stochastic, n, k, dtype):
    """Weights with tails, and weights of whole tiles."""
    assert_same(call(spec, n, k, kind, dtype, stochastic=stochastic))


# To nearest, and by random bits: the format of the moments, whether the scales are of rows, and which rounding.
@pytest.mark.parametrize(
    ("kind", "by_rows", "stochastic"),
    [("fp8", False, True), ("fp8", True, True), ("bf16", False, False), ("fp8", False, False)],
)
@pytest.mark.parametrize("spec", STORABLE, ids=str)
def test_not_finite(spec, kind, by_rows, stochastic):
    assert_same(call(spec, 70, 201, kind, torch.bfloat16, by_rows, stochastic=stochastic, nan=True))


@pytest.mark.parametrize("place", [(0, 0), (73, 0), (128, 128), (73, 256)], ids=str)
@pytest.mark.parametrize("spec", STORABLE, ids=str)
def test_shards_of_a_weight(spec, place):
    found = call(spec, 70, 201, "fp8", by_rows=True, place=place)
    assert_same(found)
    amax = normal(*amax_shape((70, 201), spec.block, place), seed=9).abs() * 3
    assert_same(found, amax)


@pytest.mark.parametrize("col", [3, 8, 1021])
@pytest.mark.parametrize("spec", [spec for spec in STORABLE if spec.block[1] == -1], ids=str)
def test_shards_that_begin_in_a_group_of_columns(spec, col):
    assert_same(call(spec, 20, 130, "fp8", by_rows=True, place=(5, col)))


@pytest.mark.parametrize("k", [1, 127, 128, 16390])
def test_lengths_of_rows(k):
    assert_same(call(QuantSpec("e4m3", (1, -1), "fp32", "pow2"), 3, k, "fp8"))
