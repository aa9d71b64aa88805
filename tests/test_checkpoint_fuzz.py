"""Damaged, foreign and malicious checkpoints: a clear error, and nothing has changed."""

import copy
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import sys

import pytest
import torch
import xxhash
from checkpoint_cases import Run, seed_all, trained
from optimizer_cases import case_named

from speedtransfer.checkpoint import tensors
from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError, StorageError
from speedtransfer.lazy import MissingPackageError
from speedtransfer.safetensors_io import header_bytes

REFUSALS = (StorageError, InvalidValueError, InvalidTypeError, OptimizerError)


@pytest.fixture(scope="module")
def points(tmp_path_factory):
    """Two checkpoints of the same run, at different times, the later one in an earlier format."""
    folder, run = tmp_path_factory.mktemp("points"), Run(case_named("adamw"))
    seed_all(1)
    for name in ("a", "b"):
        run.epochs(1)
        run.save(folder / name, extra={"words": ["x", (1, 2)], "array": torch.arange(5), "set": {1}})

    def as_version_1(content):
        content["format_version"] = 1
        for facts in content["files"].values():
            del facts["xxh3_128"]
            facts["sha256"] = hashlib.sha256((folder / "b" / facts["name"]).read_bytes()).hexdigest()

    resign(folder / "b", as_version_1)
    return folder / "a", folder / "b"


class Target:
    """A run that has trained elsewhere, and a check that it is as it was."""

    def __init__(self):
        self.run = trained(1, seed=9)
        self.before = self.run.digest()

    def load(self, path):
        """Return the refusal, or None where it loads."""
        try:
            self.run.load(path)
        except REFUSALS as error:
            refusal = str(error)
        else:
            self.__init__()
            return None
        assert self.run.digest() == self.before, f"changed, and then refused: {refusal}"
        assert "\n" not in refusal
        assert len(refusal) < 1500
        return refusal


@pytest.fixture(scope="module")
def target():
    return Target()


def sign(folder, content):
    """Write a manifest with the checksum that belongs to it."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    body = json.dumps(content, separators=(",", ":"))[1:].encode()
    head = f'{{"sha256":"{hashlib.sha256(body).hexdigest()}",\n'.encode()
    (folder / "manifest.json").write_bytes(head + body)


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def resign(folder, change):
    content = manifest(folder)
    change(content)
    sign(folder, content)


def data_file(folder, role="model"):
    return folder / manifest(folder)["files"][role]["name"]


def replace_data(folder, role, data):
    """Replace a data file, and let the manifest say so."""
    content = manifest(folder)
    (folder / content["files"][role]["name"]).write_bytes(data)
    content["files"][role].update(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
    sign(folder, content)


# --- by chance --------------------------------------------------------------------------------------------------------


def damaged(rng, data):
    """Return what is likely to be read as something else: other numbers of headers, words, lengths; or a part."""
    array = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.randrange(min(len(array), rng.choice([20, 120, len(array)])))
        kind = rng.randrange(5)
        if kind == 0:
            array[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            numbers = [b"9", b"99999999999999999999", b"-1", b" ", b"\n", b"[", b'"', b"\xff"]
            array[place : place + 1] = rng.choice(numbers)
        elif kind == 2:
            del array[place : place + rng.randrange(1, 9)]
        elif kind == 3:
            array[place:place] = rng.randbytes(rng.randrange(1, 9))
        else:
            del array[place:]
        if not array:
            break
    return bytes(array)


def change_bytes(rng, folder, other):
    file = rng.choice(sorted(folder.iterdir()))
    before = after = file.read_bytes()
    while after == before:
        after = damaged(rng, before)
    file.write_bytes(after)


def mix(rng, folder, other):
    role = rng.choice(["model", "optimizer", "objects"])
    shutil.copy(data_file(other, role), data_file(folder, role))


def other_kind(rng, folder, other):
    file = rng.choice(sorted(folder.iterdir()))
    file.unlink()
    match rng.randrange(4):
        case 0:
            file.mkdir()
        case 1:
            os.mkfifo(file)
        case 2:
            file.symlink_to("/etc/passwd" if rng.random() < 0.5 else other / file.name)
        case 3:
            file.symlink_to(file)


JUNK = [
    None, True, 0, -1, 1, 2**62, 2**70, 10**400, 1.5, 1e308,
    "", "x", "0.weight", "../../etc/passwd", "\ud800", [], [[]], {}, {"$": "x"},
    {"$": "float", "v": "1e5"}, {"$": "tensor", "v": "0.weight"}, {"$": "tensor"}, {"$": "rows"}, {"$": ["set"], "v": []},
    {"$": "set", "v": [[]]}, {"$": "set", "v": 5}, {"$": "dict", "v": [[1]]}, {"$": "dict", "v": [[[], 1]]},
    {"$": "bytes", "v": "zz"}, {"$": "scalar", "dtype": "int8", "v": 999}, {"$": "scalar", "dtype": "object", "v": 1},
    {"$": "device", "v": "moon"}, {"$": "dtype", "v": "os.system"}, {"$": "size", "v": ["x"]},
    {"$": "counter", "v": 1}, {"$": "complex", "v": [1]},
]  # fmt: skip


def places(node):
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [(node, key) for key, _ in items] + [place for _, child in items for place in places(child)]


def mutate(rng, folder, other):
    """Change the manifest anywhere, and sign it."""
    content = manifest(folder)
    content.pop("sha256")
    section = rng.choice([content, content["model"], content["optimizers"], content["objects"], content["files"]])
    for _ in range(rng.choice([1, 1, 2, 5])):
        # Not the numbers of the generators, which are most of it.
        options = [place for place in places(section) if not isinstance(place[0], list) or len(place[0]) < 100]
        node, key = rng.choice(options)
        what = rng.randrange(4)
        if what == 0:
            del node[key]
        elif what == 1:
            node[key] = copy.deepcopy(rng.choice(options)[0])
        elif what == 2 and isinstance(node, dict):
            node[rng.choice(["$", "v", "x", "step", "complex"])] = rng.choice(JUNK)
        else:
            node[key] = copy.deepcopy(rng.choice(JUNK))
        if not places(section):
            break
    try:
        sign(folder, content)
    except (ValueError, RecursionError):  # a mutation made a circle, or a number that JSON cannot write
        (folder / "manifest.json").write_text("{")


DAMAGES = [change_bytes, change_bytes, mix, other_kind, mutate, mutate]


@pytest.mark.parametrize("cases", [range(160), pytest.param(range(160, 6000), marks=pytest.mark.slow)], ids=len)
def test_whatever_is_damaged_is_refused(cases, points, target, tmp_path):
    loaded = 0
    for number in cases:
        rng = random.Random(number)
        damage = DAMAGES[number % len(DAMAGES)]
        folder = tmp_path / "point"
        which = number // len(DAMAGES) % 2
        shutil.copytree(points[which], folder)
        damage(rng, folder, points[not which])
        try:
            refusal = target.load(folder)
        except Exception as error:
            raise AssertionError(f"case {number}: {damage.__name__}: {type(error).__name__}: {error}") from error
        # A manifest that somebody has changed and signed may be a good one.
        assert refusal is not None or damage is mutate, f"case {number}: {damage.__name__} was loaded"
        loaded += refusal is None
        shutil.rmtree(folder)
    assert loaded < len(cases) / 4
    assert [target.load(point) for point in points] == [None, None]


# --- by design --------------------------------------------------------------------------------------------------------


def name_is(name):
    return lambda folder: resign(folder, lambda c: c["files"]["model"].update(name=name))


def a_pickle(folder):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {folder.parent}/owned",)

    replace_data(folder, "model", pickle.dumps(Evil()))


def bomb(folder):
    """One tensor, named a thousand times."""
    name = next(iter(manifest(folder)["files"]["objects"]["tensors"]))
    resign(folder, lambda c: c.update(extra=[c["extra"], *[{"$": "tensor", "v": name}] * 1000]))


def vast(folder):
    def change(content):
        entry = next(iter(content["files"]["model"]["tensors"].values()))
        entry.update(shape=[2**62, 0, 2**62], data_offsets=[0, 0])

    resign(folder, change)


def edited(role, name, new):
    """Give one tensor of a data file other values and another shape, with all that follows from it."""

    def edit(folder):
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
        replace_data(folder, role, header_bytes(header) + values)
        resign(folder, lambda content: content["files"][role].update(tensors=header))

    return edit


def forge_key(name, key, value):
    """Set every entry `key` below the section or object `name`, however dicts are written."""

    def change(content):
        section = content["rng"] if name == "rng" else content["objects"][name]
        found = [(node, at) for node, at in places(section) if at == key or (at == 1 and node[0] == key)]
        for node, at in found:
            node[at] = value
        assert found

    return lambda folder: resign(folder, change)


def twice(content):
    (groups,) = content["optimizers"].values()
    node = groups["rest"]["param_groups"][0]["params"]
    node[1] = node[0]


# Damage, and words of the refusal.
ATTACKS = [
    (name_is("../a/model.safetensors"), "is no name of a model file"),
    (name_is(f"objects-{'0' * 32}.safetensors"), "is no name of a model file"),
    (name_is(f"model-{'0' * 32}.safetensors\n"), "is no name of a model file"),
    (lambda f: (f / "manifest.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000), "is damaged"),
    (a_pickle, "has a header of"),
    (bomb, "tensors of the objects file are not those that the manifest refers to"),
    (vast, "a shape that no tensor has"),
    (lambda f: resign(f, lambda c: c.update(format_version=4)), "version 4 but this speedtransfer reads 1 to 3"),
    (lambda f: resign(f, lambda c: c.update(format="x")), "is no manifest of a checkpoint"),
    (lambda f: (f / "manifest.json").write_text('{"a": NaN}'), "NaN is no JSON"),
    (lambda f: (f / "manifest.json").unlink(), "holds no manifest.json"),
    (lambda f: data_file(f).unlink(), "cannot open 'model-"),
    # Plausible, and wrong.
    (forge_key("rng", "pos", 100_000_000), ""),
    (forge_key("rng", "pos", 3.0), ""),
    (forge_key("MT19937", "pos", 625), ""),
    (forge_key("Philox", "buffer_pos", 5), ""),
    (edited("optimizer", "optimizer.state[2]['exp_avg']", torch.zeros(1)), ""),
    (edited("optimizer", "optimizer.state[2]['step']", torch.zeros(0)), ""),
    (edited("optimizer", "optimizer.state[0]['step']", torch.zeros(0)), ""),
    (edited("optimizer", "optimizer.state[0]['exp_avg']", torch.zeros(3, 6)), ""),
    (edited("model", "words.weight", torch.zeros(8, 6)), ""),
    (lambda f: resign(f, twice), ""),
]


def test_attacks(points, target, tmp_path):
    for number, (damage, words) in enumerate(ATTACKS):
        damage(shutil.copytree(points[0], tmp_path / f"{number}"))
        refusal = target.load(tmp_path / f"{number}")
        assert refusal is not None, number
        assert re.search(words, refusal), refusal
        assert not (tmp_path / "owned").exists()


def test_xxhash_may_be_missing(points, target, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "KIND", "sha256")
    monkeypatch.setitem(sys.modules, "xxhash", None)
    target.run.save(tmp_path / "new")
    assert target.load(tmp_path / "new") is None
    with pytest.raises(MissingPackageError, match="need xxhash, which is not installed; run: pip install xxhash"):
        target.run.load(points[0])
