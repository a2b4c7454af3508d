"""Optimizers of torch on weights that are stored in 8 bits: on float32 copies, and directly."""

import copy
import warnings

import pytest
import torch
from trained_models import codes, counts_of_writes, data, plain_model, stored_model, train, values

import tritonfp8
from tritonfp8.layers.stored import stored_part
from tritonfp8.optim import AdamW, DirectSteps, direct_steps, with_masters
from tritonfp8.specs.testing import assert_bitwise_equal

OPTIMIZERS = {
    torch.optim.AdamW: {"lr": 1e-3},
    torch.optim.SGD: {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    torch.optim.Adagrad: {"lr": 1e-2},
}


counts = pytest.fixture(counts_of_writes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_masters_are_the_weights_of_high_precision(optimizer):
    model, options = stored_model("blockwise"), OPTIMIZERS[optimizer]
    reference = plain_model()
    reference.load_state_dict(model.state_dict())
    ours = with_masters(optimizer)(model.parameters(), **options)
    theirs = optimizer(reference.parameters(), **options)
    calls = []
    ours.register_step_post_hook(lambda *args: calls.append(args))
    for _ in range(4):
        model(data()[0]).square().mean().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
    assert len(calls) == 4
    assert isinstance(ours, optimizer)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        master = ours.state[p]["master"] if stored_part(p) is not None else p
        assert torch.equal(master, q)
        assert p.grad is None
        if stored_part(p) is not None:
            spacing = tritonfp8.dequantize(tritonfp8.quantize(q.detach(), stored_part(p).spec)) - q
            assert (p.dequantize() - q).abs().le(spacing.abs() + 1e-12).all()


def test_masters_resume():
    once = stored_model("rowwise")
    kind = with_masters(torch.optim.AdamW)
    assert kind is with_masters(torch.optim.AdamW)
    losses = train(once, kind(once.parameters(), lr=1e-3), 6)
    model = stored_model("rowwise")
    first = train(model, optimizer := kind(model.parameters(), lr=1e-3), 3)
    for again, other in (copy.deepcopy((model, optimizer)), (stored_model("rowwise"), None)):
        if other is None:
            other = kind(again.parameters(), lr=1e-3)
            again.load_state_dict(model.state_dict())
            other.load_state_dict(optimizer.state_dict())
        assert_bitwise_equal(first + train(again, other, 3), losses)
        assert_bitwise_equal(list(values(again).values()), list(values(once).values()))


def test_refused():
    for wrong, message in (
        (torch.optim.LBFGS, "LBFGS"),
        ("AdamW", "an optimizer class, such as torch.optim.Adagrad; got 'AdamW'"),
    ):
        with pytest.raises(TypeError, match=message):
            with_masters(wrong)


DIRECT = {
    "loop": (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
    "foreach": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 10.0, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd foreach": (torch.optim.SGD, {"lr": 10.0, "momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


@pytest.mark.parametrize("name", DIRECT)
def test_torch_steps_weights_directly_and_warns(name, counts):
    optimizer, options = DIRECT[name]
    model = stored_model("rowwise")
    before = codes(model)
    optimizer = optimizer(model.parameters(), **options)
    with pytest.warns(UserWarning, match=r"at most \d+\.\d\d % of their codes changed.*with_masters"):
        train(model, optimizer, 1)
    share = direct_steps().share
    changed = sum((a != b).sum().item() for a, b in zip(before, codes(model), strict=True))
    assert changed / sum(x.numel() for x in before) > 0.2
    assert share > 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = train(model, optimizer, 5)
    found = direct_steps()
    assert (found.steps, found.unchanged) == (6, 0)
    assert torch.stack(losses).isfinite().all()


def test_one_operation_rounds_the_exact_step_up_or_down_at_random():
    """Each weight of an optimizer, and each step, by bits of its own: the mean of many is the exact value."""
    start = stored_model("rowwise")[0].weight
    weights = [torch.nn.Parameter(start.detach().clone()) for _ in range(64)]
    gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(0))
    for weight in weights:
        weight.grad = gradient.clone()
    torch.optim.SGD(weights, lr=0.01).step()
    expected = start.detach().dequantize() - 0.01 * gradient
    found = torch.stack([weight.detach().dequantize() for weight in weights])
    spec = stored_part(start).spec
    nearest = tritonfp8.dequantize(tritonfp8.quantize(expected, spec))
    assert (found == nearest).all(0).float().mean() < 0.1
    # A code is at most a spacing away, an eighth of the value.
    assert ((found - expected).abs() <= expected.abs() / 8 + expected.abs().amax(1, keepdim=True) * 2**-15).all()
    error, of_one, of_nearest = ((x - expected).square().mean().sqrt() for x in (found.mean(0), found[0], nearest))
    assert error < of_one / 6
    assert error < of_nearest / 3


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_each_step_has_random_bits_of_its_own(kind):
    weight = stored_model("rowwise")[0].weight
    start, optimizer, found = weight.detach().dequantize().clone(), kind([weight], lr=1e-4), []
    for _ in range(2):
        weight.grad = torch.ones(weight.shape)
        optimizer.step()
        found.append(weight.detach().dequantize() != start)
        weight.data = start
    once, again = found
    assert min(once.sum(), again.sum()) > 20
    assert (once & again).sum() < 0.7 * once.sum()


@pytest.mark.parametrize("name", DIRECT)
def test_a_resumed_run_goes_on_to_the_bit(name):
    """Also of an optimizer that counts no steps; each step has random bits of its own."""
    optimizer, options = DIRECT[name]
    model = stored_model("rowwise")
    stepper = optimizer(model.parameters(), **options)
    train(model, stepper, 2)
    saved = copy.deepcopy((model.state_dict(), stepper.state_dict()))
    losses = train(model, stepper, 2)
    again = stored_model("rowwise")
    other = optimizer(again.parameters(), **options)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert_bitwise_equal(train(again, other, 2), losses)
    assert_bitwise_equal(codes(again), codes(model))


def test_steps_that_change_nothing_are_counted(counts):
    model = stored_model("rowwise")
    before = codes(model)
    optimizer = torch.optim.SGD([model[0].weight, model[2].weight], lr=1e-12)
    with pytest.warns(UserWarning, match=r"at most 0.00 % of their codes changed"):
        train(model, optimizer, 3)
    assert direct_steps() == DirectSteps(steps=3, unchanged=3)
    assert_bitwise_equal(codes(model), before)


def test_ours_do_not_count(counts):
    model = stored_model("rowwise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, AdamW(model.parameters()), 2)
        train(model, with_masters(torch.optim.SGD)(model.parameters(), lr=0.1), 2)
    assert direct_steps() == DirectSteps()
