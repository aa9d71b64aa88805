"""The notebooks run from top to bottom, and what they show is what such a run gave."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("execute")


def run(*arguments) -> subprocess.CompletedProcess[str]:
    # A process of its own: the libraries around Jupyter warn of themselves, which is an error in this one.
    argv = [sys.executable, str(FOLDER / "execute.py"), *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=500, check=False)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def write(path: Path, *cells: nbformat.NotebookNode) -> Path:
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    nbformat.write(new_notebook(cells=list(cells)), path)
    return path


def test_there_are_notebooks():
    names = {"knowledge_graph", "oversized", "transfer", "word2vec_adamax", "recommender"}
    assert names <= {path.stem for path in NOTEBOOKS}


@pytest.mark.slow
@every_notebook
def test_runs_at_the_small_size(path, tmp_path):
    before = path.read_bytes()
    done = run("--small", "--output", tmp_path, "--timeout", 200, path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / path.name).exists()
    assert path.read_bytes() == before, "a small run leaves the outputs that readers see"


@every_notebook
def test_committed_outputs(path, script):
    notebook = read(path)
    nbformat.validate(notebook)
    assert script.faults(notebook) == []
    assert path.stat().st_size <= script.MOST_BYTES
    assert script.text_of(notebook) == path.read_text(encoding="utf-8"), "it was not written by `make notebooks`"


@every_notebook
def test_the_readme_names_it(path):
    assert f"({path.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


# --- the script itself --------------------------------------------------------------------------------------------------


def test_outputs_are_written_in_place_and_clean(tmp_path):
    path = write(
        tmp_path / "one.ipynb",
        new_markdown_cell("text"),
        new_code_cell("import os, speedtransfer\nprint(os.listdir('.'), os.environ.get('SPEEDTRANSFER_SMALL'))"),
        new_code_cell(f"speedtransfer.__file__.startswith({str(ROOT)!r})"),
    )
    notebook = read(path)
    notebook.metadata["orig_nbformat"] = notebook.cells[1].metadata["tags"] = ["of an editor"]
    notebook.cells[1].metadata["mystnb"] = {"image": {"alt": "a picture"}}
    nbformat.write(notebook, path)
    done = run(path)
    assert done.returncode == 0, done.stderr
    notebook = read(path)
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2]
    assert notebook.cells[1].outputs[0].text == "[] None\n"  # an empty folder, the normal size
    assert notebook.cells[2].outputs[0].data["text/plain"] == "True"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert [set(cell.metadata) for cell in notebook.cells] == [set(), {"mystnb"}, set()]


@pytest.mark.parametrize(
    ("code", "timeout_s", "messages"),
    [
        ("1 / 0", 60, ["ZeroDivisionError"]),
        pytest.param(
            "import os, sys\nprint(os.getcwd(), file=sys.stderr)",
            60,
            ["has an error or a warning", "path of this machine"],
            marks=pytest.mark.slow,
        ),
        pytest.param("while True: pass", 1, ["timed out"], marks=pytest.mark.slow),
        pytest.param("import os\nos._exit(1)", 60, ["Kernel died"], marks=pytest.mark.slow),
    ],
)
def test_a_notebook_that_must_not_be_shown_stays_as_it_is(code, timeout_s, messages, tmp_path):
    path = write(tmp_path / "one.ipynb", new_code_cell(code))
    before = path.read_bytes()
    done = run("--timeout", timeout_s, path)
    assert done.returncode == 1
    assert all(message in done.stderr for message in ["one.ipynb", *messages])
    assert path.read_bytes() == before


@pytest.mark.slow
def test_small_takes_no_data_and_the_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDTRANSFER_DATA", str(tmp_path))
    code = "import os\n[os.environ.get(f'SPEEDTRANSFER_{name}') for name in ('SMALL', 'DATA')]"
    path = write(tmp_path / "one.ipynb", new_code_cell(code))
    done = run("--small", "--output", tmp_path / "a" / "b", path)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "a" / "b" / "one.ipynb").cells[0].outputs[0].data["text/plain"] == "['1', None]"


def test_a_notebook_that_is_not_there(tmp_path):
    done = run(tmp_path / "none.ipynb")
    assert done.returncode == 2
    assert "none.ipynb'; pass" in done.stderr


def test_an_output_that_is_no_folder(tmp_path):
    path = write(tmp_path / "one.ipynb", new_code_cell("1"))
    done = run("--output", path, path)
    assert done.returncode == 2
    assert "--output" in done.stderr


def test_a_home_that_is_the_root_makes_no_slash_a_fault(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    assert "/" not in runpy.run_path(str(FOLDER / "execute.py"))["_PLACES"]


def test_small_outputs_replace_nothing():
    done = run("--small")
    assert done.returncode == 2
    assert "--output" in done.stderr


@pytest.mark.parametrize(
    ("outputs", "count", "fault"),
    [
        ([], 1, "no outputs"),
        ([new_output("stream", name="stdout", text="done")], 2, "in order"),
        ([new_output("stream", name="stdout", text="done")], None, "in order"),
        ([new_output("stream", name="stderr", text="UserWarning")], 1, "warning"),
        ([new_output("error", ename="ValueError", evalue="no", traceback=[])], 1, "error"),
        ([new_output("execute_result", {"text/plain": f"'{Path.home() / 'rows.npy'}'"})], 1, "path"),
        ([new_output("stream", name="stdout", text="/tmp/rows.npy")], 1, "path"),
        ([new_output("stream", name="stdout", text="/var/tmp/rows.npy")], 1, "path"),
        ([new_output("stream", name="stdout", text="3 MB/s and 1/2")], 1, None),
        ([new_output("display_data", {"image/png": "/tmp/", "text/plain": "<Figure>"})], 1, None),
    ],
)
def test_faults(outputs, count, fault, script):
    found = script.faults(new_notebook(cells=[new_code_cell("1", outputs=outputs, execution_count=count)]))
    assert any(fault in what for what in found) if fault else found == []
