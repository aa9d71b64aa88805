"""bench/speedtorch_loop.py: tiny vocabularies trained in every way, drawn, and shown on the migration page."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.fixture
def training():
    return importlib.import_module("speedtorch_loop_training")


@pytest.fixture
def result(training, tmp_path, monkeypatch, capsys):
    """The result of a tiny run, as it lies in a file; the text is a short one."""
    text = np.resize(np.repeat(np.arange(40), 3), 500)
    words = training.Words("corpus", 40, text, np.linspace(1 / 40, 1, 40))
    monkeypatch.setattr(training, "corpus", lambda: words)
    monkeypatch.setattr(training, "QUICK", training.Settings((60,), dim=4, batch=16, rounds=4, steps=5, lr=0.3))
    path = tmp_path / "bench/results/a-device/speedtorch_loop.json"
    assert importlib.import_module("speedtorch_loop").main(["--quick", "--out", str(path)]) == 0
    return path


@pytest.mark.slow
def test_ways_are_timed_and_train(result, training, capsys):
    found = json.loads(result.read_text())
    assert (found["part"], found["complete"], found["quick"]) == ("speedtorch_loop", True, True)
    assert [(size["words"], size["rows"]) for size in found["measured"]] == [("corpus", 40), ("Zipf", 60)]
    for size in found["measured"]:
        assert list(size["ways"]) == list(training.WAYS)
        for way in size["ways"].values():
            assert way["step_s"] > 0
            assert len(way["rounds_s"]) == 4
            first, last = way["losses"]
            assert first == pytest.approx(6 * np.log(2), rel=0.2)
            assert last < first
    planes = 2 * 40 * 4 * 4  # bytes of both tables
    held = {way: found["measured"][0]["ways"][way]["bytes"] / planes for way in training.WAYS}
    assert held["dense"] == pytest.approx(4, abs=0.1)  # weights, gradients and two states
    assert all(3 <= of_planes < 16 for of_planes in held.values())  # a batch has more rows than the tables
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "60 rows: SpeedTorch's names " in printed.out
    assert result.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_migration_page_shows_it(result, tmp_path, capsys):
    readme, record = importlib.import_module("readme"), importlib.import_module("record")
    assert readme.main(check=True, root=tmp_path) == 0  # there is no page yet
    page = tmp_path / "docs/migration.md"
    page.parent.mkdir()
    page.write_text("no marks\n")
    assert readme.main(check=True, root=tmp_path) == 0
    section = readme.SPEEDTORCH_LOOP
    page.write_text(f"before\n{section.begin}\n{section.end}\nafter\n")
    assert readme.main(check=True, root=tmp_path) == 1
    assert readme.main(check=False, root=tmp_path) == 0
    assert readme.main(check=True, root=tmp_path) == 0
    shown = page.read_text()
    assert shown.startswith(f"before\n{section.begin}\n\n![")
    assert shown.endswith(f"\n\n{section.end}\nafter\n")
    assert "(../bench/results/a-device/speedtorch_loop.png)" in shown
    assert "| Zipf, 60 words | speedtransfer.speedtorch, Adamax |" in shown
    capsys.readouterr()
    assert record.status(tmp_path) == 0
    assert "step 40 rows: SpeedTorch's names " in capsys.readouterr().out


def test_the_ways_agree_where_no_row_comes_twice(training):
    """One step with each row once: all that train lazily end alike, and dense with them."""
    settings = training.Settings(dim=3, batch=4, negatives=2, lr=0.1)
    words = training.Words("few", 20, None, np.linspace(0.05, 1, 20))
    start = training.torch.linspace(-1, 1, 60).view(20, 3)
    ends = []
    for way in ("SpeedTorch's names", "drop-in", "dense"):
        with training.SpeedTorch.place.warnings.catch_warnings():
            training.SpeedTorch.place.warnings.simplefilter("ignore")
            loop = training.Loop(way, words, settings, start, training.torch.device("cpu"))
        batch = (np.arange(4)[:, None], np.arange(4, 8)[:, None], np.arange(8, 16).reshape(4, 2))
        losses = [loop.step(batch) and loop.losses[-1] for _ in range(3)]
        ends.append(losses)
    np.testing.assert_allclose(ends, [ends[0]] * 3, rtol=1e-5)


def test_the_corpus_is_the_shipped_one(training):
    words = training.corpus()
    assert words.rows > 5000
    centre, context, negative = next(training.batches(words, training.QUICK))
    assert (centre.shape, context.shape, negative.shape) == ((128, 1), (128, 1), (128, 5))
    assert min(centre.min(), context.min(), negative.min()) >= 0
    assert max(centre.max(), context.max(), negative.max()) < words.rows
