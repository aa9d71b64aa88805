"""Vectors: look-up, neighbours, files in three formats, gensim as the reader of two."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import safetensors.numpy
import torch
from gensim.models import KeyedVectors

from speedtransfer.errors import InvalidTypeError, InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.word2vec import UnknownWordError, Vectors, Vocabulary

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
    assert Vectors(["alone"], [[1.0]]).most_similar("alone") == []


def test_most_similar_agrees_with_gensim(tmp_path):
    rng = np.random.default_rng(1)
    vectors = Vectors([f"w{i}" for i in range(300)], rng.standard_normal((300, 20)).astype(np.float32))
    vectors.save(tmp_path / "v.bin")
    theirs = KeyedVectors.load_word2vec_format(tmp_path / "v.bin", binary=True)
    for word in ("w0", "w17", "w299"):
        ours, expected = vectors.most_similar(word, 12), theirs.most_similar(word, topn=12)
        assert [w for w, _ in ours] == [w for w, _ in expected]
        assert [c for _, c in ours] == pytest.approx([c for _, c in expected], abs=1e-6)


def test_a_tensor_is_taken_without_a_copy():
    rows = torch.zeros(2, 3)
    vectors = Vectors(["a", "b"], rows)
    rows[1, 2] = 5
    assert vectors["b"].tolist() == [0, 0, 5]
    assert Vectors(["a", "b"], rows.bfloat16())["b"].tolist() == [0, 0, 5]
    assert Vectors(["a", "b"], rows.double().numpy()).matrix.dtype == np.float32


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip(vectors, tmp_path, suffix):
    path = tmp_path / f"v{suffix}"
    vectors.save(path)
    again = Vectors.load(path)
    assert again.words == WORDS
    assert again.matrix.tobytes() == vectors.matrix.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip_of_many_and_of_none(tmp_path, suffix):
    for count in (0, 1, 10_000):  # more than are written at once
        vectors = Vectors([f"w{i}" for i in range(count)], np.arange(count * 2, dtype=np.float32).reshape(count, 2))
        vectors.save(tmp_path / f"v{suffix}")
        again = Vectors.load(tmp_path / f"v{suffix}")
        assert again.words == vectors.words
        assert again.matrix.tolist() == vectors.matrix.tolist()


@pytest.mark.parametrize("suffix", [".txt", ".vec", ".bin"])
def test_gensim_reads_what_we_write(vectors, tmp_path, suffix):
    words = [word.replace("\u00a0", "") for word in WORDS]  # gensim splits the lines of fvocab there
    vectors = Vectors(words, vectors.matrix)
    vectors.save(tmp_path / f"v{suffix}")
    Vocabulary(words, [9, 8, 7, 6, 5]).save(tmp_path / "vocab.txt")
    theirs = KeyedVectors.load_word2vec_format(
        tmp_path / f"v{suffix}", binary=suffix == ".bin", fvocab=tmp_path / "vocab.txt"
    )
    assert theirs.index_to_key == words
    assert theirs.vectors.tobytes() == vectors.matrix.tobytes()
    assert [theirs.get_vecattr(word, "count") for word in words] == [9, 8, 7, 6, 5]


@pytest.mark.parametrize("suffix", [".txt", ".bin"])
def test_we_read_what_gensim_writes(vectors, tmp_path, suffix):
    theirs = KeyedVectors(7)
    theirs.add_vectors(WORDS, vectors.matrix)
    theirs.save_word2vec_format(tmp_path / f"v{suffix}", binary=suffix == ".bin")  # its binary has no line ends
    again = Vectors.load(tmp_path / f"v{suffix}")
    assert again.words == WORDS
    assert again.matrix.tobytes() == vectors.matrix.tobytes()


def test_safetensors_are_safetensors_and_hold_any_word(tmp_path):
    words = ["New York", "a\nb", "", "été"]
    Vectors(words, np.eye(4, dtype=np.float32)).save(tmp_path / "v.safetensors")
    tensors = safetensors.numpy.load_file(tmp_path / "v.safetensors")
    assert sorted(tensors) == ["vectors", "word_ends", "words"]
    assert tensors["vectors"].tolist() == np.eye(4).tolist()
    assert tensors["words"].tobytes().decode() == "".join(words)
    assert Vectors.load(tmp_path / "v.safetensors").words == words


@pytest.mark.parametrize("suffix", [".txt", ".bin"])
@pytest.mark.parametrize("word", ["New York", "a\nb", ""])
def test_word_that_the_format_cannot_hold(tmp_path, suffix, word):
    (tmp_path / f"v{suffix}").write_text("old")
    with pytest.raises(InvalidValueError, match=r"is empty or holds white space.*save to \.safetensors"):
        Vectors(["a", word], np.eye(2, dtype=np.float32)).save(tmp_path / f"v{suffix}")
    assert (tmp_path / f"v{suffix}").read_text() == "old"


def test_bad_arguments(tmp_path):
    with pytest.raises(InvalidValueError, match="there are 2 words; pass one row a word"):
        Vectors(["a", "b"], np.zeros((3, 2), dtype=np.float32))
    with pytest.raises(InvalidValueError, match=r"matrix has shape \(2,\)"):
        Vectors(["a", "b"], np.zeros(2, dtype=np.float32))
    with pytest.raises(InvalidTypeError, match="matrix holds int64 but vectors are floating-point"):
        Vectors(["a"], np.zeros((1, 2), dtype=np.int64))
    with pytest.raises(InvalidValueError, match="word 'a' is there twice"):
        Vectors(["a", "a"], np.zeros((2, 2), dtype=np.float32))
    with pytest.raises(InvalidValueError, match="topn is 0 but must be at least 1"):
        Vectors(["a"], np.zeros((1, 2), dtype=np.float32)).most_similar("a", 0)
    for attempt in (Vectors(["a"], [[1.0]]).save, Vectors.load):
        with pytest.raises(InvalidValueError, match=r"ends in '.xyz' but vectors are .txt, .vec, .bin, .safetensors"):
            attempt(tmp_path / "v.xyz")
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
        (".txt", b"the 1 2\n", "line 1 of .* is no word2vec header .* but b'the 1 2"),
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
        (".safetensors", b"rubbish that is long enough", r"is no \.safetensors file or is truncated"),
    ],
)
def test_damaged_files(tmp_path, suffix, data, message):
    (tmp_path / f"v{suffix}").write_bytes(data)
    with pytest.raises(StorageError, match=message) as caught:
        Vectors.load(tmp_path / f"v{suffix}")
    assert "\n" not in str(caught.value)


def test_damaged_safetensors(vectors, tmp_path):
    path = tmp_path / "v.safetensors"
    vectors.save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StorageError, match="holds no words"):
        Vectors.load(path)
    safetensors.numpy.save_file({"vectors": np.zeros((2, 2), dtype=np.float32)}, path)
    with pytest.raises(StorageError, match="holds no words"):
        Vectors.load(path)
    ends, data = np.array([1], dtype=np.int64), np.frombuffer(b"a", dtype=np.uint8)
    tensors = {"vectors": np.zeros((2, 2), dtype=np.float32), "word_ends": ends, "words": data}
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(StorageError, match="holds 1 words but 2 vectors"):
        Vectors.load(path)
