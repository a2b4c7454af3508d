"""Every Python snippet of README and docs runs as it is written."""

import re
from pathlib import Path

import pytest
import snippet_cases

PROCESSES = 2

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    f"{page.name}-{number}": source
    for page in PAGES
    for number, source in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
}


def test_every_snippet_has_a_case():
    assert snippet_cases.CASES.keys() == BLOCKS.keys()


@pytest.mark.parametrize("name", [name for name, case in snippet_cases.CASES.items() if not case.ranks])
def test_snippet(name):
    snippet_cases.run(None, name, BLOCKS[name])


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", [name for name, case in snippet_cases.CASES.items() if case.ranks])
def test_snippet_on_ranks(ranks, name):
    ranks.run(2, snippet_cases.run, name=name, source=BLOCKS[name])
