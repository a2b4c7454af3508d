"""Pages of the API, one an object: docs/api.md names the objects, and the site shows a list of links in their place.

The pages are made in docs/api/ when the site is built. Git ignores them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = "api"
BLOCK = re.compile(r"^```\{eval-rst\}\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^\.\. ([\w:]+):: (\S+)\n((?:(?: +.*)?\n)*)", re.MULTILINE)


class Page(NamedTuple):
    """The page of an object.

    Attributes:
        name: dotted, as a program imports the object.
        directive: of Sphinx, with its options.
        summary: the first sentence about the object.
    """

    name: str
    directive: str
    summary: str

    @property
    def text(self) -> str:
        """The source of the page."""
        return f"# {self.name}\n\n```{{eval-rst}}\n{self.directive}\n```\n"

    @property
    def row(self) -> str:
        """The row of the list of objects."""
        return f"| [`{self.name.rpartition('.')[2]}`]({FOLDER}/{self.name}.md) | {self.summary} |"


def found(name: str) -> object:
    """The object of a dotted name of a module and an attribute."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def summary(text: str) -> str:
    """The first sentence of a docstring, as Markdown for a cell."""
    first = " ".join(text.split("\n\n")[0].split())
    first = re.split(r"(?<=[^.][.:]) (?=[A-Z])|:$", first)[0]
    first = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first).replace("``", "`")
    return first.replace("|", "\\|").rstrip(".:")


def _option(options: str, name: str) -> str:
    """The value of an option of a directive, on one line or more."""
    value = re.search(rf"^ +:{name}:((?:.*\n)(?:      +.*\n)*)", options, re.MULTILINE)
    return " ".join(value[1].split()) if value else ""


def _of_member(name: str, excluded: str) -> Page:
    value = found(name)
    kind, options = "data", ""
    if inspect.isclass(value):
        kind, options = "exception" if issubclass(value, Exception) else "class", "\n   :members:"
        options += f"\n   :exclude-members: {excluded}" if excluded else ""
    elif inspect.isroutine(value):
        kind = "function"
    # The docstring of data stands in the source, and Sphinx reads it there.
    about = summary(inspect.getdoc(value) or "") if kind != "data" else "data"
    return Page(name, f".. auto{kind}:: {name}{options}", about)


def pages(block: str) -> tuple[str, list[Page]]:
    """What stays of a block of directives on the page of all objects, and the pages of its objects."""
    stays, made, module = [], [], ""
    for kind, name, options in DIRECTIVE.findall(block):
        if kind in ("module", "automodule"):
            module = name
            stays.append(f".. {kind}:: {name}\n")
            members = _option(options, "members").replace(",", " ").split()
            made += [_of_member(f"{name}.{each}", _option(options, "exclude-members")) for each in members]
        elif kind == "py:data":
            directive = f".. py:currentmodule:: {module}\n.. py:data:: {name}\n{options.rstrip()}"
            made.append(Page(f"{module}.{name}", directive, summary(options.strip())))
        else:
            about = summary(inspect.getdoc(found(name)) or "") if kind != "autodata" else "data"
            made.append(Page(name, f".. {kind}:: {name}\n{options.rstrip()}".rstrip(), about))
    return "".join(stays), made


def index(text: str) -> str:
    """The page of all objects, with lists of links in place of the directives."""

    def listed(match: re.Match[str]) -> str:
        stays, made = pages(match[1])
        kept = f"```{{eval-rst}}\n{stays}```\n\n" if stays else ""
        rows = "\n".join(["| name | in short |", "|---|---|", *(page.row for page in made)])
        tree = "\n".join(f"{page.name} <{FOLDER}/{page.name}>" for page in made)
        return f"{kept}{rows}\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"

    return BLOCK.sub(listed, text)


def write(folder: Path) -> None:
    """Write the pages of the objects that ``api.md`` in a folder names, but for equal ones, and remove others."""
    made = {page.name: page for block in BLOCK.findall((folder / "api.md").read_text()) for page in pages(block)[1]}
    out = folder / FOLDER
    out.mkdir(exist_ok=True)
    for path in out.glob("*.md"):
        if path.stem not in made:
            path.unlink()
    for name, page in made.items():
        path = out / f"{name}.md"
        if not path.exists() or path.read_text() != page.text:
            path.write_text(page.text)
