"""Words, counts, and the two distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
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


@pytest.mark.parametrize("sample", [1e-5, 1e-4, 1e-3])
def test_keep_probability_as_word2vec_c_writes_it(sample):
    counts = [50_000, 4_000, 300, 20, 5]
    threshold = sample * sum(counts)
    expected = [min((math.sqrt(count / threshold) + 1) * threshold / count, 1) for count in counts]
    assert Vocabulary(list("abcde"), counts).keep_probability(sample) == pytest.approx(expected, rel=1e-12)


def test_noise():
    vocabulary = Vocabulary(["a", "b"], [16, 1])
    assert vocabulary.noise() == pytest.approx([8 / 9, 1 / 9], rel=1e-12)


def test_file_round_trip(tmp_path):
    vocabulary = Vocabulary(["the", "été", "東京"], [30, 4, 4])
    vocabulary.save(tmp_path / "vocab.txt")
    assert (tmp_path / "vocab.txt").read_text(encoding="utf-8") == "the 30\nété 4\n東京 4\n"
    again = Vocabulary.load(tmp_path / "vocab.txt")
    assert (again.words, again.counts.tolist()) == (vocabulary.words, [30, 4, 4])


@pytest.mark.parametrize("sample", [-1.0, float("nan"), float("inf")])
def test_bad_sample(sample):
    with pytest.raises(InvalidValueError, match=r"sample is .* but must be at least 0 and finite"):
        Vocabulary(["a", "b"], [1, 1]).keep_probability(sample)


def test_bad_arguments(tmp_path):
    with pytest.raises(InvalidTypeError, match="sample is '1e-3' but must be a number"):
        Vocabulary(["a", "b"], [1, 1]).keep_probability("1e-3")
    with pytest.raises(InvalidValueError, match="word 'a' is there twice"):
        Vocabulary(["a", "b", "a"], [1, 1, 1])
    with pytest.raises(InvalidValueError, match=r"2 words but counts of shape \(1,\)"):
        Vocabulary(["a", "b"], [1])
    with pytest.raises(InvalidValueError, match="min_count is 0 but must be at least 1"):
        Vocabulary.from_counts({"a": 1, "b": 1}, min_count=0)
    with pytest.raises(InvalidValueError, match="max_words is 1 but must be at least 2"):
        Vocabulary.from_counts({"a": 1, "b": 1}, min_count=1, max_words=1)
    with pytest.raises(InvalidValueError, match="holds no words but a model needs at least 2"):
        Vocabulary.from_counts({})


def test_bad_files(tmp_path):
    path = tmp_path / "vocab.txt"
    with pytest.raises(StorageError, match=r"cannot read .*No such file"):
        Vocabulary.load(path)
    path.write_text("the 3\nno count\n")
    with pytest.raises(StorageError, match=r"line 2 of .* is 'no count.n', no word and count"):
        Vocabulary.load(path)
    path.write_bytes(b"\xff\xfe 3\n")
    with pytest.raises(StorageError, match="is no vocabulary"):
        Vocabulary.load(path)
