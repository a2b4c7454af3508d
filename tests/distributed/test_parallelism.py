"""Every recipe with the ways to shard that other files test in depth, but not for every recipe."""

import fsdp_cases
import pytest
import tp_cases
from cases import QUANTIZED
from fsdp_cases import Setup
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
    on, off = (ranks.run(4, fsdp_cases.train, setup=Setup(recipe, enabled, hybrid=True), steps=2)
               for enabled in (True, False))  # fmt: skip
    assert on == off
    assert len({digest for _, digest in on}) == 1


@each_recipe
def test_checkpoint_loads_at_another_world_size(ranks, tmp_path, recipe):
    setup = Setup(recipe, enabled=recipes.get(recipe).output.quantized)
    saved = ranks.run(3, fsdp_cases.save, folder=str(tmp_path), setup=setup)
    loaded = ranks.run(2, fsdp_cases.load, folder=str(tmp_path), setup=setup)
    assert {digest for digest, _ in loaded} == {before for before, *_ in saved}
    again = ranks.run(3, fsdp_cases.load, folder=str(tmp_path), setup=setup)
    assert [losses for _, losses in again] == [losses for _, losses, *_ in saved]
