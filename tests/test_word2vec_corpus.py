"""Text out of files, folders and pipes, the corpus as word numbers in a temporary file, and its vocabulary."""

import gzip
import io
import itertools
import lzma
import sys
import tempfile

import pytest
from cases import raising

from speedtransfer.errors import HostMemoryError, InvalidValueError, StorageError
from speedtransfer.word2vec import Corpus, Vocabulary
from speedtransfer.word2vec import text as text_module
from speedtransfer.word2vec.text import decode, iter_lines, iter_pieces
from speedtransfer.word2vec.vocabulary import read_counts


def corpus_of(text, **kwargs):
    return Corpus(io.BytesIO(text.encode()), **kwargs)


def test_a_byte_order_mark_within_the_text_is_of_a_word(tmp_path):
    words = Corpus(io.BytesIO(("x " + "\ufeffa " * 10 + "b " * 6 + "c " * 5).encode()), 1)
    assert len(words.ids) == 22
    assert words.vocabulary.words[0] == "\ufeffa"
    # That of a file is none.
    (tmp_path / "counts.tsv").write_text("\ufeffa\t5\nb\t4\n", encoding="utf-8")
    assert read_counts(tmp_path / "counts.tsv")[0] == ["a", "b"]


def test_no_room_for_the_numbers(monkeypatch):
    refuse = raising(OSError(28, "No space left on device"))
    full = type("FullDisk", (io.BytesIO,), {"flush": refuse})
    for make, what in (
        (refuse, "no temporary file for the corpus"),
        (lambda **kwargs: full(), "does not fit as numbers"),
    ):
        monkeypatch.setattr(tempfile, "TemporaryFile", make)
        with pytest.raises(StorageError, match=rf"{what} .*No space left on device.*set TMPDIR"):
            corpus_of("a b " * 10)


# --- text -------------------------------------------------------------------------------------------------------------

TEXT = "the cat sat\non  the\tmat\r\n\u00e9t\u00e9 \u6771\u4eac the end"
WORDS = ["the", "cat", "sat", "on", "the", "mat", "été", "東京", "the", "end"]


def words_of(source, **kwargs):
    return [word for piece in iter_pieces(source, **kwargs) for word in decode(piece).split()]


@pytest.mark.parametrize("name", ["text8", "a.gz", "a.xz"])
def test_kinds_of_file(tmp_path, name):
    opener = {"gz": gzip.open, "xz": lzma.open}.get(name.rsplit(".")[-1], open)
    with opener(tmp_path / name, "wb") as file:
        file.write(TEXT.encode())
    assert words_of(str(tmp_path / name)) == WORDS


def test_folder_is_read_in_order_and_words_end_with_their_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("three")
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "sub" / "c.gz").write_bytes(gzip.compress(b"four"))
    (tmp_path / "notes.pdf").write_bytes(b"\0")
    assert words_of(tmp_path) == ["one", "two", "three", "four"]
    assert Corpus(tmp_path, 1, kind="lines").starts.tolist() == [0, 2, 3]


def test_pieces_are_cut_at_any_white_space():
    for space in filter(str.isspace, map(chr, range(0x110000))):
        data = space.join(["one", "été", "東京", "end"]).encode()
        pieces = list(iter_pieces(io.BytesIO(data), chunk_bytes=9))
        assert [word for piece in pieces for word in decode(piece).split()] == ["one", "été", "東京", "end"]
        assert len(pieces) > 1
        assert b"".join(piece.data for piece in pieces) == data
        assert [piece.position for piece in pieces] == [0, *itertools.accumulate(len(p.data) for p in pieces[:-1])]
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_lines(tmp_path):
    text = "one two\n\nthree \u2028 four\r\nend"
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text, newline="", encoding="utf-8")
    found = {}
    for name, lines in iter_lines(tmp_path, chunk_bytes=7):
        found.setdefault(name, []).extend(lines)
    assert found == {repr(str(tmp_path / name)): text.split("\n") for name in ("a.txt", "b.txt")}


def test_more_distinct_words_than_memory(monkeypatch):
    monkeypatch.setattr("speedtransfer.word2vec.tokenise.WordTable._grow", lambda self, room: [0] * (1 << 60))
    with pytest.raises(HostMemoryError, match="distinct words so far fill the memory; pass less text"):
        corpus_of(" ".join(map(str, range(100_000))))


def test_what_an_open_file_cannot_read(monkeypatch):
    broken = type("Broken", (io.BytesIO,), {"read": raising(OSError(5, "Input/output error"))})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(broken()))
    with pytest.raises(StorageError, match=r"cannot read standard input \(Input/output error\)"):
        words_of("-")


class Endless:
    """A line without end, such as a dump of a database that puts all in one."""

    name = "dump"
    read_bytes = 0

    def read(self, size):
        self.read_bytes += size
        return b"node " * (size // 5)


def test_a_line_too_long_for_memory_is_refused(monkeypatch):
    monkeypatch.setattr(text_module, "LINE_BYTES", 3 << 20)
    source = Endless()
    with pytest.raises(
        InvalidValueError, match=r"'dump' has a line of more than 3,145,728 bytes, up to byte \d+: .*several"
    ):
        Corpus(source, kind="graph")
    assert source.read_bytes <= 5 << 20


# --- vocabulary -------------------------------------------------------------------------------------------------------


def test_a_word_that_never_occurs():
    vocabulary = Vocabulary(["a", "b", "c"], [5, 5, 0])
    assert vocabulary.keep_probability(1e-3)[2] == 1
    assert vocabulary.noise().tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("max_words", [2, 4, 5, None])
def test_choice_against_sorting(max_words):
    counts = {word: count for count, words in ((9, "x"), (4, "dbac"), (2, "é東z"), (1, "qr")) for word in words}
    text = " ".join(" ".join(word * count) for word, count in counts.items())
    corpus = corpus_of(text, min_count=2, max_words=max_words)
    vocabulary = corpus.vocabulary
    assert [vocabulary.words[number] for number in corpus.ids] == [word for word in text.split() if word in vocabulary]
    assert corpus.ids.dtype == "int32"
    expected = sorted((-count, word) for word, count in counts.items() if count >= 2)[:max_words]
    assert list(zip((-vocabulary.counts).tolist(), vocabulary.words, strict=True)) == expected
    assert ("x" in vocabulary, "q" in vocabulary) == (True, False)
