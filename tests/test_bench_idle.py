"""bench/idle.py: small data in the format of LightGCN's, trained in every way and drawn."""

from __future__ import annotations

import importlib
import json
import lzma
from pathlib import Path

import pytest
import torch

from speedtransfer.errors import InvalidValueError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def idle(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("idle")


@pytest.fixture
def folder(tmp_path):
    """Data of 30 users, each of whom likes the even or the odd of 40 items, one file packed."""
    texts = []
    for items in (range(0, 20), range(20, 40)):
        lines = [" ".join(map(str, [user, *(item for item in items if item % 2 == user % 2)])) for user in range(30)]
        texts.append("\n".join(lines) + "\n")
    made = tmp_path / "likes"
    made.mkdir()
    (made / "train.txt").write_text(texts[0])
    (made / "test.txt.xz").write_bytes(lzma.compress(texts[1].encode()))
    return made


def test_batches_are_epochs_with_as_many_other_items(idle, folder):
    data = idle.read_data(folder)
    assert data.sizes == (30, 40)
    assert data.train[9:12].tolist() == [[0, 18], [1, 1], [1, 3]]
    assert data.test[10].tolist() == [1, 21]
    found = idle.batches(data, idle.Settings(batch=100))
    pairs = []
    for _ in range(3):
        users, items = next(found)
        assert (users.shape, items.shape) == ((100,), (200,))
        pairs += zip(users.tolist(), items[:100].tolist(), strict=True)
    assert sorted(pairs) == [tuple(pair) for pair in data.train.tolist()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no train.txt or train.txt.xz in"),
        ("0 1 2\n1 two\n", "cannot read line 2 of .*train.txt' .*'two'"),
        ("0 1 2\n1 -3\n", r"cannot read line 2 of .* \(a number is negative or not below 10,000,000\)"),
        ("0\n1\n", "names no item at all"),
    ],
)
def test_data_that_cannot_be_read_end_with_2(idle, folder, capsys, text, message):
    (folder / "train.txt").unlink()
    if text is not None:
        (folder / "train.txt").write_text(text)
    with pytest.raises(InvalidValueError, match=message):
        idle.read_data(folder)
    assert idle.main(["--data", str(folder)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_recall_by_hand(idle, folder, monkeypatch):
    monkeypatch.setattr(idle, "TOP", 5)
    data = idle.read_data(folder)
    recall = idle.Recall(data, idle.Settings(users=20))
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


def test_exact_is_dense_and_lazy_is_not(idle, folder, tmp_path, capsys):
    path = tmp_path / "idle.json"
    assert idle.main(["--data", str(folder), "--out", str(path), "--steps", "60", "--batch", "8"]) == 0
    found = json.loads(path.read_text())
    curves = found["curves"]
    assert found["counts"][-1] == 60
    for way in idle.WAYS:
        assert len(curves[way]["loss"]) + 1 == len(curves[way]["recall"]) == len(found["counts"])
    assert curves["exact"]["distance"][-1] < 1e-3 < 1e-2 < curves["lazy"]["distance"][-1]
    assert found["loss_difference"]["exact"] < 1e-5
    assert curves["dense"]["distance"][-1] == 0
    assert (found["complete"], found["data"], found["settings"]["steps"]) == (True, "likes", 60)
    assert capsys.readouterr().out.splitlines()[-4].startswith("Likes, 30 users x 40 items, ")
    assert len(idle.draw(found).axes) == 3
