"""Every recipe trains: through the kernels, compiled, the loss falls as the loss of bf16 does."""

import functools

import pytest
import torch
from cases import generator, llama

from tritonfp8 import convert, recipes
from tritonfp8.compat.counting import count_gemms
from tritonfp8.specs import BLOCK_1X32

STEPS = 30
LAST = 10


def batches(device):
    """Sequences that count up in steps of 1 to 4, modulo the vocabulary, with one token in five a random one."""
    g = generator(0)
    for _ in range(STEPS):
        start, stride = torch.randint(0, 128, (16, 1), generator=g), torch.randint(1, 5, (16, 1), generator=g)
        ids = (start + stride * torch.arange(65)) % 128
        noise = torch.randint(0, 128, ids.shape, generator=g)
        yield torch.where(torch.rand(ids.shape, generator=g) < 0.2, noise, ids).to(device)


@functools.cache
def train(name, device, backend):
    """The losses of all steps, and the products that ran."""
    model = llama(hidden_size=256, intermediate_size=704).to(device)
    convert(model, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @functools.partial(torch.compile, backend=backend, fullgraph=True)
    def loss_of(ids):
        with torch.autocast(device, torch.bfloat16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    losses = []
    with count_gemms() as counts:
        for ids in batches(device):
            optimizer.zero_grad()
            loss = loss_of(ids)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, counts


@pytest.mark.gpu
@pytest.mark.parametrize("name", recipes.names())
def test_recipe_trains_on_cuda(name):
    losses, counts = train(name, "cuda", "inductor")
    bf16, _ = train("bf16", "cuda", "inductor")
    last, expected = (sum(x[-LAST:]) / LAST for x in (losses, bf16))
    assert expected < 0.75 * bf16[0], "the model learns too little to tell recipes apart"
    assert last == pytest.approx(expected, rel=0.01)
    emulated = recipes.get(name).output.quantized and recipes.get(name).output.lhs.block == BLOCK_1X32
    kinds = ("fp8", "dequantized", "emulated") if emulated else ("fp8",)
    assert counts.share(*kinds) == pytest.approx(recipes.get(name).quantized_share)
    assert counts.share("reference") == 0
