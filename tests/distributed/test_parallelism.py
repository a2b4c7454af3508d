"""Every recipe with the ways to shard that other files test in depth, but not for every recipe."""

import covering
import fsdp_cases
import pytest
import stored_cases
import tp_cases
from cases import QUANTIZED
from fsdp_cases import Setup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

from tritonfp8 import recipes

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]

each_recipe = pytest.mark.parametrize("recipe", recipes.names())
# Placements of input, weight and bias.
COLWISE = [Replicate()], [Shard(0)], [Shard(0)]
ROWWISE = [Shard(1)], [Shard(1)], [Replicate()]


def check_layer(mesh, recipe, placements):
    """Blocks straddle the shards."""
    tp_cases.check_layer(mesh, [recipe], (301,), 253, 357, placements)


@each_recipe
def test_colwise(ranks, recipe):
    ranks.run(2, check_layer, recipe=recipe, placements=COLWISE)


@each_recipe
def test_rowwise(ranks, recipe):
    ranks.run(2, check_layer, recipe=recipe, placements=ROWWISE)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_hsdp(ranks, recipe):
    on, off = (ranks.run(4, fsdp_cases.train, setup=Setup(recipe, enabled, copies=2), steps=2)
               for enabled in (True, False))  # fmt: skip
    assert on == off
    assert len({digest for _, digest in on}) == 1


# With bits in the second step: weights that the optimizer changed.
@pytest.mark.parametrize(
    ("recipe", "reshard", "world"), covering.each(QUANTIZED, [True, False], [(1, None), (2, 2), (4, 4)])
)
def test_a_shard_that_is_the_whole(request, recipe, reshard, world):
    size, copies = world
    ranks = request.getfixturevalue("two_ranks" if size == 2 else "ranks")
    on, off = (ranks.run(size, fsdp_cases.train, setup=Setup(recipe, enabled, reshard=reshard, copies=copies), steps=2)
               for enabled in (True, False))  # fmt: skip
    assert on == off


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("stored", [True, False])
def test_replicate_of_torch(ranks, stored):
    """Each rank has all of a weight, and FSDP2 gathers nothing: the bits of the model on one rank."""
    assert all(ranks.run(2, stored_cases.replicated, recipe="blockwise", stored=stored))


def test_a_stored_weight_of_one_row(ranks):
    """The shard of one rank is the whole; the others have none."""
    assert all(ranks.run(2, stored_cases.replicated, recipe="rowwise", stored=True, apply=fully_shard))


@each_recipe
def test_checkpoint_loads_at_another_world_size(ranks, tmp_path, recipe):
    setup = Setup(recipe, enabled=recipes.get(recipe).output.quantized)
    saved = ranks.run(3, fsdp_cases.save, folder=str(tmp_path), setup=setup)
    loaded = ranks.run(2, fsdp_cases.load, folder=str(tmp_path), setup=setup)
    assert {digest for digest, _ in loaded} == {before for before, *_ in saved}
    again = ranks.run(3, fsdp_cases.load, folder=str(tmp_path), setup=setup)
    assert [losses for _, losses in again] == [losses for _, losses, *_ in saved]
