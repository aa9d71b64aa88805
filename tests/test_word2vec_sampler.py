"""Draws follow their distributions and their seed; what is trained on is that of word2vec.c and of gensim's tables."""

import dataclasses
import threading

import numpy as np
import pytest
import scipy
import torch
from late import models

from speedtransfer.word2vec import Sampler, Settings, Vocabulary
from speedtransfer.word2vec.places import pair_weight
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
        # Seeds are fixed: it fails for a wrong distribution.
        assert scipy.stats.chisquare(np.bincount(whole.numpy(), minlength=8)[1:]).pvalue > 1e-4
    assert all(torch.equal(block.before[7:-7], block.after[7:-7]) for block in blocks)
    assert {block.window for block in blocks} == {0}


@pytest.mark.parametrize("sample", [0, 1e-3])
def test_windows_end_at_the_edges_of_sequences(sample):
    """Each sequence repeats a word of its own."""
    lengths = np.random.default_rng(1).integers(1, 30, 200)
    ids, starts = np.repeat(np.arange(200, dtype=np.int32), lengths), np.cumsum([0, *lengths[:-1]])
    vocabulary = Vocabulary([f"w{i}" for i in range(200)], lengths)
    blocks = epoch_of(
        sampler_of(vocabulary, ids, starts=starts, model="cbow", sample=sample, window=7, block_words=300)
    )
    for block in blocks:
        # Before the first word and behind the last one are others.
        words = [-1, *block.words.tolist(), -1]
        for i, (left, right) in enumerate(zip(block.before.tolist(), block.after.tolist(), strict=True), start=1):
            assert set(words[i - left : i + right + 1]) == {words[i]}
            assert left >= right or words[i - left - 1] != words[i]  # what is cut is cut by an edge
            assert right >= left or words[i + right + 1] != words[i]
    assert (sum(len(block.words) for block in blocks) == len(ids)) == (sample == 0)


def test_negatives_of_a_block_spread_as_the_noise_does(vocabulary):
    sampler = sampler_of(vocabulary, corpus_ids(2), sample=0, block_words=1400, shared_negatives=100)
    for step in range(20):
        counts = np.bincount(sampler.block(step).negatives.flatten().numpy(), minlength=len(COUNTS))
        assert np.abs(counts - 300 * vocabulary.noise()).max() <= 2  # the strata at both ends of a word


@pytest.mark.parametrize("count", [1, 2, 9])
def test_blocks_are_prepared_by_the_threads_that_draw_them(vocabulary, count):
    """Which are gone when nobody asks for more."""
    sampler, threads, before = sampler_of(vocabulary, corpus_ids(10), block_words=200), [], threading.active_count()

    def prepare(block):
        threads.append(threading.current_thread().name)
        return dataclasses.replace(block, window=9)

    blocks = list(sampler.blocks(3, 6, prepare, threads=count))
    for block, plain in zip(blocks, sampler.blocks(3, 6), strict=True):
        for name in ("words", "before", "after", "negatives"):
            assert torch.equal(getattr(block, name), getattr(plain, name))
    assert [block.window for block in blocks] == [9] * 3
    assert len(threads) == 3
    assert all(name.startswith("speedtransfer-sampler") for name in threads)
    more = sampler.blocks(0, 50, threads=count)
    next(more)
    more.close()
    assert threading.active_count() == before


def test_block_of_more_words_than_there_are(vocabulary):
    """Negatives are drawn for the words there are: those of a trillion would fit nowhere."""
    ids = corpus_ids(2)
    sampler = sampler_of(vocabulary, ids, sample=0, block_words=10**12)
    (block,) = epoch_of(sampler)
    assert len(block.words) == len(ids)
    assert len(block.negatives) == 512 * -(-len(ids) // GROUP_WORDS)


def test_words_are_kept_and_drawn_with_the_probabilities_of_gensim(vocabulary):
    gensim = models.Word2Vec(vector_size=2, min_count=1, sample=0.01)
    gensim.build_vocab_from_freq(dict(zip(vocabulary.words, COUNTS, strict=True)))
    theirs = [gensim.wv.get_vecattr(word, "sample_int") / 2**32 for word in vocabulary.words]
    assert vocabulary.keep_probability(0.01) == pytest.approx(theirs, abs=1e-8)
    assert min(theirs) < 0.3
    cumulated = gensim.cum_table.astype(float) / gensim.cum_table[-1]
    assert np.cumsum(vocabulary.noise()) == pytest.approx(cumulated, abs=1e-8)
    blocks = epoch_of(sampler_of(vocabulary, corpus_ids(20), sample=0.01, block_words=500))
    words = np.bincount(torch.cat([block.words for block in blocks]).numpy(), minlength=len(COUNTS))
    assert words / (np.array(COUNTS) * 20) == pytest.approx(np.minimum(theirs, 1), abs=0.1)


def test_pairs_of_skip_gram_count_as_often_as_they_would_have_been_drawn(vocabulary):
    blocks = epoch_of(sampler_of(vocabulary, corpus_ids(), sample=0, window=5))
    assert all((block.before[5:-5] == 5).all() and (block.after[5:-5] == 5).all() for block in blocks)
    assert {block.window for block in blocks} == {5}
    assert pair_weight(torch.arange(1, 6), 5).tolist() == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
