"""Vectors: look-up, neighbours with the figures of gensim, and gensim's objects."""

import sys

import numpy as np
import pytest
import torch
from late import models
from typer.testing import CliRunner

from speedtransfer.lazy import MissingPackageError
from speedtransfer.word2vec import UnknownWordError, Vectors, Vocabulary
from speedtransfer.word2vec.commands import app

WORDS = ["the", "été", "東京", "x\u00a0y", "France"]


@pytest.fixture
def vectors():
    matrix = np.random.default_rng(0).standard_normal((len(WORDS), 7)).astype(np.float32)
    return Vectors(WORDS, matrix)


def test_look_up(vectors):
    assert (len(vectors), vectors.dim) == (5, 7)
    assert "the" in vectors
    assert "The" not in vectors
    assert (vectors["été"] == vectors.matrix[1]).all()
    assert vectors["été"].dtype == np.float32
    several = vectors[["東京", "été", "東京"]]
    assert several.tolist() == vectors.matrix[[2, 1, 2]].tolist()
    assert (vectors[[]].shape, np.shares_memory(several, vectors.matrix)) == ((0, 7), False)
    assert repr(vectors) == "Vectors(5 words, dim=7)"


def test_unknown_words(vectors):
    message = "'france' (did you mean 'France'?) is not among the 5 words; check spelling and case"
    with pytest.raises(KeyError) as caught:
        vectors["france"]
    assert str(caught.value) == message
    words = ["the", "Francee", "zzz", "été", "zzz", *(f"?{i}" for i in range(20))]
    attempts = (vectors.doesnt_match, vectors.__getitem__, lambda words: vectors.most_similar("the", negative=words))
    for attempt in attempts:
        with pytest.raises(UnknownWordError) as caught:
            attempt(words)
        assert str(caught.value).startswith("'Francee' (did you mean 'France'?), 'zzz', '?0', ")
        assert str(caught.value).endswith("'?7' and 12 more are not among the 5 words; check spelling and case")
        assert caught.value.words == ("Francee", "zzz", *(f"?{i}" for i in range(20)))


def test_cosines_by_hand():
    vectors = Vectors(["east", "north", "northeast", "west", "nowhere"], [[2.0, 0], [0, 1], [3, 3], [-1, 0], [0, 0]])
    assert vectors.similarity("east", "northeast") == pytest.approx(0.5**0.5)
    assert vectors.similarity("east", "nowhere") == 0.0
    near = vectors.most_similar("east", topn=3)
    assert [word for word, _ in near] == ["northeast", "north", "nowhere"]
    assert [cosine for _, cosine in near] == pytest.approx([0.5**0.5, 0, 0])
    assert len(vectors.most_similar("east", topn=99)) == 4
    assert vectors.most_similar(torch.tensor([2.0, 0]), 1) == [("east", pytest.approx(1))]
    assert vectors.doesnt_match(word for word in ("north", "east")) == "east"  # equals: by the alphabet
    assert vectors.rank("east", "north") == vectors.rank("east", "nowhere") == 2
    assert vectors.n_similarity(["nowhere"], ["east"]) == 0.0
    assert vectors.most_similar("nowhere", 2) == [("east", 0.0), ("north", 0.0)]
    assert Vectors(["alone"], [[1.0]]).most_similar("alone") == []


def test_a_tensor_is_taken_without_a_copy():
    rows = torch.zeros(2, 3)
    vectors = Vectors(["a", "b"], rows)
    rows[1, 2] = 5
    assert vectors["b"].tolist() == [0, 0, 5]
    assert Vectors(["a", "b"], rows.bfloat16())["b"].tolist() == [0, 0, 5]
    assert Vectors(["a", "b"], rows.double().numpy()).matrix.dtype == np.float32


def test_the_folder_of_a_run_has_the_counts(tmp_path):
    """Of the vocabulary there: a .kv file made of the folder has them for gensim."""
    words, counts = ["the", "river", "bank"], [9, 5, 2]
    Vectors(words, np.eye(3, dtype=np.float32)).save(tmp_path / "vectors.bin")
    Vocabulary(words, counts).save(tmp_path / "vocab.txt")
    assert Vectors.load(tmp_path).counts.tolist() == counts
    assert Vectors.load(tmp_path, max_words=2).counts.tolist() == counts[:2]
    arguments = ["convert", str(tmp_path), str(tmp_path / "out.kv")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert models.KeyedVectors.load(str(tmp_path / "out.kv")).get_vecattr("river", "count") == 5
    for other in ("the 9\nbank 5\nriver 2\n", "no vocabulary\n"):
        (tmp_path / "vocab.txt").write_text(other)
        assert Vectors.load(tmp_path).counts is None


# --- several words, counts, gensim ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((500, 16)).astype(np.float32) * rng.uniform(0.1, 9, (500, 1)).astype(np.float32)
    return Vectors([f"w{i}" for i in range(500)], matrix, np.arange(500, 0, -1))


def test_most_similar_is_gensims(many, monkeypatch):
    monkeypatch.setattr("speedtransfer.tables.chunks.CHUNK_BYTES", 1)
    offset = many["w5"] - many["w6"]
    for positive, negative in (
        (["w0"], []), (["w1", "w2"], ["w3"]), ([], ["w7"]), (["w8", "w8"], ["w9"]), ([offset, "w9"], []),
    ):  # fmt: skip
        ours = many.most_similar(positive=positive, negative=negative, topn=150)
        theirs = many.to_gensim().most_similar(positive=positive, negative=negative, topn=150)
        assert [word for word, _ in ours] == [word for word, _ in theirs]
        assert [cosine for _, cosine in ours] == pytest.approx([cosine for _, cosine in theirs], abs=1e-6)


def test_other_names_of_gensim(many, monkeypatch):
    monkeypatch.setattr("speedtransfer.tables.chunks.CHUNK_BYTES", 1)
    kv = many.to_gensim()
    assert many.similar_by_word("w3", 20) == many.most_similar("w3", 20)
    assert many.similar_by_vector(many["w5"], 20) == many.most_similar(many["w5"], 20)
    rng = np.random.default_rng(2)
    for _ in range(20):
        first, second = ([f"w{i}" for i in rng.integers(500, size=size)] for size in rng.integers(1, 9, 2))
        assert many.doesnt_match(first) == kv.doesnt_match(first)
        assert many.n_similarity(first, second) == pytest.approx(float(kv.n_similarity(first, second)), abs=1e-6)
        assert many.rank(first[0], second[0]) == kv.rank(first[0], second[0])
        assert many.similarity(first[0], second[0]) == pytest.approx(kv.similarity(first[0], second[0]), abs=1e-6)


def test_to_gensim(many):
    kv = many.to_gensim()
    assert np.shares_memory(kv.vectors, many.matrix)
    assert (len(kv), kv.vector_size, kv.get_index("w7")) == (500, 16, 7)
    assert kv.get_vecattr("w7", "count") == 493
    kv.add_vectors(["new"], np.ones((1, 16), dtype=np.float32))
    assert "new" in kv
    assert len(many) == 500


def test_without_gensim(many, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gensim.models.keyedvectors", None)
    (tmp_path / "v.kv").write_text("old")
    for attempt in (many.to_gensim, lambda: many.save(tmp_path / "v.kv"), lambda: Vectors.load(tmp_path / "v.kv")):
        with pytest.raises(MissingPackageError, match="need gensim, which is not installed; run: pip install gensim"):
            attempt()
    assert (tmp_path / "v.kv").read_text() == "old"
