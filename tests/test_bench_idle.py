"""bench/idle.py: small data in the format of LightGCN's, trained in every way, drawn, and shown in the docs."""

from __future__ import annotations

import importlib
import json
import lzma
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.fixture
def idle_training():
    return importlib.import_module("idle_training")


def put_data(folder: Path, packed: bool = False) -> Path:
    """Write 30 users, each of whom likes the even or the odd of 40 items, and return the folder."""
    folder.mkdir(exist_ok=True)
    for name, items in (("train.txt", range(0, 20)), ("test.txt", range(20, 40))):
        lines = [" ".join(map(str, [user, *(item for item in items if item % 2 == user % 2)])) for user in range(30)]
        text = "\n".join(lines) + "\n"
        if packed:
            (folder / f"{name}.xz").write_bytes(lzma.compress(text.encode()))
        else:
            (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_data(idle_training, tmp_path, packed):
    data = idle_training.read_data(put_data(tmp_path / "data", packed))
    assert data.sizes == (30, 40)
    assert data.train.shape == data.test.shape == (300, 2)
    assert data.train[9:12].tolist() == [[0, 18], [1, 1], [1, 3]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no train.txt or train.txt.xz in"),
        ("0 1 2\n1 two\n", "cannot read line 2 of .*train.txt' .*'two'"),
        ("0 1 2\n1 -3\n", r"cannot read line 2 of .* \(a number is negative or not below 10,000,000\)"),
        ("0 1\n\n2 3", "cannot read line 2"),
        ("0\n1\n", "names no item at all"),
        ("", "names no item at all"),
        ("0 \xe9", "cannot read line 1"),
    ],
)
def test_data_that_cannot_be_read(idle_training, tmp_path, text, message):
    if text is not None:
        (tmp_path / "train.txt").write_text(text, encoding="utf-8")
    with pytest.raises(idle_training.DataError, match=message) as caught:
        idle_training.read_data(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_archive(idle_training, tmp_path):
    put_data(tmp_path, packed=True)
    whole = (tmp_path / "test.txt.xz").read_bytes()
    (tmp_path / "test.txt.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(idle_training.DataError, match=r"test\.txt\.xz"):
        idle_training.read_data(tmp_path)


def test_batches_are_epochs_with_as_many_other_items(idle_training, tmp_path):
    data = idle_training.read_data(put_data(tmp_path))
    found = idle_training.batches(data, idle_training.Settings(batch=100))
    pairs = []
    for _ in range(3):
        users, items = next(found)
        assert (users.shape, items.shape) == ((100,), (200,))
        pairs += zip(users.tolist(), items[:100].tolist(), strict=True)
    assert sorted(pairs) == [tuple(pair) for pair in data.train.tolist()]


def test_recall(idle_training, tmp_path, monkeypatch):
    """By hand, for users that are asked in several rounds."""
    monkeypatch.setattr(idle_training, "_USERS_AT_ONCE", 7)
    monkeypatch.setattr(idle_training, "TOP", 5)
    data = idle_training.read_data(put_data(tmp_path))
    recall = idle_training.Recall(data, idle_training.Settings(users=20))
    users, items = torch.randn(30, 4), torch.randn(40, 4)
    expected = []
    for user in recall.users.tolist():
        scores = (items @ users[user]).tolist()
        known = {item for u, item in data.train.tolist() if u == user}
        wanted = {item for u, item in data.test.tolist() if u == user}
        best = sorted(set(range(40)) - known, key=lambda item: -scores[item])[:5]
        expected.append(len(wanted & set(best)) / len(wanted))
    assert len(expected) == 20
    assert recall(users, items) == pytest.approx(sum(expected) / 20)


@pytest.fixture
def result(tmp_path, capsys):
    """The result of a small run, as it lies in a file; the run has printed to `capsys`."""
    idle = importlib.import_module("idle")
    put_data(tmp_path / "likes", packed=True)
    path = tmp_path / "bench/results/a-device/idle.json"
    argv = ["--data", str(tmp_path / "likes"), "--out", str(path), "--steps", "60", "--batch", "8"]
    assert idle.main(argv) == 0
    return path


@pytest.mark.slow
def test_exact_is_dense_and_lazy_is_not(result, capsys):
    found, ways = json.loads(result.read_text()), importlib.import_module("idle_training").WAYS
    curves = found["curves"]
    assert found["counts"][-1] == 60
    for way in ways:
        assert len(curves[way]["loss"]) + 1 == len(curves[way]["recall"]) == len(found["counts"])
    assert curves["exact"]["distance"][-1] < 1e-3 < 1e-2 < curves["lazy"]["distance"][-1]
    assert found["loss_difference"]["exact"] < 1e-5
    assert curves["exact"]["loss"] == pytest.approx(curves["dense"]["loss"], rel=1e-4)
    assert curves["dense"]["distance"][-1] == 0
    assert (found["complete"], found["data"], found["settings"]["steps"]) == (True, "likes", 60)
    printed = capsys.readouterr()
    assert "Recall@20 at the end: dense" in printed.out
    assert printed.err == ""
    assert importlib.import_module("idle").markdown(found, "").startswith("Likes, 30 users x 40 items, ")
    assert 1000 < result.with_suffix(".png").stat().st_size < 100_000
    assert result.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--data", "nowhere"],
            "error: there is no train.txt or train.txt.xz in 'nowhere'; name the folder that has them",
        ),
        (["--data", ""], "error: there is no train.txt"),
        (["--data", ".", "--steps", "0"], "argument --steps: invalid positive int value: '0'"),
        ([], "the following arguments are required: --data"),
    ],
)
def test_what_makes_no_sense_ends_with_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    try:
        code = importlib.import_module("idle").main(arguments)
    except SystemExit as stop:  # of argparse
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2
    assert message in printed.err.splitlines()[-1]
    assert printed.out == ""
