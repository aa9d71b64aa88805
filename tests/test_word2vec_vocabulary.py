"""Words, counts, and the two distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.word2vec import Vocabulary


def test_order_and_look_up():
    vocabulary = Vocabulary.from_counts({"b": 2, "a": 2, "c": 9, "rare": 1}, min_count=2)
    assert vocabulary.words == ["c", "a", "b"]
    assert vocabulary.counts.tolist() == [9, 2, 2]
    assert vocabulary.counts.dtype == np.int64
    assert (len(vocabulary), vocabulary.num_words) == (3, 13)
    assert "a" in vocabulary
    assert "rare" not in vocabulary
    assert (vocabulary.get("b"), vocabulary.get("rare"), vocabulary.get("rare", -7)) == (2, -1, -7)
    assert vocabulary.encode(["a", "rare", "c"]).tolist() == [1, 0]
    assert vocabulary.encode([]).tolist() == []
    assert repr(vocabulary) == "Vocabulary(3 words, 13 occurrences)"


def test_keep_probability_is_the_formula():
    vocabulary = Vocabulary(["often", "rare"], [999_000, 1_000])
    # f = 0.999 and 0.001, t = 0.01
    expected = (math.sqrt(0.999 / 0.01) + 1) * 0.01 / 0.999
    assert vocabulary.keep_probability(0.01) == pytest.approx([expected, 1.0], rel=1e-12)
    assert expected == pytest.approx(0.11006, abs=1e-5)
    assert vocabulary.keep_probability(0).tolist() == [1.0, 1.0]


def test_a_word_that_never_occurs():
    vocabulary = Vocabulary(["a", "b", "c"], [5, 5, 0])
    assert vocabulary.keep_probability(1e-3)[2] == 1
    assert vocabulary.noise().tolist() == [0.5, 0.5, 0]


class Numbers(Sequence):
    """Words that take no memory."""

    def __init__(self, length):
        self.length, self.asked = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        if not 0 <= number < self.length:
            raise IndexError(number)
        self.asked += 1
        return str(number)


def test_words_that_are_made_up():
    words = Numbers(3_000_000)
    counts = np.full(len(words), 7)
    vocabulary = Vocabulary(words, counts)
    keep, noise = vocabulary.keep_probability(1e-7), vocabulary.noise()
    assert vocabulary.words is words
    assert vocabulary.counts is counts
    assert words.asked == 0
    assert (len(vocabulary), len(keep), len(noise)) == (3_000_000,) * 3
    np.testing.assert_allclose(keep, math.sqrt(0.3) + 0.3)  # in the last chunk, too
    small = Vocabulary(Numbers(5), [1] * 5)
    assert small.encode(["4", "5", "0"]).tolist() == [4, 0]


def test_words_that_are_made_up_twice():
    class Same(Numbers):
        def __getitem__(self, number):
            return super().__getitem__(number) and "same"

    vocabulary = Vocabulary(Same(3), [1, 1, 1])
    with pytest.raises(InvalidValueError, match="word 'same' is there twice"):
        vocabulary.get("same")


@pytest.mark.parametrize("max_words", [2, 3, 4, 5, 9, None])
def test_choice_against_sorting(max_words):
    counts = {word: count for count, words in ((9, "x"), (4, "dbac"), (2, "é東z"), (1, "qr")) for word in words}
    vocabulary = Vocabulary.from_counts(counts, min_count=2, max_words=max_words)
    expected = sorted((-count, word) for word, count in counts.items() if count >= 2)[:max_words]
    assert list(zip((-vocabulary.counts).tolist(), vocabulary.words, strict=True)) == expected


def test_choice_looks_at_no_rare_word():
    taken = []

    def take(numbers):
        taken.extend(numbers.tolist())
        return [f"w{number}" for number in numbers.tolist()]

    vocabulary, kept = Vocabulary.choose(np.array([1, 7, 0, 9, 2]), take, min_count=2)
    assert vocabulary.words == ["w3", "w1", "w4"]
    assert (kept.tolist(), sorted(taken)) == ([3, 1, 4], [1, 3, 4])


def test_file_round_trip(tmp_path):
    vocabulary = Vocabulary(["the", "été", "東京"], [30, 4, 4])
    vocabulary.save(tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8") == "the 30\nété 4\n東京 4\n"
    again = Vocabulary.load(tmp_path / "vocab.txt")
    assert (again.words, again.counts.tolist()) == (vocabulary.words, [30, 4, 4])


def test_bad_files(tmp_path):
    path = tmp_path / "vocab.txt"
    with pytest.raises(StorageError, match=r"cannot read .*No such file"):
        Vocabulary.load(path)
    path.write_text("the 3\nno count\n")
    with pytest.raises(StorageError, match=r"line 2 of .* is 'no count.n', no word and count"):
        Vocabulary.load(path)
    path.write_text("the 99999999999999999999\n")
    with pytest.raises(StorageError, match=r"line 1 of .*, no word and count"):
        Vocabulary.load(path)
    path.write_bytes(b"\xff\xfe 3\n")
    with pytest.raises(StorageError, match="is no vocabulary"):
        Vocabulary.load(path)
