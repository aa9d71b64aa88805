"""The notebooks run from top to bottom, and what they show is what such a run gave."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 150_000  # of a notebook with its outputs: a repository keeps every version
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_of(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def convert(path: Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: the libraries around Jupyter warn of themselves, which is an error in this one.
    config = FOLDER / "nbconvert_config.py"
    argv = [sys.executable, "-m", "nbconvert", "--config", config, "--output-dir", folder, path]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False, env=env)


def test_there_are_notebooks():
    names = {"knowledge_graph", "oversized", "transfer", "word2vec_adamax", "recommender"}
    assert names <= {path.stem for path in NOTEBOOKS}


@pytest.mark.slow
@every_notebook
def test_runs_at_the_small_size(path, tmp_path):
    before = path.read_bytes()
    done = convert(path, tmp_path, SPEEDTRANSFER_SMALL="1", SPEEDTRANSFER_DATA="")
    assert done.returncode == 0, done.stderr
    assert [cell.execution_count for cell in code_of(tmp_path / path.name)] == list(range(1, len(code_of(path)) + 1))
    assert path.read_bytes() == before, "a small run leaves the outputs that readers see"


@every_notebook
def test_names_that_it_imports_are_there(path):
    found = 0
    for cell in code_of(path):
        for node in ast.parse(cell.source).body:
            names = [getattr(node, "module", None), *(each.name for each in getattr(node, "names", []))]
            if isinstance(node, ast.Import | ast.ImportFrom) and any("speedtransfer" in str(name) for name in names):
                exec(compile(ast.Module([node], []), str(path), "exec"), {})
                found += 1
    assert found


@every_notebook
def test_committed_outputs(path):
    """What is shown is of one run from the top, without an error, a warning or a path of a machine."""
    notebook, cells = read(path), code_of(path)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    places = [
        f"{str(place).rstrip('/')}/" for place in (Path.home(), ROOT, tempfile.gettempdir(), "/tmp", "/home", "/root")
    ]
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
        shown = [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/png")]
        text = "\n".join(map(str, [output.get("text", ""), *shown]))
        assert not [place for place in places if place != "/" and place in text]
    assert path.stat().st_size <= MOST_BYTES
    assert set(notebook.metadata) == {"kernelspec", "language_info"}, "it was not written by `make notebooks`"
    assert {key for cell in notebook.cells for key in cell.metadata} <= {"mystnb"}


@every_notebook
def test_the_readme_names_it(path):
    assert f"({path.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_a_notebook_that_fails_is_not_written(tmp_path):
    path = tmp_path / "one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0", id="one")]), path)
    done = convert(path, tmp_path / "out")
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert not (tmp_path / "out" / "one.ipynb").exists()
