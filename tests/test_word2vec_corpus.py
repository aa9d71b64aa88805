"""A corpus as word numbers in a temporary file."""

from __future__ import annotations

import io
import os
import tempfile

import numpy as np
import pytest

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Corpus
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


def test_max_words():
    corpus = corpus_of("b a x b a b c c", min_count=1, max_words=2)
    assert corpus.vocabulary.words == ["b", "a"]
    assert corpus.ids.tolist() == [0, 1, 0, 1, 0]


def test_many_blocks(monkeypatch):
    monkeypatch.setattr(corpus_module, "CHUNK_IDS", 7)  # the renumbering in place crosses its own writes
    words = [f"w{n}" for n in np.random.default_rng(0).zipf(1.5, 3000) if n < 300]
    corpus = corpus_of(" ".join(words), min_count=3)
    counts = {word: words.count(word) for word in set(words)}
    kept = [word for word in words if counts[word] >= 3]
    assert [corpus.vocabulary.words[i] for i in corpus.ids] == kept
    assert corpus.vocabulary.encode(words).tolist() == corpus.ids.tolist()


def test_ids_are_read_only_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    corpus = corpus_of("a b " * 10)
    if os.name == "posix":
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="read-only"):
        corpus.ids[0] = 1


def test_reports_what_it_has_read():
    seen = []
    corpus_of("a b " * 10, report=seen.append)
    assert seen[-1] == 20


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
def test_too_little_text(text, message):
    with pytest.raises(InvalidValueError, match=message):
        corpus_of(text)


def test_the_min_count_that_the_message_offers_works():
    assert len(corpus_of("a a a b b c", min_count=2).vocabulary) == 2


def test_full_disk(monkeypatch):
    class FullDisk(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **kwargs: FullDisk())
    with pytest.raises(StorageError, match=r"does not fit as numbers .*No space left on device.*set TMPDIR"):
        corpus_of("a b " * 10)


def test_no_temporary_folder(monkeypatch):
    def refuse(**kwargs):
        raise FileNotFoundError(2, "No usable temporary directory")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(StorageError, match=r"no temporary file for the corpus .*set TMPDIR"):
        corpus_of("a b " * 10)
