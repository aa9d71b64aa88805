"""bench/vocabulary_drift.py: every policy is trained and shown, on streams that are what they say."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import speedtransfer as st

ROOT = Path(__file__).resolve().parents[1]
USERS, ITEMS = 120, 600


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return lambda name="": importlib.import_module(f"vocabulary_drift{name}")


@pytest.fixture
def folder(tmp_path):
    draw = torch.Generator().manual_seed(0)
    items = [torch.randperm(ITEMS, generator=draw)[:12].tolist() for _ in range(USERS)]
    for name, places in (("train", slice(10)), ("test", slice(10, 12))):
        lines = (" ".join(map(str, [user, *own[places]])) for user, own in enumerate(items))
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.slow
def test_all_policies_are_trained_and_shown(bench, folder, capsys, monkeypatch):
    out = folder / "result.json"
    training = bench("_training")
    monkeypatch.setattr(training, "QUICK", replace(training.QUICK, passes=1, shares=(0.1, 0.5)))
    assert bench().main(["--quick", "--data", str(folder), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["complete"] is False
    for name, stream in result["streams"].items():
        runs = {(run["policy"], run["share"]): run for run in stream["runs"]}
        assert len(runs) == 1 + 2 * len(training.POLICIES), name
        full = runs.pop((training.FULL, 1.0))
        assert (full["evicted"], full["lifetime"]) == (0, 0)
        for (policy, share), run in runs.items():
            assert run["rows"] == round(share * full["rows"])
            assert (run["evicted"] == 0) == (policy == training.HASHED)
            assert (run["found"] == 1.0) if policy == training.HASHED else (0 < run["found"] <= full["found"])
            assert (run["lifetime"] > 0) == (policy == training.TTL)
    zipf = {(run["policy"], run["share"]): run["quality"] for run in result["streams"]["zipf"]["runs"]}
    assert zipf["full", 1.0] > zipf["lru", 0.1] > 0
    assert out.with_suffix(".png").stat().st_size > 5000
    shown = capsys.readouterr().out
    assert "in the order of the file, which has no time stamps" in shown
    text = bench().markdown(result, "picture.png")
    assert '| `evict="lru"` | ' in text
    assert "](picture.png)" in text


def test_without_data_the_synthetic_stream_is_trained(bench, tmp_path, monkeypatch, capsys):
    main, training = bench(), bench("_training")
    monkeypatch.setattr(training, "QUICK", replace(training.QUICK, steps=20, shares=(0.5,)))
    assert main.main(["--quick", "--data", str(tmp_path / "none")]) == 2
    assert "there is no train.txt" in capsys.readouterr().err
    assert main.main(["--quick", "--out", str(tmp_path / "result.json")]) == 0
    assert list(json.loads((tmp_path / "result.json").read_text())["streams"]) == ["zipf"]


def test_ranks_move(bench):
    training = bench("_training")
    stream = training.Zipf(replace(training.QUICK, steps=200, moves=20, batch=500))
    first, last = (
        torch.cat(part).bincount(minlength=1000).double() for part in (stream.batches[:5], stream.batches[-5:])
    )
    # By Zipf's law the ten most frequent of 1000 have a third of the lookups; they are others now.
    assert first.topk(10).values.sum() / first.sum() > 0.25
    assert last[first.topk(10).indices].sum() / last.sum() < 0.1
    again = [torch.equal(a, b) for one, two in zip(stream, stream, strict=True) for a, b in zip(one, two, strict=True)]
    assert all(again)


def test_the_longest_life_that_fits(bench):
    training = bench("_training")
    draw = np.random.default_rng(0)
    batches = [np.unique(draw.integers(40, size=6) + step) for step in range(30)]
    for rows in (12, 20, 35):
        fitting = [
            life
            for life in range(1, 30)
            if all(len(set().union(*batches[end - life : end + 1])) <= rows for end in range(life, 30))
        ]
        life = training.fitting_lifetime(batches, rows)
        assert life == max(fitting)
        vocabulary = st.Vocabulary(evict=life)
        embedding = st.Embedding(rows, 2, vocabulary=vocabulary, idle="lazy")
        optimizer = torch.optim.SGD(embedding.parameters(), 0.1)
        for ids in batches:
            embedding(torch.from_numpy(ids)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_blocks_are_the_users_of_the_file_in_order(bench, folder):
    training = bench("_training")
    data = importlib.import_module("idle_data").read_data(folder)
    blocks = training.Blocks(data, training.QUICK)
    assert [users for block, _ in blocks.blocks for users in block] == list(range(USERS))
    for block, steps in blocks.blocks:
        pairs = torch.cat([torch.stack(step, dim=1) for step in steps]).tolist()
        assert sorted(pairs) == sorted(2 * data.train[(data.train[:, :1] == torch.tensor(block)).any(1)].tolist())


def test_recall_by_hand(bench, folder):
    training = bench("_training")
    data = importlib.import_module("idle_data").read_data(folder)
    blocks = training.Blocks(data, training.QUICK)
    batches = [torch.arange(ITEMS)]
    users, items = (
        training.Table(batches, training.FULL, 1.0, 4, training.QUICK, ("normal", 0.0, 1.0)) for _ in range(2)
    )
    for table in (users, items):
        table(torch.arange(ITEMS))
    found = blocks.recall(users, items, range(5, 9))
    items.eval()
    rows = items(torch.arange(ITEMS)).detach()
    for user, recall in zip(range(5, 9), found, strict=True):
        known, wanted = ({item for u, item in pairs.tolist() if u == user} for pairs in data)
        scores = (rows @ users(torch.tensor([user]))[0]).tolist()
        best = sorted(set(range(ITEMS)) - known, key=lambda item: -scores[item])[: training.TOP]
        assert recall == pytest.approx(len(wanted & set(best)) / len(wanted))


def test_the_result_is_known(bench):
    store, readme = importlib.import_module("store"), importlib.import_module("readme")
    assert store.DRIFT in store.OTHERS
    assert readme.DRIFTING in readme.SECTIONS
    text = (ROOT / readme.DRIFTING.page).read_text(encoding="utf-8")
    assert text.index(readme.DRIFTING.begin) < text.index(readme.DRIFTING.end)
