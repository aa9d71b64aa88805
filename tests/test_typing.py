"""What type checkers see of an installed package: a script of a user, checked from outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Both report an "ignore" that is not needed: a bad value that they do not see.
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
word2vec.train("corpus.txt", windw=3)  # type: ignore[call-arg]
word2vec.train("corpus.txt", window="3")  # type: ignore[arg-type]
word2vec.Corpus("corpus.txt", kind="grahp")  # type: ignore[arg-type]
st.Vocabulary(evict="fifo", unseen="none")  # type: ignore[arg-type]
st.NgramHash(rows=100, scheme="md5")  # type: ignore[arg-type]
st.plan((10, 4), idle="none")  # type: ignore[arg-type]
word2vec.train("corpus.txt", model="glove")  # type: ignore[arg-type]
"""
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def build(kind: str, folder: Path) -> Path:
    """Return the wheel that `kind` of PEP 517 or 660 makes of a copy of the checkout."""
    pytest.importorskip("setuptools", minversion="70.1")  # older ones need the package wheel beside them
    tree = folder / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "speedtransfer", tree / "speedtransfer", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, kind, str(folder)], cwd=tree, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_an_editable_install_needs_no_import_hook(tmp_path):
    """Type checkers read the .pth file and run no code."""
    with zipfile.ZipFile(build("build_editable", tmp_path)) as wheel:
        (pth,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert Path(wheel.read(pth).decode().strip()) == tmp_path / "tree"
        assert not [name for name in wheel.namelist() if name.endswith("_finder.py")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[Path]:
    """What mypy has found out of torch."""
    return tmp_path_factory.mktemp("mypy")


def installed(kind: str, folder: Path) -> Path:
    """Return the interpreter of an environment in `folder` that has the package, and torch, NumPy and others of this one."""
    made = folder / "environment"
    venv.create(made, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    with zipfile.ZipFile(build(kind, folder)) as wheel:
        wheel.extractall(packages)
    # A .pth file of that folder, such as that of this checkout, is not read there.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return made / "bin" / "python"


def check(command: list[str], script: str, folder: Path) -> None:
    (folder / "script.py").write_text(script)
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run([*command, "script.py"], cwd=folder, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
def test_mypy_knows_the_public_names(kind, tmp_path, cache):
    python = installed(kind, tmp_path)
    options = ["--strict", "--python-executable", str(python), "--cache-dir", str(cache)]
    check([sys.executable, "-m", "mypy", *options], SCRIPT, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed: npm install -g pyright")
@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
def test_pyright_knows_the_public_names(kind, tmp_path):
    command = ["pyright", "--pythonpath", str(installed(kind, tmp_path))]
    check(command, f"# pyright: reportUnnecessaryTypeIgnoreComment=true\n{SCRIPT}", tmp_path)
