"""Parts of the package that do not know experts yet say so, and leave them as they are."""

import pytest
import torch
from mixtures import experts_of, model_of

import tritonfp8
from tritonfp8 import recipes


@pytest.fixture
def model():
    found = model_of("mixtral")
    tritonfp8.convert(found, "rowwise", experts=True)
    return found


def recipes_of(model):
    return {name: experts.recipe for name, experts in experts_of(model).items()}


def test_sensitivity_gives_experts_their_recipe_back(model):
    ids = torch.randint(0, 96, (2, 12))
    tritonfp8.sensitivity(model, {"input_ids": ids, "labels": ids}, ["rowwise"])
    assert recipes_of(model) == dict.fromkeys(experts_of(model), recipes.get("rowwise"))
