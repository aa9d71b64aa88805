"""The notebooks run from top to bottom, and what they show is what such a run gave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
sys.path.insert(0, str(FOLDER))
import execute  # noqa: E402

nbformat = pytest.importorskip("nbformat")
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def run(*arguments) -> subprocess.CompletedProcess:
    # A process of its own: the libraries around Jupyter warn of themselves, which is an error in this one.
    argv = [sys.executable, str(FOLDER / "execute.py"), *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=180)


@by_name
def test_runs(path, tmp_path):
    done = run("--small", "--output", tmp_path, "--timeout", 120, path)
    assert done.returncode == 0, done.stderr
    assert execute.faults(nbformat.read(tmp_path / path.name, as_version=4)) == []
