"""bench/word2vec.py: a small text, end to end; what cannot be; how sure differences are."""

from __future__ import annotations

import importlib
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import scipy

ROOT = Path(__file__).resolve().parents[1]
TOPICS, WORDS_A_TOPIC = 6, 8
PAIRS = ("WS-353", "RG-65", "MTurk-287", "SimLex-999", "RW")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.fixture
def word2vec():
    return importlib.import_module("word2vec")


@pytest.fixture
def report():
    return importlib.import_module("word2vec_report")


def put_data(folder):
    """Write a text of ten words a topic and the sets about it, as the real ones are laid out, and return the folder."""
    folder.joinpath("corpora").mkdir(parents=True)
    folder.joinpath("wordsim").mkdir()
    rng = np.random.default_rng(0)
    topics = np.repeat(rng.integers(0, TOPICS, 300), 10)
    numbers = rng.integers(0, WORDS_A_TOPIC, len(topics))
    text = " ".join(f"t{topic}w{number}" for topic, number in zip(topics, numbers, strict=True))
    folder.joinpath("corpora/schools_wiki_2007.text8.xz").write_bytes(lzma.compress(text.encode(), preset=0))
    pairs = [(f"t{a}w0", f"t{b}w{1 + a}", 10 if a == b else 1) for a in range(TOPICS) for b in range(TOPICS)]
    lines = ["# word, word, score", *("\t".join(map(str, pair)) for pair in [*pairs, ("nobody", "knows", 5)])]
    for name in ("WS-353-ALL", "RG-65", "MTurk-287", "SIMLEX-999", "RW-STANFORD"):
        folder.joinpath(f"wordsim/EN-{name}.txt").write_text("\n".join(lines) + "\n")
    questions = ": topics\nt0w0 t0w1 t1w0 t1w1\n: gram1\nt4w0 t4w1 t5w0 t5w1\nt4w0 t4w1 t5w0 other\n"
    folder.joinpath("wordsim/questions-words.txt").write_text(questions)
    return folder


# --- data ---------------------------------------------------------------------------------------------------------------


def test_the_text_in_lines(word2vec, tmp_path):
    words = 2001
    all_words = [f"w{number}" for number in range(3100)]
    (tmp_path / "text.txt").write_text("  ".join(all_words[:50]) + "\n\n" + "\t".join(all_words[50:]))
    facts = word2vec.prepare(tmp_path / "text.txt", tmp_path / "lines.txt", words)
    lines = [line.split(" ") for line in (tmp_path / "lines.txt").read_text().splitlines()]
    assert [word for line in lines for word in line] == all_words[:words]
    assert [len(line) for line in lines[:-1]] == [1000] * (len(lines) - 1)
    assert facts["words"] == len(all_words[:words])


# --- runs ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(word2vec, tmp_path, monkeypatch):
    """The arguments of a small run, of one corpus and in this process, which saves the imports of others."""
    jobs = importlib.import_module("word2vec_child").JOBS
    monkeypatch.setattr(word2vec, "run_job", lambda script, job: json.loads(json.dumps(jobs[job["task"]](job))))
    settings = word2vec.Settings(dims=(8,), optimizers=("adagrad",), models=("skipgram",), seeds=2)
    monkeypatch.setattr(word2vec, "SETTINGS", settings)
    monkeypatch.setattr(word2vec, "LARGE", word2vec.CorpusSettings(2))
    monkeypatch.setattr(word2vec, "WARM_WORDS", 500)
    shipped = tmp_path / "shipped.txt"
    shipped.write_text("t0w0 t1w1 " * 300)
    monkeypatch.setattr(word2vec, "SHIPPED", shipped)
    monkeypatch.setattr(word2vec, "SMALL", word2vec.CorpusSettings(1, analogies=False))
    return ["--data", str(put_data(tmp_path / "data")), "--out", str(tmp_path / "word2vec.json")]


@pytest.mark.slow
def test_a_stopped_run_goes_on(word2vec, report, small, tmp_path, monkeypatch, capsys):
    train, partial = word2vec.Session._train, tmp_path / "word2vec.partial.json"

    def gensim_alone(self, system, seed, warm=False):
        if system.system != "gensim" and not warm:
            raise KeyboardInterrupt
        return train(self, system, seed, warm)

    monkeypatch.setattr(word2vec.Session, "_train", gensim_alone)
    assert word2vec.main(small) == 1
    assert "error: stopped; what was measured is in" in capsys.readouterr().err
    (first,) = json.loads(partial.read_text())["runs"]
    assert first["system"] == "gensim"
    monkeypatch.setattr(word2vec.Session, "_train", train)
    assert word2vec.main([*small, "--resume", "--words", "100"]) == 2
    assert "was measured with other corpora and words; drop --resume" in capsys.readouterr().err
    assert word2vec.main([*small, "--resume", "--seeds", "1"]) == 0
    assert not partial.exists()
    found = json.loads((tmp_path / "word2vec.json").read_text())
    assert found["complete"]
    del first["items"]
    assert found["runs"][0] == first
    large = "schools_wiki_2007.text8.xz"
    assert [(run["corpus"], run["system"]) for run in found["runs"]] == [
        (corpus, system) for corpus in (large, "shipped.txt") for system in ("gensim", "speedtransfer")
    ]
    analogies = {"analogies": 2, "analogies, semantic": 1, "analogies, syntactic": 1}
    assert [run["asked"] for run in found["runs"][:2]] == [
        dict.fromkeys(PAIRS[:3], 36) | analogies | dict.fromkeys(PAIRS[3:], 36)
    ] * 2
    assert found["same_vocabulary"]
    system = report.System(large, "skipgram", "speedtransfer", "adagrad", 8)
    compared = {one["set"]: one for one, _ in report.differences(found, system)}
    assert set(compared) == set(PAIRS)  # three questions are too few
    text = capsys.readouterr().out
    assert f"[1/3] {large}, skip-gram, speedtransfer, Adagrad, dim 8, seed 1: " in text
    assert "Analogies say nothing on a corpus of this size" in text
    assert len(report.draw(found).axes) == 2 * (1 + len(PAIRS) + 1)


def test_vectors_are_asked_alike(tmp_path):
    """Words of equal count lie in another order, and the same questions are asked; the answers by hand."""
    child, words = importlib.import_module("word2vec_child"), [f"w{number:02}" for number in range(40)]
    matrix = np.random.default_rng(0).standard_normal((40, 6)).astype("f4")
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    near, right = unit[:20] @ unit[:20].T, 0
    questions = [": any"]
    for a, b, c in ((i, i + 1, i + 2) for i in range(30)):
        scores = (unit[:20] @ (unit[b] - unit[a] + unit[c])).tolist() if c < 20 else [0.0] * 20
        best = max(set(range(20)) - {a, b, c}, key=scores.__getitem__)
        right += c < 20 and a % 2
        questions.append(" ".join(words[i] for i in (a, b, c, best if a % 2 else (best + 1) % 20)))
    (tmp_path / "set.txt").write_text("\n".join(questions))
    (tmp_path / "pairs.txt").write_text(
        "".join(f"{words[i]}\t{words[i + 1]}\t{i % 7}\n" for i in range(19)) + "w00 nil 3"
    )
    expected = scipy.stats.spearmanr([near[i, i + 1] for i in range(19)], [i % 7 for i in range(19)]).statistic
    sets = [("a", str(tmp_path / "set.txt")), ("p", str(tmp_path / "pairs.txt"))]
    for order in (np.arange(40), np.arange(40)[::-1]):
        np.save(tmp_path / "vectors.npy", matrix[order])
        (tmp_path / "words.txt").write_text("".join(f"{words[row]} 7\n" for row in order))
        found = child.evaluate({"folder": str(tmp_path), "restrict": 20, "sets": sets})
        assert found["asked"] == {"a": 18, "a, semantic": 18, "a, syntactic": 0, "p": 19}
        assert found["scores"]["a"] == found["scores"]["a, semantic"] == pytest.approx(right / 18)
        assert found["scores"]["a, syntactic"] is None
        assert found["scores"]["p"] == pytest.approx(expected)
        outcome = {name: np.array(items, dtype=float) for name, items in found["items"].items()}
        assert outcome["p"] == pytest.approx([*(near[i, i + 1] for i in range(19)), np.nan], abs=1e-6, nan_ok=True)
        assert outcome["a"] == pytest.approx([*(i % 2 for i in range(18)), *[np.nan] * 12], nan_ok=True)


# --- differences ----------------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(1)
GOLD = RANDOM.integers(0, 12, 40).astype(float)  # with ties
OURS, THEIRS = ((GOLD + noise * RANDOM.standard_normal((3, 40))).round(1) for noise in (4, 7))
APART, EVEN = np.repeat([[0.2], [0.5], [0.8]], 40, axis=1), np.full((3, 40), 0.4)
RIGHT = (RANDOM.random(4000) < 0.4).astype(float)
MORE = RIGHT.copy()
MORE[np.flatnonzero(RIGHT == 0)[:200]] = 1
HALF = 1.96 * (MORE - RIGHT).std() / np.sqrt(4000)  # of paired differences, far from that of two samples


@pytest.mark.parametrize(
    ("ours", "theirs", "gold", "value", "low", "high"),
    [
        (OURS, 2 * OURS + 1, GOLD, 0, 0, 0),  # ranks do not change, whatever the scale
        (MORE[None], RIGHT[None], None, 0.05, 0.05 - HALF, 0.05 + HALF),
        (APART, EVEN, None, 0.1, -0.2, 0.4),  # items hardly matter: as wide as the seeds are apart
    ],
)
def test_differences_that_are_known(report, monkeypatch, ours, theirs, gold, value, low, high):
    monkeypatch.setattr(report, "RESAMPLES", 200)
    found = report.bootstrap(ours, theirs, gold)
    assert found == report.bootstrap(ours, theirs, gold), "the same draws each time"
    assert found["value"] == pytest.approx(value)
    assert [found["low"], found["high"]] == pytest.approx([low, high], abs=0.2 * HALF)


def test_scores_are_those_of_scipy_and_unknown_items_are_left_out(report, monkeypatch):
    monkeypatch.setattr(report, "RESAMPLES", 20)
    ours, theirs = OURS.copy(), THEIRS.copy()
    ours[:, 0] = ours[1, 1] = theirs[2, 2] = np.nan
    found = report.bootstrap(ours, theirs, GOLD)
    means = [np.mean([scipy.stats.spearmanr(one[3:], GOLD[3:]).statistic for one in side]) for side in (OURS, THEIRS)]
    assert found["value"] == pytest.approx(means[0] - means[1], abs=2e-6)
    assert (found["seeds"], found["items"]) == (3, 37)
    assert report.bootstrap(ours[:, :22], theirs[:, :22], GOLD[:22]) is None, "19 items are too few"
    assert report.bootstrap(OURS, np.zeros_like(OURS), GOLD) is None, "equal numbers correlate with nothing"


# --- what is shown ------------------------------------------------------------------------------------------------------


def test_nothing_lost_is_hidden(report):
    """In a recorded result whose first system has become worse than gensim, and whose vocabularies differ."""
    path = min((ROOT / "bench/results").glob("*/word2vec.json"))
    made = json.loads(path.read_text())
    found = made["differences"]["found"]
    system, bounds = report.system_of(found[0]), ((0.02, 0.04), (-0.03, 0.01), (-0.11, -0.09))
    mine = [one for one in found if report.system_of(one) == system and one["set"] in ("WS-353", "RG-65", "SimLex-999")]
    for one, (low, high) in zip(mine, bounds, strict=True):
        one |= {"value": (low + high) / 2, "low": low, "high": high}
    made["same_vocabulary"] = False
    made["failures"] = [{"title": "speedtransfer, SGD", "seed": 2, "error": "lr is too large"}]
    _, tuned, reserved = next(
        report.verdicts(made, system.corpus)[number : number + 3]
        for number, line in enumerate(report.verdicts(made, system.corpus))
        if line.startswith(f"- {report.label(system)}: ")
    )
    assert tuned.startswith("  - tuned: better: WS-353 +0.030 [+0.020, +0.040]")
    assert "; not worse beyond the confidence interval: RG-65 -0.010 [-0.030, +0.010]" in tuned
    assert "**worse**: SimLex-999 -0.100 [-0.110, -0.090]" in reserved
    text = report.markdown(made)
    assert "The vocabularies were not the same" in text
    assert "**Failed**: speedtransfer, SGD, seed 2: lr is too large" in text
    assert report.draw(made).axes
    slow = {**made, "runs": [run | {"training_s": 1e6} if run["system"] != "gensim" else run for run in made["runs"]]}
    assert all(line.endswith(", slower") for line in report.verdicts(slow, system.corpus) if line.startswith("- "))
