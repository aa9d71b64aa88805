"""Checkpoints in object stores, by URL: what a folder of a disk promises."""

import os
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from checkpoint_cases import Run, trained
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from in_child import kill_at_line, run_child
from optimizer_cases import case_named
from refusals import check_refused, refusals

import speedtransfer as st
from speedtransfer.errors import StorageError


@pytest.fixture(params=["memory", "local"])
def url(request, tmp_path):
    # To fsspec a local path is a store as any other.
    yield f"memory://bucket{tmp_path}/run" if request.param == "memory" else f"local://{tmp_path}/run"
    MemoryFileSystem.store.clear()


def objects(url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {Path(name).name: fs.cat_file(name) for name in fs.ls(root, detail=False)} if fs.exists(root) else {}


def test_a_run_goes_on_from_a_store(url):
    run = trained(2)
    run.save(url, extra="old")
    first = objects(url)
    run.epochs(1)
    run.save(url, extra="new")
    second = objects(url)
    assert len(first) == len(second) == 4
    assert set(first) & set(second) == {"manifest.json"}
    run.epochs(1)
    other = Run(case_named("adamw"), seed=1)
    assert other.load(url) == "new"
    other.epochs(1)
    assert other.digest() == run.digest()


def test_what_is_in_a_store_is_what_a_disk_has(url, tmp_path):
    emb = st.Embedding(50, 4, storage_dtype=torch.int8)
    st.save_checkpoint(url, emb)
    for name, data in objects(url).items():
        (tmp_path / name).write_bytes(data)
    for place in (tmp_path, tmp_path.as_uri()):
        copy = st.Embedding(50, 4, storage_dtype=torch.int8)
        st.load_checkpoint(place, copy)
        assert torch.equal(copy.weight.detach() + 0, emb.weight.detach() + 0)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
@pytest.mark.parametrize("role", ["model", "manifest"])
def test_damage_is_refused_before_anything_changes(url, role, damage):
    trained(1).save(url)
    other = Run(case_named("adamw"), seed=1)
    before = other.digest()
    fs, root = fsspec.core.url_to_fs(url)
    name = next(f"{root}/{name}" for name in objects(url) if name.startswith(role))
    raw = bytearray(fs.cat_file(name))
    raw[-5] ^= 1
    if damage == "remove":
        fs.rm_file(name)
    else:
        fs.pipe_file(name, bytes(raw[:-1] if damage == "cut" else raw))
    with pytest.raises(StorageError):
        other.load(url)
    assert other.digest() == before


class Failing(LocalFileSystem):
    """A store that fails at a number of a call, with an error of its own."""

    protocol = "failing"
    left = 10**9

    def _open(self, path, mode="rb", **options):
        file = super()._open(path, mode=mode, **options)
        write = file.write

        def failing(data):
            Failing.left -= 1
            if Failing.left < 0:
                raise ConnectionError("the link is down")
            return write(data)

        file.write = failing
        return file


def test_a_save_that_fails_leaves_the_checkpoint_before(tmp_path):
    fsspec.register_implementation("failing", Failing, clobber=True)
    url, run = f"failing://{tmp_path}/run", trained(1)
    for left in (0, 3, 20):
        Failing.left = left
        with pytest.raises(StorageError, match=r"cannot write to .*the link is down"):
            run.save(url)
        assert not os.listdir(tmp_path / "run")
    Failing.left = 10**9
    run.save(url, extra=1)
    before = objects(url)
    Failing.left = 20
    with pytest.raises(StorageError):
        run.save(url, extra=2)
    assert objects(url) == before
    assert run.load(url) == 1


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_a_line(step, tmp_path):
    """What the saves before have left stays; at every line the store is that of before, or each save would list more."""
    url, run = f"local://{tmp_path}/run", trained(1)
    run.save(url, extra=0)
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    numbers, line = set(), 1
    while True:
        if step == 1:
            shutil.rmtree(tmp_path / "run")
            shutil.copytree(tmp_path / "before", tmp_path / "run")
        ended = run_child(lambda line=line: (kill_at_line(line, ("checkpoint/store.py",)), run.save(url, extra=line)))
        numbers.add(Run(case_named("adamw"), seed=1).load(url))
        if ended:
            break
        line += step
    assert line > 60
    assert 0 in numbers
    assert line in numbers


BAD = """
st.save_checkpoint("nosuch://bucket/run", emb) -> InvalidValueError: Protocol not known
st.load_checkpoint("nosuch://bucket/run", emb) -> InvalidValueError: Protocol not known
st.save_checkpoint(Path("s3://bucket/run"), emb) -> InvalidTypeError: pass it as a string
st.load_checkpoint(Path("s3://bucket/run"), emb) -> InvalidTypeError: pass it as a string
st.save_checkpoint(local + "other", emb) -> InvalidValueError: holds 'notes.txt' and no checkpoint
st.save_checkpoint(local + "other/notes.txt", emb) -> InvalidValueError: is no folder
st.load_checkpoint(local + "none", emb) -> StorageError: holds no manifest.json, so no finished checkpoint
"""


def test_bad_places(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for refusal in refusals(BAD):
        check_refused(refusal, st=st, emb=st.Embedding(4, 2), Path=Path, local=f"local://{tmp_path}/")
