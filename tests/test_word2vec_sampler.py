"""The draws follow their distributions and their seed."""

from __future__ import annotations

import dataclasses
import math
import threading

import numpy as np
import pytest
import torch

from speedtransfer.word2vec import Sampler, Vocabulary
from speedtransfer.word2vec.sampler import GROUP_WORDS

COUNTS = [400, 200, 100, 50, 25, 10, 5, 1]


@pytest.fixture
def vocabulary():
    return Vocabulary([f"w{i}" for i in range(len(COUNTS))], COUNTS)


def corpus_ids(repeat=1, seed=0):
    ids = np.repeat(np.arange(len(COUNTS), dtype=np.int32), np.array(COUNTS) * repeat)
    np.random.default_rng(seed).shuffle(ids)
    return ids


def sampler_of(vocabulary, ids, seed=3, **kwargs):
    return Sampler(ids, vocabulary, seed=seed, **kwargs)


def epoch_of(sampler):
    return list(sampler.blocks(0, len(sampler)))


def assert_drawn_from(observed, probability):
    """Chi-square at 1e-4 (normal approximation of Wilson and Hilferty), seeds fixed: it fails for a wrong distribution."""
    expected = np.asarray(probability) * np.sum(observed)
    assert expected.min() > 5
    chi_square = float((((observed - expected) ** 2) / expected).sum())
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < bound


def test_without_subsampling_the_blocks_are_the_corpus(vocabulary):
    ids = corpus_ids()
    sampler = sampler_of(vocabulary, ids, sample=0, block_words=100)
    blocks = epoch_of(sampler)
    assert len(blocks) == len(sampler) == 8
    assert sorted(tuple(block.words.tolist()) for block in blocks) == sorted(
        map(tuple, np.split(ids, range(100, 791, 100)))
    )
    assert {t.dtype for t in (blocks[0].words, blocks[0].before, blocks[0].negatives)} == {torch.int64}
    assert sum(block.num_corpus_words for block in blocks) == len(ids)


def test_epochs_take_the_same_stretches_in_orders_of_their_own(vocabulary):
    ids = corpus_ids()
    sampler = sampler_of(vocabulary, ids, sample=0, block_words=50)
    first, second = ([tuple(block.words.tolist()) for block in sampler.blocks(16 * n, 16 * n + 16)] for n in range(2))
    in_text = [tuple(ids[start : start + 50].tolist()) for start in range(0, len(ids), 50)]
    assert sorted(first) == sorted(second) == sorted(in_text)
    assert first != second != in_text != first
    assert [tuple(sampler.block(step).words.tolist()) for step in (20, 3, 20)] == [second[4], first[3], second[4]]
    other = sampler_of(vocabulary, ids, seed=4, sample=0, block_words=50)
    assert [tuple(block.words.tolist()) for block in epoch_of(other)] != first


def test_windows_are_drawn_anew_each_epoch(vocabulary):
    sampler = sampler_of(vocabulary, corpus_ids(), model="cbow", sample=0, block_words=1000)
    assert not torch.equal(sampler.block(0).before, sampler.block(1).before)


def test_windows_are_even(vocabulary):
    blocks = epoch_of(sampler_of(vocabulary, corpus_ids(40), model="cbow", sample=0, window=7))
    for side in ("before", "after"):
        whole = torch.cat([getattr(block, side)[7:-7] for block in blocks])  # no edge in reach
        assert (whole.min(), whole.max()) == (1, 7)
        assert_drawn_from(np.bincount(whole.numpy(), minlength=8)[1:], np.full(7, 1 / 7))
    assert all(torch.equal(block.before[7:-7], block.after[7:-7]) for block in blocks)
    assert {block.window for block in blocks} == {0}


def test_windows_of_skipgram_are_whole(vocabulary):
    """And pairs count as often as word2vec would draw them: see test_word2vec_counts.py."""
    for block in epoch_of(sampler_of(vocabulary, corpus_ids(40), sample=0, window=7)):
        assert block.window == 7
        position = torch.arange(len(block.words))
        assert torch.equal(block.before, position.clamp(max=7))
        assert torch.equal(block.after, position.flip(0).clamp(max=7))


def test_windows_end_at_the_block(vocabulary):
    for block in epoch_of(sampler_of(vocabulary, corpus_ids(2), model="cbow", sample=0.05, window=7, block_words=100)):
        position = torch.arange(len(block.words))
        assert (block.before <= position).all()
        assert (block.after <= position.flip(0)).all()
        assert block.before[0] == block.after[-1] == 0


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


def test_negatives_follow_the_noise(vocabulary):
    sampler = sampler_of(vocabulary, corpus_ids(2), sample=0, block_words=1400, shared_negatives=5)
    drawn = torch.stack([sampler.block(step).negatives for step in range(1000)])
    assert drawn.shape == (1000, 3 * 5)  # for every 512 words
    for group in range(0, 15, 3):  # wherever it stands
        counts = np.bincount(drawn[:, group : group + 3].flatten().numpy(), minlength=len(COUNTS))
        assert_drawn_from(counts, vocabulary.noise())


def test_negatives_of_a_block_spread_as_the_noise_does(vocabulary):
    sampler = sampler_of(vocabulary, corpus_ids(2), sample=0, block_words=1400, shared_negatives=100)
    for step in range(20):
        counts = np.bincount(sampler.block(step).negatives.flatten().numpy(), minlength=len(COUNTS))
        assert np.abs(counts - 300 * vocabulary.noise()).max() <= 2  # the strata at both ends of a word


def test_subsampling_keeps_the_share_of_the_formula(vocabulary):
    repeat, sample = 300, 0.02
    blocks = epoch_of(sampler_of(vocabulary, corpus_ids(repeat), sample=sample))
    kept = np.bincount(torch.cat([block.words for block in blocks]).numpy(), minlength=len(COUNTS))
    share = vocabulary.counts / vocabulary.num_words
    probability = np.minimum((np.sqrt(share / sample) + 1) * sample / share, 1)
    trials = np.array(COUNTS) * repeat
    deviation = np.sqrt(trials * probability * (1 - probability))
    assert (np.abs(kept - trials * probability) <= 4 * deviation).all()
    assert kept[-1] == trials[-1]  # rare words are never dropped
    assert probability[0] < 0.25


def test_blocks_have_about_the_size_asked_for(vocabulary):
    sampler = sampler_of(vocabulary, corpus_ids(100), sample=0.02, block_words=500)
    blocks = [
        block for block in epoch_of(sampler) if block.num_corpus_words == sampler.stretch
    ]  # not the last of the text
    sizes = [len(block.words) for block in blocks]
    assert np.mean(sizes) == pytest.approx(500, rel=0.03)
    assert len(set(sizes)) > 1
    assert len(blocks) == len(sampler) - 1


def blocks_equal(first, second):
    names = ("words", "before", "after", "negatives")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for a, b in zip(first, second, strict=True) for n in names)


def test_seed_decides_every_draw(vocabulary):
    ids = corpus_ids(10)
    first, second, other = (epoch_of(sampler_of(vocabulary, ids, s, sample=0.02, block_words=200)) for s in (5, 5, 6))
    assert blocks_equal(first, second)
    assert not torch.equal(first[0].words, other[0].words)
    assert len({tuple(block.words.tolist()) for block in first + other}) == len(first + other)


def test_any_block_again_by_its_step(vocabulary):
    ids = corpus_ids(10)
    blocks = list(sampler_of(vocabulary, ids, sample=0.02, block_words=200).blocks(0, 60))
    sampler = sampler_of(vocabulary, ids, sample=0.02, block_words=200)
    assert blocks_equal(blocks[41:60], list(sampler.blocks(41, 60)))
    assert blocks_equal([blocks[7]], [sampler.block(7)])
    assert list(sampler.blocks(5, 5)) == []


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


def test_what_fails_while_drawing_reaches_the_caller(vocabulary):
    ids = np.full(100, len(COUNTS), dtype=np.int32)  # no such word
    with pytest.raises(IndexError):
        next(sampler_of(vocabulary, ids, sample=0.02).blocks(0, 2))


def test_small_corpora(vocabulary):
    blocks = epoch_of(sampler_of(vocabulary, np.array([3], dtype=np.int32), sample=0))
    assert [block.words.tolist() for block in blocks] == [[3]]
    two = Vocabulary(["a", "b"], [10**9, 1])
    assert len(epoch_of(sampler_of(two, np.zeros(50, dtype=np.int32), sample=1e-6))) == 1


def test_block_of_more_words_than_there_are(vocabulary):
    """Negatives are drawn for the words there are: those of a trillion would fit nowhere."""
    ids = corpus_ids(2)
    sampler = sampler_of(vocabulary, ids, sample=0, block_words=10**12)
    (block,) = epoch_of(sampler)
    assert len(block.words) == len(ids)
    assert len(block.negatives) == 512 * -(-len(ids) // GROUP_WORDS)
