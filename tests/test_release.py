"""What a release says of itself: one version, links that work on an index, metadata, types; and what workflows and make do."""

import email
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import setuptools
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def release(monkeypatch):
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
    for name in release("set_version").FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 0.1.0, unreleased\n\n- One.\n")
    return tmp_path


def stated(release, tree):
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


# --- what is built ------------------------------------------------------------------------------------------------------

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def build(kind, folder):
    """Return the wheel that `kind` of PEP 517 or 660 makes of a copy of the checkout."""
    pytest.importorskip("setuptools", minversion="77")  # the first that knows licences by their expression
    tree = folder / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "speedtransfer", tree / "speedtransfer", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, kind, str(folder)], cwd=tree, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_metadata(tmp_path):
    with zipfile.ZipFile(build("build_editable", tmp_path)) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert metadata["Author"] == "speedtransfer developers"
    language = "Programming Language :: Python :: "
    pythons = [c.removeprefix(language) for c in metadata.get_all("Classifier") if c.startswith(f"{language}3.")]
    assert metadata["Requires-Python"] == f">={pythons[0]}"
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text())
    assert [f'"{version}"' for version in pythons] == matrix.split(", ")
    requires = metadata.get_all("Requires-Dist")
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
        ("13", "12.6", "", ",cuda12"),  # a driver runs what is built for an older CUDA
        ("12", None, "", ",cuda13"),  # without a build that this driver can run, which is said
        ("13", None, "https://wheels/cu126", ",cuda12"),
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


# --- types --------------------------------------------------------------------------------------------------------------

# A script of a user. An "ignore" that is not needed is reported: a bad value that mypy does not see.
SCRIPT = """
import torch
from typing_extensions import assert_type

import speedtransfer as st
from speedtransfer import word2vec

vocabulary = st.Vocabulary(evict="lru")
emb = st.Embedding(1000, 16, memory="pageable", idle="exact", layout="rows", cache_rows="auto")
bag = st.EmbeddingBag(1000, 16, mode="sum", vocabulary=vocabulary)
model = torch.nn.Sequential(emb, torch.nn.Linear(16, 2))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, 1000, (4, 8))
model(ids).sum().backward()
opt.step()
assert_type(emb.table, st.Table)
assert_type(emb.table.stats(), st.TableStats)
assert_type(emb.table.gather(ids), torch.Tensor)
assert_type(emb.weight, torch.Tensor)
assert_type(emb.activate(ids), st.ActiveRows)
assert_type(st.Embedding.from_pretrained(torch.zeros(3, 4)), st.Embedding)
assert_type(vocabulary.stats(), st.VocabularyStats)
assert_type(st.NgramHash(rows=100).num_rows, int)
for batch in st.prefetch([{"ids": ids}], lambda batch: {emb: batch["ids"]}, depth=2):
    assert_type(batch, dict[str, torch.Tensor])
best = st.plan(model, opt, batch=100, idle="lazy").best
if best is not None:
    assert_type(best.memory, str)
vectors = word2vec.train("corpus.txt", dim=32, model="cbow")
assert_type(vectors, st.word2vec.Vectors)
assert_type(vectors.most_similar("river"), list[tuple[str, float]])
try:
    st.Table.load("rows.npy", writable="shared")
except st.errors.StorageError as error:
    print(error, st.__version__)

st.Embedding(10, 4, memory="pagable")  # type: ignore[arg-type]
st.Embedding(10, 4, idle="eager")  # type: ignore[arg-type]
st.Embedding(10, 4, layout="records")  # type: ignore[arg-type]
st.Embedding(10, 4, cache_rows="all")  # type: ignore[arg-type]
st.Embedding(10, 4, memmory="pageable")  # type: ignore[call-arg]
st.Table(10, 4, memory="shared")  # type: ignore[arg-type]
word2vec.train("corpus.txt", dim="3")  # type: ignore[arg-type]
st.Vocabulary(evict="fifo", unseen="none")  # type: ignore[arg-type]
st.NgramHash(rows=100, scheme="md5")  # type: ignore[arg-type]
st.plan((10, 4), idle="none")  # type: ignore[arg-type]
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What mypy has found out of torch."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
def test_mypy_knows_the_public_names(kind, tmp_path, cache):
    """In an environment that has the package, and torch, NumPy and others of this one."""
    made = tmp_path / "environment"
    venv.create(made, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    with zipfile.ZipFile(build(kind, tmp_path)) as wheel:
        wheel.extractall(packages)
    # A .pth file of that folder, such as that of this checkout, is not read there.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    options = ["--strict", "--python-executable", str(made / "bin" / "python"), "--cache-dir", str(cache)]
    (tmp_path / "script.py").write_text(SCRIPT)
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [sys.executable, "-m", "mypy", *options, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
