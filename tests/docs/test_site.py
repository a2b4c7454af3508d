"""The site of the pages builds without a warning, and its API page has every public name."""

import importlib
import inspect
import re
import sys

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace
from test_public_names import NAMES

from docs import build, objects

# MyST of today calls what a later Sphinx removes.
pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")

NOT_ON_THE_PAGE = {"tritonfp8.__version__": "a text"}

OF_MODULES = ("class", "data", "exception", "function", "module")


def built(source, out, builder="dummy"):
    """The environment of the built site. The dummy writes nothing for readers, but every link is resolved."""
    with docutils_namespace():
        app = Sphinx(source, build.DOCS, out, out, builder, status=None, warning=sys.stderr, warningiserror=True)
        app.build()
    return app


def of_api(text):
    """The pages of the objects that a page of directives names."""
    return [page for block in objects.BLOCK.findall(text) for page in objects.pages(block)[1]]


def found(name):
    """The object of a dotted name. An attribute hides a module of its name, as `tritonfp8.convert` does."""
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for part in parts[1:]:
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(f"{value.__name__}.{part}")
    return value


def test_site_builds_without_a_warning_and_has_every_public_name(tmp_path):
    app = built(build.ROOT, tmp_path)
    assert app.statuscode == 0
    known = app.env.domains.python_domain.objects
    for page in of_api((build.DOCS / "api.md").read_text()):
        assert known[page.name].docname == f"docs/api/{page.name}"
    documented = {id(found(name)) for name, o in known.items() if o.objtype in OF_MODULES and not o.aliased}
    for module, names in NAMES.items():
        public = importlib.import_module(module)
        for name in names:
            assert f"{module}.{name}" in NOT_ON_THE_PAGE or id(getattr(public, name)) in documented, f"{module}.{name}"


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_has_a_docstring(module):
    public = importlib.import_module(module)
    values = {name: getattr(public, name) for name in NAMES[module]}
    objects = {name: value for name, value in values.items() if inspect.isroutine(value) or inspect.isclass(value)}
    assert [name for name, value in objects.items() if not inspect.getdoc(value)] == []


def test_a_broken_link_and_a_lost_page_are_warnings(tmp_path, capsys):
    pages = tmp_path / "source" / "docs"
    pages.mkdir(parents=True)
    (pages / "index.md").write_text("# A\n\n[a](b.md#nowhere), [c](c.md)\n")
    (pages / "b.md").write_text("# B\n")
    assert built(tmp_path / "source", tmp_path / "out").statuscode == 1
    warnings = capsys.readouterr().err
    assert "local id not found in doc 'docs/b': 'nowhere'" in warnings
    assert "'c.md'" in warnings
    assert "b.md: WARNING: document isn't included in any toctree" in warnings


API = """# API

```{eval-rst}
.. automodule:: tritonfp8.specs.formats
   :members: Format, FORMATS
   :exclude-members: bits
.. py:data:: A

   All of :func:`len`, and ``more``. Not this.
.. autoexception:: tritonfp8.VerificationError
```
"""


def test_objects_have_a_page_each():
    pages = {page.name: page for page in of_api(API)}
    assert [*pages] == [f"tritonfp8.{each}" for each in ("specs.formats.Format", "specs.formats.FORMATS",
                                                         "specs.formats.A", "VerificationError")]  # fmt: skip
    form = pages["tritonfp8.specs.formats.Format"].directive
    assert form == ".. autoclass:: tritonfp8.specs.formats.Format\n   :members:\n   :exclude-members: bits"
    assert pages["tritonfp8.specs.formats.FORMATS"].directive.startswith(".. autodata::")
    assert pages["tritonfp8.specs.formats.A"].summary == "All of `len`, and `more`"
    assert ".. automodule:: tritonfp8.specs.formats\n```" in objects.index(API)
    assert "[`A`](api/tritonfp8.specs.formats.A.md) |" in objects.index(API)


def test_readers_can_copy_code_see_sources_and_search(tmp_path):
    """On the written pages: wide tables keep their first column, too."""
    pages = tmp_path / "source" / "docs"
    pages.mkdir(parents=True)
    (pages / "index.md").write_text("# A\n\n```python\na = 1\n```\n\n```{toctree}\napi\nglossary\n```\n")
    (pages / "api.md").write_text(API)
    (pages / "glossary.md").write_text((build.DOCS / "glossary.md").read_text())
    (pages / "api").mkdir()
    (pages / "api" / "old.md").write_text("# A page of an object that is no more\n")
    assert built(tmp_path / "source", tmp_path / "out", "html").statuscode == 0
    written = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert written >= {"_static/copybutton.js", "_static/site.css", "_modules/tritonfp8/specs/formats.html"}
    assert "docs/api/old.html" not in written
    index, page, glossary = [
        (tmp_path / "out" / "docs" / f"{name}.html").read_text()
        for name in ("index", "api/tritonfp8.specs.formats.Format", "glossary")
    ]
    assert "copybutton.js" in index
    assert "site.css" in index
    assert 'href="../../_modules/tritonfp8/specs/formats.html#Format"' in page
    # The selector of site.css.
    assert re.search(r'class="table-wrapper[^"]*">\s*<table class="docutils', glossary)
    assert "position: sticky" in (tmp_path / "out" / "_static" / "site.css").read_text()
    found = (tmp_path / "out" / "searchindex.js").read_text()
    for word in ("saturation", "overflow", "underflow"):
        assert f"<p>{word}</p>" in glossary
        stem = word.removesuffix("ation")
        assert re.search(rf'"?\b{stem}"?:', found), word
