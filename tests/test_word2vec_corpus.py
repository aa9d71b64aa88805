"""A corpus as word numbers in a temporary file."""

from __future__ import annotations

import io
import os
import tempfile

import numpy as np
import pytest

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Corpus, Vocabulary
from speedtransfer.word2vec import corpus as corpus_module


def corpus_of(text, **kwargs):
    return Corpus(io.BytesIO(text.encode()), **kwargs)


def test_literal():
    corpus = corpus_of("b a x b a b c c", min_count=2)
    assert corpus.vocabulary.words == ["b", "a", "c"]  # by count, then by word
    assert corpus.vocabulary.counts.tolist() == [3, 2, 2]
    assert corpus.ids.tolist() == [0, 1, 0, 1, 0, 2, 2]
    assert corpus.ids.dtype == np.int32
    assert corpus.num_raw_words == 8
    assert len(corpus) == 7
    few = corpus_of("b a x b a b c c", min_count=1, max_words=2)
    assert (few.vocabulary.words, few.ids.tolist()) == (["b", "a"], [0, 1, 0, 1, 0])


def sequences_of(corpus):
    return [[corpus.vocabulary.words[i] for i in part] for part in np.split(corpus.ids, corpus.starts[1:])]


def test_lines_literal():
    corpus = corpus_of("\nb a x\r\n\n b\ny\nz a b\nc c", min_count=2, kind="lines")
    assert sequences_of(corpus) == [["b", "a"], ["b"], ["a", "b"], ["c", "c"]]  # the line "y" has lost all its words
    assert corpus.starts.tolist() == [0, 2, 3, 5]
    assert corpus.starts.dtype == np.int64
    assert corpus.num_raw_words == 10
    assert corpus_of("b a\nb a", min_count=2).starts is None


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
def test_lines_in_many_blocks(monkeypatch, chunk):
    monkeypatch.setattr(corpus_module, "CHUNK_IDS", chunk)
    rng = np.random.default_rng(chunk)
    lines = [[f"w{n}" for n in rng.zipf(1.5, rng.integers(0, 6)) if n < 100] for _ in range(400)]
    corpus = corpus_of("\n".join(map(" ".join, lines)), min_count=9, kind="lines")
    flat = [word for line in lines for word in line]
    kept = [[word for word in line if flat.count(word) >= 9] for line in lines]
    assert sequences_of(corpus) == [line for line in kept if line]
    assert corpus.num_raw_words == len(flat)


def test_a_line_longer_than_a_block(monkeypatch):
    data = io.BytesIO(b"a b c " * 100_000 + b"\n" + b"a b " * 300_000)
    assert Corpus(data, kind="lines").starts.tolist() == [0, 300_000]


def test_from_ids(tmp_path):
    vocabulary = Vocabulary(["a", "b", "c"], [2, 2, 1])
    np.array([0, 1, 2, 0, 1], np.int32).tofile(tmp_path / "ids")
    ids = np.memmap(tmp_path / "ids", np.int32, mode="r+")
    corpus = Corpus.from_ids(ids, vocabulary, np.array([0, 3]))
    assert sequences_of(corpus) == [["a", "b", "c"], ["a", "b"]]
    assert (len(corpus), corpus.num_raw_words, corpus.vocabulary) == (5, 5, vocabulary)
    assert np.shares_memory(corpus.ids, ids)
    assert not corpus.ids.flags.writeable
    assert ids.flags.writeable  # of the caller's own array nothing has changed
    assert Corpus.from_ids(ids, vocabulary).starts is None


def test_ids_are_read_only_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    corpus = corpus_of("a b " * 10)
    if os.name == "posix":
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="read-only"):
        corpus.ids[0] = 1


@pytest.mark.parametrize("kind", ["text", "lines"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'the given file' holds no words; pass a corpus with text in it"),
        (" \n\t ", "holds no words"),
        ("alone", "the corpus has one distinct word, 'alone', but a model needs at least 2"),
        ("alone " * 100, "the corpus has one distinct word, 'alone'"),
        ("a a a b b c", "min_count=5 leaves 0 of 3 distinct words .* pass min_count=2 or less"),
        ("a a a a a a b b c", "min_count=5 leaves 1 of 3 distinct words .* pass min_count=2 or less"),
    ],
)
def test_too_little_text(text, message, kind):
    with pytest.raises(InvalidValueError, match=message):
        corpus_of(text, kind=kind)


def test_the_min_count_that_the_message_offers_works():
    assert len(corpus_of("a a a b b c", min_count=2).vocabulary) == 2


@pytest.mark.parametrize("method", ["write", "flush", None])
def test_no_room_for_the_numbers(monkeypatch, method):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    full = type("FullDisk", (io.BytesIO,), {method or "none": refuse})
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse if method is None else lambda **kwargs: full())
    what = "does not fit as numbers" if method else "no temporary file for the corpus"
    with pytest.raises(StorageError, match=rf"{what} .*No space left on device.*set TMPDIR"):
        corpus_of("a b " * 10)
