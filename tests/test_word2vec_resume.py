"""A run that is broken off and resumed ends with the bits of a run that was not; nor do callbacks change a bit."""

import errno
import io
import os

import numpy as np
import pytest
import torch
from cases import raising

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Corpus, Settings, Trainer, Word2Vec, train
from speedtransfer.word2vec import run as run_module
from speedtransfer.word2vec.checkpoints import Checkpoints
from speedtransfer.word2vec.evaluation import evaluate
from speedtransfer.word2vec.optimizers import LR_END
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.run import make_callbacks
from speedtransfer.word2vec.trainer import Callback

QUICK = {"dim": 8, "epochs": 2, "block_words": 128, "shared_negatives": 32, "sample": 0.01, "device": "cpu"}
QUIET = TrainingProgress(enabled=False)


def text(num_words=3000, seed=0):
    return " ".join(f"w{n}" for n in np.random.default_rng(seed).integers(0, 50, num_words)).encode()


@pytest.fixture(scope="module")
def corpus():
    return Corpus(io.BytesIO(text()))


def quietly(corpus, **changes):
    return train(corpus, progress=False, **{**QUICK, **changes})


class BreakError(Exception):
    pass


class BreakAt(Callback):
    """Breaks training off at a step, as a crash does: what was not saved is lost."""

    def __init__(self, step):
        self.step = step

    def after_step(self, trainer):
        if trainer.step == self.step:
            raise BreakError

    def finish(self, trainer):
        raise AssertionError("training came to its end")


def broken_off(corpus, step, every, folder, tensorboard=None, **changes):
    settings = Settings(**{**QUICK, **changes})
    callbacks = make_callbacks(settings, Checkpoints(folder, settings, every), tensorboard, [], 1.0)
    with pytest.raises(BreakError):
        Trainer(corpus, settings).run(QUIET, [*callbacks, BreakAt(step)])


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (39, {"optimizer": "adagrad", "memory": "mmap"}),
        (31, {"optimizer": "sgd", "options": {"momentum": 0.9}, "model": "cbow"}),
        (13, {"optimizer": "nadam", "epochs": 1, "kind": "lines"}),
        (20, {"buckets": 300, "memory": "mmap"}),
    ],
)
def test_resumed_run_has_the_same_bits(corpus, tmp_path, step, changes, monkeypatch):
    if changes.get("kind") == "lines":
        corpus = Corpus(io.BytesIO(text().replace(b"7 ", b"7\n")), kind="lines")
    paths = [{"path": tmp_path / name} if "memory" in changes else {} for name in ("whole", "tables")]
    whole = quietly(corpus, **changes, **paths[0])
    with monkeypatch.context() as killed:
        killed.setattr(Word2Vec, "discard", lambda self: None)  # the tables are ahead of the checkpoint
        broken_off(corpus, step, 6, tmp_path / "point", **changes, **paths[1])
    assert not paths[1] or names(tmp_path / "tables") == ["input.safetensors", "output.safetensors"]
    resumed = quietly(corpus, checkpoint=tmp_path / "point", resume=True, **changes, **paths[1])
    assert resumed.matrix.tobytes() == whole.matrix.tobytes()


def test_another_number_of_threads_is_reported(corpus, tmp_path, capsys):
    """Not the one that training has while it leaves a core to another thread."""
    for threads, resume in ((2, False), (2, True), (1, True)):
        torch.set_num_threads(threads)
        quietly(corpus, checkpoint=tmp_path / "point", resume=resume, epochs=1)
        told = "this run has 1 threads but was begun with 2" in capsys.readouterr().err
        assert told == (threads == 1)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def point(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "point"
    quietly(corpus, checkpoint=folder)
    return folder


def test_other_corpus(point):
    reordered = b" ".join(reversed(text().split()))
    for content in (text().replace(b"w1 ", b"v1 "), reordered):
        with pytest.raises(InvalidValueError, match=r"is not that of checkpoint .* \(3,000 words, 50 distinct\)"):
            quietly(io.BytesIO(content), checkpoint=point, resume=True)


def test_checkpoint_of_another_run_is_kept(point, tmp_path):
    before = sorted(os.listdir(point))
    with pytest.raises(InvalidValueError, match="holds the checkpoint of a run; resume it, or choose another folder"):
        quietly("not read", checkpoint=point)
    assert sorted(os.listdir(point)) == before
    (tmp_path / "file").write_text("precious")
    with pytest.raises(StorageError, match="cannot write checkpoints to"):
        quietly("not read", checkpoint=tmp_path / "file" / "point")


def test_full_disk_does_not_end_training(corpus, tmp_path, monkeypatch, capsys):
    full = raising(StorageError("cannot save (No space left on device)"))
    monkeypatch.setattr("speedtransfer.word2vec.checkpoints.save_checkpoint", full)
    vectors = quietly(corpus, checkpoint=tmp_path / "point", epochs=1)
    assert vectors.matrix.tobytes() == quietly(corpus, epochs=1).matrix.tobytes()
    assert "No space left on device); training goes on" in capsys.readouterr().err


# --- tables in files --------------------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.glob("*"))


def test_tables_of_others_are_not_touched(point, corpus, tmp_path):
    (tmp_path / "input.safetensors").write_text("precious")
    for source, resume in (("not read", {}), (corpus, {"checkpoint": point, "resume": True})):
        with pytest.raises(StorageError, match=r"input\.safetensors' .*exists and would be overwritten"):
            quietly(source, memory="mmap", path=tmp_path, **resume)
        assert names(tmp_path) == ["input.safetensors"]


def test_damaged_checkpoint_leaves_the_tables(corpus, tmp_path):
    changes = {"memory": "mmap", "path": tmp_path / "tables"}
    quietly(corpus, checkpoint=tmp_path / "point", **changes)
    before = {name: (tmp_path / "tables" / name).read_bytes() for name in names(tmp_path / "tables")}
    assert sorted(before) == ["input.safetensors", "output.safetensors"]
    damaged = next((tmp_path / "point").glob("optimizer-*"))
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(StorageError, match="checksum"):
        quietly(corpus, checkpoint=tmp_path / "point", resume=True, **changes)
    assert before == {name: (tmp_path / "tables" / name).read_bytes() for name in names(tmp_path / "tables")}


# --- TensorBoard ------------------------------------------------------------------------------------------------------

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
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
    # The first of a process moves more rows: it tries the optimizer out.
    Trainer(corpus, Settings(**QUICK)).train_step()
    broken_off(corpus, 27, 24, tmp_path / "point", tmp_path / "board")
    quietly(corpus, checkpoint=tmp_path / "point", resume=True, tensorboard=tmp_path / "board")
    quietly(corpus, tensorboard=tmp_path / "whole")
    resumed, whole = curves(tmp_path / "board"), curves(tmp_path / "whole")
    for tag in CURVES[:-1]:
        assert resumed[tag] == whole[tag], tag


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
