"""What launchers start: the scripts of docs/processes.md, and word2vec."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hosts import end, torchrun

import speedtransfer as st
from ranks.run import DeadRankError
from speedtransfer.errors import ProcessGroupError
from speedtransfer.word2vec import Corpus, Settings
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.trainer import Trainer
from speedtransfer.word2vec.vectors import Vectors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "processes.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"^```\{code-block\} python\n:caption: (\S+)\n\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
PRINTED = {
    "train.py": ["rank 0 has 50,000 of 100,000 rows", "rank 1 has 50,000 of 100,000 rows"],
    "fsdp.py": ["rank 0: norm", "rank 1: norm"],
    "evaluate.py": ["rank 0 has all rows"],
    "ids.py": ["rank 0 has ", "rank 1 has "],
}


def test_every_script_is_run_by_a_command():
    assert SCRIPTS.keys() == PRINTED.keys()
    assert len(SCRIPTS) == PAGE.count("{code-block} python")
    for name in SCRIPTS:
        assert re.search(rf"^torchrun --nproc-per-node 2 {name}$", PAGE, re.MULTILINE)


# Each starts three processes that import torch.
@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_script(name, tmp_path):
    script = tmp_path / name
    script.write_text(SCRIPTS[name])
    printed = end(torchrun("--standalone", str(script), processes=2, folder=tmp_path))
    assert all(line in printed for line in PRINTED[name])
    assert len(set(re.findall(r"norm (\d+\.\d{6})", printed))) <= 1, "the same in all processes"


# --- groups that there are not yet, or of one process ------------------------------------------------------------------


def test_a_group_that_there_is_not_yet_is_told(monkeypatch):
    for given in (None, "world"):
        assert type(st.Embedding(10, 2, process_group=given).table) is st.Table
    with pytest.raises(ProcessGroupError, match="no process groups"):
        st.Embedding(10, 2, process_group="word")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for given in (None, "world"):
        with pytest.raises(ProcessGroupError, match="make the module after init_process_group"):
            st.Embedding(10, 2, process_group=given)
    # Left out: what DistributedDataParallel is to wrap.
    assert st.Embedding(10, 2).table.num_rows == 10


def look_up_alone() -> None:
    emb = st.Embedding(10, 2, process_group="world")
    dist.barrier()
    if dist.get_rank() == 1:
        # When the other one has left the barrier.
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    emb(torch.arange(4))


def test_who_cannot_reach_the_others_says_so(two):
    error, died = two.fails(look_up_alone, timeout=10)
    assert isinstance(died, DeadRankError)
    assert isinstance(error, ProcessGroupError)
    words = r"rank 0 of 2, process \d+ on \S+, could not reach the others where it looks up rows \("
    assert re.search(words, str(error))


# --- word2vec: the vocabulary is shared out, blocks are taken in turns, one process writes the vectors -------------------


def text(path: Path) -> Path:
    """Two topics whose words never meet."""
    draw = random.Random(4)
    topics = [[f"{topic}{i}" for i in range(12)] for topic in ("sea", "sky")]
    lines = [" ".join(draw.choices(topics[draw.randrange(2)], k=20)) for _ in range(400)]
    path.write_text("\n".join(lines) + "\n")
    return path


def trained(path: str, options: dict) -> dict[str, Any]:
    settings = Settings(dim=16, epochs=4, block_words=256, sample=0, min_count=1, kind="lines", **options)
    trainer = Trainer(Corpus(Path(path), 1, kind="lines"), settings)
    with TrainingProgress(False) as progress:
        trainer.run(progress)
    vectors = trainer.vectors()
    return {"words": vectors.words, "matrix": np.array(vectors.matrix), "steps": trainer.step}


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
            pytest.param(it, marks=pytest.mark.slow)
            for it in ({}, {"model": "cbow", "optimizer": "adagrad"}, {"buckets": 50})
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


def of_another_corpus(path: str) -> str:
    corpus = Path(path) / f"{dist.get_rank()}.txt"
    corpus.write_text("a b c d e f " * (40 + dist.get_rank()))
    with pytest.raises(ProcessGroupError) as raised:
        Trainer(Corpus(corpus, 1), Settings(dim=4, min_count=1, sample=0))
    return str(raised.value)


def test_corpora_that_differ_are_told(two, tmp_path):
    first, second = two(of_another_corpus, str(tmp_path))
    assert first == second
    assert "rank 0: a corpus of 240 words and 6 different ones" in first
    assert "rank 1: a corpus of 246 words" in first


@pytest.mark.slow
def test_word2vec_joins_what_a_launcher_starts(tmp_path):
    path, run = text(tmp_path / "topics.txt"), tmp_path / "run"
    options = "--dim 16 --min-count 1 --sample 0 --kind lines --epochs 4 --block-words 256"
    command = ["-m", "speedtransfer", "word2vec", "train", str(path), *options.split(), "-o", str(run)]
    printed = end(torchrun("--standalone", *command, processes=2, folder=tmp_path))
    assert printed.count("vectors: ") == 1
    vectors = Vectors.load(run / "vectors.txt")
    assert apart(vectors.words, torch.as_tensor(vectors.matrix).numpy()) > 0.3
    assert json.loads((run / "settings.json").read_text())["corpus_words"] == 8000
