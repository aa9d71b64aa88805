"""A table that can write to a file refuses those that others use: caches of downloads, hard links."""

from __future__ import annotations

import os

import pytest
import torch
from cases import one_line, refused
from safetensors.torch import save_file

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.tables import shared_caches

VARIABLES = [name for name in shared_caches._FOLDERS if name]


@pytest.fixture(autouse=True)
def _no_caches(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def saved(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.arange(12.0).view(4, 3)}, path)
    return path


def assert_refused(path, message):
    before = path.read_bytes(), path.stat().st_mtime_ns
    for call in (
        lambda: st.Table.load(path, "mmap", "cpu", writable=True),
        lambda: st.Table.open(path, writable=True, device="cpu"),
    ):
        with pytest.raises(StorageError, match=message) as error:
            call()
        assert "pass writable='shared' to change it all the same" in one_line(error)
    reading = st.Table.load(path, "mmap", "cpu")
    assert reading[[1]].tolist() == [[3, 4, 5]]
    with pytest.raises(StorageError, match="read in place"):
        reading.fill_(1)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    writing = st.Table.load(path, "mmap", "cpu", writable="shared")
    writing[[0]] = torch.full((1, 3), 7.0)
    assert st.Table.load(path, "mmap", "cpu")[[0]].eq(7).all()


CACHE = "is in a cache of files that other programs use"
# Inside the folder that a variable names, of the user, and of a hub anywhere.
FOLDERS = [(name, f"place/{inside}", rf"{CACHE} \('.*place'\)") for name in VARIABLES for inside in ("", "one/two/")]
FOLDERS += [
    (None, f"home/{folder}/", CACHE)
    for folder in (".cache/huggingface/hub", ".cache/torch", ".cache/modelscope", ".cache/anything", "Library/Caches/x")
]
FOLDERS += [
    (None, f"elsewhere/{kind}--some--name/{inside}/", rf"elsewhere/{kind}--some--name/{inside.split('/')[0]}'\)")
    for kind in ("models", "datasets", "spaces")
    for inside in ("snapshots/1234", "blobs")
]


@pytest.mark.parametrize(("variable", "folder", "message"), FOLDERS)
def test_folders_of_caches(tmp_path, monkeypatch, variable, folder, message):
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path / "place"))
    assert_refused(saved(tmp_path / f"{folder}a.safetensors"), message)


def test_links_are_followed(tmp_path):
    """A snapshot of the hub is a folder of links to blobs without a suffix, and people link to those."""
    blob = saved(tmp_path / "models--a--b" / "blobs" / "a.safetensors").rename(
        tmp_path / "models--a--b" / "blobs" / "12ab"
    )
    link = tmp_path / "mine.safetensors"
    link.symlink_to(blob)
    assert_refused(link, "blobs'")
    folder = tmp_path / "linked"
    folder.symlink_to(tmp_path / "cache", target_is_directory=True)
    os.environ["HF_HOME"] = str(folder)
    try:
        assert_refused(saved(tmp_path / "cache" / "b.safetensors"), "cache of files")
    finally:
        del os.environ["HF_HOME"]


def test_hard_links(tmp_path):
    path = saved(tmp_path / "a.safetensors")
    os.link(path, tmp_path / "b.safetensors")
    assert_refused(path, "is one of 2 names of a file")


def test_other_files_are_opened(tmp_path):
    for inside in (
        "a.safetensors",
        "models--a--b/a.safetensors",
        "snapshots/a.safetensors",
        "home/cache/a.safetensors",
    ):
        path = saved(tmp_path / inside)
        table = st.Table.load(path, "mmap", "cpu", writable=True)
        assert table.writable
        table.fill_(2)
        table.add_plane("m")
        assert st.Table.load(path, "pageable", "cpu").torch().eq(2).all()
        assert not st.Table.load(path, "mmap", "cpu").writable


@pytest.mark.parametrize(
    ("writable", "error", "message"),
    [
        ("Shared", InvalidValueError, "writable is 'Shared' but must be False, True or 'shared'; pass one of them"),
        (None, InvalidTypeError, "writable is None but must be False, True or 'shared'; pass one of them"),
    ],
)
@pytest.mark.parametrize("memory", ["mmap", "pageable"])
def test_wrong_arguments(tmp_path, memory, writable, error, message):
    with refused(error, message):
        st.Table.load(saved(tmp_path / "a.safetensors"), memory, "cpu", writable=writable)


@pytest.mark.parametrize("memory", ["auto", "pageable", "device"])
def test_a_copy_is_not_writable(tmp_path, memory):
    with refused(InvalidValueError, r"but memory=.* has a copy of the rows"):
        st.Table.load(saved(tmp_path / "a.safetensors"), memory, "cpu", writable=True)
