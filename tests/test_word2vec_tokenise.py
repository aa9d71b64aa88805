"""Words numbered by the compiled tokeniser: the same numbers as by `str.split`."""

from __future__ import annotations

import io
import re
import sys
import tempfile

import numpy as np
import pytest

from speedtransfer.errors import HostMemoryError, InvalidValueError
from speedtransfer.word2vec import Corpus
from speedtransfer.word2vec.tokenise import LINE_END, WordTable

SPACES = re.findall(r"\s", "".join(map(chr, range(sys.maxunicode + 1))))
# Neighbours of white space that are none, and one character of each length.
WORD_CHARACTERS = [*"abcxyz09'", "\x01", "\x1b", "\x7f", "\x84", "\x86", "é", "\u200b", "\u200c", "\u2030", "\u3001"]
WORD_CHARACTERS += [
    "\u167f",
    "\u1681",
    "\u180e",
    "\u2027",
    "\u202a",
    "\u205e",
    "\u2060",
    "東",
    "京",
    "\U0001f600",
    "\u2070",
]


class Dripping(io.BytesIO):
    """A file that gives a few bytes at a time, as a pipe may; words and characters are cut everywhere."""

    def __init__(self, data, step):
        super().__init__(data)
        self.step = step

    def read(self, size=-1):
        return super().read(self.step)


class WordDict:
    """An oracle: distinct words, numbered in order of appearance."""

    def __init__(self):
        self.words = {}

    def number(self, data, line_end=0):
        lines = data.decode().split("\n") if line_end else [data.decode()]
        numbers = [[self.words.setdefault(word, len(self.words)) for word in line.split()] for line in lines]
        return np.array([number for line in numbers for number in (*line, line_end)][:-1], np.int32)

    def take(self, numbers):
        return [list(self.words)[number] for number in numbers]


def random_text(seed, num_words):
    rng = np.random.default_rng(seed)
    types = ["".join(rng.choice(WORD_CHARACTERS, rng.integers(1, 14))) for _ in range(num_words // 20)]
    words = rng.choice(types, num_words)
    spaces = ["".join(rng.choice(SPACES, rng.integers(1, 3))) for _ in words]
    return "".join(part for pair in zip(words, spaces, strict=True) for part in pair)


@pytest.mark.sweep
@pytest.mark.parametrize("line_end", [0, LINE_END])
@pytest.mark.parametrize("seed", range(5))
def test_tokeniser_agrees_with_split(seed, line_end):
    text = random_text(seed, 4000)
    plain, fast = WordDict(), WordTable()
    for part in (text, text[: len(text) // 2], text + "\nnew words\n\n"):
        expected = plain.number(part.encode(), line_end)
        np.testing.assert_array_equal(fast.number(part.encode(), line_end), expected)
        if not line_end:
            assert fast.take(expected) == part.split()
    assert fast.take(np.arange(len(fast))) == list(plain.words)
    assert len(fast) == len(plain.words)


def test_tokeniser_knows_every_white_space():
    fast = WordTable()
    text = "".join(f"w{number}{space}" for number, space in enumerate(SPACES))
    assert len(fast.number(text.encode())) == len(SPACES)
    for character in WORD_CHARACTERS:
        assert len(fast.number(f"a{character}b".encode())) == 1


def test_tokeniser_grows():
    plain, fast = WordDict(), WordTable()
    words = [f"{n}" for n in range(20_000)] + [f"{n:07}-ends-alike" for n in range(15_000)]  # short keys and hashes
    words += ["ends-alike", "s-alike", "0000001-ends-alike", "x" * 500_000]
    data = " ".join(words + words[::-1]).encode()
    np.testing.assert_array_equal(fast.number(data), plain.number(data))
    assert fast.take(np.arange(len(fast))) == list(plain.words)


def test_tokeniser_tells_words_of_equal_hash_apart():
    plain, fast = WordDict(), WordTable()
    fast._secret = np.uint64(0), np.uint64(0)  # every word hashes to 0
    data = random_text(3, 2000).encode()
    np.testing.assert_array_equal(fast.number(data), plain.number(data))


def test_tokeniser_of_nothing():
    fast = WordTable()
    assert fast.number(b"").tolist() == []
    assert fast.number(b" \n", LINE_END).tolist() == [LINE_END]
    assert len(fast) == 0


@pytest.mark.parametrize("kind", ["text", "lines"])
@pytest.mark.parametrize("step", [37, 1000, 100_000])
def test_a_corpus_of_pieces(kind, step):
    text, plain, seen = random_text(7, 5000), WordDict(), []
    corpus = Corpus(Dripping(b"\xef\xbb\xbf" + text.encode(), step), 1, kind=kind, report=seen.append)
    numbers = plain.number(text.encode(), LINE_END)
    words = [plain.take([number])[0] for number in numbers if number != LINE_END]
    assert [corpus.vocabulary.words[number] for number in corpus.ids] == words
    assert corpus.num_raw_words == seen[-1] == len(words) == 5000
    if kind == "lines":
        ends = np.cumsum(numbers != LINE_END)[numbers == LINE_END]
        assert corpus.starts.tolist() == sorted({0, *ends.tolist()} - {5000})
        assert len(corpus.starts) > 5


def test_several_files(tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"a b file{number}\nc", encoding="utf-8")
    corpus = Corpus(tmp_path, 1, kind="lines")
    assert [corpus.vocabulary.words[i] for i in corpus.ids[:5]] == ["a", "b", "file0", "c", "a"]
    assert corpus.starts.tolist() == [0, 3, 4, 7, 8, 11, 12, 15]  # a line ends with its file


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    "rubbish", [b"\0", b"\xff", b"\xe6\x9d", b"\xed\xa0\x80", b"\xc3 ", b"\xf4\x90\x80\x80", b"\xc0\x80"]
)
@pytest.mark.parametrize("step", [5, 64, 10_000])
def test_rubbish_is_reported(mark, rubbish, step):
    data = mark + b"w\xc3\xa9rd \xe6\x9d\xb1\n" * 30
    with pytest.raises(InvalidValueError, match=f"byte {len(data) + 3}[ ;]"):
        Corpus(Dripping(data + b"abc" + rubbish + b"d e f", step))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_when_stopped(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def report(num_words):
        if num_words > 500:
            raise stop

    with pytest.raises(stop):
        Corpus(Dripping(random_text(1, 3000).encode(), 100), report=report)
    assert list(tmp_path.iterdir()) == []


def test_no_memory_for_the_words(monkeypatch):
    def refuse(self, room_bytes):
        raise MemoryError

    monkeypatch.setattr(WordTable, "_grow", refuse)
    with pytest.raises(HostMemoryError, match="distinct words so far fill the memory; pass less text"):
        Corpus(io.BytesIO(" ".join(map(str, range(100_000))).encode()))


@pytest.mark.parametrize("same", [0, 1])
def test_tokeniser_hides_where_words_are(same):
    """Whoever knows the hash, or half of its secret, cannot choose words that share a place; what comes out is the same."""
    words = [int(n).to_bytes(8, "big").hex() for n in np.random.default_rng(0).integers(0, 1 << 60, 3000)]
    data, one, other = " ".join(words).encode(), WordTable(), WordTable()
    other._secret = tuple(secret._secret[half] for half, secret in enumerate((other, one) if same else (one, other)))
    np.testing.assert_array_equal(other.number(data), one.number(data))
    places = [np.flatnonzero(table._slots[:, 1] >= 0) for table in (one, other)]
    assert not np.array_equal(*places)
