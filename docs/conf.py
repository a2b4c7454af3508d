"""Settings of the site: ``make docs``, or ``sphinx-build -c docs . build/site`` in the root of a checkout.

The root of the checkout is the source folder. Links between pages, to README.md and to files of the code therefore work
on the site as they do on GitHub.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import objects
from tritonfp8 import __version__

project, author = "tritonfp8", "the authors of tritonfp8"
release = __version__
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md"]
# Pruned before they are searched: a virtual environment has many files.
exclude_patterns = [".*", "bench", "build", "dist", "examples", "kernels", "notebooks", "runs", "tests", "tritonfp8"]
suppress_warnings = ["myst.header"]  # "### Added" follows "## Unreleased" more than once in the changelog

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature shows them
# Clients that are not installed, such as torchtitan.
autodoc_mock_imports = [
    name for name in ("accelerate", "lightning", "torchtitan", "transformers") if importlib.util.find_spec(name) is None
]

html_theme = "furo"
html_title = f"{project} {release}"
html_show_sourcelink = False  # of the page; viewcode links each object to its source
html_static_path, html_css_files = ["static"], ["site.css"]


def _write_objects(app: Any) -> None:
    """Make a page for each object of the API."""
    if (Path(app.srcdir) / "docs" / "api.md").exists():
        objects.write(Path(app.srcdir) / "docs")


def _list_objects(app: Any, docname: str, source: list[str]) -> None:
    """Show links to these pages where docs/api.md has the directives."""
    if docname == "docs/api":
        source[0] = objects.index(source[0])


def _keep_links_to_files(app: Any, docname: str, source: list[str]) -> None:
    """Links of GitHub that MyST does not know: a folder becomes its path, a page outside of the site a download."""
    root = Path(app.srcdir)
    folder = (root / docname).parent

    def replaced(found: re.Match[str]) -> str:
        text, link = found[1].replace("`", ""), found[2]
        path = (folder / link).resolve()
        if path.is_dir():
            return f"`{path.relative_to(root)}/`"
        is_page = path.relative_to(root).with_suffix("").as_posix() in app.env.found_docs
        return found[0] if is_page or path.suffix != ".md" else f"{{download}}`{text} <{link}>`"

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)\)", replaced, source[0])


def _show_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Indented lines after a blank one are code or a table. Sphinx would take them for a quotation."""
    lines[:] = re.sub(r"(?m)^(\S.*[^:\n])\n\n(?=    )", "\\1\n\n::\n\n", "\n".join(lines)).split("\n")


def _write_front_page(app: Any, error: Exception | None) -> None:
    """Lead from the root of the site to its first page, which lies in docs/ as in the checkout."""
    if error is None and app.builder.format == "html":
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>tritonfp8</title>\n'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app: Any) -> None:
    """Connect what the settings cannot say."""
    app.connect("builder-inited", _write_objects)
    app.connect("source-read", _list_objects)
    app.connect("source-read", _keep_links_to_files)
    # Before napoleon, which indents the sections of a docstring.
    app.connect("autodoc-process-docstring", _show_code, priority=400)
    app.connect("build-finished", _write_front_page)
