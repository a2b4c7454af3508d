"""Run the notebooks of this folder and write their outputs back: ``python -m notebooks.run [name ...]``.

A notebook is run as Jupyter runs it: in a new process, in this folder. The outputs lose what differs from run to run or
is noise: times of execution, versions of the kernel, and what was written to stderr, such as progress bars. Plots get a
palette, because the repository keeps them.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

FOLDER = Path(__file__).resolve().parent
SIZE = "TRITONFP8_NOTEBOOK_SIZE"
"""The environment variable that the first code cell of each notebook reads: ``small`` for tests, else unset."""

TIMEOUT = 600
"""Seconds of a cell."""

SOURCE = "outputs_of"
"""The entry of a notebook's metadata with the hash of the source whose outputs it has."""

COLORS = 64
"""Of a plot: with a palette its PNG is a third as large, and looks the same."""

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def paths() -> list[Path]:
    """The notebooks, in the order in which they are read."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    """Read and validate a notebook.

    Raises:
        nbformat.ValidationError: the file is not a notebook of version 4.
    """
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def source_hash(notebook: NotebookNode) -> str:
    """SHA-256 of the cells, in hex."""
    return hashlib.sha256("\0".join(f"{cell.cell_type} {cell.source}" for cell in notebook.cells).encode()).hexdigest()


def execute(path: Path, size: str | None = None) -> NotebookNode:
    """Run a notebook in a new process.

    Args:
        path: the file, which is not changed.
        size: ``"small"`` for fewer steps and smaller shapes; None for the size of the committed outputs.

    Returns:
        The notebook with its new outputs, cleaned.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; the message has the cell and the traceback.
        TimeoutError: a cell took longer than :data:`TIMEOUT` seconds.
    """
    notebook = read(path)
    # Tests set TRITON_INTERPRET, which readers do not: under it Triton emulates kernels.
    environment = {name: value for name, value in os.environ.items() if name not in (SIZE, "TRITON_INTERPRET")}
    if size is not None:
        environment[SIZE] = size
    # Cells print one output each, however the kernel happens to divide it.
    options = {"timeout": TIMEOUT, "kernel_name": "python3", "coalesce_streams": True}
    client = NotebookClient(notebook, resources={"metadata": {"path": FOLDER}}, **options)
    client.execute(env=environment)
    return clean(notebook)


def clean(notebook: NotebookNode) -> NotebookNode:
    """Remove what differs from run to run and what was written to stderr, in place; give plots a palette."""
    notebook.metadata = nbformat.from_dict({**METADATA, SOURCE: source_hash(notebook)})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = _with_palette(output.data["image/png"])
    return notebook


def _with_palette(png: str) -> str:
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    if image.mode == "P":
        return png
    file = io.BytesIO()
    image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the named notebooks, or all."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.run", description=main.__doc__)
    parser.add_argument("names", nargs="*", help="such as 01, or 01_formats_and_rounding.ipynb; by default all")
    parser.add_argument("--size", choices=["small"], help="fewer steps and smaller shapes; writes nothing back")
    options = parser.parse_args(arguments)
    found = [path for path in paths() if not options.names or any(path.name.startswith(name) for name in options.names)]
    if not found:
        parser.error(f"no notebook has one of these names; there are {', '.join(path.name for path in paths())}")
    for path in found:
        notebook = execute(path, options.size)
        if options.size is None:
            nbformat.write(notebook, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells ran", flush=True)


if __name__ == "__main__":
    main()
