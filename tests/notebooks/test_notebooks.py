"""The notebooks run, and their committed outputs are outputs of their source."""

import copy
import re

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook, new_output

from notebooks import run

# One worker runs all, so that kernels do not compete for the cores.
pytestmark = pytest.mark.xdist_group("notebooks")

NOTEBOOKS = [pytest.param(path, id=path.stem) for path in run.paths()]
OF_A_MACHINE = re.compile(r"/(home|root|tmp|opt|usr|work|var|Users)/|site-packages|ipykernel")
MAX_BYTES = 1_000_000


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell):
    """The texts that a cell printed or displayed."""
    for output in cell.outputs:
        yield output.get("text", "")
        yield from (value for mime, value in output.get("data", {}).items() if not mime.startswith("image/"))


@pytest.mark.timeout(run.TIMEOUT)
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_runs_at_small_size(path):
    """Every ``assert`` in the notebook holds."""
    ran = run.execute(path, size="small")
    assert all(cell.execution_count for cell in code_cells(ran))


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_outputs_are_those_of_the_source(path):
    notebook = run.read(path)
    assert notebook.metadata[run.SOURCE] == run.source_hash(notebook), "run python -m notebooks.run"
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert not [output for output in cell.outputs if output.output_type == "error"]
        assert not [text for text in texts(cell) if OF_A_MACHINE.search(text)]
        assert ("plt.show()" in cell.source) <= any("image/png" in output.get("data", {}) for output in cell.outputs)
    assert run.clean(copy.deepcopy(notebook)) == notebook


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_begins_and_ends_as_all_do_and_links_to_files(path):
    notebook = run.read(path)
    first, last = notebook.cells[0].source, notebook.cells[-1].source
    assert first.startswith(f"# {path.stem[:2]} ")
    assert "You will learn" in first
    assert "**Time:**" in first
    assert run.SIZE in code_cells(notebook)[0].source
    assert "](../docs/" in last
    assert sum(cell.source.count("assert ") for cell in code_cells(notebook)) >= 3
    for cell in notebook.cells:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", cell.source if cell.cell_type == "markdown" else ""):
            assert link.startswith("https://") or (path.parent / link).exists(), link


def test_numbers_are_consecutive_and_files_small():
    assert [path.name[:3] for path in run.paths()] == [f"{n:02d}_" for n in range(1, len(NOTEBOOKS) + 1)]
    assert sum(path.stat().st_size for path in run.paths()) < MAX_BYTES


def written(folder, *sources):
    path = folder / "01_sample.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    return path


def test_an_assert_that_fails_is_an_error_and_a_changed_source_has_no_outputs(tmp_path):
    notebook = run.clean(run.read(written(tmp_path, "1 + 1")))
    before = notebook.metadata[run.SOURCE]
    notebook.cells[0].source = "1 + 2"
    assert run.source_hash(notebook) != before
    with pytest.raises(CellExecutionError, match="two is three"):
        run.execute(written(tmp_path, "assert 2 == 3, 'two is three'"))


def test_a_notebook_runs_as_for_its_reader(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv(run.SIZE, "of the caller")
    names = ("TRITON_INTERPRET", run.SIZE)
    source = f"import os, sys\nprint(os.getcwd(), *map(os.environ.get, {names}))\nprint('noise', file=sys.stderr)"
    path = written(tmp_path, source)
    for size in (None, "small"):
        (cell,) = run.execute(path, size).cells
        assert "".join(texts(cell)) == f"{run.FOLDER} None {size}\n"


def test_names_choose_notebooks(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    path = written(tmp_path, "1 + 1")
    run.main(["01"])
    assert run.read(path).cells[0].outputs == [new_output("execute_result", {"text/plain": "2"}, execution_count=1)]
    assert capsys.readouterr().out == "01_sample.ipynb: 1 cells ran\n"
    before = path.read_bytes()
    run.main(["--size", "small"])
    assert path.read_bytes() == before
    with pytest.raises(SystemExit):
        run.main(["02"])
    assert "01_sample.ipynb" in capsys.readouterr().err
