"""Vectors: look-up, neighbours, files in three formats, gensim as the reader of two."""

from __future__ import annotations

import copy
import struct
import sys

import numpy as np
import pytest
import safetensors.numpy
import torch
from late import models
from typer.testing import CliRunner

from speedtransfer.errors import InvalidTypeError, InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.lazy import MissingPackageError
from speedtransfer.word2vec import UnknownWordError, Vectors, Vocabulary, lookup
from speedtransfer.word2vec.commands import app

WORDS = ["the", "été", "東京", "x\u00a0y", "France"]
SUFFIXES = (".txt", ".vec", ".bin", ".safetensors")


@pytest.fixture
def vectors():
    matrix = np.random.default_rng(0).standard_normal((len(WORDS), 7)).astype(np.float32)
    matrix[1] *= 1e-30  # small, large and awkward numbers survive
    matrix[2] *= 1e30
    matrix[3, 0] = np.float32(0.1)
    matrix[3, 1] = -0.0
    return Vectors(WORDS, matrix)


def test_look_up(vectors):
    assert (len(vectors), vectors.dim) == (5, 7)
    assert "the" in vectors
    assert "The" not in vectors
    assert (vectors["été"] == vectors.matrix[1]).all()
    assert vectors["été"].dtype == np.float32
    assert repr(vectors) == "Vectors(5 words, dim=7)"


def test_unknown_word(vectors):
    for attempt in (lambda: vectors["france"], lambda: vectors.most_similar("france")):
        with pytest.raises(UnknownWordError) as caught:
            attempt()
        assert str(caught.value) == "'france' is not among the 5 words; did you mean 'France'?"
        assert isinstance(caught.value, KeyError)
        assert isinstance(caught.value, SpeedtransferError)
    with pytest.raises(KeyError, match="'zzz' is not among the 5 words; check spelling and case"):
        vectors.similarity("the", "zzz")


def test_cosines_by_hand():
    vectors = Vectors(["east", "north", "northeast", "west", "nowhere"], [[2.0, 0], [0, 1], [3, 3], [-1, 0], [0, 0]])
    assert vectors.similarity("east", "northeast") == pytest.approx(0.5**0.5)
    assert vectors.similarity("east", "nowhere") == 0.0
    near = vectors.most_similar("east", topn=3)
    assert [word for word, _ in near] == ["northeast", "north", "nowhere"]
    assert [cosine for _, cosine in near] == pytest.approx([0.5**0.5, 0, 0])
    assert len(vectors.most_similar("east", topn=99)) == 4
    assert vectors.most_similar("nowhere", 2) == [("east", 0.0), ("north", 0.0)]
    compass = Vectors(vectors.words, [[2.0, 0], [0, 1], [3, 3], [-1, 0], [-1, 5]])
    (best,) = compass.analogy("east", "northeast", "north", 1)  # (1, 1) / sqrt(2) - (1, 0) + (0, 1) = (-0.293, 1.707)
    assert best == ("nowhere", pytest.approx((0.2929 + 5 * 1.7071) / (1.7320 * 26**0.5), abs=1e-3))
    assert Vectors(["alone"], [[1.0]]).most_similar("alone") == []


def test_a_tensor_is_taken_without_a_copy():
    rows = torch.zeros(2, 3)
    vectors = Vectors(["a", "b"], rows)
    rows[1, 2] = 5
    assert vectors["b"].tolist() == [0, 0, 5]
    assert Vectors(["a", "b"], rows.bfloat16())["b"].tolist() == [0, 0, 5]
    assert Vectors(["a", "b"], rows.double().numpy()).matrix.dtype == np.float32


@pytest.mark.parametrize("suffix", [".txt", ".bin", ".glove"])
def test_the_folder_of_a_run_has_the_counts(tmp_path, suffix):
    """Of the vocabulary there: a .kv file made of the folder has them for gensim."""
    words, counts = ["the", "river", "bank"], [9, 5, 2]
    Vectors(words, np.eye(3, dtype=np.float32)).save(tmp_path / f"vectors{suffix}")
    Vocabulary(words, counts).save(tmp_path / "vocab.txt")
    assert Vectors.load(tmp_path).counts.tolist() == counts
    assert Vectors.load(tmp_path, max_words=2).counts.tolist() == counts[:2]
    arguments = ["convert", str(tmp_path), str(tmp_path / "out.kv")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert models.KeyedVectors.load(str(tmp_path / "out.kv")).get_vecattr("river", "count") == 5
    for other in ("the 9\nbank 5\nriver 2\n", "no vocabulary\n"):
        (tmp_path / "vocab.txt").write_text(other)
        assert Vectors.load(tmp_path).counts is None


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip_of_many_and_of_none(tmp_path, suffix):
    for count in (0, 1, 10_000):  # more than are written at once
        vectors = Vectors([f"w{i}" for i in range(count)], np.arange(count * 2, dtype=np.float32).reshape(count, 2))
        vectors.save(tmp_path / f"v{suffix}")
        again = Vectors.load(tmp_path / f"v{suffix}")
        assert again.words == vectors.words
        assert again.matrix.tolist() == vectors.matrix.tolist()


@pytest.mark.parametrize("suffix", [".txt", ".vec", ".bin"])
def test_gensim_reads_what_we_write_and_we_what_it_writes(vectors, tmp_path, suffix):
    words = [word.replace("\u00a0", "") for word in WORDS]  # gensim splits the lines of fvocab there
    vectors = Vectors(words, vectors.matrix)
    vectors.save(tmp_path / f"v{suffix}")
    Vocabulary(words, [9, 8, 7, 6, 5]).save(tmp_path / "vocab.txt")
    theirs = models.KeyedVectors.load_word2vec_format(
        tmp_path / f"v{suffix}", binary=suffix == ".bin", fvocab=tmp_path / "vocab.txt"
    )
    assert theirs.index_to_key == words
    assert theirs.vectors.tobytes() == vectors.matrix.tobytes()
    assert [theirs.get_vecattr(word, "count") for word in words] == [9, 8, 7, 6, 5]
    theirs.save_word2vec_format(tmp_path / f"theirs{suffix}", binary=suffix == ".bin")  # its binary has no line ends
    again = Vectors.load(tmp_path / f"theirs{suffix}")
    assert (again.words, again.matrix.tobytes()) == (words, vectors.matrix.tobytes())


def test_safetensors_are_safetensors_and_hold_any_word(tmp_path):
    words = ["New York", "a\nb", "", "été"]
    Vectors(words, np.eye(4, dtype=np.float32)).save(tmp_path / "v.safetensors")
    tensors = safetensors.numpy.load_file(tmp_path / "v.safetensors")
    assert sorted(tensors) == ["vectors", "word_ends", "words"]
    assert tensors["vectors"].tolist() == np.eye(4).tolist()
    assert tensors["words"].tobytes().decode() == "".join(words)
    assert Vectors.load(tmp_path / "v.safetensors").words == words


WHITE, HALF = r"is empty or holds white space.*save to \.safetensors", r"word 'x\\ud800' cannot be written as UTF-8"


@pytest.mark.parametrize(
    ("suffix", "word", "message"),
    [
        *((suffix, word, WHITE) for suffix in (".txt", ".bin") for word in ("New York", "a\nb", "")),
        *((suffix, "x\ud800", HALF) for suffix in SUFFIXES),
    ],
)
def test_word_that_the_format_cannot_hold(tmp_path, suffix, word, message):
    (tmp_path / f"v{suffix}").write_text("old")
    with pytest.raises(InvalidValueError, match=message):
        Vectors(["a", word], np.eye(2, dtype=np.float32)).save(tmp_path / f"v{suffix}")
    assert (tmp_path / f"v{suffix}").read_text() == "old"


def test_tensors_are_vectors():
    vectors = Vectors(iter(["the", "of", "to"]), np.eye(3, 2, dtype=np.float32))
    expected = vectors.most_similar(vectors.matrix[0])
    assert vectors.most_similar(torch.from_numpy(vectors.matrix[0])) == expected
    assert vectors.most_similar([torch.from_numpy(vectors.matrix[0])]) == expected


def test_a_vector_of_nan_lets_no_word_given_be_an_answer():
    vectors = Vectors(["diverged", "a", "b"], [[np.nan, 1], [1, 2], [2, 1]])
    assert [word for word, _ in vectors.most_similar("a")] == ["b"]


def test_files_that_cannot_be_read_or_written(tmp_path):
    for suffix in SUFFIXES:
        with pytest.raises(StorageError, match=r"cannot read .*No such file"):
            Vectors.load(tmp_path / f"missing{suffix}")
        with pytest.raises(StorageError, match="cannot write"):
            Vectors(["a"], [[1.0]]).save(tmp_path / "no" / f"v{suffix}")


HEAD = b"2 2\n"
ONE = struct.pack("<2f", 1, 2)


@pytest.mark.parametrize(
    ("suffix", "data", "message"),
    [
        (".txt", b"", "line 1 of .* is no word2vec header"),
        (".txt", b"the 1\n", "line 1 of .* is no word2vec header .* but b'the 1"),
        (".txt", b"a quick brown\n", "line 1 of .* is no word and vector .*could not convert"),
        (".txt", b"1 99999999999999999999\n", "promises vectors of 99999999999999999999 numbers"),
        (".txt", b"2 2\na 1 2\nb 1\n      ", r"line 3 of .* \(1 numbers, not 2\)"),
        (".txt", b"2 2\na 1 2\nb 1 x\n", "line 3 of .*could not convert"),
        (".txt", b"2 2\na 1 2\n\xff\xfe 1 2\n", "line 3 of .*can't decode"),
        (".txt", b"2 2\na 1 2.000000000\n", "promises 2 words in its first line but holds only 1"),
        (".txt", b"1 2\na 1 2\nb 1 2\n", "promises 1 words in its first line but holds more"),
        (".txt", b"99999999999 100\na 1 2\n", "is truncated: it has .* bytes but its header promises"),
        (".bin", b"no header here\n", "line 1 of .* is no word2vec header"),
        (".bin", HEAD + b"a " + ONE + b"b ", "is truncated: it has 16 bytes but its header promises at least 24"),
        (".bin", HEAD + b"a " + ONE + b"\nlong_word " + ONE[:4], "ends or is damaged at word 2 of 2, byte 14"),
        (".bin", HEAD + b"a " + ONE + b"\n\xff\xfe " + ONE, "has no UTF-8 word at word 2 of 2, byte 14"),
        (".bin", HEAD + b"a " + ONE + b"b " + ONE + b"tail", "goes on after its 2 words, at byte 24"),
        (".bin", b"99999999999 100\n", "is truncated"),
        (".bin", b"1 1\n" + b"x" * 200_000, "ends or is damaged at word 1 of 1, byte 4"),
        (".safetensors", b"rubbish that is long enough", r"is no \.safetensors file or is truncated"),
    ],
)
def test_damaged_files(tmp_path, suffix, data, message):
    (tmp_path / f"v{suffix}").write_bytes(data)
    with pytest.raises(StorageError, match=message) as caught:
        Vectors.load(tmp_path / f"v{suffix}")
    assert "\n" not in str(caught.value)


# --- several words, counts, gensim ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    rng = np.random.default_rng(1)
    matrix = rng.standard_normal((500, 16)).astype(np.float32) * rng.uniform(0.1, 9, (500, 1)).astype(np.float32)
    return Vectors([f"w{i}" for i in range(500)], matrix, np.arange(500, 0, -1))


def test_several_words(many):
    assert many[["w3", "w1", "w3"]].tolist() == many.matrix[[3, 1, 3]].tolist()
    assert many[[]].shape == (0, 16)
    assert many[np.array(["w3"])].shape == (1, 16)
    many[["w1", "w2"]][:] = 0  # a copy
    assert many.matrix[1].any()


def test_unknown_words_are_listed(many):
    words = ["w1", "W1", "zzz", "w2", "zzz", *(f"?{i}" for i in range(20))]
    for attempt in (
        lambda: many[words],
        lambda: many.most_similar(words),
        lambda: many.most_similar("w1", negative=words),
    ):
        with pytest.raises(UnknownWordError) as caught:
            attempt()
        text = str(caught.value)
        assert text.startswith("22 of 24 words are not among the 500: 'W1', 'zzz', '?0', ")
        assert text.endswith("'?7' and 12 more; check spelling and case")
        assert caught.value.words == ("W1", "zzz", *(f"?{i}" for i in range(20)))
    with pytest.raises(UnknownWordError, match=r"'thee' \(did you mean 'the'\?\), 'zzz'; check"):
        Vectors(["the"], [[1.0]])[["thee", "zzz"]]


@pytest.mark.parametrize(
    ("positive", "negative"),
    [(["w0"], []), (["w1", "w2"], ["w3"]), (["w4", "w5", "w6"], []), ([], ["w7"]), (["w8", "w8"], ["w9"])],
)
@pytest.mark.parametrize("rows_at_once", [64, 1 << 18])
def test_most_similar_is_gensims(many, monkeypatch, positive, negative, rows_at_once):
    monkeypatch.setattr(lookup, "_ROWS_AT_ONCE", rows_at_once)
    ours = many.most_similar(positive=positive, negative=negative, topn=150)
    theirs = many.to_gensim().most_similar(positive=positive, negative=negative, topn=150)
    assert [word for word, _ in ours] == [word for word, _ in theirs]
    assert [cosine for _, cosine in ours] == pytest.approx([cosine for _, cosine in theirs], abs=1e-6)
    assert not {*positive, *negative}.intersection(word for word, _ in ours)


def test_most_similar_to_vectors(many):
    assert many.most_similar(many["w5"] * 3, 1) == [("w5", pytest.approx(1))]
    kv, offset = many.to_gensim(), many["w5"] - many["w6"]
    ours, theirs = many.most_similar([offset, "w9"], 5), kv.most_similar([offset, "w9"], topn=5)
    assert [word for word, _ in ours] == [word for word, _ in theirs]
    assert many.analogy("w1", "w2", "w3", 4) == many.most_similar(["w2", "w3"], 4, negative="w1")


@pytest.mark.parametrize("rows_at_once", [64, 1 << 18])
def test_other_names_of_gensim(many, monkeypatch, rows_at_once):
    monkeypatch.setattr(lookup, "_ROWS_AT_ONCE", rows_at_once)
    kv = many.to_gensim()
    direction = many["w5"] - many["w6"]
    for ours, theirs in (
        (many.similar_by_word("w3", 20), kv.similar_by_word("w3", topn=20)),
        (many.similar_by_vector(direction, 20), kv.similar_by_vector(direction, topn=20)),
    ):
        assert [word for word, _ in ours] == [word for word, _ in theirs]
        assert [cosine for _, cosine in ours] == pytest.approx([cosine for _, cosine in theirs], abs=1e-6)
    rng = np.random.default_rng(2)
    for _ in range(20):
        first, second = ([f"w{i}" for i in rng.integers(500, size=size)] for size in rng.integers(1, 9, 2))
        assert many.doesnt_match(first) == kv.doesnt_match(first)
        assert many.n_similarity(first, second) == pytest.approx(float(kv.n_similarity(first, second)), abs=1e-6)
        assert many.rank(first[0], second[0]) == kv.rank(first[0], second[0])
        assert many.similarity(first[0], second[0]) == pytest.approx(kv.similarity(first[0], second[0]), abs=1e-6)
    assert many.rank("w1", many.most_similar("w1", 3)[2][0]) == 3


def test_other_names_of_gensim_by_hand():
    vectors = Vectors(["east", "north", "northeast", "west", "nowhere"], [[2.0, 0], [0, 1], [3, 3], [-1, 0], [0, 0]])
    assert vectors.doesnt_match(["east", "northeast", "north", "west"]) == "west"
    assert vectors.doesnt_match(word for word in ("north", "east")) == "east"  # equals: by the alphabet
    assert vectors.rank("east", "northeast") == vectors.rank("east", "east") == 1
    assert vectors.rank("east", "north") == vectors.rank("east", "nowhere") == 2
    assert vectors.n_similarity(["east", "north"], ["northeast"]) == pytest.approx(3 / 10**0.5)
    assert vectors.n_similarity(["nowhere"], ["east"]) == 0.0
    for call in (vectors.doesnt_match, lambda words: vectors.n_similarity(words, ["east"])):
        with pytest.raises(UnknownWordError, match="did you mean 'west'"):
            call(["east", "wset"])


def test_names_of_gensim_that_are_not_here(many):
    with pytest.raises(
        AttributeError, match=r"no attribute 'wmdistance'; what .* there by vectors\.to_gensim\(\)\.wmdistance"
    ):
        many.wmdistance(["w1"], ["w2"])
    with pytest.raises(AttributeError, match=r"did you mean 'most_similar'\? What gensim's .*\.most_similar_cosmul"):
        many.most_similar_cosmul("w1")
    assert not hasattr(many, "__array__")
    assert copy.deepcopy(many).words == many.words


def test_to_gensim_and_back(many):
    kv = many.to_gensim()
    assert isinstance(kv, models.KeyedVectors)
    assert np.shares_memory(kv.vectors, many.matrix)
    assert (len(kv), kv.vector_size, kv.get_index("w7")) == (500, 16, 7)
    assert kv.get_vecattr("w7", "count") == 493
    kv.add_vectors(["new"], np.ones((1, 16), dtype=np.float32))
    assert "new" in kv
    assert len(many) == 500
    again = Vectors.from_gensim(many.to_gensim())
    assert again.words == many.words
    assert again.matrix.tobytes() == many.matrix.tobytes()
    assert again.counts.tolist() == many.counts.tolist()
    assert Vectors.from_gensim(Vectors(["a"], [[1.0]]).to_gensim()).counts is None


def test_from_a_gensim_model():
    model = models.Word2Vec([["a", "b", "c"] * 5], vector_size=4, min_count=1, workers=1)
    vectors = Vectors.from_gensim(model)
    assert vectors.words == model.wv.index_to_key
    assert vectors.counts.tolist() == [5, 5, 5]
    with pytest.raises(InvalidTypeError, match=r"dict is no gensim KeyedVectors .*; pass gensim's model\.wv"):
        Vectors.from_gensim({})
    numbered = models.KeyedVectors(2)
    numbered.add_vectors([0, 1], np.eye(2, dtype=np.float32))
    with pytest.raises(InvalidTypeError, match="key 0 is no word"):
        Vectors.from_gensim(numbered)


def test_without_gensim(many, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gensim.models.keyedvectors", None)
    (tmp_path / "v.kv").write_text("old")
    for attempt in (
        many.to_gensim,
        lambda: Vectors.from_gensim(None),
        lambda: many.save(tmp_path / "v.kv"),
        lambda: Vectors.load(tmp_path / "v.kv"),
    ):
        with pytest.raises(MissingPackageError, match="need gensim, which is not installed; run: pip install gensim"):
            attempt()
    assert (tmp_path / "v.kv").read_text() == "old"
