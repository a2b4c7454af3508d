"""One launch that casts several weights gives the bits of a cast each, in the interpreter and on a GPU."""

import pytest
import torch
from cases import each_device, normal, patterns

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


def check(xs, spec):
    found = weights.quantize_weights(xs[0], xs[1:], spec)
    assert_bitwise_equal(found, reference.quantize_weights(xs[0], xs[1:], spec))
    assert [x.stride() for x in found] == [x.stride() for each in xs for x in casts.quantize(each, spec, True)]


@each_device
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_every_shape(device, shapes):
    check([normal(*shape, seed=i, dtype=torch.bfloat16).to(device) for i, shape in enumerate(shapes)], ROWWISE)


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("spec", [ROWWISE, "e5m2:rowwise:fp32:none"])
def test_every_dtype(device, dtype, spec):
    check([normal(200, 64, seed=i, dtype=dtype).to(device) * 10.0 ** (4 * i - 4) for i in range(3)], spec)


@each_device
def test_values_without_a_number(device):
    check([patterns(torch.bfloat16).to(device), normal(64, 32, dtype=torch.bfloat16).to(device)], ROWWISE)


@each_device
def test_what_has_no_plan_is_cast_one_by_one(device):
    x, y = (normal(160, 96, seed=i, dtype=torch.bfloat16).to(device) for i in range(2))
    for xs, spec in (([x, y], SQUARE), ([x, y.t()], ROWWISE), ([x, y.float()], ROWWISE), ([x, y[:0]], ROWWISE)):
        check(xs, spec)
    check([x] * 9, ROWWISE)


@each_device
def test_two_launches_cast_all(device, monkeypatch):
    names = []
    run = executor.run
    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(executor, "run", lambda kernel, *a, **o: names.append(kernel.__name__) or run(kernel, *a, **o))
    check([normal(64, 32, seed=i, dtype=torch.bfloat16).to(device) for i in range(4)], ROWWISE)
    assert names[:2] == ["amax_of_weights_kernel", "quantize_weights_kernel"]
