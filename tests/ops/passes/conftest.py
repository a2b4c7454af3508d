"""What tests of the rewrites share."""

import pytest
from torch._inductor.fx_passes import post_grad

from tritonfp8.compat import inductor_private
from tritonfp8.ops import direct
from tritonfp8.ops.passes import chains


@pytest.fixture
def told(monkeypatch):
    """Inductor's table of passes with ours, which it has again after the test: it is told once in a process.

    Each op is a call of its own: chains would hide what the other rewrites did.
    """
    monkeypatch.setattr(chains, "MOST_WORK", 0)
    assert inductor_private.rewrite_graphs(direct.rewrite)
    yield post_grad.pass_patterns
    assert inductor_private.rewrite_graphs(direct.rewrite)
