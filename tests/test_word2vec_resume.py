"""A run that is broken off and resumed ends with the bits of a run that was not."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
import torch

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Corpus, Settings, Trainer, Word2Vec, train
from speedtransfer.word2vec.checkpoints import Checkpoints
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


def test_everything_is_taken_up(corpus, tmp_path):
    # The first of a process moves more rows: it tries the optimizer out.
    Trainer(corpus, Settings(**QUICK)).train_step()
    straight = Trainer(corpus, Settings(**QUICK))
    while straight.step < 18:
        straight.train_step()
    broken_off(corpus, 20, 6, tmp_path / "point")
    resumed = Checkpoints(tmp_path / "point", Settings(**QUICK), resume=True).restore(corpus, QUIET)
    assert resumed.step == 18
    assert (resumed.loss, resumed.moved_bytes) == (straight.loss, straight.moved_bytes)
    for trainer in (straight, resumed):
        trainer.run(QUIET)
    assert resumed.vectors().matrix.tobytes() == straight.vectors().matrix.tobytes()
    assert resumed.loss == straight.loss


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
    def full(*args, **kwargs):
        raise StorageError("cannot save (No space left on device)")

    monkeypatch.setattr("speedtransfer.word2vec.checkpoints.save_checkpoint", full)
    vectors = quietly(corpus, checkpoint=tmp_path / "point", epochs=1)
    assert vectors.matrix.tobytes() == quietly(corpus, epochs=1).matrix.tobytes()
    assert "No space left on device); training goes on" in capsys.readouterr().err


# --- tables in files --------------------------------------------------------------------------------------------------


def names(folder):
    return sorted(path.name for path in folder.glob("*"))


def test_failed_run_leaves_no_tables(corpus, tmp_path):
    for _ in range(2):  # nothing stops the second
        with pytest.raises(InvalidValueError, match="too large for sgd"):
            quietly(corpus, optimizer="sgd", lr=1e20, epochs=9, memory="mmap", path=tmp_path / "tables")
        assert names(tmp_path / "tables") == []


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
