"""The commands of ``bench/README.md``: each exists, takes these options, and has the ones that it requires."""

import importlib
import re
import shlex
import shutil
import subprocess

import pytest
import typer

from bench.contest.machine import RESULTS

PROGRAMS = ("bench.advice", "bench.distributed", "bench.scale")
README = RESULTS.parent / "README.md"
COMMANDS = re.findall(r"`((?:python|torchrun) [^`]+)`", README.read_text())


def call(command):
    """Have the options of a command read, and nothing run."""
    name, *arguments = shlex.split(command.rpartition(" -m ")[2])
    module = importlib.import_module(f"{name}.run" if name in PROGRAMS else name)
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer()
        app.command()(module.main)
    found = typer.main.get_command(app)
    context = found.make_context(name, list(arguments))
    if hasattr(found, "resolve_command"):
        _, inner, rest = found.resolve_command(context, arguments)
        inner.make_context(name, rest, parent=context)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_can_be_called(command):
    call(command)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_commands_of_eight_gpus_can_be_called():
    made = subprocess.run(
        ["make", "-n", "eight", "PYTHON=python"], cwd=RESULTS.parents[1], capture_output=True, text=True, check=True
    )
    commands = [command for command in made.stdout.splitlines() if " pytest " not in command]
    assert len(commands) == 9
    for command in commands:
        call(command)


def test_the_page_is_short_and_has_a_command_a_question():
    text = README.read_text()
    assert len(text.splitlines()) <= 40
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    assert all("`python" in row or "`torchrun" in row for row in rows)
