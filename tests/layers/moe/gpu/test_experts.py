"""Modules of experts on a GPU: no wait of the host, the same bits in every run, graphs, and training."""

import mixtures
import pytest
import torch
from cases import each_recipe, normal, with_gradients
from grouped_runs import captured

import tritonfp8
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, INSIDE, TOKENS, TOP_K = 6, 256, 192, 300, 2
# Inductor does not round between the operations of SwiGLU.
LEAST_DECIBELS_COMPILED = 30


class Layer(torch.nn.Module):
    """Experts with a router."""

    def __init__(self, recipe, bias=False):
        super().__init__()
        torch.manual_seed(0)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, **options)
        self.experts = tritonfp8.Float8Experts(EXPERTS, HIDDEN, INSIDE, recipe=recipe, bias=bias, **options)

    def forward(self, x, shift=0):
        weights, index = self.router(x).float().softmax(1).topk(TOP_K)
        return self.experts(x, (index + shift) % EXPERTS, weights.to(x.dtype))


def tokens(seed=0):
    return normal(TOKENS, HIDDEN, seed=seed, dtype=torch.bfloat16, device="cuda")


def step(layer, x, shift=0):
    """The output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    return with_gradients(layer(x, shift), [x, *layer.parameters()])


@each_recipe
def test_the_host_does_not_wait(recipe):
    layer, x = Layer(recipe), tokens()
    expected = step(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_bitwise_equal(found, expected)


@each_recipe
def test_every_run_has_the_same_bits(recipe):
    layer, x = Layer(recipe, bias=True), tokens()
    expected = step(layer, x)
    for _ in range(100):
        assert_bitwise_equal(step(layer, x), expected)


@each_recipe
def test_one_graph_serves_every_routing(recipe):
    layer = Layer(recipe)
    x, shift = tokens(), torch.zeros((), dtype=torch.int64, device="cuda")
    results, replay = captured(lambda: step(layer, x, shift), "cuda")
    for number in (1, 4):
        x.copy_(tokens(number))
        shift.fill_(number)
        replay()
        found = [t.clone() for t in results]
        assert_bitwise_equal(found, step(layer, x, shift))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_compiled_layer_compiles_once(recipe):
    # A graph of another recipe's test in this process would make this one a recompilation.
    torch._dynamo.reset()
    layer = Layer(recipe)
    compiled = torch.compile(layer, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(3):
            shift = torch.tensor(number, device="cuda")
            found, expected = step(compiled, tokens(number), shift), step(layer, tokens(number), shift)
            for actual, wanted in zip(found, expected, strict=True):
                assert sqnr(actual, wanted) >= LEAST_DECIBELS_COMPILED


@pytest.mark.parametrize(("recipe", "codes"), [("bf16", 0), ("rowwise", 1), ("rowwise_hp_grad_weight", 0)])
def test_what_is_kept_for_backward(recipe, codes):
    """The output of the first linear layer, the codes of the input of the second, and the rows that are combined.

    Autograd would keep the results of the SiLU and of the product, and a copy of the tokens for each of their experts.
    """
    # So many that the alignment of groups takes little.
    layer, x = Layer(recipe), tokens().repeat(20, 1).requires_grad_()
    layer(x).sum().backward()
    before = torch.cuda.memory_allocated()
    out = layer(x)
    kept = torch.cuda.memory_allocated() - before
    of_a_row = 2 * 2 * INSIDE + codes * INSIDE + 2 * HIDDEN
    assert kept < 1.15 * (len(x) * TOP_K * of_a_row + 2 * out.numel())
    assert kept > len(x) * TOP_K * of_a_row


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_model_of_transformers_trains(family, recipe):
    losses = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = mixtures.model_of(family, torch.bfloat16)
        tritonfp8.convert(model, recipe)
        losses[device] = trained(model.to(device))
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.02)


def trained(model):
    """The losses of five steps, after which every parameter of the experts has moved."""
    device = next(model.parameters()).device
    batch = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "experts" in name}
    losses = []
    for _ in range(5):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stuck = [name for name, p in model.named_parameters() if name in before and torch.equal(p, before[name])]
    assert not stuck
    return losses
