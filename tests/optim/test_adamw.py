"""AdamW on weights that are stored in 8 bits, on one rank."""

import copy
import importlib

import covering
import pytest
import torch
from cases import IN_BYTES, cpu_and_cuda
from stored_layers import reloaded
from torch import nn
from torch.torch_version import TorchVersion
from trained_models import codes, data, plain_model, stored_model, train, values
from transformers.pytorch_utils import Conv1D

import tritonfp8
from tritonfp8 import VerificationError
from tritonfp8.layers.stored import stored_part
from tritonfp8.optim import AdamW, with_masters
from tritonfp8.specs.testing import assert_bitwise_equal

MOMENTS = ("fp32", "bf16", "fp8")
each_recipe = pytest.mark.parametrize("name", IN_BYTES)
each_kind = pytest.mark.parametrize("moments", MOMENTS)


@cpu_and_cuda
@pytest.mark.parametrize("autocast", [False, True])
@each_recipe
def test_trained_weights_compute_as_a_plain_model_of_their_values(name, autocast, device):
    found = []
    model = stored_model(name, device)
    train(model, AdamW(model.parameters(), lr=1e-2), 2, device)
    plain = plain_model(device)
    tritonfp8.convert(plain, model[0].recipe)
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        x = data(device)[0].requires_grad_()
        for _ in range(2):
            # The second pass accumulates.
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                out = each(x)
            out.float().square().mean().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in each.parameters())])
    assert_bitwise_equal(*found)
    assert all(type(p.grad) is torch.Tensor and p.grad.dtype == torch.float32 for p in model.parameters())


# Moments have blocks of their own, whatever blocks the weight has.
@pytest.mark.parametrize(("name", "moments"), covering.each(IN_BYTES, MOMENTS))
def test_ten_and_ten_steps_are_twenty(name, moments):
    once = stored_model(name)
    before, start = codes(once), values(once)
    optimizer = AdamW(once.parameters(), lr=1e-3, moments=moments, seed=3)
    losses = train(once, optimizer, 20)
    for old, new, x in zip(before, codes(once), (start["0.weight"], start["2.weight"]), strict=True):
        assert (old != new).float().mean() > 0.2, x.shape
    model = stored_model(name)
    first = train(model, optimizer := AdamW(model.parameters(), lr=1e-3, moments=moments, seed=3), 10)
    states = reloaded([model.state_dict(), optimizer.state_dict()], weights_only=True)
    again = stored_model(name)
    optimizer = AdamW(again.parameters(), lr=1e-3, moments=moments, seed=3)
    again.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert_bitwise_equal(first + train(again, optimizer, 10), losses)
    assert values(again).keys() == values(once).keys()
    assert_bitwise_equal(list(values(again).values()), list(values(once).values()))
    assert_bitwise_equal(codes(again), codes(once))


@pytest.mark.parametrize("moments", ["fp32", "fp8"])
def test_a_step_in_backward_has_the_same_bits_and_leaves_no_gradient(moments):
    """Each parameter steps when its gradient is there, by one optimizer, which skips those without."""
    expected, model = stored_model("rowwise"), stored_model("rowwise")
    train(expected, AdamW(expected.parameters(), lr=1e-2, moments=moments), 5)
    optimizer, held = AdamW(model.parameters(), lr=1e-2, moments=moments), []

    def step(parameter):
        held.append(sum(p.grad is not None for p in model.parameters()))
        optimizer.step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    train(model, optimizer, 5)
    assert_bitwise_equal([*values(model).values()], [*values(expected).values()])
    assert held == [1] * (5 * len(list(model.parameters())))


def test_rounding_to_nearest_stalls():
    moved = {}
    for rounding in ("stochastic", "nearest"):
        model = stored_model("rowwise")
        before = values(model)
        train(model, AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, rounding=rounding), 30)
        moved[rounding] = [(values(model)[n] - x).ne(0).float().mean() for n, x in before.items() if "weight" in n]
    assert min(moved["stochastic"]) > 0.02
    assert max(moved["nearest"]) < 0.01


def stored_layer(k, *values):
    """A layer of 256 rows, whose weight starts with these values; the last one is repeated."""
    layer = nn.Linear(k, 256, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([*values, *[values[-1]] * (k - len(values))]).expand(256, k))
    tritonfp8.convert(layer, "rowwise", weight_storage="quantized")
    return layer


def test_expected_change_is_that_of_high_precision():
    # Many elements with the same value and gradient: on average they move as one in high precision does.
    layer = stored_layer(512, 0.3, 0.11)
    start = layer.weight.dequantize()[0, 1].item()
    optimizer = AdamW([layer.weight], lr=1e-4, weight_decay=0.0)
    for _ in range(10):
        layer.weight.grad = torch.ones(256, 512)
        optimizer.step()
    mean = layer.weight.dequantize()[:, 1:].mean().item()
    assert abs((start - mean) / 1e-3 - 1) < 0.03
    assert len(layer.weight.dequantize()[:, 1:].unique()) >= 2


def test_other_parameters_step_as_torch():
    model, x = stored_model("rowwise"), data()[0]
    plain = {name: p for name, p in model.named_parameters() if stored_part(p) is None}
    reference = {name: nn.Parameter(p.detach().clone()) for name, p in plain.items()}
    ours = AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.3)
    theirs = torch.optim.AdamW(reference.values(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.3)
    calls = []
    ours.register_step_post_hook(lambda *args: calls.append(args))
    for _ in range(3):
        ours.zero_grad()
        model(x).square().mean().backward()
        for name, p in reference.items():
            p.grad = plain[name].grad.clone()
        ours.step()
        theirs.step()
    assert len(plain) == 2
    assert len(calls) == 3
    assert_bitwise_equal(list(plain.values()), list(reference.values()))


@each_kind
@pytest.mark.parametrize("conv", [False, True])
def test_state_dict_to_torch_and_back(moments, conv):
    make = (lambda: nn.Sequential(Conv1D(136, 200))) if conv else plain_model

    def stored():
        model = make()
        tritonfp8.convert(model, "rowwise", weight_storage="quantized")
        return model

    model, plain = stored(), make()
    ours = AdamW(model.parameters(), lr=1e-3, moments=moments)
    for _ in range(3):
        model(data()[0]).square().mean().backward()
        ours.step()
    state = ours.state_dict()
    theirs = torch.optim.AdamW(plain.parameters())
    assert state["param_groups"][0].keys() == theirs.state_dict()["param_groups"][0].keys()
    theirs.load_state_dict(copy.deepcopy(state))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        q.grad = p.grad.clone()
        assert theirs.state[q]["exp_avg"].shape == q.shape
        assert theirs.state[q]["step"] == 3
    theirs.step()
    again = AdamW(stored().parameters(), moments=moments)
    again.load_state_dict(state)
    for index, before in state["state"].items():
        after = again.state_dict()["state"][index]
        assert_bitwise_equal([after[key] for key in sorted(before)], [before[key] for key in sorted(before)])
    # Float32 moments of torch come back as they are, others rounded.
    again.load_state_dict(theirs.state_dict())
    for index, before in theirs.state_dict()["state"].items():
        after = again.state_dict()["state"][index]
        if moments == "fp32":
            assert_bitwise_equal([after["exp_avg_sq"]], [before["exp_avg_sq"]])
        else:
            torch.testing.assert_close(after["exp_avg_sq"].sqrt(), before["exp_avg_sq"].sqrt(), rtol=0.07, atol=1e-4)


def test_moments_are_those_of_torch():
    model, reference = stored_model("rowwise"), plain_model()
    ours, theirs = AdamW(model.parameters()), torch.optim.AdamW(reference.parameters())
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = q.grad = torch.randn(p.shape, generator=generator)
        ours.step()
        theirs.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[p][key], theirs.state[q][key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("moments", "size"), [("fp32", 8), ("bf16", 4), ("fp8", 2.02)])
def test_bytes_of_the_state(moments, size):
    layer = stored_layer(1024, 0.11)
    optimizer = AdamW(layer.parameters(), moments=moments)
    layer.weight.grad = torch.ones(256, 1024)
    optimizer.step()
    state = sum(x.nbytes for x in optimizer.state[layer.weight].values())
    assert state <= size * 256 * 1024 + 4


def test_learning_rate_as_a_tensor_and_a_schedule():
    found = []
    for lr in (1e-3, torch.tensor(1e-3, dtype=torch.float64)):
        model = stored_model("rowwise")
        optimizer = AdamW([p for p in model.parameters() if stored_part(p) is not None], lr=lr, weight_decay=0.0)
        train(model, optimizer, 2)
        found.append(codes(model))
    assert_bitwise_equal(*found)
    schedule = torch.optim.lr_scheduler.LambdaLR(AdamW(stored_model("rowwise").parameters()), lambda step: 0.5)
    assert schedule.get_last_lr() == [5e-4]


def test_a_learning_rate_of_zero_changes_no_value():
    model = stored_model("blockwise")
    before = values(model)
    train(model, AdamW(model.parameters(), lr=0.0), 3)
    assert_bitwise_equal(list(values(model).values()), list(before.values()))


def test_seeds_differ_and_copies_do_not():
    found = []
    for seed in (0, 1, 2**40):
        model = stored_model("rowwise")
        optimizer = AdamW(model.parameters(), seed=seed)
        train(model, optimizer, 1)
        found.append(codes(model)[0])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    for copied, same in (copy.deepcopy((model, optimizer)), reloaded((model, optimizer), weights_only=False)):
        assert (same.seed, same.moments, same.rounding) == (2**40, "fp32", "stochastic")
        train(copied, same, 2)
        reference, theirs = copy.deepcopy((model, optimizer))
        train(reference, theirs, 2)
        assert_bitwise_equal(codes(copied), codes(reference))


def test_gradients_that_are_missing_leave_a_weight():
    model = stored_model("rowwise")
    before = codes(model)
    optimizer = AdamW(model.parameters())
    model[0].weight.grad = torch.ones(136, 200)
    optimizer.step()
    after = codes(model)
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: AdamW(p, moments="int8"), ValueError, "moments"),
        (lambda p: AdamW(p, rounding="up"), ValueError, "rounding"),
        (lambda p: AdamW(p, seed=1.5), TypeError, "seed must be an int; got float"),
        (lambda p: AdamW([x.bfloat16().detach() for x in p]), ValueError, "counts as float32; got torch.bfloat16"),
        (lambda p: AdamW(p).load_state_dict(torch.optim.AdamW(p, amsgrad=True).state_dict()), ValueError,
         "has no amsgrad"),
    ],
)  # fmt: skip
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        make(list(stored_model("rowwise").parameters()))


def test_a_check_of_the_step_reads_codes():
    model = stored_model("rowwise")
    with tritonfp8.verify_training(model, optimizer := AdamW(model.parameters())) as check:
        train(model, optimizer, 1)
    assert str(check) == "4 of 4 trainable weights moved in the step"
    optimizer = AdamW(model.parameters(), lr=1e-9, rounding="nearest")
    error = pytest.raises(VerificationError, match=r"0\.weight, 2\.weight: it got a gradient and did not change")
    with error, tritonfp8.verify_training(model, optimizer):
        train(model, optimizer, 1)


# An optimizer, and which of it and the model is compiled.
COMPILED = {
    **{name: (AdamW, 1e-2, "model", name) for name in IN_BYTES},
    "ours": (AdamW, 1e-2, "step", "rowwise"),
    "masters": (with_masters(torch.optim.SGD), 0.1, "step", "rowwise"),
    # torch compiles its AdamW in other operations than it runs, so only SGD has the same bits.
    "torch's SGD": (torch.optim.SGD, 10.0, "step", "rowwise"),
}


# Its Dynamo traces into the write; later ones leave it out of the graph.
TRACES_WRITES = TorchVersion(torch.__version__) < (2, 12)
INSIDE = r"inside torch\.compile writes to a weight that is stored in 8 bits"


@pytest.mark.filterwarnings("ignore:.* writes to weights that are stored in 8 bits")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    if TRACES_WRITES and name == "torch's SGD":
        model = stored_model("rowwise")
        optimizer, before = torch.optim.SGD(model.parameters(), lr=10.0), codes(model)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        with pytest.raises(Exception, match=INSIDE):
            train(model, optimizer, 1)
        assert_bitwise_equal(codes(model), before)
        return
    (kind, lr, part, recipe), found = COMPILED[name], []
    for compiled in (False, True):
        model = stored_model(recipe)
        call, optimizer = model, kind(model.parameters(), lr=lr)
        if compiled and part == "model":
            call = torch.compile(model, fullgraph=True, backend="aot_eager")
        elif compiled:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        found.append([*train(call, optimizer, 3), *codes(model)])
    assert_bitwise_equal(*found)


def test_a_write_inside_a_graph_is_an_error():
    weight = stored_model("rowwise")[0].weight.detach()
    before = weight._qdata.clone()
    write = torch.compile(lambda: weight.mul_(0.5), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"a weight that is stored in 8 bits" if TRACES_WRITES else INSIDE):
        write()
    assert_bitwise_equal([weight._qdata], [before])


@pytest.mark.parametrize(
    ("package", "name"), [("torchao", "AdamW8bit"), ("torchao", "AdamW4bit"), ("bitsandbytes", "AdamW8bit")]
)
def test_optimizers_of_others_that_read_memory_are_refused(package, name):
    kind = getattr(importlib.import_module(f"{package}.optim"), name)
    model = stored_model("rowwise")
    before, optimizer = codes(model), kind(model.parameters(), lr=1e-2)
    with pytest.raises(TypeError, match=rf"{name} of {package} cannot step a weight \(136, 200\).*optim\.AdamW"):
        train(model, optimizer, 1)
    assert_bitwise_equal(codes(model), before)
    # They may have frozen ones, which they do not step.
    model.zero_grad()
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    kind(model.parameters(), lr=1e-2).step()
    assert_bitwise_equal(codes(model), before)


def test_loads_and_reverts_keep_weights_trained():
    model = stored_model("rowwise")
    for assign in (False, True):
        model.load_state_dict(plain_model().state_dict(), assign=assign)
        assert stored_part(model[0].weight) is not None
        assert model[0].weight.requires_grad
    tritonfp8.revert(model)
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.requires_grad


@pytest.mark.gpu
@each_kind
@each_recipe
def test_captured_in_a_graph(name, moments):
    found = []
    for captured in (False, True):
        model = stored_model(name, "cuda")
        optimizer = AdamW(model.parameters(), lr=1e-3, moments=moments, capturable=True)
        for p in model.parameters():
            p.grad = torch.ones_like(p) * 1e-2
        optimizer.step()
        optimizer.step()
        step = optimizer.step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            step = graph.replay
        for _ in range(3):
            step()
        found.append(codes(model))
    assert_bitwise_equal(*found)


@pytest.mark.gpu
@each_kind
def test_cuda_equals_the_reference(moments):
    found = []
    for device in ("cpu", "cuda"):
        model = stored_model("rowwise", device)
        optimizer = AdamW([p for p in model.parameters() if p.ndim == 2], lr=1e-3, moments=moments)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            optimizer.step()
        found.append([x.cpu() for x in codes(model)])
    assert_bitwise_equal(*found)
