"""bench/gowalla.py: a recommender in one process and in two, on data that have a structure to be found."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "bench" / "gowalla.py"
USERS, ITEMS, GROUPS = 61, 80, 4
SIZES = ["--epochs", "12", "--batch", "100", "--dim", "8", "--lr", "0.05"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return lambda name="": importlib.import_module(f"gowalla{name}")


@pytest.fixture
def folder(tmp_path):
    """Each user has half of the items of one group, and is to be given the other half."""
    lines = {"train": [], "test": []}
    for user in range(USERS):
        mine = [item for item in range(ITEMS) if item % GROUPS == user % GROUPS]
        half = torch.randperm(len(mine), generator=torch.Generator().manual_seed(user)).tolist()
        for name, places in (("train", half[:10]), ("test", half[10:])):
            lines[name].append(" ".join(map(str, [user, *sorted(mine[place] for place in places)])))
    for name, text in lines.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(text) + "\n")
    return tmp_path


@pytest.mark.slow
def test_two_processes_train_what_one_does(bench, folder, capfd):
    out = folder / "result.json"
    command = ["--data", str(folder), "--kind", "table", "sharded", "--dtype", "float64", "--out", str(out), *SIZES]
    assert bench().main(command) == 0
    result = json.loads(out.read_text())
    one, two = result["runs"]
    assert (one["kind"], one["processes"], two["kind"], two["processes"]) == ("table", 1, "sharded", 2)
    assert result["complete"] is False  # not all kinds
    assert one["distance"] == 0
    assert two["distance"] < 1e-8
    # By chance 20 of the 70 items that a user does not have.
    assert min(one["recall"], two["recall"]) > 0.9 > 3 * 20 / 70
    assert two["recall"] == pytest.approx(one["recall"], abs=0.01)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
    assert (one["sent_bytes"], one["steps"]) == (0, 12 * 7)
    assert two["sent_bytes"] > 0
    shown = capfd.readouterr().out
    assert "sharded: epoch 12/12, loss 0." in shown
    assert "st.Embedding, sharded          2" in shown
    assert "610 pairs of 61 users and 80 items; epochs: 12, 100 pairs a step in all processes together" in shown


@pytest.mark.slow
def test_all_kinds_agree_in_single_precision(bench, folder):
    out = folder / "result.json"
    assert bench().main(["--data", str(folder), "--out", str(out), *SIZES]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["kind"] for run in runs] == ["dense", "table", "replicas", "sharded", "shared"]
    assert all(run["distance"] <= 1e-3 for run in runs)
    assert all(run["recall"] > 0.9 for run in runs)


def test_missing_data_are_told(bench, tmp_path, capsys):
    assert bench().main(["--data", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "there is no train.txt or train.txt.xz in" in said
    assert "name the folder that has them" in said
    assert "as in LightGCN's Gowalla" in said


def test_a_kind_needs_its_processes(bench, folder, capsys):
    assert bench().main(["train", "--data", str(folder), "--kind", "shared", "--quick"]) == 2
    assert "--kind shared is for several processes; start it by: torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_a_training_that_fails_is_told(bench, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "false")
    command = ["--data", str(folder), "--kind", "shared", "--quick", "--out", str(folder / "result.json")]
    assert bench().main(command) == 1
    assert "the training of 'st.Embedding, memory=\"shared\"' ended with exit code 1" in capsys.readouterr().err
    assert not (folder / "result.json").exists()


def test_scores_by_hand(bench, folder, monkeypatch):
    """For users that are scored in several rounds."""
    training = bench("_training")
    monkeypatch.setattr(training, "_USERS_AT_ONCE", 7)
    monkeypatch.setattr(training, "TOP", 12)
    (folder / "test.txt").write_text("\n".join(["3 5", *(folder / "test.txt").read_text().splitlines()[4:]]))
    data = bench().read_data(folder)
    users, items = torch.randn(USERS, 4), torch.randn(ITEMS, 4)
    recalls, ndcgs = [], []
    for user in range(3, USERS):
        known, wanted = ({item for u, item in pairs.tolist() if u == user} for pairs in data)
        values = (items @ users[user]).tolist()
        best = sorted(set(range(ITEMS)) - known, key=lambda item: -values[item])[:12]
        gains = [1 / torch.tensor(place + 2.0).log2().item() for place in range(12)]
        recalls.append(len(wanted & set(best)) / len(wanted))
        gained = sum(gain for gain, item in zip(gains, best, strict=True) if item in wanted)
        ndcgs.append(gained / sum(gains[: len(wanted)]))
    means = [sum(values) / len(values) for values in (recalls, ndcgs)]
    assert training.score(users, items, data) == pytest.approx(means)


def test_batches_are_epochs_with_items_that_users_do_not_have(bench, folder):
    training, data = bench("_training"), bench().read_data(folder)
    batches = training.Batches(data, training.Settings(batch=100))
    found = [torch.stack(batch, dim=1) for batch in batches]
    assert [len(batch) for batch in found] == [100] * 6 + [10]
    assert len(batches) == 7
    triples = torch.cat(found).tolist()
    pairs = [(user, item) for user, item in data.train.tolist()]
    assert sorted((user, item) for user, item, _ in triples) == pairs
    assert not {(user, other) for user, _, other in triples} & set(pairs)
    assert [triple for batch in batches for triple in torch.stack(batch, dim=1).tolist()] != triples


@pytest.mark.slow
def test_torchrun_by_hand(folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, "train", "--data", str(folder), "--kind", "replicas", *SIZES],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("replicas: recall@20 ")
