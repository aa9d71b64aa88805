"""bench/node2vec.py: its parts, on graphs and scores small enough to reckon by hand."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from speedtransfer.word2vec.settings import Settings

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return lambda name: importlib.import_module(f"node2vec{name}")


def test_f1_by_hand(bench):
    scores = bench("_data")
    truth = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]], bool)
    found = np.array([[0.1, 0.9, 0.8, 0.0], [0.2, 0.3, 0.1, 0.0], [0.4, 0.5, 0.0, 0.0]])
    predicted = scores.predict(found, truth)
    assert predicted.tolist() == [[False, True, True, False], [False, True, False, False], [False, True, False, False]]
    # Of four predicted groups and four true ones two agree. By group: 0 of 0 and 2; 2 of 3 and 2; 0 of 1 and 0; none.
    assert scores.f1(predicted, truth) == {
        "micro-F1": pytest.approx(2 * 2 / (4 + 4)),
        "macro-F1": pytest.approx((0 + 2 * 2 / (3 + 2) + 0 + 0) / 4),
    }
    assert scores.f1(truth, truth) == {"micro-F1": 1.0, "macro-F1": 0.5}  # nobody is in the last two
    assert scores.predict(np.zeros((1, 3)), np.array([[True, False, True]])).sum() == 2  # also where all are equal


def test_f1_is_that_of_scikit_learn(bench):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    truth, values = rng.random((200, 7)) < 0.2, rng.random((200, 7))
    truth[:, 6] = False
    predicted = bench("_data").predict(values, truth)
    assert (predicted.sum(1) == truth.sum(1)).all()
    for average in ("micro", "macro"):
        theirs = metrics.f1_score(truth, predicted, average=average, zero_division=0)
        assert bench("_data").f1(predicted, truth)[f"{average}-F1"] == pytest.approx(theirs)


def test_groups_that_vectors_tell_are_found(bench):
    pytest.importorskip("sklearn")
    scores = bench("_data")
    rng = np.random.default_rng(0)
    groups = np.eye(4, dtype=bool)[rng.integers(0, 4, 300)]
    groups = np.column_stack([groups, np.ones(300, bool), np.zeros(300, bool)])  # one all are in, and one nobody
    vectors = (groups[:, :4] @ rng.normal(size=(4, 8)) + 0.1 * rng.normal(size=(300, 8))).astype(np.float32)
    found = scores.score(vectors, groups, 0.5, seed=1)
    assert found["micro-F1"] > 0.99
    assert found["macro-F1"] == pytest.approx(5 / 6, abs=0.01)
    assert scores.score(1000 * vectors, groups, 0.5, seed=1) == found
    assert scores.score(rng.normal(size=(300, 8)), groups, 0.5, seed=1)["micro-F1"] < 0.75


def test_interval(bench):
    interval = bench("_data").interval
    assert interval([0.5]) == {"mean": 0.5, "half": None}
    assert interval([1.0, 2.0, 3.0]) == {"mean": 2.0, "half": pytest.approx(4.3027 / 3**0.5, rel=1e-4)}


@pytest.fixture
def folder(tmp_path):
    """Two rings of ten that touch at one edge; even nodes are in group 5 also, and node n19 in no group at all."""
    rings = [[f"n{10 * ring + k}" for k in range(10)] for ring in range(2)]
    lines = [f"{ring[k]} {ring[(k + 1) % 10]} {ring[(k + 2) % 10]}" for ring in rings for k in range(10)]
    (tmp_path / "bc_adjlist.txt").write_text("\n".join([*lines, "n0 n10"]))
    groups = [f"n{n} {n // 10}" + (" 5" if n % 2 == 0 else "") for n in range(19)]
    (tmp_path / "bc_labels.txt").write_text("\n".join(groups))
    return tmp_path


def test_data(bench, folder):
    data = bench("_data").read_data(folder)
    assert len(data.graph) == 20
    assert bench("").edges_of(data) == 2 * 20 + 1
    assert (len(data.nodes), data.groups.shape) == (19, (19, 3))  # numbers that no node has are no groups
    assert data.groups.sum(axis=0).tolist() == [10, 9, 10]


def test_walks_are_one_a_line(bench, folder):
    graph = bench("_data").read_data(folder).graph
    path = folder / "walks.txt"
    assert bench("_data").save_walks(graph, Settings(walks=3, walk_length=7, seed=2), path) == 20 * 3 * 7
    lines = [line.split(" ") for line in path.read_text().splitlines()]
    assert {len(line) for line in lines} == {7}
    assert sorted(line[0] for line in lines) == sorted([f"n{n}" for n in range(20)] * 3)
    assert path.read_text().endswith("\n")


def test_walks_that_end_early(bench, tmp_path):
    (tmp_path / "bc_adjlist.txt").write_text("a b\nlone\n")
    (tmp_path / "bc_labels.txt").write_text("a 1\n")
    graph = bench("_data").read_data(tmp_path).graph
    assert bench("_data").save_walks(graph, Settings(walks=1, walk_length=4), tmp_path / "walks.txt") == 4 + 4 + 1
    assert sorted((tmp_path / "walks.txt").read_text().splitlines()) == ["a b a b", "b a b a", "lone"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "there is no bc_adjlist.txt or no bc_labels.txt in"),
        ("", "is empty; it must have a node and its groups a line"),
        ("n0 1\nn1\n", "line 2 of .* is 'n1', not a node and its groups"),
        ("n0 x\n", "line 1 of .* is 'n0 x', not a node and its groups"),
        ("n0 -1\n", "line 1 of .* is 'n0 -1', not a node and its groups"),
        ("zz 1\n", "bc_labels.txt has node 'zz', which bc_adjlist.txt has not"),
    ],
)
def test_bad_data(bench, folder, labels, message, capsys):
    if labels is None:
        (folder / "bc_labels.txt").unlink()
    else:
        (folder / "bc_labels.txt").write_text(labels)
    with pytest.raises(bench("_data").DataError, match=message):
        bench("_data").read_data(folder)


def test_a_missing_package_is_told(bench, folder, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else name)
    assert bench("").main(["--data", str(folder), "--out", str(folder / "x.json")]) == 2
    assert "needs scikit-learn, which is not installed; run: pip install scikit-learn" in capsys.readouterr().err


def test_everything_is_measured(bench, folder, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    node2vec, out = bench(""), folder / "result.json"
    tiny = node2vec.Settings(dim=4, window=2, walks=2, walk_length=10, seeds=2, splits=2, shares=(0.5,))
    monkeypatch.setattr(node2vec, "QUICK_SETTINGS", tiny)
    monkeypatch.setattr(node2vec, "OPTIMIZERS", ("adamw", "sgd"))
    assert node2vec.main(["--data", str(folder), "--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [(run["seed"], run["system"]) for run in result["runs"]] == [
        (seed, system) for seed in (1, 2) for system in ("gensim", "adamw", "sgd")
    ]
    assert all(len(run["scores"]["0.5"]) == 2 for run in result["runs"])
    assert len(result["summary"]) == 3 * 2
    assert all(("difference" in row) == (row["system"] != "gensim") for row in result["summary"])
    assert result["complete"] is False
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "- gensim" in shown
    assert "20 nodes, 41 edges, 3 groups" in shown


def test_a_stopped_run_goes_on(bench, folder, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    node2vec, out, partial = bench(""), folder / "result.json", folder / "result.partial.json"
    tiny = node2vec.Settings(dim=4, window=2, walks=2, walk_length=10, seeds=1, splits=1, shares=(0.5,))
    monkeypatch.setattr(node2vec, "QUICK_SETTINGS", tiny)
    monkeypatch.setattr(node2vec, "OPTIMIZERS", ("adamw", "sgd"))
    command = ["--data", str(folder), "--quick", "--out", str(out)]
    right, trained = node2vec.train_ours, []

    def train(walks, settings, seed, optimizer):
        trained.append(optimizer)
        if trained == ["adamw", "sgd"]:
            raise KeyboardInterrupt
        return right(walks, settings, seed, optimizer)

    monkeypatch.setattr(node2vec, "train_ours", train)
    assert node2vec.main(command) == 130
    assert not out.exists()
    before = json.loads(partial.read_text())
    assert [run["system"] for run in before["runs"]] == ["gensim", "adamw"]
    assert node2vec.main([*command, "--resume"]) == 0
    assert trained == ["adamw", "sgd", "sgd"]
    assert json.loads(out.read_text())["runs"][:2] == before["runs"]
    assert not partial.exists()

    assert node2vec.main([*command, "--resume"]) == 2  # nothing is left
    assert "there is no" in capsys.readouterr().err
    changes = {"sources": {"digest": "another", "environment": {**before["environment"], "dirty": True}}}
    changes["graph"] = {"graph": {**before["graph"], "nodes": 3}}
    for what, change in changes.items():
        partial.write_text(json.dumps({**before, **change}))
        assert node2vec.main([*command, "--resume"]) == 2
        assert f"was measured with other {what}; drop --resume to start over" in capsys.readouterr().err
    partial.write_text("{")
    assert node2vec.main([*command, "--resume"]) == 2
    assert "cannot read" in capsys.readouterr().err
