"""The example of training on one device and on several: a run of it, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import parallel
from parallel import DATA_PARALLEL, ONE, ORDINARY, SHARDED, SHARED

TINY = ["--quick", "--steps", "8"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("parallel") / "found.json"
    assert parallel.main([*TINY, "--json", str(file)]) == 0
    return json.loads(file.read_text(encoding="utf-8"))["runs"]


def test_losses_are_those_of_one_process(runs):
    assert list(runs) == [ONE, DATA_PARALLEL, ORDINARY, SHARDED, SHARED]
    one = runs[ONE]["losses"]
    assert len(one) == 8
    assert one[-1] < one[0]
    assert runs[DATA_PARALLEL]["losses"] == one
    for kind in (ORDINARY, SHARDED, SHARED):
        assert runs[kind]["losses"] == pytest.approx(one, rel=1e-5)
        assert runs[kind]["differences"] == [abs(a - b) for a, b in zip(runs[kind]["losses"], one, strict=True)]
        assert runs[kind]["difference"] == max(runs[kind]["differences"])
        assert runs[kind]["step_s"] > 0


def test_each_process_has_its_part(runs):
    for kind, each, processes in ((ONE, 64, 1), (DATA_PARALLEL, 64, 1), (ORDINARY, 32, 2), (SHARDED, 32, 2)):
        assert runs[kind]["sizes"] == [[["cpu", [each, 5], [each, 1]]]] * processes
    assert runs[ORDINARY]["rows"] == [100, 100]
    assert runs[SHARDED]["rows"] == [50, 50]
    text = parallel.sentence(SHARDED, runs[SHARDED])
    assert "process 1 of 2, cpu: input (32, 5), output (32, 1), 50 rows" in text
    assert "largest difference from one process" in text


def test_other_losses_are_an_error(monkeypatch, capsys):
    about = {"losses": [2.0, 1.0], "step_s": 1.0, "sizes": [], "rows": []}
    found = {ONE: {**about, "difference": 0.0}, SHARDED: {**about, "difference": 0.001}}
    monkeypatch.setattr(parallel, "train_all", lambda args: found)
    assert parallel.main(TINY) == 1
    assert "error: the losses of DDP, sharded are not those of one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "1"], "--processes is 1 but must be at least 2"),
        (["--batch", "63"], "--batch is 63 but must be a multiple of --processes, 2"),
        (["--steps", "0"], "--steps is 0 but must be at least 1"),
        (["--rows", "x"], "invalid int"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        parallel.main([*TINY, *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_data_parallel_in_a_line():
    assert "with no GPU it calls the model" in parallel.about_data_parallel(0)
    assert "with one GPU it calls the model" in parallel.about_data_parallel(1)
    assert "to 4 GPUs in every forward; with nn.Embedding" in parallel.about_data_parallel(4)
