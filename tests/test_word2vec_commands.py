"""The commands as a user types them: files left behind, exit codes, nothing half done."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import started_script
from late import models
from typer.testing import CliRunner

from speedtransfer.checkpoint import save_checkpoint
from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import NgramVectors, Settings, Vectors, Vocabulary, run_folder
from speedtransfer.word2vec.commands import app, in_flags
from speedtransfer.word2vec.demo import run_demo
from speedtransfer.word2vec.run_folder import OutputFolder
from speedtransfer.word2vec.settings import SETTINGS
from speedtransfer.word2vec.trainer import Trainer

QUICK = ["--dim", "8", "--epochs", "1", "--device", "cpu", "--quiet"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with a corpus."""
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(0).integers(0, 50, 3000)
    Path("corpus.txt").write_text(" ".join(f"w{n}" for n in words))
    return tmp_path


def run(*arguments, **kwargs):
    return CliRunner().invoke(app, list(map(str, arguments)), **kwargs)


def fails_with(kind, message, *arguments):
    """The command line turns these errors into one line and exit code 2 (tests/test_cli.py)."""
    result = run(*arguments)
    assert isinstance(result.exception, kind), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_train(folder):
    result = run("train", "corpus.txt", "-o", "new/out", *QUICK)
    assert result.exit_code == 0, result.output
    assert "50 words," in result.stdout
    assert "rows moved:" in result.stdout
    assert f"vectors: {Path('new/out/vectors.txt')}" in result.stdout
    out = folder / "new" / "out"
    assert names(out) == ["settings.json", "vectors.txt", "vocab.txt"]
    assert names(folder) == ["corpus.txt", "new"]  # nothing else is left
    assert names(folder / "new") == ["out"]

    vocabulary = Vocabulary.load(out / "vocab.txt")
    vectors = Vectors.load(out / "vectors.txt")
    assert vectors.words == vocabulary.words
    assert (len(vectors), vectors.dim, vocabulary.num_words) == (50, 8, 3000)
    theirs = models.KeyedVectors.load_word2vec_format(out / "vectors.txt", fvocab=out / "vocab.txt")
    assert theirs.get_vecattr(vocabulary.words[0], "count") == vocabulary.counts[0]
    facts = json.loads((out / "settings.json").read_text())
    assert facts["settings"]["lr"] == Settings().first_lr
    assert (facts["corpus"], facts["corpus_words"], facts["vocabulary_words"]) == ("corpus.txt", 3000, 50)
    assert facts["steps"] == facts["of_steps"]
    assert set(facts["settings"]) == set(SETTINGS)
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"].keys() == {"speedtransfer", "torch", "numpy", "numba"}
    assert (facts["device"], facts["threads"], facts["evaluation"]) == ("cpu", torch.get_num_threads(), [])


@pytest.mark.parametrize("format", ["kv", ".BIN"])
def test_formats(folder, format):
    result = run("train", "corpus.txt", "-o", "out", "--format", format, *QUICK)
    assert result.exit_code == 0, result.output
    assert len(Vectors.load(folder / "out" / f"vectors.{format.lower().lstrip('.')}")) == 50
    # A pickle must be named itself.
    named = "out/vectors.kv" if format == "kv" else "out"
    assert run("nearest", named, "w1").exit_code == 0


def test_train_from_standard_input(folder):
    result = run("train", "-", "-o", "out", *QUICK, input=Path("corpus.txt").read_bytes())
    assert result.exit_code == 0, result.output
    assert run("train", "corpus.txt", "-o", "again", *QUICK).exit_code == 0
    assert Path("out/vectors.txt").read_bytes() == Path("again/vectors.txt").read_bytes()


@pytest.mark.parametrize(
    ("content", "flags"),
    [
        ("a b\nb c\nc d\nd a\n", ["--kind", "graph", "--walks", "20", "--walk-length", "9", "--q", "0.5"]),
        ("a b 2\nb c 1\nc a 0.5\n", ["--kind", "graph"]),
        ("a b c\nd a\n", ["--kind", "adjacency"]),
        ("a b c d\nc d\n" * 9, ["--kind", "lines", "--model", "cbow"]),
        ("new york is new\n" * 9, ["--phrases", "1", "--phrase-threshold", "0.1", "--min-count", "1"]),
        ("river rivers water waters\n" * 9, ["--buckets", "100", "--min-n", "2", "--max-n", "4"]),
    ],
)
def test_kinds_of_corpora_and_models(folder, content, flags):
    Path("items.txt").write_text(content)
    result = run("train", "items.txt", "-o", "out", *flags, "--sample", "0", *QUICK)
    assert result.exit_code == 0, result.output
    words = Vectors.load("out/vectors.txt").words
    assert "new_york" in words if "--phrases" in flags else set(words) <= set(content.split())


@pytest.mark.parametrize("chosen", [["--epochs", "2"], ["--block-words", "64"], []])
def test_what_was_chosen_from_the_corpus_holds_when_a_run_is_resumed(folder, chosen):
    """Also where another version would choose otherwise; a value that is given must be that of the checkpoint."""
    # Without the number of epochs.
    arguments = ["train", "corpus.txt", "-o", "out", "--resume", *QUICK[:2], *QUICK[4:]]
    assert run(*arguments, "--epochs", "2", "--block-words", "64").exit_code == 0
    before = Path("out/vectors.txt").read_bytes()
    settings = json.loads(Path("out/settings.json").read_text())["settings"]
    assert run(*arguments, *chosen).exit_code == 0
    assert Path("out/vectors.txt").read_bytes() == before
    assert json.loads(Path("out/settings.json").read_text())["settings"] == settings
    fails_with(InvalidValueError, "epochs is 3 but the checkpoint", *arguments, "--epochs", "3")
    fails_with(InvalidValueError, "block_words is 32 but the", *arguments, "--block-words", "32")


def test_options_reach_the_optimizer(folder):
    arguments = ["--optimizer", "SGD", "--lr", "0.001", "--option", "momentum=0.9", "--option", "nesterov=true"]
    assert run("train", "corpus.txt", "-o", "out", *arguments, *QUICK).exit_code == 0
    settings = json.loads(Path("out/settings.json").read_text())["settings"]
    assert (settings["optimizer"], settings["lr"]) == ("SGD", 0.001)
    assert settings["options"] == {"momentum": 0.9, "nesterov": True}
    wrong = ["train", "corpus.txt", "-o", "x", "--option"]
    fails_with(InvalidValueError, "option 'momentum' is no name=value", *wrong, "momentum")
    fails_with(InvalidValueError, "it must be 2 numbers; pass for instance betas=[0.9, 0.999]", *wrong, "betas=0.9")


def test_messages_speak_of_flags():
    message = "device='cuda' needs CUDA; pass memory='mmap', min_count=1 or less, or the file 'dim=8.txt' or {'p': 1}"
    assert in_flags(message) == (
        "--device cuda needs CUDA; pass --memory mmap, --min-count 1 or less, or the file 'dim=8.txt' or {'p': 1}"
    )
    message = "pass a smaller block_words, a larger lr, or the files 'lr' and block_words.txt"
    assert in_flags(message) == "pass a smaller --block-words, a larger --lr, or the files 'lr' and block_words.txt"


def test_output_folder_that_exists(folder):
    out = folder / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    (out / "vectors.bin").write_text("of an earlier run")
    fails_with(
        InvalidValueError, "output folder 'out' exists; choose another folder or pass --overwrite",
        "train", "missing.txt", "-o", "out", *QUICK,
    )  # fmt: skip
    assert (out / "vectors.bin").read_text() == "of an earlier run"

    result = run("train", "corpus.txt", "-o", "out", "--overwrite", *QUICK)
    assert result.exit_code == 0, result.output
    assert names(out) == ["settings.json", "thesis.tex", "vectors.txt", "vocab.txt"]
    assert (out / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize(
    ("content", "arguments", "kind", "message"),
    [
        (b"", [], InvalidValueError, "'bad.txt' holds no words"),
        (b"\x89PNG\0\0\0", [], InvalidValueError, "'bad.txt' is no text: byte 4 is NUL"),
        (None, [], StorageError, "'bad.txt' does not exist"),
        (b"a b " * 50, ["--optimizer", "adamm"], InvalidValueError, "did you mean 'adam'"),
        (b"a b " * 50, ["--format", "text"], InvalidValueError, "format 'text' is unknown; did you mean 'txt'"),
    ],
)
def test_nothing_is_written_where_something_is_wrong(folder, content, arguments, kind, message):
    if content is not None:
        Path("bad.txt").write_bytes(content)
    before = names(folder)
    fails_with(kind, message, "train", "bad.txt", "-o", "out", *QUICK, *arguments)
    assert names(folder) == before
    Path("out").mkdir()
    Path("out/vectors.txt").write_text("old")
    fails_with(kind, message, "train", "bad.txt", "-o", "out", "--overwrite", *QUICK, *arguments)
    assert Path("out/vectors.txt").read_text() == "old"


def test_output_that_cannot_be(folder, monkeypatch):
    fails_with(InvalidValueError, "exists and is a file", "train", "corpus.txt", "-o", "corpus.txt", *QUICK)
    fails_with(
        (StorageError, NotADirectoryError), "cannot make output folder", "train", "corpus.txt", "-o", "corpus.txt/out", *QUICK
    )  # fmt: skip
    monkeypatch.setattr(os, "access", lambda *args: False)
    Path("out").mkdir()
    with pytest.raises(StorageError, match=r"cannot make output folder 'out' \(Permission denied\)"):
        OutputFolder("out", True)


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo(folder, monkeypatch):
    quick = Settings(dim=8, epochs=1, block_words=20_000, max_words=2000, device="cpu")
    lines = []
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        run_demo("demo", quick, lines.append)
    assert lines[-2].startswith("picture: none (plots need matplotlib")
    assert names(folder / "demo") == ["settings.json", "vectors.txt", "vocab.txt"]
    lines.clear()
    run_demo("demo", quick, lines.append)  # people run it twice
    assert names(folder / "demo") == ["settings.json", "vectors.txt", "vocab.txt", "words.png"]
    text = "\n".join(lines)
    assert lines[-1] == "next: speedtransfer word2vec analogy demo china chinese france"
    for part in ("World Factbook: dim 8, adamw", "words/s", "france", "rows moved:", "vectors: demo", "picture: demo"):
        assert part in text
    assert len(Vectors.load("demo/vectors.txt")) == 2000


def test_demo_refuses_a_folder_with_other_things(folder):
    Path("demo").mkdir()
    Path("demo/thesis.tex").write_text("precious")
    fails_with(
        InvalidValueError, "output folder 'demo' holds 'thesis.tex', not created by speedtransfer", "demo", "-o", "demo"
    )
    assert names(folder / "demo") == ["thesis.tex"]


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="a signal of the terminal")
@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGINT, "default_int_handler"),
        pytest.param(signal.SIGTERM, "default_int_handler", marks=pytest.mark.slow),
        (signal.SIGTERM, "SIG_IGN"),  # as in the background jobs of a script
    ],
)
def test_a_signal_saves_and_is_reported(folder, number, handler):
    # SIGINT as a terminal has it, also where the tests run in the background and it is ignored; or ignored.
    code = (
        f"import signal; signal.signal(signal.SIGINT, signal.{handler}); from speedtransfer import cli; "
        "from speedtransfer.word2vec import progress as p; p.LINE_EVERY_S = 0.05; cli.main()"
    )
    flags = ["--dim", "8", "--epochs", "1000000"]
    with started_script(code, "word2vec", "train", "corpus.txt", "-o", "out", *flags) as script:
        script.wait_for(lambda: "\nepoch" in script.err)  # training has begun
        if handler == "SIG_IGN":
            os.kill(script.process.pid, signal.SIGINT)
            before = script.err.count("\nepoch")
            script.wait_for(lambda: script.err.count("\nepoch") > before + 1)  # it goes on
        os.kill(script.process.pid, number)
        script.process.join(100)
        out, err = script.out, script.err
    assert script.process.exitcode == 128 + number, err
    assert ("stopped at 0%" if number == signal.SIGINT else "stopped by SIGTERM at 0%") in err
    assert "Traceback" not in err
    assert "aborted" not in err  # it came to an orderly end
    assert "vectors: out" in out
    assert names(folder) == ["corpus.txt", "out"]
    assert names(folder / "out") == ["checkpoint", "settings.json", "vectors.txt", "vocab.txt"]
    assert len(Vectors.load(folder / "out" / "vectors.txt")) == 50
    facts = json.loads((folder / "out" / "settings.json").read_text())
    assert 0 < facts["steps"] < facts["of_steps"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_vectors_are_saved_waits_until_they_are(folder, monkeypatch, fresh_signals, number):
    save = run_folder.save_run
    monkeypatch.setattr(run_folder, "save_run", lambda *args: (signal.raise_signal(number), save(*args)))
    result = run("train", "corpus.txt", "-o", "out", *QUICK)
    assert result.exit_code == 128 + number
    assert len(Vectors.load(folder / "out" / "vectors.txt")) == 50
    assert names(folder) == ["corpus.txt", "out"]


# --- no room ----------------------------------------------------------------------------------------------------------


def full_disk(monkeypatch, *folders):
    """No file can be saved below these."""
    save = run_folder.save_run

    def save_run(folder, *args):
        if any(folder.resolve().is_relative_to(full.resolve()) for full in folders):
            (folder / "vectors.txt").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(folder, *args)

    monkeypatch.setattr(run_folder, "save_run", save_run)


@pytest.mark.parametrize("elsewhere", ["beside the corpus", "for temporary files"])
def test_a_full_disk_does_not_lose_the_vectors(folder, monkeypatch, elsewhere, tmp_path_factory):
    temporary, data = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("data")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    corpus = Path("corpus.txt").rename(data / "corpus.txt")
    full, place = ([folder], data) if elsewhere == "beside the corpus" else ([folder, data], temporary)
    full_disk(monkeypatch, *full)
    result = run("train", corpus, "-o", "out", *QUICK)
    assert isinstance(result.exception, StorageError), result.output
    (kept,) = place.glob("speedtransfer-vectors-*")
    assert str(result.exception) == (
        f"cannot write the vectors to 'out' (No space left on device); the vectors are in {str(kept)!r} instead"
    )
    assert names(kept) == ["settings.json", "vectors.txt", "vocab.txt"]
    assert len(Vectors.load(kept / "vectors.txt")) == 50
    assert names(folder) == []
    assert names(data) == sorted({"corpus.txt", *([kept.name] if place == data else [])})


def test_no_room_anywhere(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    full_disk(monkeypatch, folder)
    fails_with(StorageError, "nor could they be written beside", "train", "corpus.txt", "-o", "out", *QUICK)
    assert names(folder) == ["corpus.txt"]


def test_vectors_of_words_that_the_corpus_did_not_have(folder):
    words = ["riverbank", "river", "riverside", "stone", "stones", "milestone"]
    Path("words.txt").write_text(" ".join(words[(i * i + i // 5) % 6] for i in range(3000)))
    arguments = ["train", "words.txt", "-o", "run", "--buckets", "50", "--min-n", "3", "--max-n", "4", *QUICK]
    result = run(*arguments)
    assert "n-grams: run/ngrams.safetensors" in result.stdout
    assert names(folder / "run") == ["ngrams.safetensors", "settings.json", "vectors.txt", "vocab.txt"]
    vectors, ngrams = Vectors.load("run/vectors.txt"), NgramVectors.load("run/ngrams.safetensors")
    assert (ngrams.matrix.shape, ngrams.min_n, ngrams.max_n) == ((50, 8), 3, 4)
    expected = vectors.most_similar(ngrams["riverstone"], 3)
    known = vectors.most_similar("river", 3)
    shown = ["riverstone: " + ", ".join(f"{word} {cosine:.3f}" for word, cosine in expected)]
    shown.append("river: " + ", ".join(f"{word} {cosine:.3f}" for word, cosine in known))
    for where in ("run", "run/vectors.txt"):
        assert run("nearest", where, "riverstone", "river", "-n", 3).stdout.splitlines() == shown
    fails_with(KeyError, "'' is not among", "nearest", "run", "riverstone", "")
    result = run(*arguments[:4], "--overwrite", *QUICK)  # without n-grams now
    assert names(folder / "run") == ["settings.json", "vectors.txt", "vocab.txt"]
    fails_with(KeyError, "'riverstone' is not among", "nearest", "run", "riverstone")


# --- one run, one folder ----------------------------------------------------------------------------------------------


def test_a_run_is_started_and_resumed_in_its_folder(folder, monkeypatch, fresh_signals):
    """What a signal interrupted goes on with --resume alone, and ends with the bits of a run without a break."""
    arguments = ["train", "corpus.txt", "--dim", "8", "--device", "cpu", "--quiet", "--memory", "mmap", "--epochs", "3"]
    assert run(*arguments, "-o", "whole").exit_code == 0
    step = Trainer.train_step
    with monkeypatch.context() as patch:
        patch.setattr(
            Trainer,
            "train_step",
            lambda trainer: (step(trainer), trainer.step == 9 and signal.raise_signal(signal.SIGTERM)),
        )
        assert run(*arguments, "-o", "run").exit_code == 143
    assert {"checkpoint", "tables", "vectors.txt"} <= set(names(folder / "run"))
    assert json.loads(Path("run/settings.json").read_text())["steps"] == 9
    fails_with(InvalidValueError, "pass --resume to go on or --overwrite", *arguments, "-o", "run")
    fails_with(InvalidValueError, "dim is 9 but the checkpoint", *arguments, "-o", "run", "--resume", "--dim", "9")
    Path("run").rename("moved")
    result = run(*arguments, "-o", "moved", "--resume", "--curves")
    assert result.exit_code == 0, result.output
    assert "note" not in result.stderr
    assert Path("moved/vectors.txt").read_bytes() == Path("whole/vectors.txt").read_bytes()
    assert names(folder) == ["corpus.txt", "moved", "whole"]
    assert names(folder / "moved") == [
        "checkpoint", "settings.json", "tables", "tensorboard", "vectors.txt", "vocab.txt",
    ]  # fmt: skip
    assert names(folder / "whole") == ["settings.json", "tables", "vectors.txt", "vocab.txt"]  # it was not stopped
    assert names(folder / "whole" / "tables") == ["input.safetensors", "output.safetensors"]


def test_resume_starts_a_run_and_overwriting_leaves_nothing_of_it(folder):
    arguments = ["train", "corpus.txt", "-o", "run", *QUICK]
    result = run(*arguments, "--resume", "--memory", "mmap", "--curves")
    assert result.exit_code == 0, result.output
    assert "there is no checkpoint in 'run/checkpoint' yet: training begins" in result.stderr
    Path("run/thesis.tex").write_text("precious")
    assert run(*arguments, "--overwrite", "--seed", "2").exit_code == 0
    assert names(folder / "run") == ["settings.json", "thesis.tex", "vectors.txt", "vocab.txt"]
    Path("run/thesis.tex").unlink()
    fails_with(InvalidValueError, "'run' holds a run but there is no checkpoint in", *arguments, "--resume")


def test_resumed_where_nothing_was_saved_before_the_run_was_killed(folder):
    Path("run/tables").mkdir(parents=True)
    Path("run/tables/input.safetensors").write_text("half")
    result = run("train", "corpus.txt", "-o", "run", "--resume", "--memory", "mmap", *QUICK)
    assert result.exit_code == 0, result.output
    assert len(Vectors.load("run/vectors.txt")) == 50


def test_a_checkpoint_of_something_else_is_not_overwritten(folder):
    save_checkpoint("run/checkpoint", torch.nn.Linear(1, 1))
    before = names(folder / "run" / "checkpoint")
    for flag in ("--overwrite", "--resume"):
        fails_with(
            InvalidValueError, "is of no word2vec run; choose another", "train", "corpus.txt", "-o", "run", flag, *QUICK
        )
    assert names(folder / "run" / "checkpoint") == before


def test_settings_of_a_run_with_tables_in_its_folder_are_for_other_folders_too(folder):
    assert run("train", "corpus.txt", "-o", "one", "--memory", "mmap", *QUICK).exit_code == 0
    result = run("train", "corpus.txt", "-o", "two", "--config", "one/settings.json", "--quiet")
    assert result.exit_code == 0, result.output
    assert names(folder / "two" / "tables") == ["input.safetensors", "output.safetensors"]


def test_tables_may_lie_elsewhere(folder):
    result = run("train", "corpus.txt", "-o", "out", "--memory", "mmap", "--path", "t", *QUICK)
    assert result.exit_code == 0, result.output
    assert names(folder) == ["corpus.txt", "out", "t"]
    assert names(folder / "out") == ["settings.json", "vectors.txt", "vocab.txt"]
    assert names(folder / "t")
    within = ["train", "corpus.txt", "-o", "run", "--memory", "mmap", "--path", "run/own", "--resume", *QUICK]
    for _ in range(2):  # what the first leaves there is no stranger to the second
        assert run(*within).exit_code == 0


# --- guards -----------------------------------------------------------------------------------------------------------


def test_two_runs_at_once_into_one_folder(folder):
    """The second finds the folder filled when it ends: it neither replaces what is there nor loses what it has."""
    first, second = OutputFolder("out"), OutputFolder("out")
    for one, text in ((first, "first"), (second, "second")):
        one.fill(lambda staging, text=text: (staging / "vectors.txt").write_text(text))
    assert (Path("out/vectors.txt").read_text(), second.path) == ("first", Path("out-2"))
    assert Path("out-2/vectors.txt").read_text() == "second"
