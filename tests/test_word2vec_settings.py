"""Settings: the files that hold them and the signatures made from them; arguments that are refused before anything is read."""

from __future__ import annotations

import inspect
import io
import json
import re
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from refusals import Refusal, check_refused, refusals
from typer.testing import CliRunner

from speedtransfer import word2vec
from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.tables import MEMORIES
from speedtransfer.word2vec import Corpus, Settings, Vectors, Vocabulary, train
from speedtransfer.word2vec.commands import app
from speedtransfer.word2vec.config import CorpusSettings, TrainingSettings, described, read_config
from speedtransfer.word2vec.places import Places
from speedtransfer.word2vec.plot import plot
from speedtransfer.word2vec.settings import SETTINGS


def test_memories_are_those_of_tables():
    assert set(SETTINGS["memory"].metadata["choices"]) == {"auto", *MEMORIES, "shared"}


def test_json_gives_the_settings_back():
    settings = Settings(
        optimizer="SGD", options={"momentum": 0.5}, memory="mmap", path=Path("a") / "b", device="cpu", p=2
    )
    values = json.loads(json.dumps(settings.as_dict()))
    assert Settings(**values).as_dict() == values
    assert (values["lr"], values["p"]) == (settings.first_lr, 2.0)


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


@pytest.mark.parametrize(
    ("name", "content", "kind", "message"),
    [
        ("bad.toml", "dims = 3", InvalidValueError, "config 'bad.toml' has 'dims', not a setting; did you mean 'dim'"),
        ("bad.toml", "dim = '3'", InvalidTypeError, r"config 'bad.toml': dim is '3' \(str\) but must be an integer"),
        ("bad.toml", "lr = nan", InvalidValueError, "config 'bad.toml': lr is nan but must be finite"),
        ("bad.toml", "dim =\nlr = 1", InvalidValueError, "config 'bad.toml' is no TOML: .*line 1"),
        ("bad.toml", None, StorageError, r"cannot read config 'bad.toml' \(No such file"),
        ("s.json", "[" * 100_000, InvalidValueError, "'s.json' is no JSON: "),
        ("s.json", "[]", InvalidValueError, 'has no object "settings"; pass the settings.json of a run'),
        ("s.json", '{"settings": {"dimm": 3}}', InvalidValueError, "config 's.json' has 'dimm', not a setting"),
    ],
)
def test_bad_files(folder, name, content, kind, message):
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run("-o", "out", "--config", name)
    assert isinstance(result.exception, kind)
    assert re.search(message, str(result.exception))
    assert "\n" not in str(result.exception)
    assert not Path("out").exists()


# --- arguments -------------------------------------------------------------------------------------------------------

CALLS = r"""
Settings(model="skip-gram") -> InvalidValueError: model is 'skip-gram', not one of its values; did you mean 'skipgram'
Settings(memory="mmap") -> InvalidValueError: memory='mmap' needs path, the folder for the table files
Settings(memory="mmap", path="a\0b") -> InvalidValueError: path is .*not a path
Settings(path="tables") -> InvalidValueError: path is 'tables' but memory='auto' has no files
Settings(dim=0) -> InvalidValueError: dim is 0 but must be at least 1
Settings(buckets=(1 << 32) + 1) -> InvalidValueError: buckets is 4294967297 but the hash has 32 bits; pass at most
Settings(min_n=7) -> InvalidValueError: max_n is 6 but min_n is 7; pass a max_n of at least 7
Settings(p=0) -> InvalidValueError: p is 0 but must be above 0; the default is 1
Settings(q=20_000) -> InvalidValueError: q is 20000 but must be from 0.0001 to 10000; the default is 1
Settings(phrases=1, kind="graph") -> InvalidValueError: phrases is 1 but must be 0 for kind='graph': nodes are no words
Settings(seed=1 << 63) -> InvalidValueError: must be below 2\*\*63
Settings(lr=10**400) -> InvalidValueError: lr is 1000.* but must be finite
Settings(optimizer="adamv") -> InvalidValueError: optimizer 'adamv' is not in torch.optim; did you mean 'adam'
Settings(options=[1]) -> InvalidTypeError: options is \[1\] but must be a dict by argument name
Settings(options={"lr": 1}) -> InvalidValueError: options holds lr=1, which is a setting of its own; pass it as lr
Settings(options={"epss": 1}) -> InvalidValueError: AdamW has no option 'epss'; did you mean 'eps'
Settings(options={"fused": True, "foreach": True}) -> InvalidValueError: AdamW does not take .*cannot be `True`
train("not read", epoch=3) -> TypeError: 'epoch'.*did you mean 'epochs'
train("not read", vector_size=100) -> InvalidTypeError: argument 'vector_size'; gensim's 'vector_size' is 'dim' here
train("not read", checkpoint=3) -> InvalidTypeError: checkpoint is 3 \(int\) but must be the path
train("not read", resume=True) -> InvalidValueError: need a checkpoint, the folder; pass checkpoint
train("not read", checkpoint="x", checkpoint_every=0) -> InvalidValueError: checkpoint_every is 0 but must be at least 1
train("not read", evaluate=3) -> InvalidTypeError: evaluate is 3 but must be a path or a list of them
train("not read", evaluate="set", evaluate_every="1") -> InvalidTypeError: evaluate_every is '1' .str. but must be a number
Corpus(Unread(), min_count=0) -> InvalidValueError: min_count is 0 but must be at least 1
Corpus(Unread(), window=3) -> InvalidTypeError: unexpected keyword argument 'window'
Corpus(3) -> InvalidTypeError: corpus is a int but must be a path
Corpus("") -> InvalidValueError: corpus is '' but must be a path
Corpus("-") -> StorageError: corpus is '-' but the standard input is closed
Corpus("nowhere") -> StorageError: 'nowhere' does not exist; pass a text file
Corpus("here") -> InvalidValueError: holds no \.txt, \.gz, \.xz file
Corpus(io.StringIO("text")) -> InvalidTypeError: gives str but a corpus is bytes
corpus_of([0, 3]) -> InvalidValueError: ids must be numbers from 0 to 2
corpus_of([[0], [1]]) -> InvalidTypeError: ids is int32 \(2, 1\) but must be a 1-D int32 array
corpus_of([0, 1], np.array([0, 2])) -> InvalidValueError: starts must rise from 0 to below 2
Vocabulary("ab", [1, 1]) -> InvalidTypeError: words is 'ab' .* must be a list of words
Vocabulary(["a", "b", "a"], [1, 1, 1]) -> InvalidValueError: word 'a' is there twice
Vocabulary(["a", "b"], [1]) -> InvalidValueError: counts have shape \(1,\) but there are 2 words
Vocabulary(["a", "b", "c"], [1, -2, 3]) -> InvalidValueError: the count of 'b' is -2 but must be at least 0
Vocabulary(["a", "b"], [1.5, 2.5]) -> InvalidTypeError: counts hold .* but are whole numbers
Vocabulary.from_counts({}) -> InvalidValueError: holds no words but a model needs at least 2
Sampler(np.array([0, 1], "i4"), Vocabulary(["a", "b"], [0, 0])) -> InvalidValueError: the counts of the vocabulary are all 0
Sampler(np.empty(0, "i4"), words) -> InvalidValueError: the corpus has no word of the vocabulary
Sampler(np.zeros(9, "i4"), words, Settings(shared_negatives=10**12))
-> HostMemoryError: shared_negatives=1000000000000 asks for .* a step but this machine has
Places.find(Block(*[torch.arange(3)] * 4, 3, window=1), 3, 1)
-> InvalidValueError: a context reaches 2 words but window is 1; pass window=2, or 0
model(0) -> InvalidValueError: vocabulary is 0 but must be at least 1
model(20, buckets=10) -> InvalidTypeError: vocabulary is 20 but n-grams \(buckets=10\) need the words
model(20, path="here/file/tables") -> StorageError: cannot make folder
Word2Vec(20, Settings(device="cpu")).ngram_vectors() -> InvalidValueError: buckets is 0, so this model has no n-grams
NgramVectors(np.zeros((3, 2), "f4"), 4, 5)["a"] -> InvalidValueError: 'a' has no n-grams of 4 to 5 characters
NgramVectors(np.zeros((3, 2), "f4")).save("n.txt") -> InvalidValueError: ends in '\.txt' but n-gram vectors are \.safetensors
Vectors(["a", "b"], np.zeros((3, 2), "f4")) -> InvalidValueError: there are 2 words; pass one row a word
Vectors(["a"], np.zeros((1, 2), "i8")) -> InvalidTypeError: matrix holds int64 but vectors are floating-point
Vectors(["a", 3], np.eye(2)) -> InvalidTypeError: words\[1\] is 3 \(int\) but words are strings
Vectors.load(None) -> InvalidTypeError: ^path is .* but must be the path of a file; pass one$
vectors.most_similar("a", 0) -> InvalidValueError: topn is 0 but must be at least 1
vectors.most_similar() -> InvalidValueError: no words to start from
vectors.most_similar(np.ones(3)) -> InvalidValueError: a vector has shape \(3,\) but these have dim 2; pass shape \(2,\)
vectors.most_similar(3) -> InvalidTypeError: 3 .* is neither word nor vector
vectors[7] -> InvalidTypeError: 7 is no word; pass a str or a list of them
vectors.doesnt_match("a") -> InvalidTypeError: is 'a' but must be several words; pass a list of str
vectors.n_similarity([], ["a"]) -> InvalidValueError: first is empty; pass at least one word
evaluate("vectors.bin", "set") -> InvalidTypeError: vectors is a str but must be Vectors; pass
plot(vectors, "words.jpg") -> InvalidValueError: ends in '.jpg' but the picture is a PNG
plot(Vectors([], np.zeros((0, 3))), "words.png") -> InvalidValueError: there are no words to draw
"""


class Unread:
    def read(self, size):
        pytest.fail("read in spite of a bad argument")


def model(vocabulary, dim=5, **settings):
    memory = {"path": "tables", "memory": "mmap", "device": "cpu", **settings}
    return word2vec.Word2Vec(vocabulary, word2vec.Settings(dim=dim, **memory))


def corpus_of(ids, starts=None):
    return Corpus.from_ids(np.array(ids, np.int32), Vocabulary(["a", "b", "c"], [1, 1, 1]), starts)


NAMES = {
    **{name: getattr(word2vec, name) for name in word2vec.__all__}, "np": np, "torch": torch, "io": io, "plot": plot,
    "Places": Places, "Unread": Unread, "model": model, "corpus_of": corpus_of,
}  # fmt: skip


@pytest.mark.parametrize("refusal", refusals(CALLS), ids=str)
def test_refused(refusal: Refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").write_text("x")
    (tmp_path / "set").write_text("a b 1\n")
    vectors = Vectors(["a", "b"], np.eye(2, dtype=np.float32))
    check_refused(refusal, vectors=vectors, words=Vocabulary(["a", "b"], [1, 1]), **NAMES)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "here", "set"]
