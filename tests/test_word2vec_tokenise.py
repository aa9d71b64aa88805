"""Words numbered by the compiled tokeniser: the same numbers as in Python."""

from __future__ import annotations

import io
import re
import sys
import tempfile

import numpy as np
import pytest

from speedtransfer.errors import HostMemoryError, InvalidValueError, StorageError
from speedtransfer.word2vec import Corpus, tokenise
from speedtransfer.word2vec.tokenise import LINE_END, WordDict

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


@pytest.fixture
def always_fast(monkeypatch):
    monkeypatch.setattr(tokenise, "FAST_FROM_PIECES", 1)


def random_text(seed, num_words):
    rng = np.random.default_rng(seed)
    types = ["".join(rng.choice(WORD_CHARACTERS, rng.integers(1, 14))) for _ in range(num_words // 20)]
    words = rng.choice(types, num_words)
    spaces = ["".join(rng.choice(SPACES, rng.integers(1, 3))) for _ in words]
    return "".join(part for pair in zip(words, spaces, strict=True) for part in pair)


def make_tables():
    from speedtransfer.word2vec.tokenise_compiled import WordTable

    return WordDict(), WordTable()


@pytest.mark.sweep
@pytest.mark.parametrize("line_end", [0, LINE_END])
@pytest.mark.parametrize("seed", range(5))
def test_tokeniser_agrees_with_split(seed, line_end):
    text = random_text(seed, 4000)
    plain, fast = make_tables()
    for part in (text, text[: len(text) // 2], text + "\nnew words\n\n"):
        expected = plain.number(part.encode(), line_end)
        np.testing.assert_array_equal(fast.number(part.encode(), line_end), expected)
        if not line_end:
            assert fast.take(expected) == part.split()
    assert fast.take(np.arange(len(fast))) == plain.take(np.arange(len(plain)))
    assert len(fast) == len(plain)


def test_tokeniser_knows_every_white_space():
    _, fast = make_tables()
    text = "".join(f"w{number}{space}" for number, space in enumerate(SPACES))
    assert len(fast.number(text.encode())) == len(SPACES)
    for character in WORD_CHARACTERS:
        assert len(fast.number(f"a{character}b".encode())) == 1


def test_tokeniser_grows():
    plain, fast = make_tables()
    words = [f"{n}" for n in range(20_000)] + [f"{n:07}-ends-alike" for n in range(15_000)]  # short keys and hashes
    words += ["ends-alike", "s-alike", "0000001-ends-alike", "x" * 500_000]
    data = " ".join(words + words[::-1]).encode()
    np.testing.assert_array_equal(fast.number(data), plain.number(data))
    assert fast.take(np.arange(len(fast))) == plain.take(np.arange(len(plain)))


def test_tokeniser_tells_words_of_equal_hash_apart():
    from speedtransfer.word2vec.tokenise_compiled import _PRIME

    # Words of 9 bytes, c + w: the hash is (w * prime ^ c) * prime. Solved for the w that goes with another c.
    inverse = pow(_PRIME, -1, 2**64)
    rng = np.random.default_rng(0)
    pairs = []
    for first, second, *rest in rng.integers(33, 127, (100_000, 10)).tolist():
        word = bytes(rest)
        mixed = int.from_bytes(word, "big") * _PRIME % 2**64 ^ first ^ second
        other = (mixed * inverse % 2**64).to_bytes(8, "big")
        if first != second and all(33 <= byte < 127 for byte in other):
            pairs.append((bytes([first]) + word, bytes([second]) + other))
    assert len(pairs) > 2
    plain, fast = make_tables()
    fast._secret = np.uint64(0), np.uint64(_PRIME)
    data = b" ".join(word for pair in pairs * 2 for word in pair)
    np.testing.assert_array_equal(fast.number(data), plain.number(data))
    assert len(fast) == 2 * len(pairs)


def test_tokeniser_of_nothing():
    _, fast = make_tables()
    assert fast.number(b"").tolist() == []
    assert fast.number(b" \n", LINE_END).tolist() == [LINE_END]
    assert len(fast) == 0


@pytest.mark.parametrize("kind", ["text", "lines"])
@pytest.mark.parametrize("step", [37, 1000, 100_000])
def test_numba_changes_nothing(always_fast, kind, step):
    data = b"\xef\xbb\xbf" + random_text(7, 5000).encode()
    reports = {}
    corpora = {}
    for threads in (0, None):
        seen = reports[threads] = []
        corpora[threads] = Corpus(Dripping(data, step), 3, kind=kind, threads=threads, report=seen.append)
    plain, fast = corpora.values()
    assert fast.ids.tobytes() == plain.ids.tobytes()
    assert fast.vocabulary.words == plain.vocabulary.words
    np.testing.assert_array_equal(fast.vocabulary.counts, plain.vocabulary.counts)
    assert fast.num_raw_words == plain.num_raw_words == 5000
    assert reports[0] == reports[None]
    if kind == "lines":
        np.testing.assert_array_equal(fast.starts, plain.starts)
        assert len(fast.starts) > 5


def test_several_files(always_fast, tmp_path):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"a b file{number}\nc", encoding="utf-8")
    corpora = [Corpus(tmp_path, 1, kind="lines", threads=threads) for threads in (0, None)]
    for corpus in corpora:
        assert [corpus.vocabulary.words[i] for i in corpus.ids[:5]] == ["a", "b", "file0", "c", "a"]
        assert corpus.starts.tolist() == [0, 3, 4, 7, 8, 11, 12, 15]  # a line ends with its file


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize(
    "rubbish", [b"\0", b"\xff", b"\xe6\x9d", b"\xed\xa0\x80", b"\xc3 ", b"\xf4\x90\x80\x80", b"\xc0\x80"]
)
@pytest.mark.parametrize("step", [5, 64, 10_000])
def test_rubbish_is_reported_alike(always_fast, mark, rubbish, step):
    data = mark + b"w\xc3\xa9rd \xe6\x9d\xb1\n" * 30
    messages = []
    for threads in (0, None):
        with pytest.raises(InvalidValueError, match=f"byte {len(data) + 3}[ ;]") as caught:
            Corpus(Dripping(data + b"abc" + rubbish + b"d e f", step), threads=threads)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_when_stopped(always_fast, tmp_path, monkeypatch, stop):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def report(num_words):
        if num_words > 500:
            raise stop

    with pytest.raises(stop):
        Corpus(Dripping(random_text(1, 3000).encode(), 100), report=report)
    assert list(tmp_path.iterdir()) == []


def test_no_memory_for_the_words(always_fast, monkeypatch):
    from speedtransfer.word2vec.tokenise_compiled import WordTable

    def refuse(self, room_bytes):
        raise MemoryError

    monkeypatch.setattr(WordTable, "_grow", refuse)
    with pytest.raises(HostMemoryError, match="distinct words so far fill the memory; pass less text"):
        Corpus(io.BytesIO(" ".join(map(str, range(100_000))).encode()))


def test_damaged_archive(always_fast, tmp_path):
    import gzip

    (tmp_path / "a.gz").write_bytes(gzip.compress(random_text(2, 5000).encode())[:-20])
    with pytest.raises(StorageError, match=r"a\.gz' is damaged"):
        Corpus(tmp_path / "a.gz")


def test_a_small_text_does_not_wait_for_numba(monkeypatch):
    monkeypatch.setattr(tokenise, "compiled_tokeniser", lambda: pytest.fail("asked for"))
    assert len(Corpus(io.BytesIO(b"a b a b"), 1)) == 4


def test_the_compiled_way_is_taken(always_fast, monkeypatch):
    taken = []
    inner = tokenise.compiled_tokeniser
    monkeypatch.setattr(tokenise, "compiled_tokeniser", lambda: taken.append(inner()) or taken[-1])
    for threads in (3, 0, None):
        Corpus(io.BytesIO(b"a b a b"), 1, threads=threads)
    assert len(taken) == 2


def test_tokeniser_hides_where_words_are():
    """Whoever knows the hash cannot choose words that share a place; what comes out does not depend on it."""
    from speedtransfer.word2vec import tokenise_compiled

    _, fast = make_tables()
    prime, seed = tokenise_compiled._PRIME, np.uint64(0)
    words = [int(n).to_bytes(8, "big").hex().encode() for n in np.random.default_rng(0).integers(0, 1 << 60, 3000)]
    data = b" ".join(words)
    numbers = fast.number(data)
    places = []
    for _ in range(2):
        _, other = make_tables()
        np.testing.assert_array_equal(other.number(data), numbers)
        assert other._secret != (seed, np.uint64(prime))
        places.append(np.flatnonzero(other._slots[:, 1] >= 0))
    assert not np.array_equal(*places)
