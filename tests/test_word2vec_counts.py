"""What is trained on, counted: pairs, windows and negatives against the formulas of word2vec.c and the tables of gensim."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from late import models
from test_word2vec_sampler import assert_drawn_from

from speedtransfer.word2vec import Block, Sampler, Vocabulary
from speedtransfer.word2vec.gradients import DRAWS, MODELS
from speedtransfer.word2vec.places import Places, pair_weight

COUNTS = np.array([900, 500, 300, 150, 80, 40, 20, 10])
WORDS = [f"w{i}" for i in range(len(COUNTS))]
WINDOW, NEGATIVE, SAMPLE = 5, 5, 0.01


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(WORDS, COUNTS)


@pytest.fixture(scope="module")
def blocks(vocabulary):
    ids = np.repeat(np.arange(len(COUNTS), dtype=np.int32), COUNTS * 60)
    np.random.default_rng(0).shuffle(ids)
    settings = {"seed": 4, "window": WINDOW, "sample": SAMPLE, "block_words": 2000, "shared_negatives": 128}
    samplers = {model: Sampler(ids, vocabulary, model=model, **settings) for model in MODELS}
    return {model: [sampler.block(step) for step in range(3 * len(sampler))] for model, sampler in samplers.items()}


@pytest.fixture(scope="module")
def gensim():
    model = models.Word2Vec(vector_size=2, min_count=1, sample=SAMPLE, negative=NEGATIVE)
    model.build_vocab_from_freq(dict(zip(WORDS, COUNTS.tolist(), strict=True)))
    return model


def test_words_are_kept_with_the_probabilities_of_gensim(vocabulary, gensim):
    theirs = [gensim.wv.get_vecattr(word, "sample_int") / 2**32 for word in WORDS]
    assert vocabulary.keep_probability(SAMPLE) == pytest.approx(theirs, abs=1e-8)
    assert min(theirs) < 0.3


def test_noise_is_that_of_gensim(vocabulary, gensim):
    cumulated = gensim.cum_table.astype(float) / gensim.cum_table[-1]
    assert np.cumsum(vocabulary.noise()) == pytest.approx(cumulated, abs=1e-8)


def gaps_of(block):
    """Return the signed distance of every pair of the block, away from its edges."""
    sizes = block.before[WINDOW:-WINDOW].numpy()
    return np.concatenate([np.repeat([gap, -gap], (sizes >= gap).sum()) for gap in range(1, WINDOW + 1)])


def test_pairs_by_distance(blocks):
    """A word at distance d is in the window with the probability that the window, 1 to 5, is at least d."""
    drawn = blocks["cbow"]
    sizes = np.concatenate([block.before[WINDOW:-WINDOW].numpy() for block in drawn])
    assert_drawn_from(np.bincount(sizes, minlength=WINDOW + 1)[1:], np.full(WINDOW, 1 / WINDOW))
    gaps, expected = np.concatenate([gaps_of(block) for block in drawn]), np.arange(WINDOW, 0, -1)
    share = np.bincount(abs(gaps))[1:] / len(gaps)
    assert share == pytest.approx(expected / expected.sum(), abs=0.005)
    assert (gaps > 0).sum() == (gaps < 0).sum()
    # Skip-gram has all pairs within the window, and each counts as often as it would have been drawn.
    assert all(
        (block.before[WINDOW:-WINDOW] == WINDOW).all() and block.window == WINDOW for block in blocks["skipgram"]
    )
    assert pair_weight(torch.arange(1, WINDOW + 1), WINDOW).tolist() == pytest.approx(expected / WINDOW)


def test_pairs_by_the_frequency_of_both_words(blocks, vocabulary):
    kept = COUNTS * vocabulary.keep_probability(SAMPLE)
    share, table = kept / kept.sum(), np.zeros((len(COUNTS), len(COUNTS)))
    for block in blocks["cbow"]:
        words = block.words.numpy()
        centers = np.arange(
            WINDOW, len(words) - WINDOW, 2 * WINDOW + 1
        )  # one pair of each stretch: they are independent
        near = centers + np.where(centers % 2, block.after[centers].numpy(), -block.before[centers].numpy())
        np.add.at(table, (words[centers], words[near]), 1)
    common = np.outer(share, share) * table.sum() > 8
    expected = np.append(np.outer(share, share)[common], np.outer(share, share)[~common].sum())
    assert_drawn_from(np.append(table[common], table[~common].sum()), expected)


@pytest.mark.parametrize("model", ["skipgram", "cbow"])
def test_negatives_by_frequency_stand_for_as_many_a_prediction_as_asked_for(blocks, vocabulary, model):
    """Also by the frequency of the word that they serve: the noise is the same for all."""
    weight, expected, spans = np.zeros((2, len(COUNTS))), np.zeros(2), 0
    drawn = np.zeros(len(COUNTS))
    for block in blocks[model]:
        num_draws = DRAWS[model] * NEGATIVE
        places = Places.find(block, len(COUNTS), num_draws)
        reached = [side[:, None] >= torch.arange(1, WINDOW + 1) for side in (block.before, block.after)]
        around = sum((side * pair_weight(torch.arange(1, WINDOW + 1), block.window)).sum(1) for side in reached).numpy()
        predictions = np.minimum(around, 1) if model == "cbow" else around
        assert float(places.num_pairs) == pytest.approx(around.sum())
        negatives = places.outputs.ids[places.draws].numpy()
        assert negatives.shape[1] == num_draws
        for number, of_span in enumerate(negatives):
            here = slice(number * places.span, (number + 1) * places.span)
            rare = block.words[here].numpy() >= 4
            counts = np.bincount(of_span, minlength=len(COUNTS))
            drawn += counts
            for group, chosen in enumerate((~rare, rare)):
                served = NEGATIVE * predictions[here][chosen].sum()
                weight[group] += served / negatives.shape[1] * counts
                expected[group] += served
            spans += 1
    assert_drawn_from(drawn, vocabulary.noise())
    for group in range(2):
        assert weight[group].sum() == pytest.approx(expected[group])
        assert weight[group] / expected[group] == pytest.approx(vocabulary.noise(), abs=0.01)
    assert spans > 1000


@pytest.mark.parametrize("pool", [1, 2, 100, 512, 4096, 8192])
@pytest.mark.parametrize("num_draws", [1, 10, 30])
def test_spans_use_all_of_the_pool_alike(pool, num_draws):
    """Where some words of the pool were used seven times and others never, vectors by AdamW fell into one dimension."""
    words, zeros = torch.arange(16 * pool), torch.zeros(16 * pool, dtype=torch.int64)
    places = Places.find(Block(words, zeros, zeros, torch.arange(pool), len(words)), 16 * pool, num_draws)
    assert places.draws.shape == (pool, min(pool, num_draws))
    drawn = places.outputs.ids[places.draws]
    assert (torch.bincount(drawn.flatten(), minlength=pool)[:pool] == min(pool, num_draws)).all()
