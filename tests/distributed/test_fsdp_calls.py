"""Host time: how many functions of the package an eager step calls where FSDP2 gathers weights in 8 bits."""

import call_cases
import pytest
from cases import QUANTIZED

pytestmark = [pytest.mark.xdist_group("ranks")]

LAYERS = 4
# Forward and backward of all layers, the calls of the layers themselves included.
MOST = 84 * LAYERS, 46 * LAYERS


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_step_calls_few_functions(ranks, recipe):
    [counted] = ranks.run(1, call_cases.calls_of_a_step, recipe=recipe)
    for found, limit in zip(counted, MOST, strict=True):
        assert 0 < len(found) <= limit, f"{len(found)}\n" + "\n".join(found)
