"""A sharded model gives the tensors of the whole one, on every rank."""

import export_cases
import pytest

pytestmark = pytest.mark.xdist_group("ranks")
PROCESSES = 2


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2(ranks, reshard):
    for exported in ranks.run(2, export_cases.fsdp, format="compressed_channel", reshard=reshard):
        assert len(exported) > 6


@pytest.mark.parametrize("format", ["fine_grained", "compressed_mxfp8", "compressed_tensor"])
def test_tensor_parallel(ranks, format):
    assert ranks.run(2, export_cases.tensor_parallel, format=format) == [True, True]


def test_files_are_of_whole_models(ranks):
    for save, load in ranks.run(2, export_cases.refused):
        assert "is sharded (a DTensor): tritonfp8.export.save needs whole tensors. Gather the weights" in save
        assert "is sharded (a DTensor): tritonfp8.export.load needs whole tensors" in load
