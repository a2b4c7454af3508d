"""The prototype of delayed scaling scales by the past, and finds the amax of the present."""

import pytest
import torch

import tritonfp8
from bench.training import delayed
from tritonfp8.specs import QuantSpec

E4M3, E5M2 = QuantSpec("e4m3"), QuantSpec("e5m2")


def tensor(seed, largest):
    x = torch.randn(40, 72, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3).bfloat16()
    x[7, 11] = -largest
    return x


@pytest.mark.parametrize(("spec", "spec_t"), [(E4M3, E5M2), (E4M3, None), (None, E5M2)])
def test_casts_are_scaled_by_the_largest_amax_of_the_steps_before(spec, spec_t):
    history = delayed.History(torch.device("cpu"), casts=4, steps=2)
    # Two casts a step. Of the second, the steps have the amaxes 10, 40, 20, 5; the history has two steps.
    for step, (largest, scaled_by) in enumerate(((10.0, 10.0), (40.0, 10.0), (20.0, 40.0), (5.0, 40.0), (5.0, 20.0))):
        with delayed.delayed(history):
            delayed.quantize_for(tensor(99, 4.0), E4M3, None)
            x = tensor(step, largest)
            pair, pair_t = delayed.quantize_for(x, spec, spec_t)
            assert history.present[:2, 0].tolist() == [4.0, largest]
        given = torch.tensor([[scaled_by]])
        for found, of, matrix in ((pair, spec, x), (pair_t, spec_t, x.t())):
            if of is not None:
                expected = tritonfp8.quantize(matrix, of, amax=given)
                assert torch.equal(found[0].view(torch.uint8), expected.qdata.view(torch.uint8))
                assert torch.equal(found[1], expected.scale)
