"""tritonfp8.verify_training names each weight that a step does not move, and each that only one side knows."""

import itertools
import logging
import re

import pytest
import torch
from cases import each_recipe, generator, normal
from torch import nn

import tritonfp8
from tritonfp8.layers.changes import CHUNK_BYTES, Fingerprints


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


def converted(recipe="tensorwise"):
    model = Model()
    tritonfp8.convert(model, recipe)
    return model


def with_sgd(lr=0.1):
    model = converted()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def step(model, *optimizers, clear=True):
    model(torch.ones(4, 32)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        if clear:
            optimizer.zero_grad()


def failures(model, optimizer, run=step, **options):
    check = tritonfp8.verify_training(model, optimizer, **options)
    with pytest.raises(tritonfp8.VerificationError) as caught, check:
        run(model, *(optimizer if isinstance(optimizer, list) else [optimizer]))
    assert caught.value.report is check
    for each in check.failures:
        assert re.search(rf"\b{re.escape(each.layer)}\b.*: {re.escape(each.what)}", str(caught.value))
    return {each.layer: f"{each.cause}. {each.remedy}" for each in check.failures}


@each_recipe
@pytest.mark.parametrize("clear", [False, True])
def test_weights_that_move_pass(clear, recipe, caplog):
    model = converted(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with caplog.at_level(logging.INFO, logger="tritonfp8"), tritonfp8.verify_training(model, optimizer) as check:
        step(model, optimizer, clear=clear)
    assert check.ok
    assert check.steps == 1
    assert check.moved == ("a.weight", "a.bias", "b.weight")
    assert check.without_gradient == ("unused.weight",)
    assert [each.getMessage() for each in caplog.records] == ["3 of 4 trainable weights moved; failures: 0"]
    # The hook is gone.
    step(model, optimizer)
    assert check.steps == 1


def test_a_weight_that_does_not_move():
    """An optimizer that steps on copies."""
    model, optimizer = with_sgd()

    def run(model, optimizer):
        before = model.b.weight.detach().clone()
        step(model, optimizer)
        model.b.weight.data.copy_(before)

    found = failures(model, optimizer, run)
    assert found.keys() == {"b.weight"}
    assert "it got a gradient and did not change, at a learning rate of 0.1" in found["b.weight"]


def test_an_update_below_the_rounding_of_the_weight():
    model = converted().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)

    def run(model, optimizer):
        model(torch.ones(4, 32, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    found = failures(model, optimizer, run)
    assert "below the rounding of torch.bfloat16" in found["b.weight"]


def test_a_learning_rate_of_zero_has_its_own_cause():
    """In a group, and in the first step of a schedule."""
    model = converted()
    groups = [{"params": model.a.parameters(), "lr": 0.0}, {"params": [model.b.weight, model.unused.weight]}]
    found = failures(model, torch.optim.SGD(groups, lr=0.1))
    assert found.keys() == {"a.weight", "a.bias"}
    assert all("its learning rate is 0" in each for each in found.values())
    model, optimizer = with_sgd()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
    found = failures(model, optimizer, lambda model, optimizer: (step(model, optimizer), schedule.step()))
    assert all("its learning rate is 0" in each for each in found.values())
    with tritonfp8.verify_training(model, optimizer):
        step(model, optimizer)


def test_gradients_of_zeros_have_their_own_cause():
    model, optimizer = with_sgd()
    model.a.weight.register_hook(torch.zeros_like)
    found = failures(model, optimizer)
    assert found.keys() == {"a.weight"}
    assert "its gradient is all zeros" in found["a.weight"]
    # Weight decay moves it.
    with tritonfp8.verify_training(model, optimizer := torch.optim.AdamW(model.parameters(), lr=0.1)) as check:
        step(model, optimizer)
    assert "a.weight" in check.moved


def test_an_optimizer_of_other_parameters():
    model, optimizer = with_sgd()
    model.b.weight = nn.Parameter(model.b.weight.detach().clone())
    found = failures(model, optimizer)
    assert found.keys() == {"parameter 2 of group 0 of the optimizer", "b.weight"}
    assert "(32, 32) of torch.float32, it is not a parameter of the model" in "".join(found.values())
    assert "the optimizer does not hold it" in found["b.weight"]


def test_a_parameter_that_the_optimizer_lacks():
    model = converted()
    found = failures(model, torch.optim.SGD(model.a.parameters(), lr=0.1))
    assert found.keys() == {"b.weight", "unused.weight"}
    model.b.requires_grad_(False)
    model.unused.requires_grad_(False)
    with tritonfp8.verify_training(model, optimizer := torch.optim.SGD(model.a.parameters(), lr=0.1)):
        step(model, optimizer)


def test_several_optimizers_share_a_model():
    model = converted()
    others = torch.optim.AdamW([model.b.weight, model.unused.weight], lr=0.1)
    several = [torch.optim.SGD(model.a.parameters(), lr=0.1), others]
    with tritonfp8.verify_training(model, several) as check:
        step(model, *several)
    assert check.steps == 2
    assert check.ok


def test_a_block_without_a_step():
    """As with GradScaler, which skips a step whose gradients are infinite."""
    model, optimizer = with_sgd()
    found = failures(model, optimizer, lambda model, optimizer: model(torch.ones(4, 32)).sum().backward())
    assert found.keys() == {"optimizer"}
    assert "no step ran inside the block" in found["optimizer"]


class Wrapper:
    """As accelerate's: it has the optimizer, and no hooks."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


class Own:
    """An optimizer that is not torch's."""

    def __init__(self, parameters):
        self.param_groups = [{"params": list(parameters)}]

    def step(self):
        with torch.no_grad():
            for p in self.param_groups[0]["params"][1:]:
                p -= 0.1 if p.grad is None else 0.1 * p.grad


def test_a_wrapped_optimizer_and_one_that_is_not_torchs():
    model = converted()
    wrapped = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with tritonfp8.verify_training(model, wrapped) as check:
        step(model, wrapped)
    assert check.steps == 1
    assert failures(model, Own(model.parameters()), lambda m, o: step(m, o, clear=False)).keys() == {"a.weight"}


def engine_step(model, lost=()):
    """An engine keeps copies of the parameters, steps those, and clears the gradients."""
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randn(8, 32)).sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None and name not in lost:
            p.data.copy_(copies[name] - 0.1 * p.grad)
        p.grad = None


def test_an_engine_that_steps_copies():
    model = converted()
    with tritonfp8.verify_training(model, None) as check:
        engine_step(model)
    assert check.moved == ("a.weight", "a.bias", "b.weight")
    assert check.without_gradient == ("unused.weight",)

    check = tritonfp8.verify_training(model, None)
    with pytest.raises(tritonfp8.VerificationError, match="it got a gradient and did not change"), check:
        engine_step(model, lost=("b.weight",))
    assert [each.layer for each in check.failures] == ["b.weight"]


def test_the_optimizer_of_an_engine_is_an_error():
    class EngineOptimizer(torch.optim.Optimizer):
        def __init__(self, inner):
            self.optimizer = inner

        param_groups = ()

    with pytest.raises(TypeError, match="EngineOptimizer wraps object, .* give optimizer=None"):
        tritonfp8.verify_training(converted(), EngineOptimizer(object()))


def test_closures_and_sparse_gradients():
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tritonfp8.verify_training(model, optimizer):
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
    model = converted()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32)).square().sum()
        loss.backward()
        return loss

    with tritonfp8.verify_training(model, optimizer) as check:
        optimizer.step(closure)
    assert "b.weight" in check.moved


def test_an_error_in_the_block_is_the_callers():
    model, optimizer = with_sgd()
    with pytest.raises(KeyError), tritonfp8.verify_training(model, optimizer) as check:
        raise KeyError
    step(model, optimizer)
    assert check.steps == 0


def test_a_warning_in_place_of_an_error():
    model, optimizer = with_sgd(lr=0.0)
    check = tritonfp8.verify_training(model, optimizer, on_failure="warn")
    with pytest.warns(UserWarning, match=r"a\.weight, .*learning rate is 0") as caught, check:
        step(model, optimizer)
    assert caught[0].filename == __file__
    assert not check.ok


def test_arguments_are_checked():
    model, optimizer = with_sgd()
    with pytest.raises(TypeError, match="model must be"):
        tritonfp8.verify_training(optimizer, model)
    with pytest.raises(TypeError, match="have param_groups; got int"):
        tritonfp8.verify_training(model, 3)
    with pytest.raises(ValueError, match="on_failure must be one of"):
        tritonfp8.verify_training(model, optimizer, on_failure="ignore")


def same(a, b):
    make = Fingerprints()
    return torch.equal(make.of(a), make.of(b))


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.uint8]
# More than a chunk is cut by bytes, whatever the dtype: one of a byte and one of two are enough.
CHECKED = [*itertools.product(DTYPES, [(), (1,), (3, 5)]), (torch.uint8, (CHUNK_BYTES + 3,))]
CHECKED += [(torch.bfloat16, (CHUNK_BYTES // 2 + 3,))]


@pytest.mark.parametrize(("dtype", "shape"), CHECKED)
def test_a_checksum_changes_with_any_bit(dtype, shape):
    count = max(1, torch.Size(shape).numel())
    bits = torch.randint(0, 256, (count, dtype.itemsize), generator=generator(0)).to(torch.uint8)
    of = lambda each: each.clone().view(dtype).reshape(shape)  # noqa: E731
    assert same(of(bits), of(bits))
    for row, column in [(0, 0), (-1, -1), (bits.shape[0] // 2, 0)]:
        for bit in (0, 7):
            changed = bits.clone()
            changed[row, column] ^= 1 << bit
            assert not same(of(bits), of(changed))


def test_a_checksum_sees_signs_order_and_length():
    x, count = normal(1 << 20), torch.arange(5, dtype=torch.uint8)
    # Two chunks in the other order.
    chunks = torch.cat([x, 2 * x])
    assert chunks.numel() * 4 == 2 * CHUNK_BYTES
    zeros = torch.zeros(4, dtype=torch.uint8)
    pairs = (x, -x), (x, x.flip(0)), (x, x.roll(-1)), (chunks, chunks.roll(len(x))), (zeros, zeros[:3])
    for a, b in (*pairs, (torch.zeros(2), -torch.zeros(2))):
        assert not same(a, b)
    assert same(x.reshape(1024, 1024).t(), x.reshape(1024, 1024).t().contiguous())
    assert same(count[1:], count[1:].clone())
    assert same(torch.empty(0), torch.empty(0))
