"""Fixtures of the tests of tuned configurations."""

import pytest
from tuned import ADA, MACHINE

from tritonfp8.compat import hardware
from tritonfp8.tuning import chooser


@pytest.fixture
def own_tables():
    """Empty tables of tuned entries for an H200 and an L40S; afterwards the files are read again."""
    chooser.reload()
    chooser._tables.update({MACHINE: {}, hardware.machine_key(ADA): {}})
    yield
    chooser.reload()
