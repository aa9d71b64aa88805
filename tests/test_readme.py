"""What README.md shows works when it is copied."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speedtransfer.benchmark import measure
from speedtransfer.cli import app
from speedtransfer.engines import auto
from speedtransfer.engines.calibration import load
from speedtransfer.word2vec import Settings, demo

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line]


@pytest.mark.slow
def test_the_first_python_block_runs_alone(tmp_path):
    subprocess.run([sys.executable, "-W", "error", "-c", blocks("python")[0]], cwd=tmp_path, check=True, timeout=300)


@pytest.mark.parametrize("number", range(1, len(blocks("python"))))
def test_python(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():  # here and not in a process of its own, which would take seconds to import torch
        exec(compile(blocks("python")[number], f"README.md, block {number}", "exec"), {"__name__": "__main__"})


def test_the_drop_in_takes_ten_lines():
    assert len([line for line in blocks("python")[0].splitlines() if line.strip()]) <= 10


def our_commands() -> list[list[str]]:
    lines = [shlex.split(line)[1:] for line in commands() if line.startswith("speedtransfer ")]
    assert {line[0] for line in lines} == {"info", "word2vec", "bench", "calibrate"}
    return lines


def test_code_fits_the_page():
    """As GitHub shows it on a desktop: a line that is longer scrolls."""
    for language in ("python", "bash"):
        for line in "".join(blocks(language)).splitlines():
            assert len(line) <= 96, line


def test_command_line(tmp_path, monkeypatch):
    """All of it in this process: the demo in one epoch, and what measures with few rows and samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(measure.EFFORT, True, {"turns": 1, "samples": 1, "budget_s": 0.0})
    monkeypatch.setattr(auto, "PLANE_BYTES", 1 << 20)
    monkeypatch.setattr(demo.run_demo, "__defaults__", (Settings(dim=8, epochs=1, block_words=20_000), print))
    for argv in our_commands():
        small = ["--rows", "100", "--table-bytes", "262144"] if argv[0] == "bench" else []
        assert not app([*argv, *small], standalone_mode=False), argv
    assert (tmp_path / "words.png").stat().st_size > 1000
    assert (tmp_path / "report" / "report.md").exists()
    assert load(torch.device("cpu")) is not None, "calibrate has kept what it measured"


@pytest.mark.slow
def test_what_measures_at_its_own_sizes(tmp_path):
    for argv in our_commands():
        if argv[0] in ("bench", "calibrate"):
            program = [sys.executable, "-m", "speedtransfer", *argv]  # what is measured must not reach other tests
            result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
            assert result.returncode == 0, f"{argv}: {result.stderr}"


def test_it_is_short():
    assert len(README.splitlines()) <= 150


def test_every_make_target_named_exists():
    named = {word for line in commands() if line.startswith("make ") for word in shlex.split(line)[1:]}
    named |= set(re.findall(r"`make ([a-z-]+)`", README))
    assert {"demo", "test"} <= named
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


def test_figures_are_those_of_the_results(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    assert importlib.import_module("readme").main(check=True) == 0, capsys.readouterr().err
