"""What tests of the rewrites share."""

import pytest
from torch._inductor.fx_passes import post_grad

from tritonfp8.compat import inductor_private
from tritonfp8.ops import passes


@pytest.fixture
def told():
    """Inductor's table of passes with ours, which it has again after the test: it is told once in a process."""
    assert inductor_private.rewrite_graphs(passes.rewrite)
    yield post_grad.pass_patterns
    assert inductor_private.rewrite_graphs(passes.rewrite)
