"""The shipped file that a machine reads: its own, or that of a machine whose GEMMs are as fast."""

import dataclasses

import pytest
from tuned import MACHINE, SMALL, WIDE, entry, key

from tritonfp8.conversion.cost import H200
from tritonfp8.hardware import machine_key
from tritonfp8.tuning import store
from tritonfp8.tuning.store import dump, measured_elsewhere, read_shipped

H100 = machine_key(dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3"))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Ships entries for a machine."""
    monkeypatch.setattr(store, "SHIPPED", tmp_path)
    return lambda machine, entries: (tmp_path / f"{machine}.json").write_bytes(dump(entries, machine))


def test_a_gpu_that_computes_alike_has_the_entries_of_the_other(shipped):
    shipped(MACHINE, {key(): entry()})
    assert read_shipped(H100) == measured_elsewhere(H100) == {key(): entry()}
    assert read_shipped(MACHINE) == {key(): entry()}
    assert measured_elsewhere(MACHINE) == {}


@pytest.mark.parametrize(
    "machine", ["nvidia-h100-pcie-sm90-114", "nvidia-b200-sm100-132", "nvidia-h200-sm90-16", "cpu-4", ""]
)
def test_one_with_another_capability_or_number_of_sms_has_none(shipped, machine):
    shipped(MACHINE, {key(): entry()})
    assert read_shipped(machine) == measured_elsewhere(machine) == {}


def test_a_file_of_its_own_comes_first(shipped):
    shipped(MACHINE, {key(): entry(), key(m=64): entry()})
    shipped(H100, {key(): entry(SMALL)})
    assert read_shipped(H100) == {key(): entry(SMALL)}
    assert measured_elsewhere(H100) == {}
    shipped("nvidia-a-later-one-sm90-132", {key(): entry(WIDE)})
    assert read_shipped(H100) == {key(): entry(SMALL)}
