"""Files of vectors beyond round trips of text: GloVe, gensim's own, and packed ones; damage: test_forged_files.py."""

import gzip

import numpy as np
import pytest
import safetensors.numpy
from late import models

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Vectors, Vocabulary
from speedtransfer.word2vec.formats import FORMATS

SUFFIXES = (".txt", ".vec", ".bin", ".safetensors")
WORDS = ["the", "été", "東京", "12", "x\u00a0y"]


@pytest.fixture
def vectors():
    matrix = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    matrix[1] *= 1e-15  # small, large and awkward numbers survive
    matrix[2] *= 1e15
    matrix[3, :2] = 0.1, -0.0
    return Vectors(WORDS, matrix, [9, 7, 5, 3, 1])


def same(one, other):
    return one.words == other.words and one.matrix.tobytes() == other.matrix.tobytes()


@pytest.mark.parametrize("suffix", FORMATS)
def test_round_trip_of_every_format(vectors, tmp_path, suffix):
    path = tmp_path / f"v{suffix}"
    vectors.save(path)
    again = Vectors.load(path)
    assert same(again, vectors)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # gensim would put large arrays beside a .kv
    kept = vectors.counts.tolist() if suffix in (".safetensors", ".kv") else None
    assert (again.counts if again.counts is None else again.counts.tolist()) == kept
    assert same(Vectors.load(path, max_words=2), Vectors(WORDS[:2], vectors.matrix[:2]))
    assert same(Vectors.load(path, max_words=99), vectors)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("count", "dim"), [(0, 2), (10_000, 2), (30, 20_000)])  # more than are written or read at once
def test_round_trip_of_many_and_of_none(tmp_path, suffix, count, dim):
    matrix = np.arange(count * dim, dtype=np.float32).reshape(count, dim)
    vectors = Vectors([f"w{i}" for i in range(count)], matrix)
    vectors.save(tmp_path / f"v{suffix}")
    assert same(Vectors.load(tmp_path / f"v{suffix}"), vectors)


# --- gensim -----------------------------------------------------------------------------------------------------------


def test_we_load_gensims_kv_and_models(tmp_path):
    words = [f"w{i}" for i in range(200)]
    theirs = models.KeyedVectors(15)
    theirs.add_vectors(words, np.random.default_rng(0).standard_normal((200, 15)).astype(np.float32))
    theirs.save(str(tmp_path / "large.kv"), sep_limit=1000)
    assert len(list(tmp_path.iterdir())) == 2  # gensim writes large arrays by themselves
    ours = Vectors.load(tmp_path / "large.kv")
    assert ours.words == words
    assert ours.matrix.tobytes() == theirs.vectors.tobytes()
    next(path for path in tmp_path.iterdir() if path.suffix == ".npy").unlink()
    with pytest.raises(StorageError, match=r"cannot read .*large\.kv.* \(No such file"):
        Vectors.load(tmp_path / "large.kv")
    model = models.Word2Vec([["a", "b", "c"] * 5], vector_size=4, min_count=1, workers=1)
    model.save(str(tmp_path / "model.kv"))
    assert Vectors.load(tmp_path / "model.kv").words == model.wv.index_to_key
    whole = (tmp_path / "model.kv").read_bytes()
    for length in (0, 20, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.kv").write_bytes(whole[:length])
        with pytest.raises(StorageError, match=r"cut\.kv"):
            Vectors.load(tmp_path / "cut.kv")


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")  # in gensim
@pytest.mark.parametrize("suffix", [".txt", ".bin", ".glove"])
def test_gensim_reads_what_we_write_and_we_what_it_writes(vectors, tmp_path, suffix):
    vectors = Vectors(["the", "été", "東京", "12", "xy"], vectors.matrix)  # gensim splits lines at any white space
    vectors.save(tmp_path / f"v{suffix}")
    Vocabulary(vectors.words, [9, 8, 7, 6, 5]).save(tmp_path / "vocab.txt")
    kind = {"no_header": True} if suffix == ".glove" else {"binary": suffix == ".bin", "fvocab": tmp_path / "vocab.txt"}
    theirs = models.KeyedVectors.load_word2vec_format(tmp_path / f"v{suffix}", **kind)
    assert (theirs.index_to_key, theirs.vectors.tobytes()) == (vectors.words, vectors.matrix.tobytes())
    if suffix != ".glove":
        assert [theirs.get_vecattr(word, "count") for word in vectors.words] == [9, 8, 7, 6, 5]
    binary = suffix == ".bin"  # gensim's has no line ends
    theirs.save_word2vec_format(tmp_path / f"theirs{suffix}", binary=binary, write_header=suffix != ".glove")
    assert same(Vectors.load(tmp_path / f"theirs{suffix}"), vectors)


# --- GloVe ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".glove", ".txt"])
def test_header_or_not(tmp_path, suffix):
    path = tmp_path / f"v{suffix}"
    path.write_text("2 3 1\n7 0.5 -1e-3\n")  # words of digits
    assert same(Vectors.load(path), Vectors(["2", "7"], [[3.0, 1], [0.5, -1e-3]]))
    path.write_text("2 1\n7 0.5\n8 1\n")
    assert same(Vectors.load(path), Vectors(["7", "8"], [[0.5], [1]]))
    path.write_text("a 1 2\r\n. . . 3 4\nat x@y.z 5 6\n\n")  # as in GloVe's own files; the last line is blank
    assert same(Vectors.load(path), Vectors(["a", ". . .", "at x@y.z"], [[1.0, 2], [3, 4], [5, 6]]))
    path.write_text("long" * 50 + " 1 2\nb 3 4")  # no line end at the end
    assert same(Vectors.load(path), Vectors(["long" * 50, "b"], [[1.0, 2], [3, 4]]))
    for line, message in (
        ("b 3 4 5", r"line 2 of .* \(3 numbers, not 2\)"),
        ("b", r"8 bytes but 2 vectors as long as most"),
        ("bbbbbbb 3", r"line 2 of .* \(1 numbers, not 2\)"),
    ):
        path.write_text(f"a 1 2\n{line}\n")
        with pytest.raises(StorageError, match=message):
            Vectors.load(path)


@pytest.mark.parametrize("header", ["", "5 2\n"])
def test_words_with_spaces(tmp_path, header):
    """Also in the first line, and with a header; a non-breaking space (of UTF-8) and a line separator are parts of a word."""
    path = tmp_path / "v.txt"
    path.write_text(header + ". . . 1 2\nin New York 3 4\nNew\u00a0York 5 6\n\u0085 7 8\n2008 9 10\n")
    expected = Vectors([". . .", "in New York", "New\u00a0York", "\u0085", "2008"], np.arange(1.0, 11).reshape(5, 2))
    assert same(Vectors.load(path), expected)
    path.write_text(header + "Windows 95 1 2\na 3 4\nb 5 6\nc 7 8\nd 9 10\n")
    with pytest.raises(
        StorageError, match=rf"line {2 if header else 1} of .* \(3 numbers, not 2\); .* leave that line out"
    ):
        Vectors.load(path)


def test_safetensors_are_safetensors_and_hold_any_word(tmp_path):
    words = ["New York", "a\nb", "", "été"]
    Vectors(words, np.eye(4, dtype=np.float32)).save(tmp_path / "v.safetensors")
    tensors = safetensors.numpy.load_file(tmp_path / "v.safetensors")
    assert sorted(tensors) == ["vectors", "word_ends", "words"]
    assert tensors["vectors"].tolist() == np.eye(4).tolist()
    assert tensors["words"].tobytes().decode() == "".join(words)
    assert Vectors.load(tmp_path / "v.safetensors").words == words


# --- packed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".txt", ".bin"])
def test_packed(vectors, tmp_path, suffix):
    vectors.save(tmp_path / f"v{suffix}")
    data = gzip.compress((tmp_path / f"v{suffix}").read_bytes())
    path = tmp_path / f"v{suffix}.gz"
    path.write_bytes(data)
    assert same(Vectors.load(path), vectors)
    for damaged in (data[:-9], data[:40], b"no gzip", data[:-8] + b"\0" * 8):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"is not a whole file of words \(.*\); get the file again"):
            Vectors.load(path)
    message = r"ends in '\.gz', which is only read, and only of \.txt, \.vec, \.bin"
    for attempt, name in ((vectors.save, path), (Vectors.load, tmp_path / "v.kv.gz")):
        with pytest.raises(InvalidValueError, match=message):
            attempt(name)
    path.write_bytes(gzip.compress(b"99999999 9999\n"))
    with pytest.raises(StorageError, match=r"is truncated: it has .* bytes but its header promises"):
        Vectors.load(path)
