"""The bytes of a sharded weight, all ranks in one process."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tritonfp8 import QuantSpec, recipes
from tritonfp8.distributed.fsdp.byte_layout import ByteLayout, GatheredBytes
from tritonfp8.distributed.fsdp.orientations import WeightOrientation, weight_orientations
from tritonfp8.distributed.fsdp.shard_casts import (
    fill_amax,
    one_nan,
    quantize_shard,
    scale_of_orientation,
    scales_of_amaxes,
)
from tritonfp8.functional import quantize
from tritonfp8.recipes import Gemm, Recipe

ROWS_OF_128 = QuantSpec("e4m3", (1, 128), "fp32", "pow2")
ALL = {name: recipes.get(name) for name in recipes.names() if recipes.get(name).output.quantized}
ALL["1x128"] = Recipe("1x128", Gemm(ROWS_OF_128, ROWS_OF_128), Gemm(ROWS_OF_128, ROWS_OF_128))


def gathered(weight, layout, orientation):
    """What the ranks of ``layout`` make of ``weight`` together."""
    shards = [weight[start : start + count] for start, count in map(layout.shard, range(layout.shards))]
    index = layout.orientations.index(orientation)
    grids = torch.zeros(layout.shards, len(layout.reduced(orientation)), layout.grid(orientation)[1])
    for rank, shard in enumerate(shards):
        if grids[rank].numel():
            fill_amax(grids[rank], shard, layout.place(orientation, rank))
    reduced = one_nan(grids).view(torch.int32).amax(0).view(torch.float32)
    # Bytes that nobody writes are not to be read.
    segments = torch.full((layout.shards, layout.rank_segment_size), 0x55, dtype=torch.uint8)
    for rank, shard in enumerate(shards):
        if shard.shape[0]:
            layout.write(segments[rank], index, *quantize_shard(shard, layout.place(orientation, rank), reduced))
    scale = None
    if not orientation.sends_scales:
        flat = scales_of_amaxes(reduced, orientation.spec.format, orientation.spec.scale_rounding)
        scale = scale_of_orientation(flat, orientation, layout.grid(orientation), layout.extent(orientation))
    return layout.read(GatheredBytes(segments.flatten(), None, scale, scale), index, index)


def bits(x):
    return x.new_empty(x.shape).copy_(x).view(torch.uint8)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


@settings(max_examples=60, deadline=None)
@example(rows=4, cols=16, shards=2, recipe="rowwise", together=False, dtype=torch.bfloat16, seed=0)
@given(
    rows=st.integers(1, 300),
    cols=st.sampled_from([1, 16, 42, 130, 256]),
    shards=st.integers(1, 6),
    recipe=st.sampled_from(list(ALL)),
    together=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_segments_make_the_quantized_whole_weight(rows, cols, shards, recipe, together, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, cols, generator=generator) * 2.0 ** torch.randint(-30, 30, (rows, 1))).to(dtype)
    if seed % 3 == 0:
        weight[seed % rows, seed % cols] = (torch.nan, torch.inf, -torch.nan)[seed % 7 % 3]
    layout = ByteLayout(rows, cols, shards, weight_orientations(ALL[recipe]), together)
    for orientation in layout.orientations:
        expected = quantize(weight, orientation.spec, transpose=orientation.transposed)
        qdata, scale = gathered(weight, layout, orientation)
        assert same_bits(qdata, expected.qdata)
        assert same_bits(scale, expected.scale)
        assert scale.stride() == expected.scale.stride()


def test_scale_of_a_shard_alone_would_be_another():
    weight = torch.ones(6, 40)
    weight[5] = 1000.0
    layout = ByteLayout(6, 40, 2, weight_orientations(ALL["rowwise"]), False)
    qdata, scale = quantize_shard(weight[:3], layout.places(0)[1], torch.full((1, 40), 1000.0))
    alone = quantize(weight[:3], layout.orientations[1].spec, transpose=True)
    assert not same_bits(scale, alone.scale)
    assert not same_bits(qdata, alone.qdata)


@pytest.mark.parametrize(
    ("rows", "shards", "expected"), [(64, 2, ()), (62, 2, (0,)), (300, 3, (3, 6)), (5, 4, (0,)), (96, 3, ())]
)
def test_blocks_on_several_ranks(rows, shards, expected):
    layout = ByteLayout(rows, 16, shards, weight_orientations(ALL["mxfp8"]), False)
    assert tuple(layout.reduced(layout.orientations[1])) == expected
    assert tuple(layout.reduced(layout.orientations[0])) == ()


def test_untransposed_bytes_are_not_copied():
    layout = ByteLayout(5, 16, 4, weight_orientations(ALL["rowwise"]), False)
    buffer = torch.zeros(4 * layout.rank_segment_size, dtype=torch.uint8)
    qdata, _ = layout.read(GatheredBytes(buffer, None, torch.ones(5, 1)), 0, 0)
    assert qdata.data_ptr() == buffer.data_ptr()


def test_recipes_that_read_the_values_have_no_forms():
    spec = QuantSpec("e4m3")
    assert weight_orientations(recipes.get("bf16")) == ()
    assert weight_orientations(Recipe("output only", output=Gemm(spec, spec))) == ()
    assert weight_orientations(Recipe("grad_input only", grad_input=Gemm(spec, spec))) == ()
    assert weight_orientations(recipes.get("tensorwise")) == (WeightOrientation(spec, False),)
