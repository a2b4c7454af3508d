"""A sharded model gives the tensors of the whole one, on every rank."""

import export_cases
import pytest
from cases import QUANTIZED

pytestmark = pytest.mark.xdist_group("ranks")
PROCESSES = 4


def check_fsdp2(ranks, **options):
    for exported in ranks.run(2, export_cases.fsdp, format="compressed_channel", **options):
        assert len(exported) > 6


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_fsdp2_that_left_weights_gathered(ranks, recipe):
    check_fsdp2(ranks, recipe=recipe, reshard=False)


def test_fsdp2(ranks):
    check_fsdp2(ranks, recipe="rowwise", reshard=True)


@pytest.mark.parametrize("format", ["fine_grained", "compressed_mxfp8", "compressed_tensor"])
def test_tensor_parallel(ranks, format):
    assert ranks.run(2, export_cases.tensor_parallel, format=format) == [True, True]


def test_data_parallel(ranks):
    assert ranks.run(2, export_cases.data_parallel) == [True, True]


@pytest.mark.parametrize(("storage", "dora"), [("parameters", True), ("quantized", False)])
def test_adapters_on_a_sharded_base_are_merged(ranks, storage, dora):
    assert ranks.run(2, export_cases.merged, storage=storage, dora=dora) == [True, True]


def test_saved_files_are_of_whole_models(ranks):
    for message in ranks.run(2, export_cases.refused):
        assert "is sharded (a DTensor): tritonfp8.export.save needs whole tensors. Gather the weights" in message


@pytest.mark.parametrize(
    ("way", "recipe", "storage", "format"),
    [
        ("fsdp", "rowwise", "parameters", "compressed_channel"),
        ("fsdp", "blockwise", "quantized", "fine_grained"),
        ("tp", "rowwise", "quantized", "compressed_channel"),
        ("tp", "mxfp8", "quantized", "compressed_mxfp8"),
        ("fsdp tp", "rowwise", "parameters", "compressed_channel"),
        ("fsdp tp", "blockwise", "quantized", "fine_grained"),
    ],
)
def test_loads(ranks, way, recipe, storage, format):
    way = tuple(way.split())
    first, *others = ranks.run(2 * len(way), export_cases.loads, format=format, recipe=recipe, storage=storage, way=way)
    assert len(first.layers) == 2
    assert all(each == first for each in others)


def test_a_sharded_model_on_the_meta_device_loads_nothing(ranks):
    for message in ranks.run(2, export_cases.needs_memory):
        assert "is sharded and on the meta device: give it memory first, by model.to_empty(device=...)" in message
