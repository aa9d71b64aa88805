"""What an installation is told: licence, author, ranges of versions; and what git does not see."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_checkout = pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="no git checkout")


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """The metadata of a built distribution, by name."""
    pytest.importorskip("setuptools", minversion="77")  # the first that knows licences by their expression
    folder = tmp_path_factory.mktemp("metadata")
    code = (
        "import sys; from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
    tree = folder / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "speedtransfer", tree / "speedtransfer", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=tree, check=True, capture_output=True)
    (found,) = folder.glob("*.dist-info")
    fields: dict[str, list[str]] = {}
    for line in (found / "METADATA").read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        name, _, value = line.partition(": ")
        fields.setdefault(name, []).append(value)
    return fields


def test_licence_and_author(metadata):
    assert metadata["License-Expression"] == ["Apache-2.0"]
    assert metadata["License-File"] == ["LICENSE"]
    assert metadata["Author"] == ["speedtransfer developers"]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for part in ("Apache License", "Version 2.0, January 2004", "END OF TERMS AND CONDITIONS"):
        assert part in text


def test_versions(metadata):
    python = [
        c.rpartition(" ")[2] for c in metadata["Classifier"] if c.startswith("Programming Language :: Python :: 3.")
    ]
    assert metadata["Requires-Python"] == [f">={python[0]}"]
    requires = {line.partition(">=")[0]: line.partition(">=")[2] for line in metadata["Requires-Dist"]}
    assert requires["typer"] == "0.12.4", "with 0.12.3 no command starts: it does not know `Path | None`"


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize(
    ("driver", "torch_cuda", "index", "extra"),
    [
        (None, "13.0", "", ""),
        ("12", "12.6", "", ",cuda12"),
        ("13", "12.6", "", ",cuda12"),  # a driver runs what is built for an older CUDA
        ("13", "13.0", "", ",cuda13"),
        ("13", None, "", ",cuda13"),
        ("13", None, "https://wheels/cu126", ",cuda12"),
        ("13", "None", "", ""),  # built without CUDA
    ],
)
def test_the_cuda_extra_is_that_of_torch(tmp_path, driver, torch_cuda, index, extra):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\n{f'echo {torch_cuda}' if torch_cuda else 'exit 1'}\n")
    python.chmod(0o755)
    command = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path}", f"CUDA_MAJOR={driver or ''}", f"TORCH_INDEX={index}"]
    done = subprocess.run([*command, f"{tmp_path}/.ready-dev"], capture_output=True, text=True, check=True)
    assert f'-e ".[dev{extra}]"' in done.stdout


def test_cupy_comes_with_its_compiler(metadata):
    """A driver has neither NVRTC nor headers."""
    for major in ("12", "13"):
        (cupy,) = [r for r in metadata["Requires-Dist"] if r.startswith(f"cupy-cuda{major}x") and f"cuda{major}" in r]
        assert "[ctk]" in cupy


@needs_checkout
@pytest.mark.parametrize(
    "path", ["docs/_build/x", "docs/jupyter_execute/x", ".venv/x", ".venv-release/x", "env/x", "demo/x"]
)
def test_what_our_commands_leave_is_no_change_of_the_tree(path):
    assert subprocess.run(["git", "-C", str(ROOT), "check-ignore", "-q", path]).returncode == 0
