"""bench/word2vec_statistics.py: outcomes whose difference is known, and edge cases of the bootstrap."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import scipy

ROOT = Path(__file__).resolve().parents[1]
SEEDS, ITEMS = 3, 40


@pytest.fixture
def found(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    module = importlib.import_module("word2vec_statistics")
    monkeypatch.setattr(module.bootstrap, "__defaults__", (200,))
    return module


def made(random, noise, items=ITEMS, seeds=SEEDS):
    """People's scores with ties, and outcomes that follow them, also with ties."""
    gold = random.integers(0, 12, items).astype(float)
    outcomes = (gold + noise * random.standard_normal((seeds, items))).round(1)
    return gold, outcomes


def test_scores_are_those_of_scipy(found):
    gold, ours = made(np.random.default_rng(1), 4)
    theirs = np.zeros_like(ours) + np.arange(ITEMS)
    measured = found.bootstrap(ours, theirs, gold)
    means = [np.mean([scipy.stats.spearmanr(one, gold).statistic for one in side]) for side in (ours, theirs)]
    assert measured["value"] == pytest.approx(means[0] - means[1], abs=2e-6)
    assert (measured["seeds"], measured["items"]) == (SEEDS, ITEMS)
    assert measured == found.bootstrap(ours, theirs, gold), "the same draws each time"


def test_identical_systems_differ_by_nothing(found):
    gold, ours = made(np.random.default_rng(2), 5)
    measured = found.bootstrap(ours, ours.copy(), gold)
    assert (measured["value"], measured["low"], measured["high"]) == (0, 0, 0)
    # Ranks do not change, whatever the scale.
    measured = found.bootstrap(ours, 2 * ours + 1, gold)
    assert (measured["value"], measured["low"], measured["high"]) == (0, 0, 0)


def test_known_shifts(found):
    """Shares of right answers: the interval is that of paired differences, and far from that of two samples."""
    random = np.random.default_rng(3)
    theirs = (random.random(4000) < 0.4).astype(float)
    ours = theirs.copy()
    ours[np.flatnonzero(theirs == 0)[:200]] = 1
    measured = found.bootstrap(np.stack([ours] * 2), np.stack([theirs] * 2), None)
    half = 1.96 * (ours - theirs).std() / np.sqrt(4000)
    assert measured["value"] == pytest.approx(0.05)
    assert [measured["low"], measured["high"]] == pytest.approx([0.05 - half, 0.05 + half], abs=0.2 * half)
    assert found.bootstrap(theirs[None], ours[None], None)["high"] < 0


def test_seeds_count(found):
    """With items that hardly matter the interval is as wide as the seeds are apart; with one seed it is not."""
    ours, theirs = np.repeat([[0.2], [0.5], [0.8]], ITEMS, axis=1), np.full((3, ITEMS), 0.4)
    measured = found.bootstrap(ours, theirs, None)
    assert (measured["value"], measured["low"], measured["high"]) == pytest.approx((0.1, -0.2, 0.4))
    alone = found.bootstrap(ours[:1], theirs[:1], None)
    assert (alone["low"], alone["high"]) == pytest.approx((-0.2, -0.2))
    # Paired: what both have of a seed, however good, is no difference.
    paired = found.bootstrap(ours, ours - 0.1, None)
    assert (paired["low"], paired["high"]) == pytest.approx((0.1, 0.1))


@pytest.mark.slow
def test_intervals_hold_what_they_promise(found):
    """Of 60 sets of items, about 57 intervals hold the true difference, 0."""
    random, held = np.random.default_rng(4), 0
    for _ in range(60):
        gold, ours = made(random, 6, items=100, seeds=1)
        theirs = gold + 6 * random.standard_normal((1, 100))
        measured = found.bootstrap(ours, theirs, gold, resamples=100)
        held += measured["low"] <= 0 <= measured["high"]
    assert 51 <= held <= 60


def test_unknown_items_are_left_out(found):
    """Of both sides and all seeds, whoever does not know them."""
    random = np.random.default_rng(5)
    gold, ours = made(random, 4)
    theirs = gold + 7 * random.standard_normal((SEEDS, ITEMS))
    expected = found.bootstrap(ours[:, 3:], theirs[:, 3:], gold[3:])
    ours[:, 0] = ours[1, 1] = theirs[2, 2] = np.nan
    measured = found.bootstrap(ours, theirs, gold)
    assert measured == expected
    assert measured["items"] == ITEMS - 3
    assert found.bootstrap(ours[:, :22], theirs[:, :22], gold[:22]) is None, "19 items are too few"


def test_what_correlates_with_nothing(found):
    gold, ours = made(np.random.default_rng(6), 4)
    assert found.bootstrap(ours, np.zeros_like(ours), gold) is None
    nearly = np.zeros(ITEMS)
    nearly[0] = 1  # of some draws: then undefined
    measured = found.bootstrap(ours, np.stack([nearly] * SEEDS), gold)
    assert np.isfinite([measured["low"], measured["high"]]).all()


def test_differences_of_a_result(found):
    """Only seeds that both have; what is asked of one corpus is not asked of another; no items are left in the result."""
    sets = importlib.import_module("word2vec_data")
    random = np.random.default_rng(7)

    def run(corpus, system, seed, right):
        answers = (random.random(50) < right).astype(int)
        key = {"corpus": corpus, "model": "cbow", "system": system, "optimizer": "", "dim": 8, "seed": seed}
        outcomes = [*answers.tolist(), None]
        both = {"a": outcomes, "a, semantic": outcomes} if corpus == "large" else {}
        return {**key, "scores": dict.fromkeys(both, answers.mean()), "items": both}

    systems = (("gensim", (1, 2, 3), 0.1), ("speedtransfer", (1, 2), 0.9))
    result = {
        "corpora": [{"name": "large"}, {"name": "small"}],
        "groups": {"a": "reserved"},
        "runs": [
            run(corpus, name, seed, right)
            for corpus in ("large", "small")
            for name, seeds, right in systems
            for seed in seeds
        ],
    }
    path = Path(__file__).with_name("questions.txt")
    analogies = sets.EvaluationSet("a", "analogies", "reserved", path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "_gold", lambda one: None)
        compared = found.with_differences(result, [analogies])
    assert all("items" not in made for made in compared["runs"])
    system = found.System("large", "cbow", "speedtransfer", "", 8)
    differences = list(found.differences(compared, system))
    assert [(name, one.verdict) for name, one in differences] == [("a", "better"), ("a, semantic", "better")]
    assert [(one["corpus"], one["seeds"], one["items"]) for one in compared["differences"]["found"]] == [
        ("large", 2, 50)
    ] * 2
    means = [
        np.mean([r["scores"]["a"] for r in result["runs"] if r["system"] == name and r["scores"] and r["seed"] < 3])
        for name in ("speedtransfer", "gensim")
    ]
    assert differences[0][1].value == pytest.approx(means[0] - means[1], abs=1e-6)
