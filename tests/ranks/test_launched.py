"""Processes that a launcher has started: modules made before their groups, word2vec that joins them, corpora that differ."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import speedtransfer as st
from speedtransfer.errors import ProcessGroupError
from speedtransfer.word2vec import Corpus, Settings
from speedtransfer.word2vec.trainer import Trainer


def test_a_group_that_there_is_not_yet_is_told(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for given in (None, "world"):
        with pytest.raises(ProcessGroupError, match="make the module after init_process_group"):
            st.Embedding(10, 2, process_group=given)
    # Left out: what DistributedDataParallel is to wrap.
    assert st.Embedding(10, 2).table.num_rows == 10


def test_the_world_of_one_process_is_that_process():
    for given in (None, "world"):
        assert type(st.Embedding(10, 2, process_group=given).table) is st.Table
    with pytest.raises(st.errors.ProcessGroupError, match="no process groups"):
        st.Embedding(10, 2, process_group="word")


def looks_up_alone() -> None:
    emb = st.Embedding(10, 2, process_group="world")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    emb(torch.arange(4))


def test_who_cannot_reach_the_others_says_so(two):
    error, _ = two.fails(looks_up_alone, timeout=10)
    assert isinstance(error, ProcessGroupError)
    assert re.search(
        r"rank 0 of 2, process \d+ on \S+, could not reach the others where it looks up rows \(", str(error)
    )


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
def test_word2vec_joins_what_another_launcher_starts(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 50}" for i in range(2000)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "speedtransfer", "word2vec", "train", str(tmp_path / "text.txt"), "--dim", "4"]
    runs = [
        subprocess.Popen(
            [*command, "--epochs", "1", "-q", "-o", str(tmp_path / f"run{rank}")],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert ["vectors: " in text for text in told] == [True, False]
    assert (tmp_path / "run0" / "vectors.txt").exists()
    assert not (tmp_path / "run1").exists()
