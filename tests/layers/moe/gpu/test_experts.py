"""Modules of experts on a GPU: the host waits for nothing, runs repeat to the bit, and models train as on a CPU."""

import copy

import pytest
import torch
from cases import CUDA, QUANTIZED, cpu_and_cuda, each_recipe, generator, normal
from mixtures import experts_of, model_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tritonfp8
from tritonfp8 import Float8Experts
from tritonfp8.testing import FUSED_SQNR, assert_bitwise_equal, sqnr

each_quantized = pytest.mark.parametrize("recipe", QUANTIZED)
on_cuda = pytest.mark.parametrize("device", [CUDA])

EXPERTS, HIDDEN, INSIDE, TOKENS, TOP_K = 8, 272, 208, 101, 2
# No token takes this one.
IDLE = 3


def experts_with(recipe, device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Float8Experts(EXPERTS, HIDDEN, INSIDE, recipe=recipe, bias=True, dtype=dtype).to(device)


def routed(device, seed=0, dtype=torch.bfloat16):
    """Tokens, their experts and the weights of these, which differ with ``seed``."""
    scores = normal(TOKENS, EXPERTS, seed=seed)
    scores[:, IDLE] = -torch.inf
    weights, index = scores.softmax(1).topk(TOP_K)
    return normal(TOKENS, HIDDEN, seed=seed + 1, dtype=dtype).to(device), index.to(device), weights.to(device, dtype)


def step(experts, hidden, index, weights):
    """The output, and the gradients of the tokens, of the weights of their experts and of the parameters."""
    leaves = [x.detach().requires_grad_() for x in (hidden, weights)]
    out = experts(leaves[0], index, leaves[1])
    grad = normal(*out.shape, seed=9).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *experts.parameters()], grad)]


@on_cuda
@each_recipe
def test_the_host_waits_for_nothing(device, recipe):
    """With a router on the device, in forward and backward; warnings of torch would be errors."""
    torch.manual_seed(0)
    router = nn.Linear(HIDDEN, EXPERTS, device=device, dtype=torch.bfloat16)
    experts = experts_with(recipe, device)
    hidden = routed(device)[0].requires_grad_()
    grad = torch.ones_like(hidden)

    def train():
        weights, index = router(hidden).softmax(1).topk(TOP_K)
        experts(hidden, index, weights).backward(grad)

    train()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad.isfinite().all() for p in (hidden, *router.parameters(), *experts.parameters()))


@on_cuda
@each_recipe
def test_repeats_have_the_same_bits(device, recipe):
    experts, batch = experts_with(recipe, device), routed(device)
    expected = step(experts, *batch)
    for _ in range(20):
        assert_bitwise_equal(step(experts, *batch), expected)


@cpu_and_cuda
@each_recipe
def test_accumulated_gradients_are_sums(device, recipe):
    experts = experts_with(recipe, device)
    wanted = [step(experts, *routed(device, seed))[3:] for seed in (0, 20)]
    for seed in (0, 20):
        hidden, index, weights = routed(device, seed)
        out = experts(hidden, index, weights)
        out.backward(normal(*out.shape, seed=9).to(out.device, out.dtype))
    assert_bitwise_equal([p.grad for p in experts.parameters()], [x + y for x, y in zip(*wanted, strict=True)])


@cpu_and_cuda
@each_recipe
def test_later_steps_are_finite(device, recipe):
    """An expert without tokens has no gradient, and does not change."""
    experts = experts_with(recipe, device)
    optimizer = torch.optim.AdamW(experts.parameters(), 1e-2, weight_decay=0.0)
    before = copy.deepcopy(experts.state_dict())
    for seed in range(3):
        hidden, index, weights = routed(device, 20 * seed)
        out = experts(hidden, index, weights)
        assert out.isfinite().all()
        out.float().square().mean().backward()
        for parameter in experts.parameters():
            assert parameter.grad.isfinite().all()
            assert not parameter.grad[IDLE].any()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in experts.named_parameters():
        assert parameter.isfinite().all()
        changed = (parameter != before[name]).flatten(1).any(1)
        assert changed.tolist() == [expert != IDLE for expert in range(EXPERTS)]


@on_cuda
@pytest.mark.parametrize(
    ("backend", "recipe", "dtype"),
    [("aot_eager", "blockwise", torch.bfloat16), ("inductor", "rowwise", torch.float32)],
    ids=["aot_eager", "inductor"],
)
def test_one_graph_serves_every_routing(device, backend, recipe, dtype):
    """Inductor does not round between elementwise ops: in float32 results differ from those of eager by a few ulps."""
    torch._dynamo.reset()
    experts = experts_with(recipe, device, dtype)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(experts, backend=counter, fullgraph=True)
    for seed in (0, 20, 40):
        batch = routed(device, seed, dtype)
        if seed == 40:
            batch[1].zero_()
        found, expected = (step(each, *batch) for each in (compiled, experts))
        if backend == "aot_eager":
            assert_bitwise_equal(found, expected)
        for x, y in zip(found, expected, strict=True):
            assert sqnr(x, y) >= FUSED_SQNR
    assert counter.frame_count == 1


def trained(recipe, device):
    """Losses of five steps of a small Mixtral in bfloat16 on one batch; and parameters of experts that did not move."""
    model = model_of("mixtral", torch.bfloat16).to(device)
    report = tritonfp8.convert(model, {"*.mlp.experts": recipe}, experts=True)
    assert list(report.converted) == list(experts_of(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    ids, losses = torch.randint(0, 96, (4, 25), generator=generator(1)).to(device), []
    for _ in range(5):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    moved = {name: not torch.equal(p, before[name]) for name, p in model.named_parameters() if ".experts." in name}
    assert len(moved) == 2 * len(report.converted)
    return losses, [name for name, is_moved in moved.items() if not is_moved]


@on_cuda
@each_quantized
def test_a_mixture_trains_as_on_a_cpu(device, recipe):
    (found, stuck), (expected, _) = trained(recipe, device), trained(recipe, "cpu")
    assert not stuck
    assert found == pytest.approx(expected, rel=0.02)
    assert found[-1] < 0.85 * found[0]
