"""Host time: how many functions of the package an eager step calls where FSDP2 gathers weights in 8 bits."""

import pytest
import torch
from calls import calls_of
from cases import QUANTIZED
from fsdp_cases import step
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import enable_float8_all_gather

pytestmark = [pytest.mark.xdist_group("ranks")]

LAYERS = 4
# Forward and backward of all layers, the calls of the layers themselves included.
MOST = 84 * LAYERS, 46 * LAYERS


def calls_of_a_step(mesh, recipe):
    """The calls of forward and of backward, for two blocks of two layers, after two steps."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    model = nn.Sequential(*blocks).to(mesh.device_type)
    tritonfp8.convert(model, recipe)
    enable_float8_all_gather(model)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(8, 64, device=mesh.device_type, requires_grad=True)
    for _ in range(2):
        step(lambda: model(x).sum(), optimizer)
    forward, out = calls_of(lambda: model(x))
    backward, _ = calls_of(lambda: out.backward(torch.ones_like(out)))
    return forward, backward


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_step_calls_few_functions(ranks, recipe):
    [counted] = ranks.run(1, calls_of_a_step, recipe)
    # Each rank rounds its shard twice: for the amaxes, and for the codes that it sends.
    more = 0 if recipes.get(recipe).weights is None else 4 * LAYERS
    for found, limit in zip(counted, (MOST[0] + more, MOST[1]), strict=True):
        assert 0 < len(found) <= limit, f"{len(found)}\n" + "\n".join(found)
