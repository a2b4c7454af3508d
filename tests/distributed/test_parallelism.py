"""Every recipe with the ways to shard that other files test in depth, but not for every recipe."""

import covering
import pytest
import stored_cases
from cases import CODES, QUANTIZED, each_recipe, named
from fsdp_cases import Setup, load, save, train
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from tp_cases import check_layer

from tritonfp8 import recipes

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]


# Blocks straddle the shards. The placements are of input, weight and bias.
@each_recipe
def test_colwise(ranks, recipe):
    ranks.run(2, check_layer, [recipe], (301,), 253, 357, ([Replicate()], [Shard(0)], [Shard(0)]))


@each_recipe
def test_rowwise(ranks, recipe):
    ranks.run(2, check_layer, [recipe], (301,), 253, 357, ([Shard(1)], [Shard(1)], [Replicate()]))


def trained_with_and_without(ranks, world, recipe, **options):
    """Two steps: the second has weights that the optimizer changed."""
    on, off = (ranks.run(world, train, Setup(recipe, enabled, **options), 2) for enabled in (True, False))
    assert on == off
    return on


@pytest.mark.parametrize("recipe", [*QUANTIZED, *CODES.values()], ids=named)
def test_hsdp(ranks, recipe):
    assert len({digest for _, digest in trained_with_and_without(ranks, 4, recipe, copies=2)}) == 1


@pytest.mark.parametrize(
    ("recipe", "reshard", "world"), covering.each(QUANTIZED, [True, False], [(1, None), (2, 2), (4, 4)])
)
def test_a_shard_that_is_the_whole(request, recipe, reshard, world):
    size, copies = world
    ranks = request.getfixturevalue("two_ranks" if size == 2 else "ranks")
    trained_with_and_without(ranks, size, recipe, reshard=reshard, copies=copies)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("stored", [True, False])
def test_replicate_of_torch(ranks, stored):
    """Each rank has all of a weight, and FSDP2 gathers nothing: the bits of the model on one rank."""
    assert all(ranks.run(2, stored_cases.replicated, recipe="blockwise", stored=stored))


def test_a_stored_weight_of_one_row(ranks):
    """The shard of one rank is the whole; the others have none."""
    assert all(ranks.run(2, stored_cases.replicated, recipe="rowwise", stored=True, apply=fully_shard))


@each_recipe
def test_checkpoint_loads_at_another_world_size(ranks, tmp_path, recipe):
    setup, folder = Setup(recipe, enabled=recipes.get(recipe).output.quantized), str(tmp_path)
    saved = ranks.run(3, save, folder, setup)
    assert {digest for digest, _ in ranks.run(2, load, folder, setup)} == {before for before, *_ in saved}
    assert [losses for _, losses in ranks.run(3, load, folder, setup)] == [losses for _, losses, *_ in saved]
