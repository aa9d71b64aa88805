"""Table files: what other programs write and we read, what we write and they read, rubbish; damage: test_forged_files.py."""

import functools
import itertools
import json
import os
import warnings

import numpy as np
import pytest
import torch
from cases import NPY_DTYPES, TABLE_DTYPES, assert_same_bits, dtype_name, numbers, one_line, refused
from refusals import check_refused, refusals
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import speedtransfer as st
from speedtransfer.errors import StorageError
from speedtransfer.tables import shared_caches

MEMORIES = ["pageable", "mmap"]


def safetensors_bytes(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def npy_bytes(header, data=b"", version=b"\x01\x00"):
    text = header.encode()
    size = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + text + data


def load(path, memory="pageable", **kwargs):
    return st.Table.load(path, memory, "cpu", **kwargs)


# --- other programs ---------------------------------------------------------------------------------------------------


SHAPES = pytest.mark.parametrize("shape", [(13, 3), (0, 3), (4, 0), (1, 1)], ids=str)


@pytest.mark.sweep
@SHAPES
@pytest.mark.parametrize("dtype", NPY_DTYPES, ids=dtype_name)
def test_numpy_and_we_read_what_the_other_writes(tmp_path, dtype, shape):
    values = numbers(shape, dtype)
    for version in ((1, 0), (2, 0), (3, 0)):
        with open(tmp_path / "a.npy", "wb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns that old versions of it cannot read 2.0 and 3.0
            np.lib.format.write_array(file, values.numpy(), version=version)
        for memory in MEMORIES:
            assert_same_bits(load(tmp_path / "a.npy", memory).torch(), values)
    st.Table.from_array(values, "pageable", device="cpu").save(tmp_path / "b.npy")
    loaded = np.load(tmp_path / "b.npy", allow_pickle=False)
    assert loaded.dtype == values.numpy().dtype
    assert_same_bits(loaded, values.numpy())
    assert np.load(tmp_path / "b.npy", mmap_mode="r").shape == shape


@pytest.mark.sweep
@SHAPES
@pytest.mark.parametrize("dtype", TABLE_DTYPES, ids=dtype_name)
def test_safetensors_and_we_read_what_the_other_writes(tmp_path, dtype, shape):
    values = numbers(shape, dtype)
    save_file({"embedding": values}, tmp_path / "a.safetensors", metadata={"format": "pt", "made by": "another"})
    for memory in MEMORIES:
        assert_same_bits(load(tmp_path / "a.safetensors", memory).torch(), values)
    st.Table.from_array(values, "pageable", device="cpu").save(tmp_path / "b.safetensors")
    loaded = load_file(tmp_path / "b.safetensors")
    assert list(loaded) == ["weight"]
    # Rows begin on a cache line.
    assert (8 + int.from_bytes((tmp_path / "b.safetensors").read_bytes()[:8], "little")) % 64 == 0
    assert_same_bits(loaded["weight"], values)
    with safe_open(tmp_path / "b.safetensors", "np") as file:
        assert file.get_slice("weight").get_shape() == list(shape)


# --- files with several tensors ---------------------------------------------------------------------------------------


@pytest.fixture
def several(tmp_path):
    tensors = {"users": numbers((7, 3), torch.float32), "items": numbers((5, 2), torch.bfloat16)}
    tensors |= {"bias": torch.zeros(4), "mask": torch.zeros(2, 2, dtype=torch.bool)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


def test_a_table_inside_a_file_leaves_the_others(several):
    path, tensors = several
    table = load(path, "mmap", key="items", writable=True)
    table.scatter([1], torch.zeros(1, 2, dtype=torch.bfloat16))
    table.flush()
    tensors["items"][1] = 0
    torch.testing.assert_close(load_file(path), tensors, rtol=0, atol=0)


BAD_KEYS = r"""
load(path) -> InvalidValueError: has no tensor 'weight'; choose from 'bias', .*\(argument key\)
load(path, key="user") -> InvalidValueError: has no tensor 'user'; did you mean 'users'\? \(argument key\)
load(path, key="users", writable="Shared") -> InvalidValueError: writable is 'Shared' but must be False, True or 'shared'; pass
load(path, key="users", writable=None) -> InvalidTypeError: writable is None but must be False, True or 'shared'; pass one
load(path, "device", key="users", writable=True) -> InvalidValueError: but memory=.* has a copy of the rows
load(path, "mmap", key="users", writable=True, max_rows=3) -> InvalidValueError: max_rows is 3 but the table has 7 rows; pass
load(path, key="bias") -> InvalidValueError: holds an array of shape \(4,\) but a table is 2-D;
load(path, key="mask") -> InvalidTypeError: tensor 'mask' of .* is BOOL but a table holds floats or integers; convert
"""


def test_wrong_keys_and_writable_of_another_kind(several):
    for refusal in refusals(BAD_KEYS):
        check_refused(refusal, load=load, path=several[0])


# --- rubbish ----------------------------------------------------------------------------------------------------------

DATA = bytes(16)
NPY = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }"


def entry(**changes):
    about = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}
    return safetensors_bytes({"weight": about}, DATA)


# Bytes, and part of the message.
RUBBISH_NPY = [
    (b"", "is no valid .npy file"),
    (b"\x93NUMPY\x01\x00", "is no valid .npy file"),
    (npy_bytes(NPY, DATA[:-1]), "is truncated: 84 bytes, but .* promises 85"),
    (npy_bytes(NPY, DATA, b"\x09\x00"), "format version 9.0"),
    (npy_bytes(NPY.replace("(2, 2)", f"({2**99}, 0)"), DATA), "which no array has"),
    (npy_bytes("{'descr': '<f4', 'fortran_order': False}", DATA), "is no valid .npy"),
    (npy_bytes("(" * 9000, DATA), "is no valid .npy"),
]
RUBBISH = [
    ((2**63).to_bytes(8, "little") + bytes(40), "or is truncated"),
    (bytes(8), "is no valid .safetensors"),
    (safetensors_bytes(b"{weight}"), "is no valid .safetensors"),
    (safetensors_bytes(b"[" * 100_000), "is no valid .safetensors"),
    (safetensors_bytes([1]), "is no JSON object"),
    (safetensors_bytes({}), "has no tensor 'weight'"),
    (safetensors_bytes({"weight": None}), "is no valid .safetensors"),
    (entry(data_offsets=[0, 12]), "does not match its bytes"),
    (entry(data_offsets=[-16, 0]), "does not match its bytes"),
    (entry(data_offsets=[16, 32]), "is truncated"),
    (entry(shape=[-2, -2]), "does not match its bytes"),
    (entry(shape=[2.0, 2.0]), "does not match its bytes"),
    (entry(dtype=["F32"]), "is no valid .safetensors"),
    (entry(shape=[2**70, 0], data_offsets=[0, 0]), "a shape that no tensor has"),
    (entry(shape=[1] * 63 + [2, 2]), "a shape that no tensor has"),
]


@pytest.mark.parametrize(("suffix", "rubbish"), [(".npy", RUBBISH_NPY), (".safetensors", RUBBISH)], ids=str)
def test_rubbish(tmp_path, suffix, rubbish):
    path = tmp_path / f"rubbish{suffix}"
    for (content, message), memory in itertools.product(rubbish, MEMORIES):
        path.write_bytes(content)
        with refused(ValueError if message == "has no tensor 'weight'" else OSError, message) as error:
            load(path, memory)
        assert repr(str(path)) in str(error.value)
        assert path.read_bytes() == content


# --- files that others use: caches of downloads, hard links ------------------------------------------------------------

VARIABLES = [name for name in shared_caches._FOLDERS if name]


@pytest.fixture
def no_caches(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def saved(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.arange(12.0).view(4, 3)}, path)
    return path


def assert_refused(path, message):
    before = path.read_bytes(), path.stat().st_mtime_ns
    for way in (functools.partial(st.Table.load, memory="mmap"), st.Table.open):
        with pytest.raises(StorageError, match=message) as error:
            way(path, writable=True, device="cpu")
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
HOME = (".cache/huggingface/hub", ".cache/torch", ".cache/modelscope", ".cache/anything", "Library/Caches/x")
FOLDERS += [(None, f"home/{folder}/", CACHE) for folder in HOME]
FOLDERS += [
    (None, f"elsewhere/{kind}--some--name/{inside}/", rf"elsewhere/{kind}--some--name/{inside.split('/')[0]}'\)")
    for kind in ("models", "datasets", "spaces")
    for inside in ("snapshots/1234", "blobs")
]


def test_folders_of_caches(tmp_path, monkeypatch, no_caches):
    for number, (variable, folder, message) in enumerate(FOLDERS):
        with monkeypatch.context() as patch:
            if variable is not None:
                patch.setenv(variable, str(tmp_path / f"{number}place"))
            assert_refused(saved(tmp_path / f"{number if variable else ''}{folder}{number}.safetensors"), message)


def test_links_are_followed(tmp_path, monkeypatch, no_caches):
    """A snapshot of the hub is a folder of links to blobs without a suffix, and people link to those."""
    blobs, link = tmp_path / "models--a--b" / "blobs", tmp_path / "mine.safetensors"
    link.symlink_to(saved(blobs / "a.safetensors").rename(blobs / "12ab"))
    assert_refused(link, "blobs'")
    folder = tmp_path / "linked"
    folder.symlink_to(tmp_path / "cache", target_is_directory=True)
    monkeypatch.setenv("HF_HOME", str(folder))
    assert_refused(saved(tmp_path / "cache" / "b.safetensors"), "cache of files")


def test_hard_links(tmp_path, no_caches):
    path = saved(tmp_path / "a.safetensors")
    os.link(path, tmp_path / "b.safetensors")
    assert_refused(path, "is one of 2 names of a file")


def test_other_files_are_opened(tmp_path, no_caches):
    for inside in (".", "models--a--b", "snapshots", "home/cache"):
        path = saved(tmp_path / inside / "a.safetensors")
        table = st.Table.load(path, "mmap", "cpu", writable=True)
        assert table.writable
        table.fill_(2)
        table.add_plane("m")
        assert st.Table.load(path, "pageable", "cpu").torch().eq(2).all()
        assert not st.Table.load(path, "mmap", "cpu").writable
