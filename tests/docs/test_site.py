"""The site of the pages builds without a warning, and its API page has every public name."""

import importlib
import inspect
import sys

import pytest
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace
from test_public_names import NAMES

from docs import build

# MyST of today calls what a later Sphinx removes.
pytestmark = pytest.mark.filterwarnings("ignore::sphinx.deprecation.RemovedInSphinx11Warning")

NOT_ON_THE_PAGE = {"tritonfp8.__version__": "a text"}

OF_MODULES = ("class", "data", "exception", "function", "module")


def built(source, out):
    """The environment of the built site; nothing is written for readers, but every link is resolved."""
    with docutils_namespace():
        app = Sphinx(source, build.DOCS, out, out, "dummy", status=None, warning=sys.stderr, warningiserror=True)
        app.build()
    return app


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
    objects = app.env.domains.python_domain.objects
    documented = {id(found(name)) for name, o in objects.items() if o.objtype in OF_MODULES and not o.aliased}
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
