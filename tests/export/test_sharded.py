"""A sharded model gives the tensors of the whole one, on every rank."""

import export_cases
import pytest
from cases import QUANTIZED

pytestmark = pytest.mark.xdist_group("ranks")
PROCESSES = 2


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


def test_files_are_of_whole_models(ranks):
    for save, load in ranks.run(2, export_cases.refused):
        assert "is sharded (a DTensor): tritonfp8.export.save needs whole tensors. Gather the weights" in save
        assert "is sharded (a DTensor): tritonfp8.export.load needs whole tensors" in load
