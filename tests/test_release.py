"""What a release says of itself: one version, links that work on an index, its metadata; and what workflows and make do."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")
needs_checkout = pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="no git checkout")


@pytest.fixture
def release(monkeypatch):
    """A function that imports a script of release/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    return importlib.import_module


@pytest.fixture
def for_an_index(monkeypatch):
    """The function of setup.py that leads the links of a README away from the repository."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.syspath_prepend(str(ROOT))
    yield importlib.import_module("setup").readme_for_an_index
    del sys.modules["setup"]


def test_links_lead_to_the_version(for_an_index):
    text = "![A picture](bench/a.png)\n\n[this](docs/a.md#b), [that](https://example.org/x), [below](#limits)"
    site = "https://example.org/o/r"
    assert for_an_index(text, site, "v1.2.3") == (
        f"![A picture]({site}/raw/v1.2.3/bench/a.png)\n\n"
        f"[this]({site}/blob/v1.2.3/docs/a.md#b), [that](https://example.org/x), [below](#limits)"
    )
    without = for_an_index(text, "", "v1.2.3")
    assert without.strip() == "this, [that](https://example.org/x), [below](#limits)"


@pytest.mark.parametrize("repository", ["", "https://example.org/o/r"])
def test_no_link_of_the_readme_is_left(for_an_index, release, repository):
    relative = release("check").RELATIVE
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(relative.findall(text)) > 10
    assert not relative.findall(for_an_index(text, repository, "v1.2.3"))


# --- versions -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, release):
    """The files that state the version, as they are."""
    for name in release("set_version").FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 0.1.0, unreleased\n\n- One.\n")
    return tmp_path


def stated(release, tree: Path) -> list[str]:
    """What each file states, and the first heading's date."""
    found = [re.search(p, (tree / name).read_text(), re.MULTILINE) for name, p in release("check").VERSIONS.items()]
    return [*(match[1] for match in found), found[-1][2]]


def test_files_state_one_version(release):
    version, cited, changed, _ = stated(release, ROOT)
    assert version == cited
    assert changed == version.partition(".dev")[0]


def test_a_release_and_what_comes_after(release, tree):
    set_version = release("set_version").set_version
    set_version(tree, "0.1.0", "2030-01-02")
    assert stated(release, tree) == ["0.1.0", "0.1.0", "0.1.0", "2030-01-02"]
    assert "\ndate-released: 2030-01-02\n" in (tree / "CITATION.cff").read_text()
    with pytest.raises(ValueError, match="no changes are waiting"):
        set_version(tree, "0.1.1", "2030-01-03")
    set_version(tree, "0.2.0.dev0", "2030-01-04")
    assert stated(release, tree) == ["0.2.0.dev0", "0.2.0.dev0", "0.2.0", "unreleased"]
    assert "date-released" not in (tree / "CITATION.cff").read_text()
    assert "## 0.1.0, 2030-01-02\n\n- One.\n" in (tree / "CHANGELOG.md").read_text()
    set_version(tree, "0.2.0rc1", "2030-01-05")
    assert stated(release, tree) == ["0.2.0rc1", "0.2.0rc1", "0.2.0rc1", "2030-01-05"]
    for number in range(2):
        set_version(tree, f"0.3.0.dev{number}", "2030-01-06")
    assert (tree / "CHANGELOG.md").read_text().count("unreleased") == 1


@pytest.mark.parametrize("version", ["", "1", "v1.2.3", "1.2.3.post1", "1.2.3\n"])
def test_what_is_no_version(release, tree, version):
    with pytest.raises(ValueError, match=re.escape("a version is 1.2.3, 1.2.3rc1 or 1.2.3.dev0")):
        release("set_version").set_version(tree, version, "2030-01-02")
    assert stated(release, tree) == stated(release, ROOT)


# --- metadata -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """The metadata of a built distribution, by name."""
    pytest.importorskip("setuptools", minversion="77")  # the first that knows licences by their expression
    folder = tmp_path_factory.mktemp("metadata")
    code = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
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


def test_metadata(metadata):
    assert (metadata["License-Expression"], metadata["License-File"]) == (["Apache-2.0"], ["LICENSE"])
    assert metadata["Author"] == ["speedtransfer developers"]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for part in ("Version 2.0, January 2004", "END OF TERMS AND CONDITIONS"):
        assert part in text
    language = "Programming Language :: Python :: "
    pythons = [c.removeprefix(language) for c in metadata["Classifier"] if c.startswith(f"{language}3.")]
    assert metadata["Requires-Python"] == [f">={pythons[0]}"]
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text())
    assert [f'"{version}"' for version in pythons] == matrix.split(", ")
    requires = metadata["Requires-Dist"]
    assert "typer>=0.12.4" in requires, "with 0.12.3 no command starts: it does not know `Path | None`"
    for major in ("12", "13"):  # a driver has neither NVRTC nor headers
        (cupy,) = [line for line in requires if line.startswith(f"cupy-cuda{major}x") and f"cuda{major}" in line]
        assert "[ctk]" in cupy


# --- workflows and make -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_jobs_may_do_little(path):
    text = path.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    used = re.findall(r"^ *(?:- )?uses: (.*)$", text, re.MULTILINE)
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    assert workflow["permissions"] == {}
    allowed = [job["permissions"] for job in workflow["jobs"].values()]
    assert all(allow in ({"contents": "read"}, {"id-token": "write"}) for allow in allowed), allowed
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets


def make(*arguments, check=True, **given):
    """Run make as from a shell: `make test` tells its children how it was called."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    argv = ["make", "--no-print-directory", *arguments]
    return subprocess.run(argv, cwd=ROOT, env={**env, **given}, capture_output=True, text=True, check=check)


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@needs_make
@pytest.mark.parametrize(
    ("driver", "torch_cuda", "index", "extra"),
    [
        (None, "13.0", "", ""),
        ("11", None, "", ""),
        ("12", "12.6", "", ",cuda12"),
        ("13", "12.6", "", ",cuda12"),  # a driver runs what is built for an older CUDA
        ("12", None, "", ",cuda13"),  # without a build that this driver can run, which is said
        ("13", None, "", ",cuda13"),
        ("13", None, "https://wheels/cu126", ",cuda12"),
        ("12", None, "https://wheels/cu126", ",cuda12"),
        ("13", "None", "", ""),  # built without CUDA
    ],
)
def test_the_cuda_extra_is_that_of_torch(tmp_path, driver, torch_cuda, index, extra):
    program(tmp_path / "bin" / "python", f"echo {torch_cuda}" if torch_cuda else "exit 1")
    program(tmp_path / "path" / "nvidia-smi", f"echo '| CUDA Version: {driver}.0 |'" if driver else "exit 1")
    given = [f"VENV={tmp_path}", f"TORCH_INDEX={index}", f"{tmp_path}/.ready-dev"]
    done = make("-n", *given, PATH=f"{tmp_path / 'path'}{os.pathsep}{os.environ['PATH']}")
    assert f'-e ".[dev{extra}]"' in done.stdout
    assert (f"--extra-index-url {index}" in done.stdout) == bool(index)
    assert ("pass TORCH_INDEX=" in done.stderr) == (driver == "12" and extra == ",cuda13")


@needs_make
@pytest.mark.parametrize(("record", "readme", "error"), [(3, 0, 3), (0, 4, 4), (0, 0, 0)])
def test_make_writes_the_readme_also_after_a_failure(tmp_path, record, readme, error):
    python = program(
        tmp_path / "bin" / "python", f'echo "$@"; [ "$1" = bench/record.py ] && exit {record} || exit {readme}'
    )
    done = make("-s", "bench", f"PY={python}", "ARGS=--only step --quick", check=False)
    assert done.stdout.splitlines() == ["bench/record.py here --only step --quick", "bench/readme.py"]
    assert done.returncode == (2 if error else 0)
    assert (f"Error {error}" in done.stderr) == bool(error)


@needs_checkout
def test_what_our_commands_leave_is_no_change_of_the_tree():
    left = ["docs/_build/x", "docs/jupyter_execute/x", ".venv/x", ".venv-release/x", "env/x", "demo/x"]
    done = subprocess.run(["git", "-C", str(ROOT), "check-ignore", *left], capture_output=True, text=True, check=False)
    assert done.stdout.split() == left
