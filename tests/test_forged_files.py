"""Files of strangers: damage, pipes, pickles, sizes; refused, and nothing else is done. Tables: test_tables_files.py."""

import gzip
import json
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint_fuzz import damaged, resign

import speedtransfer as st
from speedtransfer.engines import calibration
from speedtransfer.errors import SpeedtransferError, StorageError
from speedtransfer.speedtorch import storage as speedtorch_files
from speedtransfer.word2vec import Settings, Vectors, Vocabulary
from speedtransfer.word2vec.checkpoints import Checkpoints
from speedtransfer.word2vec.commands import read_config
from speedtransfer.word2vec.evaluation import load_set

# --- files elsewhere, pipes and pickles ---------------------------------------------------------------------------------


def test_a_manifest_that_names_files_elsewhere(tmp_path):
    """Neither read nor removed."""
    victims = tmp_path / "victim.txt", tmp_path / "other" / "v"
    victims[1].parent.mkdir()
    for victim in victims:
        victim.write_text("mine")
    folder, model = tmp_path / "c", torch.nn.Linear(2, 2)
    extra = {"word2vec": {"settings": {}, "corpus": {}, "training": {}}}
    st.save_checkpoint(folder, model, torch.optim.SGD(model.parameters()), extra=extra)
    checkpoints = Checkpoints(folder, Settings(), overwrite=True)

    def change(content):
        content["files"]["model"]["name"] = "../victim.txt"
        content["files"]["objects"]["name"] = str(victims[1])

    resign(folder, change)
    with pytest.raises(StorageError, match="is no name of a model file"):
        st.load_checkpoint(folder, model)
    checkpoints.remove()
    assert all(victim.exists() for victim in victims)
    assert not (folder / "manifest.json").exists()


READERS = {
    "x.safetensors": st.Table.open,
    "x.npy": st.Table.load,
    "y.safetensors": lambda path: st.Table.load(path, memory="mmap", writable=True),
    "model.safetensors.index.json": lambda path: st.Table.open(path, key="x"),
    "v.txt": Vectors.load,
    "v.txt.gz": Vectors.load,
    "v.bin": Vectors.load,
    "z.safetensors": Vectors.load,
    "vocab.txt": Vocabulary.load,
    "pairs.txt": load_set,
    "c.toml": read_config,
    "c.json": read_config,
    "array.npy": speedtorch_files.read_npy,
    "machine.yaml": lambda path: st.plan((2, 2), machine=path),
    "tensor.pt": speedtorch_files.read_torch,
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_not_waited_for_and_not_replaced(tmp_path):
    for name, read in READERS.items():
        os.mkfifo(tmp_path / name)
        with pytest.raises(StorageError, match=r"^'[^']*' is a pipe, not a file; copy"):
            read(str(tmp_path / name))
    with pytest.raises(StorageError, match="is a pipe, not a file; choose another path"):
        st.Table(2, 2, memory="pageable").save(tmp_path / "x.safetensors")


def test_an_index_of_files_elsewhere(tmp_path):
    secret, folder = tmp_path / "private.safetensors", tmp_path / "downloaded"
    folder.mkdir()
    save_file({"x": torch.ones(4, 4)}, secret)
    for name in ("../private.safetensors", str(secret), "..", ""):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(StorageError, match="which is not a file in its folder"):
            st.Table.open(folder, key="x")
    # As caches of downloads have them.
    os.symlink(secret, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model.safetensors"}}')
    assert float(st.Table.open(folder, key="x").gather([0])[0, 0]) == 1


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_in_a_folder_is_not_opened(tmp_path):
    marker, folder = tmp_path / "ran", tmp_path / "run"
    folder.mkdir()
    (folder / "vectors.kv").write_bytes(pickle.dumps(Runs(marker)))
    with pytest.raises(
        StorageError, match=r"pass the file itself, which for \.kv, a pickle that can run any code, must"
    ):
        Vectors.load(folder)
    Vectors(["a"], np.ones((1, 2), np.float32)).save(folder / "vectors.glove")
    assert Vectors.load(folder).words == ["a"]
    assert not marker.exists()


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "head"), [("v.txt.gz", b"1 1\na "), ("v.glove.gz", b"a "), ("v.vec.gz", b"1 9\nb ")])
def test_a_line_without_an_end(name, head, tmp_path):
    with gzip.open(tmp_path / name, "wb") as file:
        file.write(head)
        for _ in range(20):
            file.write(b"0" * (1 << 20))
    with pytest.raises(StorageError, match=r"has a line of over \d+ bytes"):
        Vectors.load(tmp_path / name)


def test_json_of_brackets(tmp_path, monkeypatch):
    monkeypatch.setattr("speedtransfer.untrusted.MAX_JSON_VALUES", 1000)
    body = b'{"a":[' + b"[]," * 600 + b"[]]}"
    (tmp_path / "x.safetensors").write_bytes(len(body).to_bytes(8, "little") + body + b"\0" * 8)
    with pytest.raises(StorageError, match="over 1000 values"):
        st.Table.open(tmp_path / "x.safetensors")
    (tmp_path / "m.safetensors.index.json").write_bytes(b"[" * 100_000)
    with pytest.raises(StorageError, match=r"nested too deep|over 1000 values"):
        st.Table.open(tmp_path / "m.safetensors.index.json", key="x")


# --- damage -----------------------------------------------------------------------------------------------------------

GOOD = {"direction": "gather", "row_bytes": 64, "num_rows": 10, "seconds": {"host": 1.0}, "plane_bytes": 1 << 28}


@pytest.mark.parametrize("change", [{"num_rows": 10**400}, {"seconds": {"\x1b[31m": 1.0}}, {"direction": []}], ids=str)
def test_a_damaged_calibration_is_left_out(change, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path))
    machine = calibration.machine_of(torch.device("cpu"))
    data = {"machine": machine, "copy_bytes_per_s": 1.0, "points": [GOOD]}
    calibration.file_of(machine).write_text(json.dumps(data))
    assert calibration.load(torch.device("cpu")) is not None
    calibration.file_of(machine).write_text(json.dumps({**data, "points": [{**GOOD, **change}]}))
    assert calibration.load(torch.device("cpu")) is None
    (record,) = caplog.records
    assert "is left out" in record.getMessage()


def written(folder):
    """A file of each format that rows or vectors are read from."""
    vectors = Vectors(["a", "b\u00e9", "c"], np.arange(12, dtype=np.float32).reshape(3, 4), np.array([3, 2, 1]))
    for suffix in (".txt", ".bin", ".glove", ".safetensors"):
        vectors.save(folder / f"v{suffix}")
    for suffix in (".npy", ".safetensors"):
        st.Table.from_array(torch.arange(12.0).view(3, 4), memory="pageable").save(folder / f"t{suffix}")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("count", "seed"), [(150, 1), pytest.param(20_000, 100, marks=pytest.mark.slow)])
def test_damaged_files_of_rows_and_vectors(count, seed, tmp_path):
    good, rng = written(tmp_path), random.Random(seed)
    for _ in range(count):
        name = rng.choice(sorted(good))
        data = damaged(rng, good[name])
        (tmp_path / name).write_bytes(data)
        try:
            for memory in ("pageable", "mmap") if name.startswith("t") else ():
                table = st.Table.load(tmp_path / name, memory=memory, device="cpu")
                table.gather(list(range(min(len(table), 5))))
            if name.startswith("v"):
                vectors = Vectors.load(tmp_path / name)
                with np.errstate(all="ignore"):
                    vectors.most_similar(vectors.words[0], 2)
        except SpeedtransferError as error:
            assert "".join(str(error).split("\n")).isprintable(), data  # noqa: PT017
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} of {name}: {data!r}") from error
