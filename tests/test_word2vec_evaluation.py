"""Evaluation: the figures of gensim on the same vectors, intervals against scipy, sets that are malformed or unknown."""

import numpy as np
import pytest
import scipy

from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec import Vectors, lookup
from speedtransfer.word2vec.evaluation import Section, Similarity, evaluate, load_set

CASES = [
    str.lower,
    str.upper,
    str.title,
    lambda word: word[:-1] + word[-1].upper(),
    lambda word: "w" + word[1:].upper(),
]


def some_vectors(seed=0, kinds=60, dim=6):
    """Words in several cases each, near to one another."""
    rng = np.random.default_rng(seed)
    words, rows = [], []
    for kind in range(kinds):
        base = rng.standard_normal(dim)
        names = dict.fromkeys(case(f"word{chr(97 + kind // 26)}{chr(97 + kind % 26)}") for case in CASES)
        for name in list(names)[: rng.choice([1, 1, 1, 2, 5])]:
            words.append(name)
            rows.append(base + rng.standard_normal(dim) * rng.choice([0.02, 1.0]))
    order = rng.permutation(len(words))
    matrix = np.array(rows, dtype=np.float32)[order]
    return Vectors([words[i] for i in order], matrix)


def write_questions(path, vectors, seed=0, count=400):
    """Questions of three sections: known words in any case, a few unknown, some that expect a word they ask with."""
    rng = np.random.default_rng(seed)
    lines = []
    for name in ("capitals", "gram1-plural", "gram2 of two words"):
        lines.append(f": {name}")
        for _ in range(count // 3):
            question = [str(word) for word in rng.choice(vectors.words, 4)]
            if rng.random() < 0.5:  # a question that vectors can answer
                a, b, c = question[:3]
                near = vectors.most_similar([b, c], 3, negative=[a])
                question[3] = near[rng.integers(len(near))][0] if near else b
            if rng.random() < 0.1:
                question[rng.integers(4)] = "Unknown"
            if rng.random() < 0.1:
                question[3] = question[rng.integers(3)]
            lines.append(" ".join(CASES[rng.integers(3)](word) for word in question))
    path.write_text("\n".join(lines) + "\n")
    return path


def upper(questions):
    return [tuple(word.upper() for word in question) for question in questions]


def assert_as_gensim(vectors, path, restrict_vocab=300_000):
    score, theirs = vectors.to_gensim().evaluate_word_analogies(str(path), restrict_vocab=restrict_vocab)
    ours = evaluate(vectors, path, restrict_vocab)
    assert [section.name for section in ours.sections] == [section["section"] for section in theirs[:-1]]
    for one, other in zip([*ours.sections, ours.total], theirs, strict=True):
        assert upper(one.correct) == other["correct"]
        assert upper(one.incorrect) == other["incorrect"]
    assert ours.accuracy == score
    return ours


@pytest.mark.parametrize(("kinds", "dim"), [(60, 6), (1, 2), (3, 2)])
def test_analogies_are_gensims(tmp_path, kinds, dim, monkeypatch):
    monkeypatch.setattr(lookup, "_COSINES_AT_ONCE", 500)
    vectors = some_vectors(kinds, kinds, dim)
    found = assert_as_gensim(vectors, write_questions(tmp_path / "questions.txt", vectors, kinds))
    assert kinds < 60 or 0.05 < found.accuracy < 0.95
    assert kinds < 60 or assert_as_gensim(vectors, tmp_path / "questions.txt", restrict_vocab=60)


# --- similarity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restrict_vocab", [300_000, 70])
def test_similarity_is_gensims(tmp_path, restrict_vocab):
    rng, vectors = np.random.default_rng(0), some_vectors()
    lines = ["# Word 1\tWord 2\tHuman (mean)"]
    for _ in range(150):
        a, b = (CASES[rng.integers(3)](str(word)) for word in rng.choice([*vectors.words, "unknown", "Other"], 2))
        if a.upper() != b.upper():
            lines.append(f"{a}\t{b}\t{rng.integers(0, 40) / 4}")  # people's scores have ties
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(lines) + "\n")
    pearson, spearman, oov_ratio = vectors.to_gensim().evaluate_word_pairs(path, restrict_vocab=restrict_vocab)
    found = evaluate(vectors, path, restrict_vocab)
    assert found.spearman == pytest.approx(spearman.statistic, abs=1e-9)
    assert found.pearson == pytest.approx(pearson.statistic, abs=1e-6)  # gensim's cosines are float32
    assert found.oov_ratio == pytest.approx(oov_ratio, abs=1e-12)
    assert found.num_pairs + found.num_unknown == len(lines) - 1


def test_a_word_is_as_near_to_itself_as_any_other(tmp_path):
    """In gensim rounding decides which of two such pairs ranks first."""
    rng = np.random.default_rng(0)
    vectors = Vectors([f"w{i}" for i in range(40)], rng.standard_normal((40, 7)))
    pairs, scores = [(i, i) for i in range(20)] + [(i, i + 1) for i in range(20)], rng.permutation(40)
    cosines = [1.0 if a == b else vectors.similarity(f"w{a}", f"w{b}") for a, b in pairs]
    lines = [f"w{a} W{b} {score}" for (a, b), score in zip(pairs, scores, strict=True)]
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    found = evaluate(vectors, tmp_path / "pairs.txt")
    assert found.spearman == pytest.approx(scipy.stats.spearmanr(cosines, scores).statistic, abs=1e-12)


def test_pairs_separated_by_white_space_or_tabs(tmp_path):
    vectors = Vectors(["new york", "a", "b", "c"], np.eye(4) + np.arange(16).reshape(4, 4) / 20)
    (tmp_path / "tabs.txt").write_text("new york\ta\t1\r\na\tb\t2.5\r\nb\tc\t-1e0\r\na\tq\t3\r\n", newline="")
    found = evaluate(vectors, tmp_path / "tabs.txt")
    assert (found.num_pairs, found.num_unknown, found.unknown_words) == (3, 1, ("q",))
    (tmp_path / "spaces.txt").write_text("\ufeffa  b 2\na c 3\nb c 1")
    assert load_set(tmp_path / "spaces.txt").pairs == (("a", "b"), ("a", "c"), ("b", "c"))
    assert evaluate(vectors, tmp_path / "spaces.txt").num_pairs == 3


# --- intervals --------------------------------------------------------------------------------------------------------


def test_interval_of_spearman():
    found = Similarity("x", 0.5, 0.5, 103, 0, ())
    # z = atanh(0.5) = 0.549306, 1.959964 * sqrt(1.06 / 100) = 0.201790
    assert found.interval == pytest.approx((np.tanh(0.347516), np.tanh(0.751096)), abs=1e-6)
    assert Similarity("x", 0.5, 0.5, 3, 0, ()).interval == (-1.0, 1.0)
    assert Similarity("x", 1.0, 1.0, 30, 0, ()).interval == (1.0, 1.0)


@pytest.mark.parametrize(("right", "of"), [(0, 5), (5, 5), (3, 10), (700, 2000)])
def test_interval_of_accuracy_is_wilsons(right, of):
    word = ("a", "b", "c", "d")
    section = Section("x", (word,) * right, (word,) * (of - right))
    wilson = scipy.stats.binomtest(right, of).proportion_ci(method="wilson")
    assert section.interval == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    assert Section("x", (), ()).interval == (0.0, 1.0)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_vectors_that_are_zero_or_diverged(tmp_path):
    (tmp_path / "set.txt").write_text("a b 1\na c 2\nc d 3\n")
    vectors = Vectors(["a", "b", "c", "d"], [[1.0, 0], [0, 0], [1, 1], [0, 1]])
    assert np.isfinite(evaluate(vectors, tmp_path / "set.txt").spearman)
    vectors.matrix[1, 0] = np.inf
    with pytest.raises(InvalidValueError, match=r"the vector of 'b' \(row 1\) holds nan, infinity .*smaller lr"):
        evaluate(vectors, tmp_path / "set.txt")
