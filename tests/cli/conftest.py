"""A command line in this process."""

import pytest
from typer.testing import CliRunner

from tritonfp8.cli import app


@pytest.fixture
def invoke():
    def run(*args):
        return CliRunner().invoke(app.app, [str(arg) for arg in args])

    return run
