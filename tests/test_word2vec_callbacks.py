"""Callbacks: TensorBoard and evaluation. Neither changes a bit of the vectors."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_word2vec_resume import QUICK, broken_off, corpus, quietly  # noqa: F401

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Settings, Trainer
from speedtransfer.word2vec import run as run_module
from speedtransfer.word2vec.evaluation import evaluate
from speedtransfer.word2vec.optimizers import LR_END

CURVES = ["rows/bytes_in", "rows/bytes_out", "train/loss", "train/lr", "train/words_per_s"]


@pytest.fixture
def every_step(monkeypatch):
    monkeypatch.setattr(run_module, "LOG_EVERY_S", 0.0)


@pytest.fixture
def sets(tmp_path):
    (tmp_path / "pairs.txt").write_text("w1\tw2\t3\nw3\tw4\t1\nw5\tw6\t7\nw7\tw8\t2\nw1\tunknown\t5\n")
    (tmp_path / "analogies.txt").write_text(": one\nw1 w2 w3 w4\n: gram-two\nw5 w6 w7 w8\n")
    return [tmp_path / "pairs.txt", tmp_path / "analogies.txt"]


def curves(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_curves_and_the_frequent_words_in_the_projector(corpus, tmp_path, every_step, monkeypatch):
    monkeypatch.setattr(run_module, "PROJECTOR_WORDS", 7)
    board = tmp_path / "runs" / "one"
    vectors = quietly(corpus, tensorboard=board)
    assert vectors.matrix.tobytes() == quietly(corpus).matrix.tobytes()
    seen = curves(board)
    assert sorted(seen) == CURVES
    steps = 2 * len(Trainer(corpus, Settings(**QUICK)).sampler)
    for tag in CURVES:
        assert [step for step, _ in seen[tag]] == list(range(1, steps + 1))
    lr = [value for _, value in seen["train/lr"]]
    assert lr == pytest.approx([0.3 * max(1 - step / steps, LR_END) for step in range(steps)], rel=1e-6)
    bytes_in = [value for _, value in seen["rows/bytes_in"]]
    assert bytes_in == sorted(bytes_in)
    assert bytes_in[0] > 2 * 40 * 8 * 4
    assert all(value > 0 for _, value in seen["train/words_per_s"])
    assert 3 < seen["train/loss"][-1][1] < 5
    (tensors,), (words,) = (sorted(board.rglob(name)) for name in ("tensors.tsv", "metadata.tsv"))
    assert words.read_text().split() == vectors.words[:7]
    assert np.loadtxt(tensors, delimiter="\t") == pytest.approx(vectors.matrix[:7], rel=1e-5)
    assert str(tensors.relative_to(board)) in (board / "projector_config.pbtxt").read_text()


def test_resumed_run_goes_on_with_its_curves(corpus, tmp_path, every_step):
    broken_off(corpus, 27, 24, tmp_path / "point", tmp_path / "board")
    vectors = quietly(corpus, checkpoint=tmp_path / "point", resume=True, tensorboard=tmp_path / "board")
    assert vectors.matrix.tobytes() == quietly(corpus).matrix.tobytes()
    steps = [step for step, _ in curves(tmp_path / "board")["train/lr"]]
    assert steps == list(range(1, steps[-1] + 1))  # each once


def test_a_full_disk_ends_the_curves_and_not_the_run(corpus, tmp_path, every_step, monkeypatch, capsys):
    written = []

    def add_scalar(writer, tag, value, step):
        written.append(step)
        if step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", add_scalar)
    quietly(corpus, tensorboard=tmp_path / "board")
    assert "board' end here (No space left on device); training goes on" in capsys.readouterr().err
    assert written == [1] * 5 + [2] * 5 + [3]


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_does_not_disturb(corpus, tmp_path, sets, capsys, every_step):
    vectors = quietly(corpus, evaluate=sets, evaluate_every=0.5, tensorboard=tmp_path / "board")
    assert vectors.matrix.tobytes() == quietly(corpus).matrix.tobytes()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 0.5", "epoch 1", "epoch 1.5", "epoch 2"]
    last = evaluate(vectors, sets[0])
    pairs = f"epoch 2  pairs: spearman {last.spearman:.3f} pearson {last.pearson:.3f}  analogies: accuracy "
    assert lines[-1].startswith(pairs)
    seen = curves(tmp_path / "board")
    assert sorted(set(seen) - set(CURVES)) == [
        "evaluation/analogies/accuracy", "evaluation/analogies/semantic", "evaluation/analogies/syntactic",
        "evaluation/pairs/pearson", "evaluation/pairs/spearman",
    ]  # fmt: skip
    steps = len(Trainer(corpus, Settings(**QUICK)).sampler)
    assert [step for step, _ in seen["evaluation/pairs/spearman"]] == [steps // 2, steps, 3 * steps // 2, 2 * steps]
    assert seen["evaluation/pairs/spearman"][-1][1] == pytest.approx(last.spearman)


def test_bad_sets_are_found_before_training(corpus, tmp_path):
    with pytest.raises(StorageError, match=r"missing\.txt"):
        quietly("not read", evaluate=[tmp_path / "missing.txt"])
    (tmp_path / "pairs.txt").write_text("chat chien 7\nw1 chat 2\n")
    with pytest.raises(InvalidValueError, match="'chat'"):
        quietly(
            corpus, evaluate=tmp_path / "pairs.txt", memory="mmap", path=tmp_path / "t", tensorboard=tmp_path / "board"
        )
    assert list((tmp_path / "t").glob("*")) == []
    assert not (tmp_path / "board").exists()


def test_failed_evaluation_does_not_end_training(corpus, sets, monkeypatch, capsys):
    calls = []

    def fails_later(vectors, words):
        calls.append(words)
        if len(calls) > 1:
            raise InvalidValueError("the cosines are all 0")
        return evaluate(vectors, words)

    monkeypatch.setattr("speedtransfer.word2vec.run.measure", fails_later)
    vectors = quietly(corpus, evaluate=sets[0])
    assert vectors.matrix.tobytes() == quietly(corpus).matrix.tobytes()
    assert capsys.readouterr().err.splitlines() == [f"epoch {n}  the cosines are all 0" for n in (1, 2)]
