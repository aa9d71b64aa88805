"""The example of training on one device and on several: a run of it, what it writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from parallel import run
from parallel.training import DATA_PARALLEL, KINDS, ONE, ORDINARY, SHARDED, SHARED

TINY = ["--quick", "--steps", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    assert run.main([*TINY, "--out", str(folder)]) == 0
    return folder


def test_losses_are_those_of_one_process(folder):
    runs = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    assert list(runs) == list(KINDS)
    one = runs[ONE]["losses"]
    assert len(one) == 8
    assert one[-1] < one[0]
    assert runs[DATA_PARALLEL]["losses"] == one
    for kind in (ORDINARY, SHARDED, SHARED):
        assert runs[kind]["losses"] == pytest.approx(one, rel=1e-5)
        assert runs[kind]["differences"] == [abs(a - b) for a, b in zip(runs[kind]["losses"], one, strict=True)]
        assert runs[kind]["difference"] == max(runs[kind]["differences"])
        assert runs[kind]["step_s"] > 0


def test_each_process_has_its_part(folder):
    runs = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    for kind, each, processes in ((ONE, 64, 1), (DATA_PARALLEL, 64, 1), (ORDINARY, 32, 2), (SHARDED, 32, 2)):
        assert runs[kind]["sizes"] == [[["cpu", [each, 5], [each, 1]]]] * processes
    assert runs[ORDINARY]["rows"] == [100, 100]
    assert runs[SHARDED]["rows"] == [50, 50]
    text = run.sentence(SHARDED, runs[SHARDED], 2)
    assert "process 1 of 2, cpu: input (32, 5), output (32, 1), 50 rows" in text
    assert "largest difference from one process" in text


def test_curves_for_tensorboard(folder):
    runs = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    events = EventAccumulator(str(folder / "tensorboard" / "DDP-sharded")).Reload()
    found = events.Scalars("loss")
    assert [one.step for one in found] == list(range(8))
    assert [one.value for one in found] == pytest.approx(runs[SHARDED]["losses"])
    assert len(list((folder / "tensorboard").iterdir())) == len(KINDS)
    assert (folder / "curves.png").stat().st_size > 5000


def test_other_losses_are_an_error(tmp_path, monkeypatch, capsys):
    losses = {ONE: [2.0, 1.0], SHARDED: [2.0, 1.001]}
    answers = {
        kind: {"losses": found, "step_s": 1.0, "sizes": [], "rows": [], "differences": apart, "difference": max(apart)}
        for kind, found in losses.items()
        for apart in [[abs(a - b) for a, b in zip(found, losses[ONE], strict=True)]]
    }
    monkeypatch.setattr(run, "_train", lambda *about: answers)
    assert run.main([*TINY, "--out", str(tmp_path)]) == 1
    assert "error: the losses of DDP, sharded are not those of one process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "1"], "--processes is 1 but must be at least 2"),
        (["--batch", "63"], "--batch is 63 but must be a multiple of --processes, 2"),
        (["--steps", "0"], "--steps is 0 but must be at least 1"),
        (["--lr", "nan"], "--lr is nan but must be at least 0"),
        (["--out", __file__], "File exists"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert run.main([*TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


def test_data_parallel_in_a_line():
    assert "with no GPU it calls the model" in run.about_data_parallel(0)
    assert "with one GPU it calls the model" in run.about_data_parallel(1)
    assert "to 4 GPUs in every forward; with nn.Embedding" in run.about_data_parallel(4)
