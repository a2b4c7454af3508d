"""What sequence parallelism remembers of calls: so much, whatever lengths come."""

import tracemalloc

from torch.distributed.tensor import Replicate, Shard

from tritonfp8.distributed.shard_layout import Mesh, flattened
from tritonfp8.distributed.tensor_parallel.placements import CACHED_LAYERS, cached_layer_of, layer_of

MIB = 2**20


def call(function, batch, tokens, ranks, rank=0, block=128):
    """A layer ``[4096, 4096]`` sharded by out features, of ``[batch, tokens]`` that are sharded by tokens."""
    mesh, came = ((ranks,), (rank,), ("group",)), ((Shard(1),), (Shard(0),))
    return function(mesh, (batch, tokens), (4096, 4096), came, (block,) * 3, False, None, "global", None)


def test_it_is_bounded_over_changing_lengths():
    cached_layer_of.cache_clear()
    tracemalloc.start()
    try:
        for tokens in range(2 * CACHED_LAYERS):
            call(cached_layer_of, 2, 100 + tokens, 2)
            if tokens + 1 == CACHED_LAYERS:
                full = tracemalloc.get_traced_memory()[0]
        assert cached_layer_of.cache_info().currsize == CACHED_LAYERS
        assert tracemalloc.get_traced_memory()[0] < 1.3 * full < 4 * MIB
        # As large as entries get: every layer of it would take this much.
        before = tracemalloc.get_traced_memory()[0]
        entries = [call(layer_of, 64, 4099 + tokens, 8) for tokens in range(2)]
        largest = (tracemalloc.get_traced_memory()[0] - before) / len(entries)
    finally:
        tracemalloc.stop()
        cached_layer_of.cache_clear()
    assert largest * CACHED_LAYERS < 40 * MIB


def test_ranks_share_the_cuts_and_each_has_those_of_its_own_layout():
    gather = call(layer_of, 3, 50, 4, rank=1).gather
    assert all(source.cuts is gather.sources[0].cuts for source in gather.sources)
    for rank, source in enumerate(gather.sources):
        single = flattened((3, 50), Mesh((4,), (rank,), ("group",)), [Shard(1)])
        assert source.cuts == single.cuts == (13, 26, 39, 50, 63, 76, 89, 100, 113, 126, 139)
        assert source.segments == single.segments
    assert flattened((3, 50), Mesh((4,), (1,), ("group",)), [Replicate()]).cuts == ()
