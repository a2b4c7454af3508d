"""Ranks that gather weights by different recipes: every rank has the same error, which says who has which."""

import re
from dataclasses import replace

import pytest
import torch
from fsdp_cases import Setup, build, tokens_of
from fsdp_models import Llama, initialize
from raised import raised
from torch.distributed.fsdp import fully_shard

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]


def disagree(mesh, how):
    """The error of ranks that gather by different recipes of one size."""
    base = tritonfp8.recipes.get("tensorwise")
    changes = {"rounding": {"scale_rounding": "pow2"}, "format": {"format": "e5m2"}}
    other = replace(base.output.rhs, **changes.get(how, {}))
    mine = replace(base, output=replace(base.output, rhs=other), grad_input=replace(base.grad_input, rhs=other))
    rank = mesh.get_local_rank()
    model = initialize(Llama())
    tritonfp8.convert(model, {"layers.1.up": mine if rank == 1 else base, "*": base})
    enable_float8_all_gather(model)
    fully_shard(model, mesh=mesh)
    if how == "swapped later":
        model(tokens_of(0))
        name = "rowwise" if rank == 1 else "blockwise"
        tritonfp8.swap_recipe(model, {"layers.0.q": name, "*": "tensorwise"})
    return raised(lambda: model(tokens_of(0)))


@pytest.mark.parametrize("how", ["rounding", "format", "swapped later"])
def test_ranks_that_disagree_on_a_recipe_are_told_which_and_where(ranks, how):
    told = ranks.run(3, disagree, how)
    assert told[0] == told[1] == told[2]
    layer, others = ("layers.0.q", "blockwise") if how == "swapped later" else ("layers.1.up", "tensorwise")
    line = next(line for line in told[0].splitlines() if layer in line)
    assert "ranks disagree" in told[0]
    assert "on ranks 0, 2" in line
    assert "on ranks 1" in line
    assert others in line
    assert len(told[0].splitlines()) == 2


def changes_alone(mesh, how, copies=None, first="rowwise"):
    """The errors of two forwards after only rank 1 changed a recipe. Changed back, the loss is as before."""
    model, _ = build(mesh, Setup(first, copies=copies, param_dtype=None))
    expected = model(tokens_of(0)).item()
    model(tokens_of(0)).sum().backward()
    if torch.distributed.get_rank() == 1:
        if how == "reverted":
            tritonfp8.revert(model)
        else:
            tritonfp8.swap_recipe(model, {"layers.0.q": how, "*": first} if how == "blockwise" else how)
    told = [raised(lambda: model(tokens_of(0))) for _ in range(2)]
    if how != "reverted":
        tritonfp8.swap_recipe(model, first)
        assert model(tokens_of(0)).item() == expected
    return told


@pytest.mark.one_in(1)
# Recipes that reduce amaxes and mxfp8, which reduces none; one that gathers nothing in 8 bits; no recipe at all.
@pytest.mark.parametrize(
    ("world", "options", "words"),
    [
        (2, {"how": "blockwise"}, "recipe 'blockwise'"),
        (2, {"how": "tensorwise", "first": "mxfp8"}, "recipe 'tensorwise'"),
        (3, {"how": "bf16"}, "weight in high precision"),
        (2, {"how": "rowwise", "first": "blockwise"}, "recipe 'rowwise'"),
        (2, {"how": "reverted"}, "not gathered"),
        # Some ranks share neither shards nor copies with the one that changed.
        (4, {"how": "bf16", "first": "mxfp8", "copies": 2}, "weight in high precision"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_rank_that_changes_its_recipe_alone(ranks, world, options, words):
    told = ranks.run(world, changes_alone, **options, timeout=30)
    assert all(each == told[0] for each in told)
    # The next forward says it again, until ranks agree.
    for text in told[0]:
        line = next(line for line in text.splitlines() if re.search(r"layers\.0(-1)?\.q", line))
        assert "ranks disagree" in text
        assert f"on ranks {', '.join(str(rank) for rank in range(world) if rank != 1)}" in line
        assert line.rstrip(";").count(words) == 1
        assert words in next(part for part in line.split(";") if "on ranks 1" in part)
