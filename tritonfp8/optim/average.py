"""A copy of a model in float32, in which averages and other small changes of stored weights add up."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from tritonfp8.layers.stored import is_stored, restore_plain
from tritonfp8.specs.checks import require_type


def float32_copy(model: nn.Module) -> nn.Module:
    """A copy of a model whose weights are all plain float32 parameters; layers keep their recipes.

    Weights that are stored in 8 bits have the values of their codes there. The copy takes an average without a rounding
    at each step: ``AveragedModel(float32_copy(model))`` of ``torch.optim.swa_utils``, or
    ``p.lerp_(q, 0.005)`` for ``p`` of the copy and ``q`` of the model. ``model.load_state_dict(average.state_dict())``
    brings the values back, each rounded once.

    Args:
        model: any module, with stored weights or without.

    Raises:
        TypeError: no module.
        ValueError: its parameters are sharded: copy the model first, then shard both in the same way.
    """
    require_type("model", model, nn.Module, "an nn.Module")
    if sharded := [name for name, p in model.named_parameters() if hasattr(p, "_local_tensor")]:
        raise ValueError(
            f"the parameters of the model are sharded ({sharded[0]}): call float32_copy before fully_shard or a "
            "parallel style, then shard the copy in the same way"
        )
    found: Any = copy.deepcopy(model)
    for layer in found.modules():
        if is_stored(layer):
            restore_plain(layer)
    return found.float()
