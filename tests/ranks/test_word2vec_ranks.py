"""word2vec over several processes: the vocabulary is shared out, blocks are taken in turns, one process writes the vectors."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from ranks.run import torchrun
from speedtransfer.word2vec import Corpus, Settings
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.trainer import Trainer
from speedtransfer.word2vec.vectors import Vectors


def text(path: Path) -> Path:
    """Two topics whose words never meet."""
    draw = random.Random(4)
    topics = [[f"{topic}{i}" for i in range(12)] for topic in ("sea", "sky")]
    lines = [" ".join(draw.choices(topics[draw.randrange(2)], k=20)) for _ in range(400)]
    path.write_text("\n".join(lines) + "\n")
    return path


def trained(path: str, options: dict) -> dict:
    settings = Settings(dim=16, epochs=4, block_words=256, sample=0, min_count=1, kind="lines", **options)
    trainer = Trainer(Corpus(Path(path), 1, kind="lines"), settings)
    with TrainingProgress(False) as progress:
        trainer.run(progress)
    vectors = trainer.vectors()
    return {"words": vectors.words, "matrix": np.array(vectors.matrix), "steps": trainer.step, "loss": trainer.loss}


def apart(words: list[str], matrix: np.ndarray) -> float:
    """How much closer words of one topic are than words of two."""
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    same = np.array([[a[:3] == b[:3] for b in words] for a in words])
    cosines = unit @ unit.T
    return float(cosines[same].mean() - cosines[~same].mean())


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "shared"},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({}, {"optimizer": "sgd"}, {"model": "cbow", "optimizer": "adagrad"}, {"buckets": 50})
        ),
    ],
    ids=str,
)
def test_topics_come_apart_as_in_one_process(two, tmp_path, options):
    path = str(text(tmp_path / "topics.txt"))
    first, second = two(trained, path, options)
    assert first["words"] == second["words"]
    np.testing.assert_array_equal(first["matrix"], second["matrix"])
    alone = trained(path, {k: v for k, v in options.items() if k != "memory"})
    # As many steps, of as many words, as in one process.
    assert abs(first["steps"] - alone["steps"]) <= 4
    ours, theirs = (apart(each["words"], each["matrix"]) for each in (first, alone))
    assert theirs > 0.3
    assert ours > 0.8 * theirs


@pytest.mark.slow
def test_by_torchrun(tmp_path):
    path = text(tmp_path / "topics.txt")
    command = ["-m", "speedtransfer", "word2vec", "train", str(path), "-o", str(tmp_path / "run"), "--dim", "16"]
    more = ["--min-count", "1", "--kind", "lines", "--epochs", "4", "--block-words", "256", "--sample", "0"]
    done = torchrun(*command, *more, world=2)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("vectors: ") == 1
    vectors = Vectors.load(tmp_path / "run" / "vectors.txt")
    assert apart(vectors.words, torch.as_tensor(vectors.matrix).numpy()) > 0.3
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["corpus_words"] == 8000
