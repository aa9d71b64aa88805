"""Settings: the files that hold them and the signatures made from them; arguments that are refused before anything is read."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from speedtransfer.tables import MEMORIES
from speedtransfer.word2vec import Settings, train
from speedtransfer.word2vec.commands import app, described, read_config
from speedtransfer.word2vec.settings import SETTINGS, CorpusSettings, TrainingSettings


def test_memories_are_those_of_tables():
    assert set(SETTINGS["memory"].metadata["choices"]) == {"auto", *MEMORIES, "shared"}


def test_type_checkers_know_the_settings_that_are_taken_by_name():
    kinds, taken = get_type_hints(Settings), {**get_type_hints(TrainingSettings), **get_type_hints(CorpusSettings)}
    named = {"dim", "optimizer", "lr", "min_count", "max_words"}
    assert taken == {name: kind for name, kind in kinds.items() if name not in named}
    assert set(inspect.signature(train).parameters) >= named


def test_every_setting_is_described_on_the_command_line():
    text = " ".join(CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "250"}).output.split())
    for name in SETTINGS:
        assert described(name), name
        if name != "options":
            assert f"--{name.replace('_', '-')} " in text
            assert described(name)[:30] in text


# --- files ------------------------------------------------------------------------------------------------------------

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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("one two three four five six " * 50)
    Path("run.toml").write_text(TOML)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["train", "corpus.txt", "--quiet", "--device", "cpu", *map(str, arguments)])


def settings_of(folder):
    return json.loads(Path(folder, "settings.json").read_text())["settings"]


def test_file_wins_over_defaults(folder):
    Path("run.json").write_text('{"settings": {"epochs": null, "block_words": null, "options": null}}')
    assert Settings(**read_config("run.json")) == Settings()
    assert read_config("run.toml") == {
        "dim": 12, "optimizer": "sgd", "lr": 0.001, "epochs": 1, "sample": 0.0,
        "options": {"momentum": 0.9, "nesterov": True},
    }  # fmt: skip
    assert run("-o", "out", "--config", "run.toml").exit_code == 0
    settings = settings_of("out")
    # 300 words are too few for larger blocks, and settings.json has what was chosen.
    assert settings == Settings(**read_config("run.toml"), block_words=32, device="cpu").as_dict()
    assert settings["window"] == Settings.window


def test_flags_win_over_the_file(folder):
    # One of them has the value of the default: it was given all the same.
    flags = ["--dim", Settings.dim, "--lr", "0.002", "--option", "momentum=0.5"]
    assert run("-o", "out", "--config", "run.toml", *flags).exit_code == 0
    settings = settings_of("out")
    assert (settings["dim"], settings["lr"], settings["optimizer"]) == (Settings.dim, 0.002, "sgd")
    assert settings["options"] == {"momentum": 0.5, "nesterov": True}


def test_what_was_chosen_from_the_corpus_is_written_down_and_repeated(folder):
    result = run("-o", "out", "--dim", "8")
    settings = settings_of("out")
    assert (settings["epochs"], settings["block_words"]) == (50, 32)
    assert "6 words, 50 steps of 32 words (epochs: 50), " in result.stdout  # subsampling leaves fewer than 32 of 300
    assert run("-o", "same", "--config", "out/settings.json").exit_code == 0
    assert settings_of("same") == settings
    assert Path("same/vectors.txt").read_bytes() == Path("out/vectors.txt").read_bytes()
