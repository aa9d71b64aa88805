"""Files of strangers: plausible and wrong values with right checksums, damage, pipes; refused, and nothing else is done."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from safetensors.torch import save_file
from test_checkpoint_fuzz import data_file, replace_data, resign

import speedtransfer as st
from speedtransfer.engines import calibration
from speedtransfer.errors import InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.planning.machine import machine_given
from speedtransfer.safetensors_io import header_bytes
from speedtransfer.speedtorch import files as speedtorch_files
from speedtransfer.word2vec import Vectors, Vocabulary
from speedtransfer.word2vec.checkpoints import Checkpoints
from speedtransfer.word2vec.config import read_config
from speedtransfer.word2vec.evaluation import load_set

# --- checkpoints ------------------------------------------------------------------------------------------------------


class Saved:
    """A dense layer and a table with a fused Adam, saved with generators of NumPy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.ModuleDict({"dense": torch.nn.Linear(6, 5), "rows": st.Embedding(9, 4, idle="lazy")})
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        self.generators = {
            kind: np.random.Generator(getattr(np.random, kind)(3)) for kind in ("Philox", "MT19937", "PCG64")
        }
        loss = self.model["dense"](torch.ones(2, 6)).sum() + self.model["rows"](torch.tensor([1, 2])).sum()
        loss.backward()
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        st.save_checkpoint(folder, self.model, self.optimizer, **self.generators)

    def load(self, folder: Path) -> None:
        st.load_checkpoint(folder, self.model, self.optimizer, **self.generators)

    def values(self) -> list[Any]:
        states = [value.bit_generator.state for value in self.generators.values()]
        return [
            repr(self.model.state_dict()),
            repr(self.optimizer.state_dict()),
            repr(states),
            repr(np.random.get_state()),
        ]


def edit_tensor(folder: Path, role: str, name: str, new: torch.Tensor) -> None:
    """Give one tensor of a data file other values and another shape, with all that follows from it."""
    raw = data_file(folder, role).read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header, end, values = json.loads(raw[8:begin]), 0, b""
    for key, entry in header.items():
        first, last = entry["data_offsets"]
        blob = raw[begin + first : begin + last]
        if key == name:
            blob, entry["shape"] = new.numpy().tobytes(), list(new.shape)
        entry["data_offsets"] = [end, end + len(blob)]
        end, values = end + len(blob), values + blob
    data = header_bytes(header) + values

    replace_data(folder, role, data)
    resign(folder, lambda content: content["files"][role].update(tensors=header))


def forge_key(name: str, key: str, value: Any) -> Callable[[Path], None]:
    """Set every entry `key` below the section or object `name`, however dicts are written."""

    def walk(node: Any) -> int:
        count = 0
        if isinstance(node, dict):
            for inner in node:
                if inner == key:
                    node[inner], count = value, count + 1
                else:
                    count += walk(node[inner])
        elif isinstance(node, list):
            if len(node) == 2 and node[0] == key:
                node[1] = value
                return 1
            count += sum(walk(item) for item in node)
        return count

    def change(content: Any) -> None:
        assert walk(content["rng"] if name == "rng" else content["objects"][name]) > 0

    return lambda folder: resign(folder, change)


def twice(content: Any) -> None:
    (groups,) = content["optimizers"].values()
    node = groups["rest"]["param_groups"][0]["params"]
    node[1] = node[0]


FORGED: dict[str, Callable[[Path], None]] = {
    "position of np.random": forge_key("rng", "pos", 100_000_000),
    "negative position": forge_key("rng", "pos", -1),
    "position that is no integer": forge_key("rng", "pos", 3.0),
    "position of a generator": forge_key("MT19937", "pos", 625),
    "position in a buffer": forge_key("Philox", "buffer_pos", 5),
    "state of a dense parameter": lambda f: edit_tensor(
        f, "optimizer", "optimizer.state[0]['exp_avg']", torch.zeros(1)
    ),
    "state of more values": lambda f: edit_tensor(
        f, "optimizer", "optimizer.state[0]['exp_avg_sq']", torch.zeros(6, 6)
    ),
    "no step": lambda f: edit_tensor(f, "optimizer", "optimizer.state[0]['step']", torch.zeros(0)),
    "no step of a table": lambda f: edit_tensor(f, "optimizer", "optimizer.state[2]['step']", torch.zeros(0)),
    "rows of state": lambda f: edit_tensor(f, "optimizer", "optimizer.state[2]['exp_avg']", torch.zeros(3, 4)),
    "rows": lambda f: edit_tensor(f, "model", "rows.weight", torch.zeros(8, 4)),
    "a parameter twice": lambda f: resign(f, twice),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forged") / "good"
    Saved().save(folder)
    return folder


@pytest.mark.parametrize("name", FORGED)
def test_values_of_a_checkpoint_that_are_plausible_and_wrong(name: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    FORGED[name](folder)
    target = Saved()
    before = target.values()
    with pytest.raises((StorageError, InvalidValueError)):
        target.load(folder)
    assert target.values() == before
    target.load(saved)


def test_a_manifest_that_names_files_elsewhere(tmp_path: Path) -> None:
    """Neither read nor removed."""
    victims = tmp_path / "victim.txt", tmp_path / "other" / "v"
    victims[1].parent.mkdir()
    for victim in victims:
        victim.write_text("mine")
    folder, model = tmp_path / "c", torch.nn.Linear(2, 2)
    extra = {"word2vec": {"settings": {}, "corpus": {}, "training": {}}}
    st.save_checkpoint(folder, model, torch.optim.SGD(model.parameters()), extra=extra)
    checkpoints = Checkpoints(folder, overwrite=True)

    def change(content: Any) -> None:
        content["files"]["model"]["name"] = "../victim.txt"
        content["files"]["objects"]["name"] = str(victims[1])

    resign(folder, change)
    with pytest.raises(StorageError, match="is no name of a model file"):
        st.load_checkpoint(folder, model)
    checkpoints.remove()
    assert all(victim.exists() for victim in victims)
    assert not (folder / "manifest.json").exists()


# --- files that are none ----------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[str], Any]] = {
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
    "tensor.pt": speedtorch_files.read_torch,
}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "x.safetensors": lambda path: st.Table(2, 2, memory="pageable").save(path),
    "v.txt": lambda path: Vectors(["a"], np.ones((1, 2), np.float32)).save(path),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError, match="is a pipe, not a file; copy"):
        READERS[name](str(tmp_path / name))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("name", WRITERS)
def test_a_pipe_is_not_replaced(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(StorageError, match="is a pipe, not a file; choose another path"):
        WRITERS[name](tmp_path / name)
    assert (tmp_path / name).is_fifo()


def test_an_index_of_files_elsewhere(tmp_path: Path) -> None:
    secret, folder = tmp_path / "private.safetensors", tmp_path / "downloaded"
    folder.mkdir()
    save_file({"x": torch.ones(4, 4)}, secret)
    for name in ("../private.safetensors", str(secret), "..", ""):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(StorageError, match="which is no file of its folder"):
            st.Table.open(folder, key="x")
    # As caches of downloads have them.
    os.symlink(secret, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model.safetensors"}}')
    assert float(st.Table.open(folder, key="x").gather([0])[0, 0]) == 1


class Runs:
    """What a pickle can do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_in_a_folder_is_not_opened(tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "run"
    folder.mkdir()
    (folder / "vectors.kv").write_bytes(pickle.dumps(Runs(marker)))
    with pytest.raises(StorageError, match=r"a pickle, which can run any code; pass '.*vectors\.kv' itself"):
        Vectors.load(folder)
    Vectors(["a"], np.ones((1, 2), np.float32)).save(folder / "vectors.glove")
    assert Vectors.load(folder).words == ["a"]
    assert not marker.exists()


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "head"), [("v.txt.gz", b"1 1\na "), ("v.glove.gz", b"a "), ("v.vec.gz", b"1 9\nb ")])
def test_a_line_without_an_end(name: str, head: bytes, tmp_path: Path) -> None:
    with gzip.open(tmp_path / name, "wb") as file:
        file.write(head)
        for _ in range(20):
            file.write(b"0" * (1 << 20))
    with pytest.raises(StorageError, match=r"has a line of over \d+ bytes"):
        Vectors.load(tmp_path / name)


def test_json_of_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedtransfer.untrusted.MAX_JSON_VALUES", 1000)
    body = b'{"a":[' + b"[]," * 600 + b"[]]}"
    (tmp_path / "x.safetensors").write_bytes(len(body).to_bytes(8, "little") + body + b"\0" * 8)
    with pytest.raises(StorageError, match="over 1000 values"):
        st.Table.open(tmp_path / "x.safetensors")
    (tmp_path / "m.safetensors.index.json").write_bytes(b"[" * 100_000)
    with pytest.raises(StorageError, match=r"nested too deep|over 1000 values"):
        st.Table.open(tmp_path / "m.safetensors.index.json", key="x")


@pytest.mark.parametrize("shape", ["(9223372036854775807, 0)", "(0, 9223372036854775807)"])
def test_an_array_without_values_of_a_shape_that_none_has(shape: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 0), dtype=np.float32))
    data = (tmp_path / "x.npy").read_bytes().replace(b"(10, 0)", shape.encode())
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(StorageError):
        st.Table.load(tmp_path / "x.npy")


# --- damage -----------------------------------------------------------------------------------------------------------

GOOD = {"direction": "gather", "row_bytes": 64, "num_rows": 10, "seconds": {"host": 1.0}, "plane_bytes": 1 << 28}


@pytest.mark.parametrize(
    "change",
    [
        {"plane_bytes": 0},
        {"row_bytes": 0},
        {"num_rows": -1},
        {"row_bytes": "x"},
        {"plane_bytes": None},
        {"num_rows": 10**400},
        {"seconds": {"host": float("inf")}},
        {"seconds": {"host": True}},
        {"seconds": {"\x1b[31m": 1.0}},
        {"direction": []},
        "deep",
    ],
    ids=str,
)
def test_a_damaged_calibration_is_left_out(
    change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path))
    machine = calibration.machine_of(torch.device("cpu"))
    data = {"machine": machine, "copy_bytes_per_s": 1.0, "points": [GOOD]}
    calibration.file_of(machine).write_text(json.dumps(data))
    assert calibration.load(torch.device("cpu")) is not None
    if change == "deep":
        calibration.file_of(machine).write_text("[" * 200_000)
    else:
        calibration.file_of(machine).write_text(json.dumps({**data, "points": [{**GOOD, **change}]}))
    assert calibration.load(torch.device("cpu")) is None
    (record,) = caplog.records
    assert "is left out" in record.getMessage()


def test_arrays_and_tensors_of_speedtorch(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((30, 5), np.float32))
    good = (tmp_path / "x.npy").read_bytes()
    for data in (
        good.replace(b"(30, 5)", b"(30, 5("),
        good.replace(b"(30, 5)", b"(10**9,"),
        good.replace(b"(30, 5), ", b"(%d,5)," % 2**64),
        good.replace(b"'descr'", b"'de cr "),
    ):
        (tmp_path / "y.npy").write_bytes(data)
        with pytest.raises(StorageError):
            speedtorch_files.read_npy(tmp_path / "y.npy")
    for data in (b"\x80\x02t.", b"\x80\x02c\x1b]0;owned\x07\nx\n.", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."):
        (tmp_path / "y.pt").write_bytes(data)
        with pytest.raises(StorageError) as refused:
            speedtorch_files.read_torch(tmp_path / "y.pt")
        assert "\x1b" not in str(refused.value)


def test_a_machine_whose_name_a_terminal_would_carry_out(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text('name: "srv\\e]0;owned\\a"\nbase: h100-pcie\n')
    with pytest.raises(InvalidValueError, match=r"m\.yaml, 'srv\\x1b.*: name is 'srv\\x1b.* must be plain text"):
        machine_given(str(tmp_path / "m.yaml"))


def written(folder: Path) -> dict[str, bytes]:
    """A file of each format that rows or vectors are read from."""
    vectors = Vectors(["a", "b\u00e9", "c"], np.arange(12, dtype=np.float32).reshape(3, 4), np.array([3, 2, 1]))
    for suffix in (".txt", ".bin", ".glove", ".safetensors"):
        vectors.save(folder / f"v{suffix}")
    for suffix in (".npy", ".safetensors"):
        st.Table.from_array(torch.arange(12.0).view(3, 4), memory="pageable").save(folder / f"t{suffix}")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load_any(path: Path) -> None:
    if path.name.startswith("t"):
        for memory in ("pageable", "mmap"):
            table = st.Table.load(path, memory=memory, device="cpu")
            table.gather(list(range(min(len(table), 5))))
    else:
        vectors = Vectors.load(path)
        vectors.most_similar(vectors.words[0], 2)


def damage(rng: random.Random, data: bytes) -> bytes:
    """Damage that is likely to be read as something else: numbers of headers, words, lengths."""
    array = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.randrange(min(len(array), rng.choice([20, 120, len(array)])))
        kind = rng.randrange(4)
        if kind == 0:
            array[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            array[place : place + 1] = rng.choice(
                [b"9", b"99999999999999999999", b"-1", b" ", b"\n", b"[", b'"', b"\xff"]
            )
        elif kind == 2:
            del array[place : place + rng.randrange(1, 9)]
        else:
            array[place:place] = rng.randbytes(rng.randrange(1, 9))
        if not array:
            break
    return bytes(array)


def fuzz(folder: Path, count: int, seed: int) -> None:
    good, rng = written(folder), random.Random(seed)
    for _ in range(count):
        name = rng.choice(sorted(good))
        data = damage(rng, good[name])
        (folder / name).write_bytes(data)
        try:
            with np.errstate(all="ignore"):
                load_any(folder / name)
        except SpeedtransferError as error:
            assert "".join(str(error).split("\n")).isprintable(), data  # noqa: PT017
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__} of {name}: {data!r}") from error


FUZZ = [(150, 1), *(pytest.param(2000, seed, marks=pytest.mark.slow) for seed in range(100, 110))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("count", "seed"), FUZZ)
def test_damaged_files_of_rows_and_vectors(count: int, seed: int, tmp_path: Path) -> None:
    fuzz(tmp_path, count, seed)


# --- public calls -----------------------------------------------------------------------------------------------------

DTYPES = [np.int8, np.uint8, np.int32, np.int64, np.uint64, np.float32, np.float64, bool, object, np.float16]
NUMBERS = some.one_of(some.integers(-3, 12), some.sampled_from([2**31, 2**40, 2**63 - 1, -(2**63)]))


@some.composite
def arrays(draw: Any) -> Any:
    """Arrays and tensors of any dtype, shape and strides, many of them no index."""
    dtype = draw(some.sampled_from(DTYPES))
    shape = draw(some.sampled_from([(0,), (1,), (3,), (2, 2), (4, 1), ()]))
    values = [draw(NUMBERS) for _ in range(int(np.prod(shape)) * 2)]
    with np.errstate(all="ignore"):
        base = np.array([value % 2**64 for value in values], dtype=np.uint64).view(np.int64).astype(dtype)
    array = base[::2].reshape(shape) if draw(some.booleans()) else base[: int(np.prod(shape))].reshape(shape)
    if draw(some.booleans()) and array.dtype != object:
        with contextlib.suppress(TypeError):
            return torch.from_numpy(np.asarray(array))
    return array


def check_calls(index: Any, rows: Any) -> None:
    table = st.Table.from_array(torch.arange(20.0).view(5, 4), memory="pageable", device="cpu")
    for call in (
        lambda: table.gather(index),
        lambda: table.scatter(index, rows),
        lambda: table.gather(index, out=rows),
    ):
        before = table.torch().clone()
        try:
            call()
        except SpeedtransferError:
            assert torch.equal(table.torch(), before)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_calls_with_anything(count: int) -> None:
    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(
        given(arrays(), arrays())(check_calls)
    )()
