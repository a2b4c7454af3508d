"""An exact model computes what the model computed before: close logits and gradients, from the same parameters."""

import copy

import pytest
import torch
from exact_models import OTHERS, of_family, padded, positions, sequences
from rollout_models import FAMILIES

from tritonfp8.rollout import make_exact


def gradients(model, ids, mask):
    out = model(ids, attention_mask=mask, position_ids=positions(mask), labels=ids.masked_fill(mask == 0, -100))
    out.loss.backward()
    return out.logits.detach()[mask.bool()], {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", [*FAMILIES, *OTHERS])
def test_logits_and_gradients_are_close(kind):
    model = of_family(kind, torch.float32)
    other = make_exact(copy.deepcopy(model))
    assert list(other.state_dict()) == list(model.state_dict())
    ids, mask = padded(sequences(), "left")
    (logits, grads), (expected, others) = gradients(other, ids, mask), gradients(model, ids, mask)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, others[name], atol=1e-6, rtol=1e-3, msg=name)
