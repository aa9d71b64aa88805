"""Settings: their rules, the files that hold them, and the signatures made from them."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.testing import CliRunner

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.tables import MEMORIES
from speedtransfer.word2vec import Corpus, Settings, train
from speedtransfer.word2vec.commands import app
from speedtransfer.word2vec.config import described, read_config
from speedtransfer.word2vec.sampler import schedule_for
from speedtransfer.word2vec.settings import SETTINGS, Keywords


def test_memories_are_those_of_tables():
    assert set(SETTINGS["memory"].metadata["choices"]) == {"auto", *MEMORIES, "shared"}


def test_json_gives_the_settings_back():
    settings = Settings(
        optimizer="SGD", options={"momentum": 0.5}, memory="mmap", path=Path("a") / "b", device="cpu", p=2
    )
    values = json.loads(json.dumps(settings.as_dict()))
    assert Settings(**values).as_dict() == values
    assert (values["lr"], values["p"]) == (settings.first_lr, 2.0)


# --- signatures -------------------------------------------------------------------------------------------------------


def test_signature_shows_every_setting():
    parameters = inspect.signature(train).parameters
    kinds = get_type_hints(Settings)
    for name, field in SETTINGS.items():
        assert parameters[name].default == field.default
        assert parameters[name].annotation == kinds[name]
    assert list(parameters)[:4] == ["corpus", "dim", "optimizer", "lr"]
    assert "settings" not in parameters
    apart = {name: kinds.pop(name) for name in ("dim", "optimizer", "lr", "min_count", "max_words")}
    assert get_type_hints(Keywords) == kinds
    assert all(parameters[name].annotation == kind for name, kind in apart.items())


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
    Path("corpus.txt").write_text(Path("corpus.txt").read_text() * 100)
    assert run("-o", "again", "--config", "out/settings.json", "--epochs", "1").exit_code == 0
    assert settings_of("again") == {**settings, "epochs": 1}
    assert schedule_for(Settings(epochs=3, sample=0), Corpus("corpus.txt")) == (3, 64)  # what would be chosen anew


def test_help_tells_what_is_chosen_from_the_corpus():
    text = " ".join(CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "250"}).output.split())
    assert "chosen from the corpus; usually 5" in text
    assert "chosen from the corpus; usually 16384" in text
    assert "[default: (the optimizer's)]" in text
    groups = [
        "─ Corpus",
        "│ --kind",
        "─ Model",
        "│ --dim",
        "─ Training",
        "│ --epochs",
        "─ Optimizer",
        "│ --lr",
        "─ Memory",
    ]
    places = [text.index(f"{name} ") for name in groups]
    assert places == sorted(places)


def test_what_is_chosen_can_be_left_open_in_a_file(folder):
    Path("run.json").write_text('{"settings": {"epochs": null, "block_words": null, "options": null}}')
    assert read_config("run.json") == {"epochs": None, "block_words": None, "options": None}
    assert Settings(**read_config("run.json")) == Settings()
    assert run("-o", "out", "--config", "run.json", "--epochs", "1").exit_code == 0


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ("dims = 3", InvalidValueError, "config 'bad.toml' has 'dims', not a setting; did you mean 'dim'"),
        ("[training]\ndim = 3", InvalidValueError, "config 'bad.toml' has 'training', not a setting"),
        ("dim = '3'", InvalidTypeError, r"config 'bad.toml': dim is '3' \(str\) but must be an integer"),
        ("dim = 3.0", InvalidTypeError, r"config 'bad.toml': dim is 3.0 \(float\) but must be an integer"),
        ("lr = '1e-3'", InvalidTypeError, r"config 'bad.toml': lr is '1e-3' \(str\) but must be a number"),
        ("lr = nan", InvalidValueError, "config 'bad.toml': lr is nan but must be finite"),
        ("dim = 0", InvalidValueError, "config 'bad.toml': dim is 0 but must be at least 1"),
        ("options = 3", InvalidTypeError, "config 'bad.toml': options is 3 but must be a dict"),
        ("path = 3", InvalidTypeError, "config 'bad.toml': path is 3 "),
        ("optimizer = 'adm'", InvalidValueError, "config 'bad.toml': optimizer 'adm' is not in torch.optim"),
        ("dim =\nlr = 1", InvalidValueError, "config 'bad.toml' is no TOML: .*line 1"),
        ("dim = 3\ndim = 4", InvalidValueError, "config 'bad.toml' is no TOML: "),
        (b"\xff", InvalidValueError, "config 'bad.toml' is no UTF-8 text"),
        (None, StorageError, r"cannot read config 'bad.toml' \(No such file"),
    ],
)
def test_bad_files(folder, content, kind, message):
    if content is not None:
        Path("bad.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(kind, match=message) as caught:
        read_config("bad.toml")
    assert "\n" not in str(caught.value)
    assert isinstance(run("-o", "out", "--config", "bad.toml").exception, kind)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "'s.json' is no JSON: "),
        ("[" * 100_000, "'s.json' is no JSON: "),
        ("[]", 'has no object "settings"; pass the settings.json of a run'),
        ('{"settings": 3}', 'has no object "settings"'),
        ('{"settings": {"dimm": 3}}', "config 's.json' has 'dimm', not a setting"),
    ],
)
def test_bad_json(folder, content, message):
    Path("s.json").write_text(content)
    with pytest.raises(InvalidValueError, match=message):
        read_config("s.json")


def test_settings_that_fit_only_together(folder):
    Path("n.toml").write_text("min_n = 7")
    assert isinstance(run("-o", "out", "--config", "n.toml").exception, InvalidValueError)
    assert run("-o", "out", "--config", "n.toml", "--max-n", "8", "--epochs", 1).exit_code == 0
