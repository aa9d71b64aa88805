"""Vectors of unseen words against gensim's fastText on the same rows; and their file."""

from __future__ import annotations

import os

import numpy as np
import pytest
import safetensors.numpy
from late import fasttext

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.word2vec import NgramVectors, UnknownWordError, Word2Vec

WORDS = ["walking", "walked", "talking", "été", "naïve"]


def make(buckets=60):
    model = Word2Vec(WORDS, 7, buckets=buckets, min_n=2, max_n=4, device="cpu")
    return model, model.ngram_vectors()


def test_words_have_the_vectors_that_fasttext_gives_them():
    model, ngrams = make()
    table = model.input.table.numpy()
    theirs = fasttext.FastTextKeyedVectors(7, 2, 4, 60)
    theirs.add_vectors(WORDS, table[: len(WORDS)])
    theirs.vectors_vocab, theirs.vectors_ngrams = table[: len(WORDS)], table[len(WORDS) :]
    theirs.recalc_char_ngram_buckets()
    theirs.adjust_vectors()
    np.testing.assert_allclose(model.word_vectors().numpy(), theirs.vectors, atol=1e-7)
    for word in ("talked", "étéä", "日本", "x"):
        np.testing.assert_allclose(ngrams[word], theirs[word], atol=1e-7)
        np.testing.assert_allclose(model.vector(word), theirs[word], atol=1e-7)


def test_rows_are_those_of_the_table():
    model, ngrams = make()
    assert np.shares_memory(ngrams.matrix, model.input.table.numpy())
    assert repr(ngrams) == "NgramVectors(60 buckets, dim=7, min_n=2, max_n=4)"


def test_a_file_and_back(tmp_path):
    _, ngrams = make()
    ngrams.save(tmp_path / "ngrams.safetensors")
    again = NgramVectors.load(tmp_path / "ngrams.safetensors")
    assert (again.min_n, again.max_n) == (2, 4)
    assert np.array_equal(again["talked"], ngrams["talked"])
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "ngrams.safetensors")["ngrams"], ngrams.matrix)
    assert [p.name for p in tmp_path.iterdir()] == ["ngrams.safetensors"]


def test_bad_words_and_sizes(tmp_path):
    ngrams = NgramVectors(np.zeros((3, 2), np.float32), min_n=4, max_n=5)
    with pytest.raises(UnknownWordError, match="'a' has no n-grams of 4 to 5 characters; pass a longer word"):
        ngrams["a"]
    with pytest.raises(InvalidValueError, match=r"matrix has shape \(3,\) but must be \(buckets, dim\)"):
        NgramVectors(np.zeros(3, np.float32))
    with pytest.raises(InvalidValueError, match="max_n is 2 but min_n is 3"):
        NgramVectors(np.zeros((3, 2), np.float32), max_n=2)
    with pytest.raises(InvalidTypeError, match=r"min_n is 2\.5"):
        NgramVectors(np.zeros((3, 2), np.float32), min_n=2.5)
    with pytest.raises(InvalidValueError, match=r"ends in '\.txt' but n-gram vectors are \.safetensors"):
        ngrams.save(tmp_path / "ngrams.txt")
    assert not list(tmp_path.iterdir())


def test_bad_files(tmp_path):
    path = tmp_path / "ngrams.safetensors"
    with pytest.raises(StorageError, match="cannot read"):
        NgramVectors.load(path)
    rows = {"ngrams": np.zeros((3, 2), np.float32)}
    path.write_bytes(safetensors.numpy.save(rows))
    with pytest.raises(StorageError, match="does not say min_n and max_n"):
        NgramVectors.load(path)
    path.write_bytes(safetensors.numpy.save(rows, metadata={"min_n": "3", "max_n": "x"}))
    with pytest.raises(StorageError, match="does not say min_n and max_n"):
        NgramVectors.load(path)
    path.write_bytes(safetensors.numpy.save({"vectors": rows["ngrams"]}))
    with pytest.raises(InvalidValueError, match="has no tensor 'ngrams'"):
        NgramVectors.load(path)
    with pytest.raises(InvalidTypeError, match="path is a int but must be the path of a file"):
        NgramVectors.load(3)
    whole = safetensors.numpy.save(rows, metadata={"min_n": "3", "max_n": "6"})
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises((StorageError, InvalidValueError)):
            NgramVectors.load(path)


def test_a_save_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    _, ngrams = make()
    path = tmp_path / "ngrams.safetensors"
    ngrams.save(path)
    before = path.read_bytes()

    def fail(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    ngrams.matrix = ngrams.matrix + 1
    with pytest.raises(StorageError, match="No space left"):
        ngrams.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["ngrams.safetensors"]
