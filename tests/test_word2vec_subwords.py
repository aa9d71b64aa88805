"""N-grams and buckets against gensim's, which are fastText's; vectors of unseen words, gradients of bags, and their file."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import safetensors.numpy
import torch
from late import fasttext
from lazy_oracle import one_thread  # noqa: F401 (a fixture that acts on every test here)

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import NgramVectors, Word2Vec, subwords
from speedtransfer.word2vec.subwords import Bags, Subwords, count_ngrams, hash_ngrams

LETTERS = "abcdefghijklmnopqrstuvwxyzäßéñдצ日本語中文한😀ç<>'"  # of one to four bytes


def draw_words(count, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randint(0, 14))) for _ in range(count)]


def rows_by_gensim(words, buckets, min_n, max_n):
    return [
        [i, *(len(words) + h for h in fasttext.ft_ngram_hashes(w, min_n, max_n, buckets))] for i, w in enumerate(words)
    ]


@pytest.mark.parametrize(
    ("buckets", "min_n", "max_n"),
    [(2_000_000, 3, 6), (1000, 1, 4), (7, 1, 1), (1 << 32, 2, 2), (100_003, 5, 9), (1, 3, 3)],
)
def test_ngrams_fall_into_the_buckets_of_fasttext(buckets, min_n, max_n):
    words = [*draw_words(500), "banana", "", "a", "é", "😀", "<", "<>"]
    expected = [fasttext.ft_ngram_hashes(word, min_n, max_n, buckets) for word in words]
    assert hash_ngrams(words, buckets, min_n, max_n).tolist() == [h for hashes in expected for h in hashes]
    assert count_ngrams(words, min_n, max_n).tolist() == list(map(len, expected))


@pytest.mark.parametrize("chunk", [1, 50, 1 << 20])
def test_rows_of_a_vocabulary(monkeypatch, chunk):
    monkeypatch.setattr(subwords, "_CHUNK_CHARACTERS", chunk)
    words = list(dict.fromkeys(draw_words(200)))
    bags = Subwords(words, 1000, 2, 4)
    expected = rows_by_gensim(words, 1000, 2, 4)
    ends = bags.offsets.tolist()
    assert [bags.rows[ends[i] : ends[i + 1]].tolist() for i in range(len(words))] == expected
    assert (bags.rows.dtype, bags.num_rows) == (torch.int32, len(words) + 1000)
    rows, counts = bags.bags(torch.tensor([5, 0, 5, 77]))
    assert rows.tolist() == [row for i in (5, 0, 5, 77) for row in expected[i]]
    assert counts.tolist() == [len(expected[i]) for i in (5, 0, 5, 77)]


def test_rows_beyond_int32():
    bags = Subwords(["word", "other"], 1 << 32)
    assert bags.rows.dtype == torch.int64
    expected = rows_by_gensim(["word", "other"], 1 << 32, 3, 6)
    assert bags.rows.tolist() == [*expected[0], *expected[1]]


def test_bags_of_words_that_repeat():
    texts = draw_words(30)
    bags, expected = Subwords(texts, 40), rows_by_gensim(texts, 40, 3, 6)
    words = torch.tensor([3, 7, 3, 29])
    found = bags.find(words)
    assert found.rows.ids[found.rows.inverse].tolist() == [row for word in words.tolist() for row in expected[word]]
    assert found.starts.diff().tolist() == [len(expected[word]) for word in words.tolist()]
    assert torch.equal(found.bag_of, torch.repeat_interleave(torch.arange(4), found.starts.diff()))
    single = Bags.of_single_rows(words)
    assert single.rows.ids[single.rows.inverse].tolist() == words.tolist()
    assert (single.starts.tolist(), single.bag_of.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])


def test_ngrams_longer_than_all_words():
    """A limit beyond every word costs nothing: the n-grams are those of a limit at the longest."""
    words = ["a", "abc", "größe"]
    assert hash_ngrams(words, 97, 3, 10**9).tolist() == hash_ngrams(words, 97, 3, 7).tolist()
    assert count_ngrams(words, 3, 10**9).tolist() == count_ngrams(words, 3, 7).tolist()
    assert hash_ngrams(words, 97, 10**6, 10**9).tolist() == []
    assert count_ngrams(words, 10**6, 10**9).tolist() == [0, 0, 0]


# --- vectors of unseen words against gensim's fastText on the same rows; and their file -------------------------------


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
