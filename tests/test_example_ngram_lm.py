"""The example of a small GPT with n-gram tables: a run of it, what it writes, and what it refuses."""

from __future__ import annotations

import json
import lzma
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import speedtransfer as st

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from ngram_lm import run, training
from ngram_lm.comparison import PAIRS
from ngram_lm.contenders import CONTENDERS
from ngram_lm.data import END, UNKNOWN, DataError, batches, read_corpus, windows_of
from ngram_lm.pictures import save_pictures
from ngram_lm.settings import Settings

RUN = Path(run.__file__)
_SIZES = {"steps": 9, "batch": 2, "context": 8, "vocabulary": 40, "width": 8, "layers": 2, "rows": 50, "dim": 4}
TINY = [word for name, value in {**_SIZES, "attention-heads": 2}.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A few hundred words of seventy, a document a line."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = torch.Generator().manual_seed(0)
    words = (torch.rand(900, generator=draw) ** 2 * 70).long().tolist()
    lines = [" ".join(f"W{number}" for number in words[start : start + 30]) for start in range(0, 900, 30)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("dense", "lazy", "exact"), tuple(CONTENDERS)],
    ids=["some", "all"],
)
def test_a_run(text, tmp_path, names):
    """In float64, a process each: one test, as tests in other processes would run them all again."""
    folder = tmp_path / "deep" / "down"
    argv = [sys.executable, str(RUN), "--data", str(text), "--out", str(folder), "--dtype", "float64", *TINY]
    argv += ["--only", *names]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    check_contenders(folder, done.stdout, result, names)
    check_comparisons(done.stdout, result, names)
    check_memory(result, names)


def check_contenders(folder, out, result, names):
    assert result["complete"]
    assert list(CONTENDERS) == list(run.NAMES)
    assert tuple(result["contenders"]) == names
    for one in result["contenders"].values():
        assert one["complete"]
        assert len(one["losses"]) == 9
        assert one["validation"][-1][0] == 9
        assert one["peak_bytes"] > 50_000_000
        assert one["step_s"] > 0
    assert all(CONTENDERS[name].title in out for name in names)
    assert {path.name for path in folder.iterdir()} == {"results.json", "curves.png", "bars.png"}
    assert all(path.stat().st_size > 5000 for path in folder.glob("*.png"))
    # Something is learned, the tables take part, and all begin alike.
    losses = {name: one["losses"] for name, one in result["contenders"].items()}
    assert all(values[-1] < values[0] for values in losses.values())
    assert len({values[0] for values in losses.values()}) == 1
    assert "none" not in names or losses["none"][-1] != losses["dense"][-1]


def check_comparisons(out, result, names):
    found = {(one["contender"], one["to"]): one for one in result["comparisons"]}
    assert list(found) == [(name, other) for name, other, _ in PAIRS if {name, other} <= set(names)]
    for name in {name.removesuffix("-prefetch") for name in names if name.endswith("-prefetch")}:
        ahead = found[f"{name}-prefetch", name]
        assert ahead["losses_equal"]
        assert ahead["table_equal"]
        assert ahead["loss_difference"] == ahead["table_difference"] == 0
    exact, lazy = found["exact", "dense"], found["lazy", "dense"]
    assert exact["loss_difference"] <= 1e-14
    assert exact["table_difference"] <= 1e-11
    assert lazy["table_difference"] > 1e-3
    assert lazy["loss_difference"] > 1e-6
    assert not lazy["losses_equal"]
    assert ("losses and the table are the same bits" in out) == ("lazy-prefetch" in names)


def check_memory(result, names):
    rows = result["contenders"]["lazy"]["table_bytes"] // (3 * 4 * 8)
    assert rows >= 16 * 50
    found = {name: one["table_bytes"] for name, one in result["contenders"].items()}
    plain = rows * 3 * 4 * 8
    wanted = {
        "none": 0,
        # The optimizer's own count of steps.
        "dense": plain + 4,
        "sparse": plain,
        "lazy": plain,
        "lazy-prefetch": plain,
        "exact": plain + 4 * rows,
        "exact-prefetch": plain + 4 * rows,
    }
    assert found == {name: wanted[name] for name in names}


@pytest.mark.parametrize("name", [pytest.param("lazy", marks=pytest.mark.slow), "exact"])
def test_rows_are_read_ahead(text, monkeypatch, name):
    found, wait = [], st.nn.Ticket.wait

    def counted(*args):
        found.append(wait(*args))
        return found[-1]

    monkeypatch.setattr(st.nn.Ticket, "wait", counted)
    settings = Settings(
        steps=5, batch=2, context=8, vocabulary=40, width=8, layers=2, attention_heads=2, rows=50, dim=4
    )
    corpus, said = read_corpus(text, 40), []
    training.train(name, settings, corpus, said.append)
    assert not found
    training.train(f"{name}-prefetch", settings, corpus, said.append)
    assert len(found) == 5
    assert None not in found
    assert said[:5] == said[5:]


# --- errors and interruptions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--heads", "5"], "--heads is 5 but must be a multiple of the number of --orders, 2"),
        (["--width", "9"], "--width is 9 but must be a multiple of --attention-heads, 2"),
        (["--steps", "0"], "--steps is 0 but must be at least 1"),
        (["--lr", "nan"], "--lr is nan but must be at least 0"),
        (["--orders", "1"], "--orders is 1 but must be at least 2"),
        (["--orders", "2", "2"], "must be ascending numbers"),
        (["--orders", "3", "2"], "must be ascending numbers"),
        (["--batch", "1000"], "which is too short for batches of 1000 windows"),
        (["--context", "700"], "which is too short for batches of 2 windows of 700 tokens"),
        (["--data", "no-such.txt"], "no-such.txt cannot be read"),
        (["--data", "."], ". cannot be read"),
        (["--out", __file__], "File exists"),
    ],
)
def test_what_makes_no_sense_is_refused(text, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert run.main(["--data", str(text), "--out", str(tmp_path / "out"), *TINY, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.parametrize("arguments", [["--only", "dens"], ["--dtype", "float16"], ["--steps", "1.5"]])
def test_arguments_of_another_form_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(arguments)
    assert stop.value.code == 2
    assert "invalid" in capsys.readouterr().err


def test_damaged_files_are_refused(text, tmp_path):
    packed = tmp_path / "text.xz"
    packed.write_bytes(lzma.compress(text.read_bytes()))
    assert torch.equal(read_corpus(packed, 40).train, read_corpus(text, 40).train)
    for path, content in ((packed, packed.read_bytes()[:-20]), (tmp_path / "text.gz", b"not packed")):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            read_corpus(path, 40)


@pytest.mark.slow
def test_a_contender_that_takes_too_much_memory_is_left_out(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "available_bytes", lambda: 16 * 50 * 4 * 4 * 4)
    arguments = ["--data", str(text), "--out", str(tmp_path), *TINY, "--only", "dense", "none"]
    assert run.main(arguments) == 1
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert result["contenders"]["none"]["complete"]
    assert result["contenders"]["dense"]["error"] == "takes 51.2 kB of memory but 51.2 kB are free"
    assert "takes 51.2 kB" in capsys.readouterr().out


@pytest.mark.slow
def test_a_contender_that_fails_costs_no_other(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "_check", lambda *args: None)
    # No window to validate on, which `_check` would have found.
    assert (
        run.main(["--data", str(text), "--out", str(tmp_path), *TINY, "--context", "200", "--only", "none", "lazy"])
        == 1
    )
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert {name: one["complete"] for name, one in result["contenders"].items()} == {"none": False, "lazy": False}
    assert all("Error" in one["error"] for one in result["contenders"].values())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_there_is_is_kept_when_it_is_stopped(text, tmp_path, number):
    argv = [sys.executable, "-u", str(RUN), "--data", str(text), "--out", str(tmp_path), *TINY, "--steps", "100000"]
    argv += ["--only", "lazy", "exact"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("lazy: step 1 of 100,000, loss ")
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped; this is what there is" in err
    assert not Path(f"/proc/{child}").exists()
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert not result["complete"]
    assert list(result["contenders"]) == ["lazy"]
    steps = len(result["contenders"]["lazy"]["losses"])
    assert 0 < steps < 100_000
    assert f"(stopped after {steps:,} steps)" in out
    assert (tmp_path / "curves.png").exists()


# --- the text -----------------------------------------------------------------------------------------------------------


def test_words_by_number(tmp_path):
    path = tmp_path / "text.txt"
    lines = ["The cat sat", "the CAT ran", "the end"] * 10
    path.write_text("\n".join(lines), encoding="utf-8")
    corpus = read_corpus(path, 4)
    # The two most frequent words; all others are unknown.
    assert corpus.vocabulary == 4
    both = torch.cat([corpus.train, corpus.validation])
    assert both.tolist() == [2, 3, UNKNOWN, END, 2, 3, UNKNOWN, END, 2, UNKNOWN, END] * 10
    assert len(corpus.validation) == 11
    assert read_corpus(path, 1000).vocabulary == 2 + 5


def test_windows_overlap_by_one_token():
    windows = windows_of(torch.arange(10), 3)
    assert windows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    stream = batches(windows, 2, seed=0)
    seen = [next(stream) for _ in range(4)]
    assert all(batch.shape == (2, 4) for batch in seen)
    assert len({tuple(batch[:, 0].tolist()) for batch in seen}) > 1


def test_pictures_of_what_was_stopped_and_of_nothing(tmp_path):
    one = {"losses": [3.0, 2.0], "validation": [], "complete": False}
    base = {"settings": {"batch": 2, "context": 3}, "comparisons": []}
    assert list(save_pictures({**base, "contenders": {"lazy": one}}, tmp_path)) == []
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png"}
    assert list(save_pictures({**base, "contenders": {}}, tmp_path / "missing")) == []
    (problem,) = save_pictures({**base, "contenders": {"lazy": one}}, tmp_path / "missing")
    assert problem.startswith("no curves.png: ")


def test_the_shipped_text_has_a_vocabulary():
    corpus = read_corpus(None, 1000)
    assert corpus.vocabulary == 1000
    assert corpus.name == "world_factbook"
    assert len(corpus.train) > 9 * len(corpus.validation) - 10 > 500_000
    for part in corpus.train, corpus.validation:
        assert 0 <= int(part.min()) <= int(part.max()) < 1000
