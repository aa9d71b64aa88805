"""The commands as a user types them: settings, files left behind, exit codes, nothing half done.

What the flags of corpora, models and optimizers do, `test_docs` runs, and `test_cli` what is refused.
"""

import errno
import json
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from late import models
from typer.testing import CliRunner

from speedtransfer.checkpoint import save_checkpoint
from speedtransfer.errors import HostMemoryError, InvalidValueError, StorageError
from speedtransfer.tables import MEMORIES, write_lock
from speedtransfer.word2vec import NgramVectors, Settings, Vectors, Vocabulary, run_folder
from speedtransfer.word2vec.commands import app, described, read_config
from speedtransfer.word2vec.run_folder import run_demo
from speedtransfer.word2vec.settings import SETTINGS
from speedtransfer.word2vec.trainer import Trainer

QUICK = ["--dim", "8", "--epochs", "1", "--device", "cpu", "--quiet"]
TRAIN = ["train", "corpus.txt", "-o", "out"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = np.random.default_rng(0).integers(0, 50, 3000)
    Path("corpus.txt").write_text(" ".join(f"w{n}" for n in words))
    return tmp_path


def run(*arguments, **kwargs):
    return CliRunner().invoke(app, list(map(str, arguments)), **kwargs)


def succeeds(*arguments, **kwargs):
    result = run(*arguments, **kwargs)
    assert result.exit_code == 0, result.output
    return result


def fails_with(kind, message, *arguments):
    """The command line turns these errors into one line and exit code 2 (tests/test_cli.py)."""
    result = run(*arguments)
    assert isinstance(result.exception, kind), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert result.stdout == ""


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def facts_of(folder):
    return json.loads(Path(folder, "settings.json").read_text())


def test_train(folder):
    result = succeeds("train", "corpus.txt", "-o", "new/out", *QUICK)
    for part in ("50 words,", "rows moved:", f"vectors: {Path('new/out/vectors.txt')}"):
        assert part in result.stdout
    assert names("new/out") == ["settings.json", "vectors.txt", "vocab.txt"]
    assert (names(folder), names("new")) == (["corpus.txt", "new"], ["out"])  # nothing else is left
    vocabulary, vectors = Vocabulary.load("new/out/vocab.txt"), Vectors.load("new/out/vectors.txt")
    assert vectors.words == vocabulary.words
    assert (len(vectors), vectors.dim, vocabulary.num_words) == (50, 8, 3000)
    theirs = models.KeyedVectors.load_word2vec_format("new/out/vectors.txt", fvocab="new/out/vocab.txt")
    assert theirs.get_vecattr(vocabulary.words[0], "count") == vocabulary.counts[0]
    facts = facts_of("new/out")
    assert facts["settings"]["lr"] == Settings().first_lr
    assert (facts["corpus"], facts["corpus_words"], facts["vocabulary_words"]) == ("corpus.txt", 3000, 50)
    assert facts["steps"] == facts["of_steps"]
    assert set(facts["settings"]) == set(SETTINGS)
    assert facts["versions"].keys() == {"speedtransfer", "torch", "numpy", "numba"}
    assert (facts["device"], facts["threads"]) == ("cpu", torch.get_num_threads())
    succeeds("train", "-", "-o", "piped", *QUICK, "--format", ".BIN", input=Path("corpus.txt").read_bytes())
    assert Vectors.load("piped/vectors.bin").matrix.tobytes() == vectors.matrix.tobytes()


def test_output_folder_that_exists(folder):
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("precious")
    Path("out/vectors.bin").write_text("of an earlier run")
    message = "output folder 'out' exists; choose another folder or pass --overwrite"
    fails_with(InvalidValueError, message, "train", "missing.txt", "-o", "out", *QUICK)
    fails_with(InvalidValueError, message, "demo", "-o", "out")
    fails_with(StorageError, "'missing.txt' does not exist", "train", "missing.txt", "-o", "out", "--overwrite", *QUICK)
    assert Path("out/vectors.bin").read_text() == "of an earlier run"
    succeeds(*TRAIN, "--overwrite", *QUICK)
    assert names("out") == ["settings.json", "thesis.tex", "vectors.txt", "vocab.txt"]
    assert Path("out/thesis.tex").read_text() == "precious"


def test_what_cannot_be(folder):
    fails_with(InvalidValueError, "exists and is a file", "train", "corpus.txt", "-o", "corpus.txt", *QUICK)
    fails_with(StorageError, "cannot write vectors", "train", "corpus.txt", "-o", "corpus.txt/out", *QUICK)
    fails_with(InvalidValueError, "ends in '.text' but vectors are .txt, .vec,", *TRAIN, "--format", "text", *QUICK)
    fails_with(InvalidValueError, "option 'momentum' is no name=value", *TRAIN, "--option", "momentum", *QUICK)
    fails_with(InvalidValueError, "needs a dim of 2 at least", *TRAIN, "--format", "glove", *QUICK, "--dim", 1)
    # As of a variable of the shell without a value; it is no Path(".").
    empty = run("train", "corpus.txt", "-o", "", "--overwrite", *QUICK)
    assert empty.exit_code == 2
    assert "output is empty" in empty.output
    assert names(folder) == ["corpus.txt"]


def test_an_output_folder_beside_what_it_must_be_apart_from(folder):
    """A corpus of which vectors would be read as text; an earlier run, where the next is refused; and a run under way."""
    Path("texts/.old").mkdir(parents=True)
    Path("texts/a.txt").write_text("sea sky " * 300)
    Path("texts/.old/a.txt").write_text("hidden " * 300)
    for output in ("texts/out", "texts"):
        fails_with(InvalidValueError, "lie in each other", "train", "texts", "-o", output, "--overwrite", *QUICK)
    succeeds("train", "texts", "-o", "out", *QUICK, "--resume")
    assert Vocabulary.load("out/vocab.txt").words == ["sea", "sky"]
    before = names("out")
    for error, *flags in ((HostMemoryError, "--shared-negatives", 10**12), (InvalidValueError, "--memory", "shared")):
        fails_with(error, "", "train", "texts", "-o", "out", "--overwrite", *QUICK, *flags)
        assert names("out") == before
    assert "checkpoint" in before
    # As of another process, which has opened the file by itself.
    with run_folder._alone(Path("out").absolute()), Path(next(Path().glob(".out-*.lock"))).open("r+") as lock:
        held = write_lock._held.copy()
        write_lock._held.clear()
        fails_with(
            StorageError, "another run is writing to 'out'", "train", "texts", "-o", "out", "--overwrite", *QUICK
        )
        write_lock._held.update(held)
        assert lock.readable()
    assert names(folder) == ["corpus.txt", "out", "texts"]


def test_demo(folder, monkeypatch):
    """Without its picture, which tests/test_docs.py has drawn."""
    lines = []
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    quick = Settings(dim=8, epochs=1, block_words=20_000, max_words=2000, device="cpu")
    run_demo(Path("demo"), False, quick, lines.append)
    assert lines[-2].startswith("picture: none (plots need matplotlib")
    assert lines[-1] == "next: speedtransfer word2vec analogy demo china chinese france"
    for part in ("words/s", "france", "vectors: demo"):
        assert part in "\n".join(lines)
    assert len(Vectors.load("demo")) == 2000


# --- settings ---------------------------------------------------------------------------------------------------------

TOML = """
dim = 12
optimizer = "sgd"
lr = 0.001
epochs = 1
sample = 0
[options]
momentum = 0.9
nesterov = true
"""


def test_every_setting_is_described_on_the_command_line():
    text = " ".join(CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "250"}).output.split())
    assert set(SETTINGS["memory"].metadata["choices"]) == {"auto", *MEMORIES, "shared"}
    for name in SETTINGS:
        assert described(name), name
        if name != "options":
            assert f"--{name.replace('_', '-')} " in text
            assert described(name)[:30] in text


def test_file_wins_over_defaults_and_flags_over_the_file(folder):
    Path("run.toml").write_text("\ufeff" + TOML, encoding="utf-8")
    Path("run.json").write_text('{"settings": {"epochs": null, "block_words": null, "options": null}}')
    assert Settings(**read_config("run.json")) == Settings()
    assert read_config("run.toml") == {
        "dim": 12, "optimizer": "sgd", "lr": 0.001, "epochs": 1, "sample": 0.0,
        "options": {"momentum": 0.9, "nesterov": True},
    }  # fmt: skip
    arguments = [*TRAIN, "--config", "run.toml", "--device", "cpu", "--quiet"]
    succeeds(*arguments)
    # 3,000 words are too few for larger blocks, and settings.json has what was chosen.
    settings = Settings(**read_config("run.toml"), block_words=32, device="cpu").as_dict()
    assert facts_of("out")["settings"] == settings
    # One of the flags has the value of the default: it was given all the same.
    flags = ["--dim", Settings.dim, "--lr", "0.002", "--option", "momentum=0.5", "--option", "nesterov=False"]
    succeeds(*arguments, "--overwrite", *flags)
    changed = {"dim": Settings.dim, "lr": 0.002, "options": {"momentum": 0.5, "nesterov": False}}
    assert facts_of("out")["settings"] == settings | changed


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_vectors_are_saved_waits_until_they_are(folder, monkeypatch, fresh_signals, number):
    save = Vocabulary.save
    monkeypatch.setattr(Vocabulary, "save", lambda *given: (signal.raise_signal(number), save(*given)))
    assert run(*TRAIN, *QUICK).exit_code == 128 + number
    assert len(Vectors.load("out")) == 50
    assert names(folder) == ["corpus.txt", "out"]


# --- no room ----------------------------------------------------------------------------------------------------------


def fill_disk(monkeypatch, *folders):
    """Let no vectors be saved below these."""
    save = Vocabulary.save

    def save_or_fail(self, path):
        if any(path.resolve().is_relative_to(full.resolve()) for full in folders):
            path.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path)

    monkeypatch.setattr(Vocabulary, "save", save_or_fail)


def test_a_full_disk_does_not_lose_the_vectors(folder, monkeypatch, tmp_path_factory):
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    fill_disk(monkeypatch, folder)
    message = "cannot write the vectors to 'out' (No space left on device); the vectors are in '"
    fails_with(StorageError, message + str(temporary), *TRAIN, *QUICK)
    (kept,) = temporary.glob("speedtransfer-vectors-*")
    assert names(kept) == ["settings.json", "vectors.txt", "vocab.txt"]
    assert len(Vectors.load(kept)) == 50
    fill_disk(monkeypatch, folder, temporary)
    fails_with(StorageError, "(No space left on device), nor to ", *TRAIN, *QUICK)
    assert (names(folder), list(temporary.glob("speedtransfer-*"))) == (["corpus.txt"], [kept])


def test_a_folder_that_another_run_fills_meanwhile_is_left_alone(folder, monkeypatch):
    save = Vocabulary.save

    def save_late(*given):
        Path("out").mkdir()
        Path("out/vectors.txt").write_text("of the other")
        monkeypatch.setattr(Vocabulary, "save", save)
        save(*given)

    monkeypatch.setattr(Vocabulary, "save", save_late)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    fails_with(StorageError, "another run has filled the folder 'out' meanwhile; the vectors are in", *TRAIN, *QUICK)
    assert Path("out/vectors.txt").read_text() == "of the other"


def test_vectors_of_words_that_the_corpus_did_not_have(folder):
    words = ["riverbank", "river", "riverside", "stone", "stones", "milestone"]
    Path("words.txt").write_text(" ".join(words[(i * i + i // 5) % 6] for i in range(3000)))
    arguments = ["train", "words.txt", "-o", "run", "--buckets", "50", "--min-n", "3", "--max-n", "4", *QUICK]
    assert "n-grams: run/ngrams.safetensors" in succeeds(*arguments).stdout
    assert names("run") == ["ngrams.safetensors", "settings.json", "vectors.txt", "vocab.txt"]
    vectors, ngrams = Vectors.load("run/vectors.txt"), NgramVectors.load("run/ngrams.safetensors")
    assert (ngrams.matrix.shape, ngrams.min_n, ngrams.max_n) == ((50, 8), 3, 4)
    expected = {"riverstone": vectors.most_similar(ngrams["riverstone"], 3), "river": vectors.most_similar("river", 3)}
    shown = [
        f"{word}: {', '.join(f'{near} {cosine:.3f}' for near, cosine in found)}" for word, found in expected.items()
    ]
    for where in ("run", "run/vectors.txt"):
        assert run("nearest", where, "riverstone", "river", "-n", 3).stdout.splitlines() == shown
    fails_with(KeyError, "'' is not among", "nearest", "run", "riverstone", "")
    succeeds(*arguments[:4], "--overwrite", *QUICK)  # without n-grams now
    assert names("run") == ["settings.json", "vectors.txt", "vocab.txt"]
    fails_with(KeyError, "'riverstone' (did you mean ", "nearest", "run", "riverstone")


# --- one run, one folder ----------------------------------------------------------------------------------------------


def test_a_run_is_started_and_resumed_in_its_folder(folder, monkeypatch, fresh_signals):
    """What a signal interrupted goes on with --resume alone, and ends with the bits of a run without a break."""
    arguments = ["train", "corpus.txt", "--dim", "8", "--device", "cpu", "--quiet", "--memory", "mmap", "--epochs", "3"]
    succeeds(*arguments, "-o", "whole")
    step = Trainer.train_step
    with monkeypatch.context() as patch:
        patch.setattr(
            Trainer,
            "train_step",
            lambda trainer: (step(trainer), trainer.step == 9 and signal.raise_signal(signal.SIGINT)),
        )
        stopped = run(*arguments, "-o", "run")
    assert (stopped.exit_code, "vectors: run" in stopped.stdout) == (130, True)
    assert "stopped at 12% (epoch 1 of 3): the vectors so far are kept" in stopped.stderr
    assert {"checkpoint", "tables", "vectors.txt"} <= set(names("run"))
    assert facts_of("run")["steps"] == 9
    fails_with(InvalidValueError, "pass --resume to go on or --overwrite", *arguments, "-o", "run")
    fails_with(InvalidValueError, "dim is 9 but the checkpoint", *arguments, "-o", "run", "--resume", "--dim", "9")
    Path("run").rename("moved")
    succeeds(*arguments, "-o", "moved", "--resume", "--curves")
    assert Path("moved/vectors.txt").read_bytes() == Path("whole/vectors.txt").read_bytes()
    assert names(folder) == ["corpus.txt", "moved", "whole"]
    assert names("moved") == ["checkpoint", "settings.json", "tables", "tensorboard", "vectors.txt", "vocab.txt"]
    assert names("whole") == ["settings.json", "tables", "vectors.txt", "vocab.txt"]  # it was not stopped
    assert names("whole/tables") == ["input.safetensors", "output.safetensors"]
    succeeds("train", "corpus.txt", "-o", "two", "--config", "whole/settings.json", "--quiet")
    assert names("two/tables") == ["input.safetensors", "output.safetensors"]  # in its own folder


def test_what_was_chosen_from_the_corpus_is_written_down_and_holds_when_a_run_is_resumed(folder):
    """Also where another version would choose otherwise; a value that is given must be that of the checkpoint."""
    Path("few.txt").write_text("one two three four five six " * 50)
    arguments = ["train", "few.txt", "--resume", "--dim", "8", "--device", "cpu", "--quiet"]
    # Subsampling leaves fewer than 32 of 300 words.
    assert "6 words, 50 steps of 32 words (epochs: 50), " in succeeds(*arguments, "-o", "run").stdout
    vectors, settings = Path("run/vectors.txt").read_bytes(), facts_of("run")["settings"]
    assert (settings["epochs"], settings["block_words"]) == (50, 32)
    succeeds("train", "few.txt", "-o", "same", "--config", "run/settings.json", "--quiet")
    assert (Path("same/vectors.txt").read_bytes(), facts_of("same")["settings"]) == (vectors, settings)
    succeeds(*arguments, "-o", "out", "--epochs", "2", "--block-words", "64")
    vectors, settings = Path("out/vectors.txt").read_bytes(), facts_of("out")["settings"]
    for chosen in (["--epochs", "2"], []):
        succeeds(*arguments, "-o", "out", *chosen)
        assert (Path("out/vectors.txt").read_bytes(), facts_of("out")["settings"]) == (vectors, settings)
    fails_with(InvalidValueError, "epochs is 3 but the checkpoint", *arguments, "-o", "out", "--epochs", "3")


def test_resume_starts_a_run_and_overwriting_leaves_nothing_of_it(folder):
    Path("out/tables").mkdir(parents=True)
    Path("out/tables/input.safetensors").write_text("of a run that was killed before it had saved anything")
    result = succeeds(*TRAIN, "--resume", "--memory", "mmap", "--curves", *QUICK)
    assert "there is no checkpoint in 'out/checkpoint' yet: training begins" in result.stderr
    Path("out/thesis.tex").write_text("precious")
    succeeds(*TRAIN, "--overwrite", "--seed", "2", *QUICK)
    assert names("out") == ["settings.json", "thesis.tex", "vectors.txt", "vocab.txt"]
    fails_with(InvalidValueError, "'out' holds a run but there is no checkpoint in", *TRAIN, "--resume", *QUICK)


def test_a_checkpoint_of_something_else_is_not_overwritten(folder):
    save_checkpoint("out/checkpoint", torch.nn.Linear(1, 1))
    before = names("out/checkpoint")
    for flag in ("--overwrite", "--resume"):
        fails_with(InvalidValueError, "is of no word2vec run; choose another", *TRAIN, flag, *QUICK)
    assert names("out/checkpoint") == before
