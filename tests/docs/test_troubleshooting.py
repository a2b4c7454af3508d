"""Each message that docs/troubleshooting.md quotes is one that the code gives."""

import ast
import functools
import re

import pytest

from docs import build

PAGE = (build.DOCS / "troubleshooting.md").read_text()
HEADER = ["symptom", "message", "cause", "what to do"]
# In a string of the code: what differs from call to call.
HOLE = "\0"
NEVER = "none"


def rows(page):
    """The cells of the tables of a page, without their heads."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return [cells for cells in lines if cells != HEADER and not cells[0].startswith("---")]


def messages(page):
    """The quoted messages: the inline code of the second column."""
    return [message for cells in rows(page) for message in re.findall(r"`([^`]+)`", cells[1])]


def template(node):
    """The text of an expression that makes a string, with holes; None if it makes no string of its own."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else HOLE for each in node.values)
    return None


def strings(tree):
    """``(kind, text)`` of every string but docstrings. The kind is the exception that it is given to, or "" ."""
    named = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and (text := template(node.value)) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = text
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(each) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for each in ast.walk(node)}
    parts -= {id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)}
    for node in ast.walk(tree):
        text = template(node)
        if text is not None and id(node) not in docstrings | parts:
            yield "", text
        if isinstance(node, ast.Call) and (kind := kind_of(node.func)):
            for argument in node.args:
                for each in ast.walk(argument):
                    text = named.get(each.id) if isinstance(each, ast.Name) else template(each)
                    if text is not None:
                        yield kind, text


def kind_of(function):
    """The exception that a call makes, or UserWarning for one that warns."""
    name = getattr(function, "attr", getattr(function, "id", ""))
    return "UserWarning" if "warn" in name else name if name.endswith("Error") else ""


@functools.cache
def all_strings():
    folder = build.ROOT / "tritonfp8"
    return [each for path in sorted(folder.rglob("*.py")) for each in strings(ast.parse(path.read_text()))]


def is_given(message, given):
    """Whether one string has all fixed parts of the message, in order, and is given to the exception that it names."""
    kind, words = re.fullmatch(r"(?:(\w+(?:Error|Warning)): )?(.*)", message).groups()
    pattern = ".*".join(re.escape(part.strip()) for part in words.split("..."))
    return any((kind is None or kind == of) and re.search(pattern, text, re.DOTALL) for of, text in given)


def test_every_table_has_a_column_of_messages():
    heads = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| symptom")]
    assert heads == [HEADER] * PAGE.count("\n|---")
    for cells in rows(PAGE):
        assert len(cells) == 4, cells
        assert cells[1] == NEVER or re.fullmatch(r"`[^`]+`(<br>`[^`]+`)*", cells[1]), cells


def test_messages_are_quoted_once_and_at_length():
    found = messages(PAGE)
    assert len(found) > 80
    assert len(set(found)) == len(found)
    for message in found:
        words = re.sub(r"^\w+(Error|Warning): |\.\.\.", "", message)
        assert len(words.split()) > 2, f"{message!r} would match by chance"


@pytest.mark.parametrize("message", messages(PAGE))
def test_message_is_one_of_the_code(message):
    assert is_given(message, all_strings()), "no string of tritonfp8/ has these words: quote what the code says"


def test_a_changed_message_is_missed():
    source = """
_TEXT = "the third message is a constant"

def f(x):
    "the docstring is no message"
    if x:
        raise ValueError(f"the first {x} message has a hole")
    warnings.warn("the second message " "is in two parts")
    raise TypeError(_TEXT)
"""
    given = list(strings(ast.parse(source)))
    quotes = {
        True: (
            "ValueError: the first ... message has a hole", "the first ... has a hole",
            "UserWarning: the second message is in two parts", "TypeError: the third message is a constant",
        ),
        False: (
            "TypeError: the first ... message has a hole", "ValueError: the first message has a hole",
            "ValueError: the first ... message has two holes", "ValueError: has a hole ... the first",
            "UserWarning: the third message is a constant", "the docstring is no message",
            "the second message ... the third message",
        ),
    }  # fmt: skip
    for expected, message in ((key, message) for key in quotes for message in quotes[key]):
        assert is_given(message, given) == expected, message
