"""A corpus as word numbers in a temporary file."""

from __future__ import annotations

import io
import os
import tempfile

import numpy as np
import pytest

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
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


@pytest.mark.parametrize(
    ("ids", "starts", "error", "message"),
    [
        ([0, 3], None, InvalidValueError, r"ids\[1\] is 3 but must be from 0 to 2"),
        ([0, 1, 1, 1, 1, 1, 1, 1, -1], None, InvalidValueError, r"ids\[8\] is -1 but"),
        ([], None, InvalidValueError, "ids is empty"),
        ([0, 1], [0, 2], InvalidValueError, "starts must rise from 0 to below 2"),
        ([0, 1], [1], InvalidValueError, "starts must rise"),
        ([0, 1], [0, 0], InvalidValueError, "starts must rise"),
        ([0, 1], [], InvalidValueError, "starts must rise"),
        ([[0], [1]], None, InvalidTypeError, r"ids is int32 \(2, 1\) but must be a 1-D int32 array"),
        (np.array([0, 1]), None, InvalidTypeError, r"ids is int64 \(2,\) but must be a 1-D int32 array"),
        ((0, 1), None, InvalidTypeError, "ids is tuple but must"),
        ([0, 1], (0,), InvalidTypeError, "starts is tuple but must be a 1-D int64 array"),
    ],
)
def test_bad_ids(monkeypatch, ids, starts, error, message):
    monkeypatch.setattr(corpus_module, "CHUNK_IDS", 7)
    ids = np.array(ids, np.int32) if isinstance(ids, list) else ids
    starts = np.array(starts, np.int64) if isinstance(starts, list) else starts
    with pytest.raises(error, match=message):
        Corpus.from_ids(ids, Vocabulary(["a", "b", "c"], [1, 1, 1]), starts)


class Unread:
    def read(self, size):
        pytest.fail("read in spite of a bad argument")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_count": 0}, "min_count is 0 but must be at least 1"),
        ({"max_words": 1}, "max_words is 1 but must be at least 2"),
        ({"kind": "what"}, "choose from 'text', 'lines', 'graph', 'adjacency'"),
        ({"phrases": 1, "kind": "graph"}, "phrases is 1 but must be 0 for kind='graph': nodes are no words"),
    ],
)
def test_bad_arguments_are_reported_before_reading(arguments, message):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        Corpus(Unread(), **arguments)


def test_settings_of_other_parts_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'windows'"):
        Corpus(Unread(), windows=3)


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
