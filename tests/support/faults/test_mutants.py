"""The faults that the tests must notice can be put in: their texts are those of the files."""

from pathlib import Path

import pytest
from mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{Path(mutant.file).stem}-{mutant.wrong}")
def test_a_fault_changes_one_place(mutant):
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1
    assert source.replace(mutant.old, mutant.new) != source
    paths = [name for name in mutant.tests if name.startswith("tests/")]
    assert paths
    assert all((ROOT / path).exists() for path in paths)
