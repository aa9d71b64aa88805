"""Draws follow their distributions and their seed; what is trained on is that of word2vec.c and of gensim's tables."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import scipy
import torch
from late import models

from speedtransfer.word2vec import Block, Sampler, Settings, Vocabulary
from speedtransfer.word2vec.gradients import DRAWS, MODELS
from speedtransfer.word2vec.places import Places, pair_weight
from speedtransfer.word2vec.sampler import GROUP_WORDS

COUNTS = [400, 200, 100, 50, 25, 10, 5, 1]


@pytest.fixture
def vocabulary():
    return Vocabulary([f"w{i}" for i in range(len(COUNTS))], COUNTS)


def corpus_ids(repeat=1, seed=0):
    ids = np.repeat(np.arange(len(COUNTS), dtype=np.int32), np.array(COUNTS) * repeat)
    np.random.default_rng(seed).shuffle(ids)
    return ids


def sampler_of(vocabulary, ids, seed=3, starts=None, **settings):
    return Sampler(ids, vocabulary, Settings(seed=seed, **settings), starts)


def epoch_of(sampler):
    return list(sampler.blocks(0, len(sampler)))


def assert_drawn_from(observed, probability):
    """Seeds are fixed: it fails for a wrong distribution."""
    expected = np.asarray(probability) * np.sum(observed)
    assert expected.min() > 5
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-4


def test_epochs_take_the_same_stretches_in_orders_of_their_own(vocabulary):
    ids = corpus_ids()
    sampler = sampler_of(vocabulary, ids, sample=0, block_words=50)
    first, second = ([tuple(block.words.tolist()) for block in sampler.blocks(16 * n, 16 * n + 16)] for n in range(2))
    in_text = [tuple(ids[start : start + 50].tolist()) for start in range(0, len(ids), 50)]
    assert sorted(first) == sorted(second) == sorted(in_text)
    assert first != second != in_text != first
    assert [tuple(sampler.block(step).words.tolist()) for step in (20, 3, 20)] == [second[4], first[3], second[4]]


def test_windows_are_even(vocabulary):
    blocks = epoch_of(sampler_of(vocabulary, corpus_ids(40), model="cbow", sample=0, window=7))
    for side in ("before", "after"):
        whole = torch.cat([getattr(block, side)[7:-7] for block in blocks])  # no edge in reach
        assert (whole.min(), whole.max()) == (1, 7)
        assert_drawn_from(np.bincount(whole.numpy(), minlength=8)[1:], np.full(7, 1 / 7))
    assert all(torch.equal(block.before[7:-7], block.after[7:-7]) for block in blocks)
    assert {block.window for block in blocks} == {0}


@pytest.mark.parametrize("sample", [0, 0.02])
def test_windows_end_at_the_edges_of_sequences(vocabulary, sample):
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 30, 200)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    ids = corpus_ids(10)[: lengths.sum()]
    sampler = sampler_of(vocabulary, ids, starts=starts, model="cbow", sample=sample, window=7, block_words=300)
    kept_at = []
    for step in range(len(sampler)):
        start = int(sampler._order_of(0)[step]) * sampler.stretch
        block, span = sampler.block(step), slice(start, start + sampler.stretch)
        sequence = np.repeat(np.arange(200), lengths)[span]
        numbers = torch.from_numpy(ids[span].astype(np.int64))
        generator = torch.Generator().manual_seed(sampler._seed_of(step))
        kept = (torch.rand(len(numbers), generator=generator) < sampler._keep[numbers]).numpy()
        sequence = sequence[kept]
        n = len(block.words)
        for i in range(n):
            left, right = int(block.before[i]), int(block.after[i])
            assert len(set(sequence[i - left : i + right + 1])) == 1
            if left < right:  # cut on the left: by an edge
                assert i - left == 0 or sequence[i - left - 1] != sequence[i]
            if right < left:
                assert i + right == n - 1 or sequence[i + right + 1] != sequence[i]
        kept_at.append(kept.mean())
    assert (np.mean(kept_at) == 1) == (sample == 0)


def test_negatives_of_a_block_spread_as_the_noise_does(vocabulary):
    sampler = sampler_of(vocabulary, corpus_ids(2), sample=0, block_words=1400, shared_negatives=100)
    for step in range(20):
        counts = np.bincount(sampler.block(step).negatives.flatten().numpy(), minlength=len(COUNTS))
        assert np.abs(counts - 300 * vocabulary.noise()).max() <= 2  # the strata at both ends of a word


def blocks_equal(first, second):
    names = ("words", "before", "after", "negatives")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for a, b in zip(first, second, strict=True) for n in names)


def test_blocks_are_prepared_by_the_thread_that_draws_them(vocabulary):
    sampler, threads = sampler_of(vocabulary, corpus_ids(10), block_words=200), []

    def prepare(block):
        threads.append(threading.current_thread().name)
        return dataclasses.replace(block, num_corpus_words=-1)

    blocks = list(sampler.blocks(3, 6, prepare))
    assert blocks_equal(blocks, list(sampler.blocks(3, 6)))
    assert [block.num_corpus_words for block in blocks] == [-1] * 3
    assert len(threads) == 3
    assert all(name.startswith("speedtransfer-sampler") for name in threads)


def test_stopping_early_leaves_no_thread(vocabulary):
    before = threading.active_count()
    blocks = sampler_of(vocabulary, corpus_ids(10), block_words=200).blocks(0, 50)
    next(blocks)
    blocks.close()
    assert threading.active_count() == before


def test_block_of_more_words_than_there_are(vocabulary):
    """Negatives are drawn for the words there are: those of a trillion would fit nowhere."""
    ids = corpus_ids(2)
    sampler = sampler_of(vocabulary, ids, sample=0, block_words=10**12)
    (block,) = epoch_of(sampler)
    assert len(block.words) == len(ids)
    assert len(block.negatives) == 512 * -(-len(ids) // GROUP_WORDS)


# --- what is trained on, counted -------------------------------------------------------------------------------------

COUNTED = np.array([900, 500, 300, 150, 80, 40, 20, 10])
WORDS = [f"w{i}" for i in range(len(COUNTED))]
WINDOW, NEGATIVE, SAMPLE = 5, 5, 0.01


@pytest.fixture(scope="module")
def known():
    return Vocabulary(WORDS, COUNTED)


@pytest.fixture(scope="module")
def blocks(known):
    ids = np.repeat(np.arange(len(COUNTED), dtype=np.int32), COUNTED * 60)
    np.random.default_rng(0).shuffle(ids)
    settings = {"seed": 4, "window": WINDOW, "sample": SAMPLE, "block_words": 2000, "shared_negatives": 128}
    samplers = {model: Sampler(ids, known, Settings(model=model, **settings)) for model in MODELS}
    return {model: [sampler.block(step) for step in range(3 * len(sampler))] for model, sampler in samplers.items()}


@pytest.fixture(scope="module")
def gensim():
    model = models.Word2Vec(vector_size=2, min_count=1, sample=SAMPLE, negative=NEGATIVE)
    model.build_vocab_from_freq(dict(zip(WORDS, COUNTED.tolist(), strict=True)))
    return model


def test_words_are_kept_with_the_probabilities_of_gensim(known, gensim):
    theirs = [gensim.wv.get_vecattr(word, "sample_int") / 2**32 for word in WORDS]
    assert known.keep_probability(SAMPLE) == pytest.approx(theirs, abs=1e-8)
    assert min(theirs) < 0.3


def test_noise_is_that_of_gensim(known, gensim):
    cumulated = gensim.cum_table.astype(float) / gensim.cum_table[-1]
    assert np.cumsum(known.noise()) == pytest.approx(cumulated, abs=1e-8)


def test_pairs_of_skip_gram_count_as_often_as_they_would_have_been_drawn(blocks):
    expected = np.arange(WINDOW, 0, -1)
    assert all(
        (block.before[WINDOW:-WINDOW] == WINDOW).all() and block.window == WINDOW for block in blocks["skipgram"]
    )
    assert pair_weight(torch.arange(1, WINDOW + 1), WINDOW).tolist() == pytest.approx(expected / WINDOW)


def test_negatives_by_frequency_stand_for_as_many_a_prediction_as_asked_for(blocks, known):
    """Also by the frequency of the word that they serve: the noise is the same for all."""
    weight, expected = np.zeros((2, len(COUNTED))), np.zeros(2)
    drawn = np.zeros(len(COUNTED))
    for block in blocks["cbow"][:40]:
        places = Places.find(block, len(COUNTED), DRAWS["cbow"] * NEGATIVE)
        predictions = np.minimum((block.before + block.after).numpy(), 1)
        assert int(places.num_predicted) == predictions.sum()
        negatives = places.outputs.ids[places.draws].numpy()
        assert negatives.shape[1] == DRAWS["cbow"] * NEGATIVE
        for number, of_span in enumerate(negatives):
            here = slice(number * places.span, (number + 1) * places.span)
            rare = block.words[here].numpy() >= 4
            counts = np.bincount(of_span, minlength=len(COUNTED))
            drawn += counts
            for group, chosen in enumerate((~rare, rare)):
                served = NEGATIVE * predictions[here][chosen].sum()
                weight[group] += served / negatives.shape[1] * counts
                expected[group] += served
    assert_drawn_from(drawn, known.noise())
    for group in range(2):
        assert weight[group].sum() == pytest.approx(expected[group])
        assert weight[group] / expected[group] == pytest.approx(known.noise(), abs=0.01)


@pytest.mark.parametrize("pool", [1, 100, 512])
@pytest.mark.parametrize("num_draws", [1, 30])
def test_spans_use_all_of_the_pool_alike(pool, num_draws):
    """Where some words of the pool were used seven times and others never, vectors by AdamW fell into one dimension."""
    words, zeros = torch.arange(16 * pool), torch.zeros(16 * pool, dtype=torch.int64)
    places = Places.find(Block(words, zeros, zeros, torch.arange(pool), len(words)), 16 * pool, num_draws)
    assert places.draws.shape == (pool, min(pool, num_draws))
    drawn = places.outputs.ids[places.draws]
    assert (torch.bincount(drawn.flatten(), minlength=pool)[:pool] == min(pool, num_draws)).all()
