"""Words out of files, folders, pipes, and what is no text."""

from __future__ import annotations

import gzip
import io
import itertools
import lzma
import sys

import pytest

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Corpus, text
from speedtransfer.word2vec.text import decode, find_files, iter_lines, iter_pieces

TEXT = "the cat sat\non  the\tmat\r\n\u00e9t\u00e9 \u6771\u4eac the end"
WORDS = ["the", "cat", "sat", "on", "the", "mat", "été", "東京", "the", "end"]


def words_of(source, **kwargs):
    return [word for piece in iter_pieces(source, **kwargs) for word in decode(piece).split()]


@pytest.mark.parametrize("chunk_bytes", [12, 13, 14, 17, 64, 1 << 20])
def test_words_do_not_depend_on_the_blocks(tmp_path, chunk_bytes):
    (tmp_path / "a.txt").write_text(TEXT, newline="")
    assert words_of(tmp_path / "a.txt", chunk_bytes=chunk_bytes) == WORDS


def test_one_long_line_comes_in_blocks():
    blocks = [decode(piece).split() for piece in iter_pieces(io.BytesIO(b"word " * 100_000), chunk_bytes=1000)]
    assert len(blocks) > 400
    assert sum(map(len, blocks)) == 100_000


@pytest.mark.parametrize("name", ["text8", "a.txt", "a.gz", "a.xz", "a.text8.gz"])
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
    assert [path.name for path in find_files(tmp_path)] == ["a.txt", "b.txt", "c.gz"]


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert words_of("-") == WORDS


@pytest.mark.parametrize("space", [c for c in map(chr, range(0x110000)) if c.isspace()])
def test_pieces_are_cut_at_any_white_space(space):
    data = space.join(["one", "été", "東京", "end"]).encode()
    assert words_of(io.BytesIO(data), chunk_bytes=9) == ["one", "été", "東京", "end"]
    pieces = list(iter_pieces(io.BytesIO(data), chunk_bytes=9))
    assert len(pieces) > 1
    assert b"".join(piece.data for piece in pieces) == data
    assert [piece.position for piece in pieces] == [0, *itertools.accumulate(len(p.data) for p in pieces[:-1])]
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("chunk_bytes", [7, 16, 1 << 20])
def test_lines(tmp_path, chunk_bytes):
    text = "one two\n\nthree \u2028 four\r\nend"
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text, newline="", encoding="utf-8")
    found = {}
    for name, lines in iter_lines(tmp_path, chunk_bytes=chunk_bytes):
        found.setdefault(name, []).extend(lines)
    assert found == {repr(str(tmp_path / name)): text.split("\n") for name in ("a.txt", "b.txt")}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"some text\0more", "is no text: byte 9 is NUL"),
        (b"some text \xff\xfe", "is no UTF-8 text: invalid start byte at byte 10"),
        (b"cut short \xe6\x9d", "is no UTF-8 text: unexpected end of data at byte 10"),
        (b"x" * 100, "holds a word of over 20 bytes"),
        ("東".encode() * 50, "holds a word of over 20 bytes"),  # blocks of 20 bytes end within a character
        (b"x" * 30 + b"\0" + b"x" * 30, "is no text: byte 30 is NUL"),
    ],
)
def test_rubbish(tmp_path, data, message):
    (tmp_path / "rubbish.txt").write_bytes(data)
    with pytest.raises(InvalidValueError, match=message) as caught:
        words_of(tmp_path / "rubbish.txt", chunk_bytes=20)
    assert "rubbish.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["gz", "xz"])
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_damaged_archive(tmp_path, suffix, damage):
    packed = {"gz": gzip, "xz": lzma}[suffix].compress(b"word " * 10_000)
    (tmp_path / f"a.{suffix}").write_bytes(packed[:-20] if damage == "cut" else b"not packed at all")
    with pytest.raises(StorageError, match=rf"a\.{suffix}' is damaged or no \.{suffix} file"):
        words_of(tmp_path / f"a.{suffix}")


def test_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(StorageError, match=r"cannot read .*a\.txt' \(Permission denied\)"):
        words_of(tmp_path / "a.txt")


def test_what_an_open_file_cannot_read(monkeypatch):
    class Broken(io.BytesIO):
        def read(self, size=-1):
            raise OSError(5, "Input/output error")

    with pytest.raises(StorageError, match=r"cannot read 'the given file' \(Input/output error\)"):
        words_of(Broken())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Broken()))
    with pytest.raises(StorageError, match=r"cannot read standard input \(Input/output error\)"):
        words_of("-")


class Endless:
    """A line without end, such as a dump of a database that puts all in one."""

    name = "dump"
    read_bytes = 0

    def read(self, size):
        self.read_bytes += size
        return b"node " * (size // 5)


@pytest.mark.parametrize("kind", ["graph", "adjacency"])
def test_a_line_too_long_for_memory_is_refused(monkeypatch, kind):
    monkeypatch.setattr(text, "LINE_BYTES", 3 << 20)
    source = Endless()
    with pytest.raises(
        InvalidValueError, match=r"'dump' has a line of more than 3,145,728 bytes, up to byte \d+: .*several"
    ):
        Corpus(source, kind=kind)
    assert source.read_bytes <= 5 << 20


def test_long_lines_within_the_limit_are_read(monkeypatch):
    monkeypatch.setattr(text, "LINE_BYTES", 250)
    whole = "node " * 40 + "\n"
    found = [line for _, lines in iter_lines(io.BytesIO(whole.encode() * 30), chunk_bytes=64) for line in lines]
    assert found == [whole[:-1]] * 30 + [""]
