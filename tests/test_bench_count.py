"""bench/count.py: files and lines of Python by part."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
FILES = {
    "setup.py": 2,
    "speedtransfer/errors.py": 251,
    "speedtransfer/nn/bag.py": 250,
    "speedtransfer/nn/deep/lookup.py": 10,
    "tests/test_nn.py": 300,
    "tests/data.txt": 1000,
}
TABLE = """\
part                files  lines  over 250 lines
*.py                    1      2               0
speedtransfer/*.py      1    251               1
speedtransfer/nn        2    260               0
tests                   1    300               1
speedtransfer, all      3    511               1
all                     5    813               2
"""


@pytest.fixture
def count(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("count")


def git(folder, *arguments):
    about = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *about, *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path):
    for name, lines in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * lines)
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        git(tmp_path, *arguments)
    return tmp_path


def test_a_commit_and_the_files_as_they_are(count, tree, capsys):
    assert count.main([], tree) == 0
    assert capsys.readouterr().out == TABLE
    (tree / "setup.py").unlink()
    (tree / ".gitignore").write_text("build\n")
    for name in ("new.py", "build/made.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("x = 1\n")
    assert count.main([], tree) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["*.py", "1", "1", "0"]
    assert count.main(["HEAD"], tree) == 0
    assert capsys.readouterr().out == TABLE


@pytest.mark.parametrize("commit", ["0123abc", "--output=x"])
def test_a_commit_that_is_not_there(count, tree, capsys, commit):
    assert count.main(["--", commit], tree) == 2
    assert f"git cannot read commit {commit!r}" in capsys.readouterr().err
    assert not (tree / "x").exists()
