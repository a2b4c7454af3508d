"""One launch that casts several weights gives the bits of a cast each, in the interpreter and on a GPU."""

import pytest
import torch
from cases import banded, each_device, normal, patterns, random_bits, with_specials

from tritonfp8 import reference
from tritonfp8.launch import casts, executor
from tritonfp8.launch.casts import weights
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
ROWWISE, SQUARE = "e4m3:rowwise:fp32:pow2", "e4m3:128x128:fp32:pow2"
SHAPES = {
    "aligned": [(256, 128), (512, 64), (128, 192)],
    "tails": [(300, 200), (40, 72), (1000, 8)],
    "no vectors": [(131, 77), (64, 128), (1, 1)],
    "one": [(160, 96)],
    "most": [(64 * i, 16 * i) for i in range(1, 9)],
    "high": [(9000, 8), (8, 200)],
}


def check(xs, spec, codes=None):
    scales = [] if codes is None else [reference.quantize(x, codes)[1] for x in xs]
    args = (xs[0], xs[1:], spec, scales, codes)
    found = weights.quantize_weights(*args)
    assert_bitwise_equal(found, reference.quantize_weights(*args))
    assert [x.stride() for x in found] == [x.stride() for each in xs for x in casts.quantize(each, spec, True)]


def check_both(xs, spec):
    """From values, and from the codes that they have."""
    check(xs, spec)
    check(xs, spec, spec)


@each_device
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_every_shape(device, shapes):
    check_both([banded(*shape, seed=i, dtype=torch.bfloat16).to(device) for i, shape in enumerate(shapes)], ROWWISE)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spec", [ROWWISE, "e5m2:rowwise:fp32:pow2"])
def test_every_dtype(device, dtype, spec):
    xs = [normal(200, 64, seed=i, dtype=dtype).to(device) * 10.0 ** (4 * i - 4) for i in range(3)]
    check_both(xs, spec)
    check(xs, spec.replace("pow2", "none"))


@each_device
def test_values_without_a_number(device):
    check_both([patterns(torch.bfloat16).to(device), normal(64, 32, dtype=torch.bfloat16).to(device)], ROWWISE)
    check_both([with_specials(normal(140, 70)).to(device), random_bits(256, 200).to(device)], ROWWISE)


@each_device
def test_zeros_and_values_that_no_scale_makes_normal(device):
    rows = torch.zeros(130, 40)
    rows[::3] = 2.0 ** torch.arange(-149.0, -109)
    rows[1, ::7] = torch.finfo(torch.float32).max
    check_both([rows.to(device), torch.full((70, 24), 1e-45, device=device)], ROWWISE)


@each_device
def test_what_has_no_plan_is_cast_one_by_one(device):
    x, y = (normal(160, 96, seed=i, dtype=torch.bfloat16).to(device) for i in range(2))
    for xs, spec in (([x, y], SQUARE), ([x, y.t()], ROWWISE), ([x, y.float()], ROWWISE), ([x, y[:0]], ROWWISE)):
        check(xs, spec)
        check(xs, spec, spec)
    check_both([x] * 9, ROWWISE)


@each_device
@pytest.mark.parametrize("codes", [None, ROWWISE])
def test_two_launches_cast_all(device, monkeypatch, codes):
    names = []
    run = executor.run
    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(executor, "run", lambda kernel, *a, **o: names.append(kernel.__name__) or run(kernel, *a, **o))
    check([normal(64, 32, seed=i, dtype=torch.bfloat16).to(device) for i in range(4)], ROWWISE, codes)
    assert names[:2] == ["amax_of_weights_kernel", "quantize_weights_kernel"]
    names.clear()
    x = normal(64, 32, dtype=torch.bfloat16).to(device)
    casts.transpose_codes(x, reference.quantize(x, ROWWISE)[1], ROWWISE, ROWWISE)
    assert names == ["amax_of_weights_kernel", "quantize_weights_kernel"]
