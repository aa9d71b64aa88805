"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from speedtransfer.device import cuda_status


def run(*arguments: str, cwd=None) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-W", "error", "-m", "speedtransfer", *arguments]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_info_says_what_there_is():
    result = run("info")
    assert result.returncode == 0
    assert torch.__version__ in result.stdout
    assert "host memory" in result.stdout
    if not cuda_status().available:
        assert cuda_status().reason.split(";")[0] in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["word2vec", "train", "missing.txt", "-o", "out"], ["missing.txt"]),
        (["word2vec", "train", "empty.txt", "-o", "out"], ["empty"]),
        (["word2vec", "train", "one.txt", "-o", "out"], ["one"]),
        (["word2vec", "train", "binary.txt", "-o", "out"], ["binary.txt"]),
        (["word2vec", "train", "good.txt", "-o", "taken"], ["taken"]),
        (["word2vec", "train", "good.txt", "-o", "out", "--optimizer", "admaw"], ["admaw", "AdamW"]),
        (["word2vec", "train", "good.txt", "-o", "out", "--optimizer", "adafactor"], ["Adafactor", "row by row"]),
        (["word2vec", "train", "good.txt", "-o", "out", "--memory", "pined"], ["pined", "pinned"]),
        (["word2vec", "train", "good.txt", "-o", "out", "--dim", "-3"], ["dim", "-3"]),
        (["word2vec", "train", "good.txt", "-o", "out", "--memory", "mmap"], ["mmap", "path"]),
        (["word2vec", "nearest", "good.txt", "river"], ["good.txt"]),
    ],
    ids=lambda value: "-".join(value[1:3]) if len(value) > 2 else "",
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, words):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("word " * 1000)
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "good.txt").write_text("the river and the bank of stone " * 200)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "vectors.bin").write_text("precious")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before, "nothing is written"
    assert (tmp_path / "taken" / "vectors.bin").read_text() == "precious"


@pytest.mark.skipif(cuda_status().available, reason="CUDA works here")
def test_pinned_without_cuda_says_why(tmp_path):
    (tmp_path / "good.txt").write_text("the river and the bank of stone " * 200)
    result = run("word2vec", "train", "good.txt", "-o", "out", "--memory", "pinned", cwd=tmp_path)
    assert result.returncode == 2
    assert "CUDA" in result.stderr
    assert not (tmp_path / "out").exists()
